"""Fusion of several operators into one kernel: a rewrite of the graph for runtimes with fused kernels.

A rule names the operators of a kernel and the values it keeps for its backward. The forward operators of a kernel become one
node, their input gradients another and their weight gradients a third. Values that only they pass to each other disappear;
the backward derives those it needs from the values that the kernel keeps.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from stagewright.graph.graph import Node, OperatorGraph, Origin, Part, Ref, Value, makers_of, short_name
from stagewright.graph.simplify import renumbered_graph
from stagewright.graph.tensor import TensorMeta, contiguous
from stagewright.graph.tensor_parallel import ALL_GATHER, ALL_REDUCE

KERNEL = "runtime."
"""Prefix of the operator of a fused kernel; the name of its rule follows."""

INPUTS, RESULTS = "inputs", "results"

HELD = "held"
"""Argument that an operator does not read: a tensor that stays alive until then."""

JOINED = {"mm": 0, "addmm": 1}
"""Matmuls that may be joined, and the index of the argument that is not a matrix of weights."""


@dataclass(frozen=True)
class FusionRule:
    """A fused kernel, in short names of operators (``silu``), without library and overload.

    * `around`: every kernel contains one or more of these, and grows from the first.
    * `absorbs`: adjacent operators that join the kernel if the whole can still run as one; views between them join too.
    * `within`: where adjacent operators are searched: in the ``module`` of the first, its ``parent`` too, or the ``model``;
      in the ``loss``: in the module of the first, after the last matmul.
    * `keeps`: what the forward saves for the backward: ``inputs``, ``results``, or names of operators whose results it
      saves although nothing else uses them.
    * `forward_bytes`, `backward_bytes`: memory traffic per element of the largest input or output; None: every tensor once.
    * `scratch_bytes`, `backward_scratch_bytes`: temporary memory per element of the largest tensor.
    * `kind`: what bounds it: ``memory``, ``norm`` for kernels that need statistics of a row first, or ``matmul``: matmuls
      of one tensor with several matrices, joined into one whose results lie in one storage.
    """

    name: str
    around: frozenset[str]
    absorbs: frozenset[str] = frozenset()
    keeps: frozenset[str] = frozenset({INPUTS})
    forward_bytes: float | None = None
    backward_bytes: float | None = None
    scratch_bytes: float = 0.0
    backward_scratch_bytes: float = 0.0
    kind: Literal["memory", "norm", "matmul"] = "memory"
    within: Literal["module", "parent", "model", "loss"] = "module"


def is_kernel(op: str) -> bool:
    """Whether an operator is a fused kernel."""
    return op.startswith(KERNEL)


def fuse(graph: OperatorGraph, rules: Sequence[FusionRule]) -> OperatorGraph:
    """Return `graph` with one node for every kernel of `rules`; an operator belongs to the first rule that claims it.

    A kernel is not fused if an operator outside depends on one part of it and another part depends on that operator. A node
    has the name of the first operator it stands for.
    """
    if not rules:
        return graph
    groups = list(_groups(graph, rules))
    while groups:
        fused = _Fused(graph, groups)
        if not fused.blocked:
            return fused.graph()
        groups = [group for index, group in enumerate(groups) if index not in fused.blocked]
    return graph


def accumulating_in_matmuls(graph: OperatorGraph) -> OperatorGraph:
    """Return `graph` with matmuls that accumulate weight gradients into the buffer instead of returning them.

    Such a gradient becomes an empty tensor.
    """
    maker = makers_of(graph.nodes)
    values = list(graph.values)
    for contributions in graph.contributions.values():
        for _, value in contributions:
            passed = [value]
            while passed[-1] in maker and _is_view(graph, maker[passed[-1]]):
                passed.append(maker[passed[-1]].inputs[0])
            source = maker.get(passed[-1])
            if source is None or source.part is not Part.WEIGHT_GRAD or not _multiplies(source):
                continue
            if all(len(graph.consumers.get(result, ())) <= 1 for result in passed):
                for result in passed:
                    values[result] = replace(values[result], meta=contiguous((0,), values[result].meta.dtype))
    return replace(graph, values=tuple(values))


def reducing_once(graph: OperatorGraph) -> OperatorGraph:
    """Return `graph` without gradient all-reduces over tensor-parallel ranks: a runtime that runs them once per step.

    Ignores: their time at the end of the step, for norms and biases only.
    """
    summed = {
        node.outputs[0]: node.inputs[0]
        for node in graph.nodes
        if node.op == ALL_REDUCE and node.part is Part.WEIGHT_GRAD
    }
    if not summed:
        return graph
    contributions = {
        gradient: tuple((node, summed.get(value, value)) for node, value in parts)
        for gradient, parts in graph.contributions.items()
    }
    contributed = {value for parts in graph.contributions.values() for _, value in parts}
    nodes = tuple(
        node for node in graph.nodes if node.op != ALL_REDUCE or contributed.isdisjoint(node.outputs)
    )
    return renumbered_graph(replace(graph, nodes=nodes, contributions=contributions))


def holding_logits(graph: OperatorGraph) -> OperatorGraph:
    """Return `graph` with logits that live until the backward of the loss, as in a training loop that has them in a
    variable."""
    if (logits := logits_of(graph)) is None:
        return graph
    last_position = graph.position[graph.values[logits].node]
    of_loss = [
        node
        for node in graph.nodes
        if node.part is Part.INPUT_GRAD and graph.position.get(node.forward, -1) > last_position
    ]
    if not of_loss or not graph.storage_bytes[graph.values[logits].storage]:
        return graph
    last = of_loss[-1]
    held = replace(last, kwargs=(*last.kwargs, (HELD, Ref(logits))), inputs=(*last.inputs, logits))
    return replace(graph, nodes=tuple(held if node is last else node for node in graph.nodes))


def logits_of(graph: OperatorGraph) -> int | None:
    """Return the result of the last matmul of the forward, or its all-gather; None if there is none."""
    matmul = _last_matmul(graph)
    if matmul is None or matmul.outputs[0] is None:
        return None
    logits = matmul.outputs[0]
    while (user := _sole_forward_user(graph, logits)) and (user.op == ALL_GATHER or _is_view(graph, user)):
        (result,) = user.outputs
        if result is None:
            break
        logits = result
    return logits


def _last_matmul(graph: OperatorGraph) -> Node | None:
    """Return the last matmul of the forward, or None if there is none."""
    forward = map(graph.nodes.__getitem__, reversed(graph.forward_ids))
    return next((node for node in forward if _multiplies(node)), None)


def _sole_forward_user(graph: OperatorGraph, value: int) -> Node | None:
    users = [graph.nodes[user] for user in graph.consumers.get(value, ())]
    forward = [node for node in users if node.part is Part.FORWARD]
    return forward[0] if len(forward) == 1 else None


def _multiplies(node: Node) -> bool:
    return short_name(node.op) in (*JOINED, "_grouped_mm") or dict(node.kwargs).get("kind") == "matmul"


@dataclass(frozen=True)
class _Group:
    rule: FusionRule
    members: tuple[int, ...]
    """Forward nodes, in order."""


def _groups(graph: OperatorGraph, rules: Sequence[FusionRule]) -> Iterator[_Group]:
    maker = makers_of(graph.nodes)
    taken: set[int] = set()
    for rule in rules:
        if rule.kind == "matmul":
            for members in _with_one_input(graph, rule, taken):
                taken.update(members)
                yield _Group(rule, members)
            continue
        for node in _after_logits(graph) if rule.within == "loss" else graph.nodes:
            if node.part is Part.FORWARD and node.id not in taken and short_name(node.op) in rule.around:
                members = _grown(graph, rule, node, maker, taken)
                if not members:
                    continue
                if len(members) > 1 or rule.forward_bytes is not None or rule.keeps != frozenset({INPUTS}):
                    taken.update(members)
                    yield _Group(rule, tuple(sorted(members)))


def _after_logits(graph: OperatorGraph) -> Iterator[Node]:
    """Yield the operators of the forward after its last matmul; all if it has none."""
    last = _last_matmul(graph)
    first = 0 if last is None else graph.position[last.id] + 1
    yield from map(graph.nodes.__getitem__, graph.forward_ids[first:])


def _with_one_input(graph: OperatorGraph, rule: FusionRule, taken: set[int]) -> Iterator[tuple[int, ...]]:
    """Yield groups of matmuls of one tensor, with different matrices, in modules of one parent."""
    members_by_input: dict[tuple[int, str], list[int]] = {}
    for node in graph.nodes:
        if node.part is Part.FORWARD and node.id not in taken and short_name(node.op) in rule.around:
            place = JOINED[short_name(node.op)]
            members_by_input.setdefault((node.inputs[place], node.module.rpartition(".")[0]), []).append(
                node.id
            )
    yield from (tuple(members) for members in members_by_input.values() if len(members) > 1)


def _is_view(graph: OperatorGraph, node: Node) -> bool:
    return all(value is None or graph.values[value].storage != value for value in node.outputs)


def _grown(
    graph: OperatorGraph, rule: FusionRule, anchor: Node, maker: dict[int, Node], taken: set[int]
) -> set[int]:
    """Return the kernel around `anchor`: neighbours that the rule absorbs, without the views at its ends."""
    names = rule.around | rule.absorbs
    is_late = graph.position[anchor.id] >= graph.late
    members, waiting = {anchor.id}, [anchor]
    while waiting:
        node = waiting.pop()
        for other, is_user in _neighbours(graph, node, maker):
            if (
                other.id not in members
                and other.id not in taken
                and other.part is Part.FORWARD
                and (graph.position[other.id] >= graph.late) == is_late
                and (short_name(other.op) in names or _is_view(graph, other))
                and _in_reach(rule.within, anchor.module, other.module)
                and not (
                    _leads_in(graph, other, members, maker) if is_user else _leads_out(graph, other, members)
                )
            ):
                members.add(other.id)
                waiting.append(other)
    return _without_ends(graph, members, maker)


def _neighbours(graph: OperatorGraph, node: Node, maker: dict[int, Node]) -> Iterator[tuple[Node, bool]]:
    """Yield the makers of a node's inputs, with False, and the users of its outputs, with True."""
    for value in node.inputs:
        if value in maker:
            yield maker[value], False
    for value in node.outputs:
        if value is not None:
            yield from ((graph.nodes[user], True) for user in graph.consumers.get(value, ()))


def _leads_in(graph: OperatorGraph, node: Node, members: set[int], maker: dict[int, Node]) -> bool:
    """Whether another input of `node`, a user of members, depends on them through operators outside the kernel."""
    first, seen = min(members), set()
    waiting = [value for value in node.inputs if value in maker and maker[value].id not in members]
    while waiting:
        source = maker[waiting.pop()]
        if source.id in members:
            return True
        if source.id > first and source.id not in seen and source.part is Part.FORWARD:
            seen.add(source.id)
            waiting += [value for value in source.inputs if value in maker]
    return False


def _leads_out(graph: OperatorGraph, node: Node, members: set[int]) -> bool:
    """Whether a member depends on an output of `node` through operators outside the kernel."""
    last, seen = max(members), set()
    waiting = [user for user in _users(graph, node) if user not in members]
    while waiting:
        user = waiting.pop()
        if user in members:
            return True
        if user < last and user not in seen:
            seen.add(user)
            waiting += _users(graph, graph.nodes[user])
    return False


def _users(graph: OperatorGraph, node: Node) -> Iterator[int]:
    for value in node.outputs:
        if value is not None:
            yield from graph.consumers.get(value, ())


def _in_reach(within: str, anchor: str, module: str) -> bool:
    """Whether an operator of `module` may be part of a kernel around one of `anchor`.

    >>> _in_reach("parent", "h.1.mlp.act", "h.1.mlp"), _in_reach("module", "h.1.mlp.act", "h.1.mlp")
    (True, False)
    """
    if within == "model" or module == anchor:
        return True
    return within == "parent" and module == anchor.rpartition(".")[0]


def _without_ends(graph: OperatorGraph, members: set[int], maker: dict[int, Node]) -> set[int]:
    """Drop views at the inputs or outputs of the kernel, unless it reads all elements of their base."""
    members = set(members)
    while True:
        ends = set()
        for index in members:
            node = graph.nodes[index]
            if not _is_view(graph, node):
                continue
            users = list(_users(graph, node))
            forward = [user for user in users if graph.nodes[user].part is Part.FORWARD]
            if not members.intersection(users) or (
                not any(value in maker and maker[value].id in members for value in node.inputs)
                and not (members.issuperset(forward) and _reads_all(graph, node, members))
            ):
                ends.add(index)
        if not ends:
            return members
        members -= ends


def _reads_all(graph: OperatorGraph, view: Node, members: set[int]) -> bool:
    """Whether members read every element of the base of a view, through the view or directly."""
    base, views = view.inputs[0], [value for value in view.outputs if value is not None]
    elements = sum(graph.values[value].meta.num_elements for value in views)
    readers = {user for user in graph.consumers.get(base, ()) if not _is_view(graph, graph.nodes[user])}
    return elements == graph.values[base].meta.num_elements or bool(members & readers)


@dataclass
class _Unit:
    """The nodes of one group and part, which become one node."""

    group: int
    part: Part
    nodes: list[Node] = field(default_factory=list)


class _Fused:
    """A graph with its groups contracted to kernels."""

    def __init__(self, graph: OperatorGraph, groups: Sequence[_Group]) -> None:
        self.old = graph
        self.groups = groups
        self.group_of = {member: index for index, group in enumerate(groups) for member in group.members}
        self.values: list[Value] = list(graph.values)
        self.maker = makers_of(graph.nodes)
        self.outside = self._needed_outside()
        self._signatures: dict[Any, int] = {}
        self._first_signature = 1 + max(node.signature for node in graph.nodes)
        self.units = self._units()
        self.unit_of = {node.id: key for key, unit in self.units.items() for node in unit.nodes}
        self.kernels = self._rewritten()
        self.order, self.blocked = self._ordered()

    def graph(self) -> OperatorGraph:
        """Return the rewritten graph, numbered in running order."""
        old = self.old
        leaders = {member: group.members[0] for group in self.groups for member in group.members}
        nodes = tuple(
            node if node.forward not in leaders else replace(node, forward=leaders[node.forward])
            for node in self.order
        )
        self._follow_storages(nodes)
        late = [node.id for node in nodes if node.part is Part.FORWARD and old.position[node.id] >= old.late]
        rewritten = replace(
            old,
            nodes=nodes,
            values=tuple(self.values),
            contributions={
                gradient: tuple((leaders.get(node, node), value) for node, value in parts)
                for gradient, parts in old.contributions.items()
            },
            facts=old.facts | ({"late": _number_before(nodes, late)} if late else {}),
        )
        return renumbered_graph(rewritten)

    def _needed_outside(self) -> set[int]:
        """Return the values that the graph needs apart from inputs of nodes."""
        old = self.old
        needed = {old.loss, *(value for _, value in old.mutations)}
        return needed | {value for parts in old.contributions.values() for _, value in parts}

    def _units(self) -> dict[tuple[int, Part], _Unit]:
        units: dict[tuple[int, Part], _Unit] = {}
        for node in self.old.nodes:
            if node.part < Part.FORWARD:
                continue
            group = self.group_of.get(node.id if node.part is Part.FORWARD else node.forward)
            if group is None or self._adds_other_gradient(node, group) or self._stands_apart(node, group):
                continue
            units.setdefault((group, node.part), _Unit(group, node.part)).nodes.append(node)
        for (group, part), unit in units.items():
            if part is Part.INPUT_GRAD and self.groups[group].rule.kind == "matmul":
                self._take_sums(unit)
        return {
            key: unit
            for key, unit in units.items()
            if unit.part is Part.FORWARD or not all(_is_view(self.old, node) for node in unit.nodes)
        }

    def _take_sums(self, unit: _Unit) -> None:
        """Include in the input gradient of a joined matmul the additions of its parts."""
        old, inside = self.old, {node.id: node for node in unit.nodes}
        views: dict[int, list[Node]] = {}  # value that leaves -> the views that it went through
        ready: list[int] = []
        seen: set[int] = set()

        def leaves(node: Node, through: list[Node]) -> None:
            for value in node.outputs:
                if value is not None:
                    views[value] = through
                    for user in old.consumers.get(value, ()):
                        heapq.heappush(ready, user)

        for node in unit.nodes:
            leaves(node, [])
        while ready:
            node = old.nodes[heapq.heappop(ready)]
            if node.id in seen or node.id in inside or node.part is not Part.INPUT_GRAD:
                continue
            seen.add(node.id)
            if any(value not in views for value in node.inputs):
                continue
            through = [view for value in node.inputs for view in views[value]]
            if short_name(node.op) == "add":
                inside |= {view.id: view for view in (*through, node)}
                leaves(node, [])
            elif _is_view(old, node):
                leaves(node, [*through, node])
        unit.nodes = sorted(inside.values(), key=lambda node: node.id)

    def _adds_other_gradient(self, node: Node, group: int) -> bool:
        """Whether a node adds a gradient from elsewhere to one of the kernel's: autograd does that, not the kernel."""
        if node.part is not Part.INPUT_GRAD or short_name(node.op) != "add" or len(node.inputs) != 2:
            return False
        from_kernel = [self._is_backward_of(value, group) for value in node.inputs]
        users = (self.old.nodes[user] for user in _users(self.old, node))
        return sum(from_kernel) < 2 and not any(self._is_backward_of_node(user, group) for user in users)

    def _stands_apart(self, node: Node, group: int) -> bool:
        """Whether a view in the backward is adjacent to no other node of the kernel."""
        if node.part is Part.FORWARD or not _is_view(self.old, node):
            return False
        users = (self.old.nodes[user] for user in _users(self.old, node))
        return not any(self._is_backward_of(value, group) for value in node.inputs) and not any(
            self._is_backward_of_node(user, group) and not self._adds_other_gradient(user, group)
            for user in users
        )

    def _is_backward_of(self, value: int, group: int) -> bool:
        node = self.maker.get(value)
        return node is not None and self._is_backward_of_node(node, group)

    def _is_backward_of_node(self, node: Node, group: int) -> bool:
        return node.part > Part.FORWARD and self.group_of.get(node.forward) == group

    # -- what a kernel reads and leaves -----------------------------------------------------------------------------

    def _rewritten(self) -> dict[tuple[int, Part], Node]:
        """Return the node of every unit."""
        results = [self._leaving(self.units[index, Part.FORWARD]) for index in range(len(self.groups))]
        kept: list[list[int]] = [[] for _ in self.groups]
        reads = {}
        for key, unit in self.units.items():
            if unit.part is Part.FORWARD:
                continue
            reads[key], needed = self._backward_reads(unit, results[unit.group])
            kept[unit.group] += [value for value in needed if value not in kept[unit.group]]
        kernels = {}
        for key, unit in self.units.items():
            if unit.part is Part.FORWARD:
                outputs = self._rooted(results[unit.group] + kept[unit.group])
                if self.groups[unit.group].rule.kind == "matmul":
                    outputs = [self._join(outputs), *outputs]
                kernels[key] = self._node(unit, self._entering(unit), outputs)
            else:
                kernels[key] = self._node(unit, reads[key], self._rooted(self._leaving(unit)))
        return kernels

    def _entering(self, unit: _Unit) -> list[int]:
        inside = {value for node in unit.nodes for value in node.outputs}
        return list(
            dict.fromkeys(value for node in unit.nodes for value in node.inputs if value not in inside)
        )

    def _leaving(self, unit: _Unit) -> list[int]:
        """Return the results of a unit that others use; for a forward, others than the kernel's own backward."""
        inside = {node.id for node in unit.nodes}

        def is_used(value: int) -> bool:
            users = (user for user in self.old.consumers.get(value, ()) if user not in inside)
            return value in self.outside or any(self._group_of_unit(user) != unit.group for user in users)

        results = (value for node in unit.nodes for value in node.outputs if value is not None)
        return [value for value in results if is_used(value)]

    def _group_of_unit(self, node: int) -> int:
        """Return the group whose forward or backward has a node; -1 if none has."""
        return self.unit_of.get(node, (-1, Part.FORWARD))[0]

    def _backward_reads(self, unit: _Unit, results: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return what the backward reads, and which inner values of the forward must be saved for it."""
        rule = self.groups[unit.group].rule
        inside = {value for node in unit.nodes for value in node.outputs}
        forward = self.units[unit.group, Part.FORWARD]
        makers = makers_of(forward.nodes)
        entering = set(self._entering(forward))
        other = self.units.get((unit.group, Part.INPUT_GRAD)) if unit.part is Part.WEIGHT_GRAD else None
        partner = {value for node in other.nodes for value in node.outputs} if other else set()
        reads: dict[int, None] = {}
        kept: dict[int, None] = {}

        def take(value: int) -> None:
            """Follow a value of the forward back to values that are saved."""
            node = makers.get(value)
            if node is None:
                if value not in entering or INPUTS in rule.keeps or self._is_free(value):
                    reads[value] = None
                elif RESULTS in rule.keeps:
                    reads.update(dict.fromkeys(results))
            elif short_name(node.op) in rule.keeps:
                kept[value] = None
                reads[value] = None
            elif value in results and RESULTS in rule.keeps:
                reads[value] = None
            elif RESULTS in rule.keeps and INPUTS not in rule.keeps:
                reads.update(dict.fromkeys(results))
            else:
                for source in node.inputs:
                    take(source)

        for node in unit.nodes:
            for value in node.inputs:
                if value in inside:
                    continue
                if value in partner and other is not None:
                    for source in self._cotangents(other, makers):
                        reads[source] = None
                elif value in makers or value in entering:
                    take(value)
                else:
                    reads[value] = None
        if not any(self._is_cotangent(value) for value in reads):
            reads.update(dict.fromkeys(self._cotangents(unit, makers)))
        return list(reads), [value for value in kept if value not in results]

    def _cotangents(self, unit: _Unit, makers: dict[int, Node]) -> list[int]:
        return [value for value in self._entering(unit) if value not in makers and self._is_cotangent(value)]

    def _is_cotangent(self, value: int) -> bool:
        maker = self.maker.get(value)
        return (maker is not None and maker.part > Part.FORWARD) or value == self.old.seed

    def _is_free(self, value: int) -> bool:
        """Whether a value is available anyway: a parameter, or computed from inputs alone."""
        maker = self.maker.get(value)
        return maker is None or maker.part < Part.FORWARD

    def _rooted(self, outputs: list[int]) -> list[int]:
        """Give results new storages where the one they were in disappears."""
        roots = set(outputs)
        for value in outputs:
            result = self.values[value]
            maker, unit = self.maker.get(result.storage), self.unit_of.get(self.maker[value].id)
            inside = maker is not None and unit is not None and self.unit_of.get(maker.id) == unit
            if result.storage not in roots and inside:
                meta = contiguous(result.meta.shape, result.meta.dtype)
                self.values[value] = replace(result, storage=value, meta=meta)
        return outputs

    def _join(self, outputs: list[int]) -> int:
        """Add a tensor that contains all results one after the other."""
        number, offset = len(self.values), 0
        for value in outputs:
            result = self.values[value]
            meta = replace(contiguous(result.meta.shape, result.meta.dtype), offset=offset)
            self.values[value] = replace(result, storage=number, meta=meta)
            offset += result.meta.num_elements
        return self._new_value(contiguous((offset,), self.values[outputs[0]].meta.dtype))

    def _joined_matmul(self, group: int, part: Part) -> tuple[tuple[str, Any], ...]:
        """Return, as arguments of a joined matmul, its FLOP in one direction, the elements of its matrices of weights, and
        its rows, columns and inner dimension."""
        rows, inner, weights = 0, 0, 0
        for member in self.groups[group].members:
            node = self.old.nodes[member]
            place = JOINED[short_name(node.op)]
            factor, matrix = (self.old.values[value].meta for value in node.inputs[place : place + 2])
            inner = factor.shape[-1]
            rows = factor.num_elements // inner
            weights += matrix.num_elements
        outer = weights // inner
        shape = {Part.FORWARD: (rows, outer, inner), Part.INPUT_GRAD: (rows, inner, outer)}.get(
            part, (inner, outer, rows)
        )
        return ("flop", 2.0 * rows * weights), ("weights", weights), ("shape", shape)

    def _follow_storages(self, nodes: Iterable[Node]) -> None:
        """Move views to the storages that their bases have now."""
        for node in nodes:
            if is_kernel(node.op):
                continue
            for value in node.outputs:
                root = value if value is None else self.old.values[value].storage
                if value is None or root == value:
                    continue
                base = next(
                    (argument for argument in node.inputs if self.old.values[argument].storage == root), None
                )
                if base is not None:
                    view, moved = self.values[value], self.values[base]
                    offset = view.meta.offset + moved.meta.offset - self.old.values[base].meta.offset
                    meta = replace(view.meta, offset=offset)
                    self.values[value] = replace(view, storage=moved.storage, meta=meta)

    def _node(self, unit: _Unit, inputs: list[int], outputs: list[int]) -> Node:
        rule = self.groups[unit.group].rule
        first = unit.nodes[0]
        largest = max((self.values[value].meta.num_elements for value in (*inputs, *outputs)), default=0)
        is_forward = unit.part is Part.FORWARD
        per_element = rule.forward_bytes if is_forward else rule.backward_bytes
        kwargs: tuple[tuple[str, Any], ...] = (("kind", rule.kind),)
        if rule.kind == "matmul":
            kwargs += self._joined_matmul(unit.group, unit.part)
        if per_element is not None:
            kwargs += (("bytes_moved", per_element * largest * (unit.part is not Part.WEIGHT_GRAD)),)
        scratch: list[int] = []
        scratch_bytes = rule.scratch_bytes if is_forward else rule.backward_scratch_bytes
        if scratch_bytes and unit.part is not Part.WEIGHT_GRAD:
            scratch = [self._new_value(TensorMeta((int(scratch_bytes * largest),), (1,), "uint8"))]
        return replace(
            first,
            op=f"{KERNEL}{rule.name}.{unit.part.name.lower()}",
            args=tuple(Ref(value) for value in inputs),
            kwargs=kwargs,
            inputs=tuple(inputs),
            outputs=(*outputs, *scratch),
            signature=self._signature(unit, inputs, outputs),
            draw=next((node.draw for node in unit.nodes if node.draw >= 0), -1),
        )

    def _new_value(self, meta: TensorMeta) -> int:
        number = len(self.values)
        self.values.append(Value(number, meta, number, Origin.NODE))
        return number

    def _signature(self, unit: _Unit, inputs: list[int], outputs: list[int]) -> int:
        metas = tuple(self.values[value].meta for value in (*inputs, *outputs))
        key = (self.groups[unit.group].rule, unit.part, len(inputs), metas)
        return self._signatures.setdefault(key, self._first_signature + len(self._signatures))

    # -- running order ----------------------------------------------------------------------------------------------

    def _ordered(self) -> tuple[list[Node], set[int]]:
        """Return all nodes in running order, and the groups that prevent one."""
        old = self.old
        nodes: list[tuple[int, Node]] = []
        for node in old.nodes:
            key = self.unit_of.get(node.id)
            if key is None:
                nodes.append((node.id, node))
            elif self.units[key].nodes[-1].id == node.id:
                nodes.append((node.id, self.kernels[key]))
        makers = {value: index for index, (_, node) in enumerate(nodes) for value in node.outputs}
        waiting = [0] * len(nodes)
        users: list[list[int]] = [[] for _ in nodes]
        for index, (_, node) in enumerate(nodes):
            sources = {makers[value] for value in node.inputs if value in makers} - {index}
            waiting[index] = len(sources)
            for source in sources:
                users[source].append(index)
        ready = [(place, index) for index, (place, _) in enumerate(nodes) if not waiting[index]]
        heapq.heapify(ready)
        order = []
        while ready:
            _, index = heapq.heappop(ready)
            order.append(nodes[index][1])
            for user in users[index]:
                waiting[user] -= 1
                if not waiting[user]:
                    heapq.heappush(ready, (nodes[user][0], user))
        if len(order) == len(nodes):
            return order, set()
        circular = _on_circles({index for index, count in enumerate(waiting) if count}, users)
        return order, {key[0] for index in circular if (key := self.unit_of.get(nodes[index][0])) is not None}


def _on_circles(waiting: set[int], users: Sequence[Sequence[int]]) -> set[int]:
    """Return the nodes on cycles: drop those that no other node waits for until none is left."""
    waiting = set(waiting)
    while free := {index for index in waiting if not waiting.intersection(users[index])}:
        waiting -= free
    return waiting


def _number_before(nodes: Iterable[Node], late: Sequence[int]) -> int:
    """Count the forward nodes before the first of `late`."""
    forward = [node.id for node in nodes if node.part is Part.FORWARD]
    return min(forward.index(node) for node in late)
