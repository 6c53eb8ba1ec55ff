"""Several operators as one kernel, as runtimes with fused kernels run them: a rewrite of the graph.

A rule names the operators of a kernel and what it keeps for its backward. The forward operators that belong together
become one node, their input gradients another and their weight gradients a third; values that only they pass to each other
are gone, and what the backward needs of them is derived again from what the kernel keeps.
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
"""How the operator of a fused kernel begins; the name of its rule follows."""

INPUTS, RESULTS = "inputs", "results"

HELD = "held"
"""Argument of an operator that does not read it: a tensor that is there until then."""

JOINED = {"mm": 0, "addmm": 1}
"""Products that may become one, and which argument is the tensor that is multiplied."""


@dataclass(frozen=True)
class FusionRule:
    """A fused kernel: short names of operators (``silu``), without library and overload.

    * `around`: every kernel holds one or more of these, and grows from the first.
    * `absorbs`: operators that join where they touch what belongs to it, if the whole can still run as one; views between
      them join too.
    * `within`: where these are looked for: in the same ``module`` as the first, its ``parent`` too, or in the whole
      ``model``.
    * `keeps`: what the forward leaves for the backward: ``inputs``, ``results``, or names of operators whose results it
      keeps although nothing else uses them.
    * `forward_bytes`, `backward_bytes`: moved per element of the largest tensor that enters or leaves; None: every tensor
      once.
    * `scratch_bytes`: per element of the largest tensor, there only while the forward runs.
    * `kind`: what bounds it: ``memory``, ``norm`` for those that need statistics of a row first, or ``matmul``: products of
      one tensor with several matrices, which become one product whose results lie in one storage.
    """

    name: str
    around: frozenset[str]
    absorbs: frozenset[str] = frozenset()
    keeps: frozenset[str] = frozenset({INPUTS})
    forward_bytes: float | None = None
    backward_bytes: float | None = None
    scratch_bytes: float = 0.0
    kind: Literal["memory", "norm", "matmul"] = "memory"
    within: Literal["module", "parent", "model"] = "module"


def is_kernel(op: str) -> bool:
    """Whether a node is a fused kernel."""
    return op.startswith(KERNEL)


def fuse(graph: OperatorGraph, rules: Sequence[FusionRule]) -> OperatorGraph:
    """`graph` with one node for every kernel of `rules`, the first rule that claims an operator having it.

    Kernels that could not run as one, because an operator outside needs a part of them and gives to another, stay apart.
    Names of nodes are those of the first operator they stand for.
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


def adding_in_products(graph: OperatorGraph) -> OperatorGraph:
    """`graph` with products that add the gradients of weights to what is there, in place of handing them on.

    Such a gradient is an empty tensor.
    """
    maker = makers_of(graph.nodes)
    values = list(graph.values)
    for made in graph.contributions.values():
        for _, value in made:
            passed = [value]
            while passed[-1] in maker and _is_view(graph, maker[passed[-1]]):
                passed.append(maker[passed[-1]].inputs[0])
            source = maker.get(passed[-1])
            if source is None or source.part is not Part.WEIGHT_GRAD or not _multiplies(source):
                continue
            if all(len(graph.consumers.get(one, ())) <= 1 for one in passed):
                for one in passed:
                    values[one] = replace(values[one], meta=contiguous((0,), values[one].meta.dtype))
    return replace(graph, values=tuple(values))


def summing_once(graph: OperatorGraph) -> OperatorGraph:
    """`graph` without sums of gradients over the ranks that share a layer: a runtime that makes them once per step.

    Ignores: what they take then, of norms and biases alone.
    """
    summed = {
        node.outputs[0]: node.inputs[0]
        for node in graph.nodes
        if node.op == ALL_REDUCE and node.part is Part.WEIGHT_GRAD
    }
    contributions = {
        gradient: tuple((node, summed.get(value, value)) for node, value in made)
        for gradient, made in graph.contributions.items()
    }
    handed_on = {value for made in graph.contributions.values() for _, value in made}
    gone = {node.id for node in graph.nodes if node.op == ALL_REDUCE and handed_on.intersection(node.outputs)}
    nodes = tuple(node for node in graph.nodes if node.id not in gone)
    return renumbered_graph(replace(graph, nodes=nodes, contributions=contributions))


def holding_logits(graph: OperatorGraph) -> OperatorGraph:
    """`graph` whose logits are there until the loss is differentiated, used or not: of a loop that has them in a variable.

    Logits are what the last product of the forward makes, or what is gathered of it.
    """
    product = next(
        (node for node in map(graph.nodes.__getitem__, reversed(graph.body)) if _multiplies(node)), None
    )
    if product is None or product.outputs[0] is None:
        return graph
    logits, maker = product.outputs[0], product
    while (user := _sole_forward_user(graph, logits)) and (user.op == ALL_GATHER or _is_view(graph, user)):
        (made,) = user.outputs
        if made is None:
            break
        logits, maker = made, user
    behind = graph.position[maker.id]
    of_loss = [
        node
        for node in graph.nodes
        if node.part is Part.INPUT_GRAD and graph.position.get(node.forward, -1) > behind
    ]
    if not of_loss or not graph.storage_bytes[graph.values[logits].storage]:
        return graph
    last = of_loss[-1]
    held = replace(last, kwargs=(*last.kwargs, (HELD, Ref(logits))), inputs=(*last.inputs, logits))
    return replace(graph, nodes=tuple(held if node is last else node for node in graph.nodes))


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
        for node in graph.nodes:
            if node.part is Part.FORWARD and node.id not in taken and short_name(node.op) in rule.around:
                members = _grown(graph, rule, node, maker, taken)
                if not members:
                    continue
                if len(members) > 1 or rule.forward_bytes is not None or rule.keeps != frozenset({INPUTS}):
                    taken.update(members)
                    yield _Group(rule, tuple(sorted(members)))


def _with_one_input(graph: OperatorGraph, rule: FusionRule, taken: set[int]) -> Iterator[tuple[int, ...]]:
    """Products of one tensor in modules next to each other, each by a matrix of its own."""
    found: dict[tuple[int, str], list[int]] = {}
    for node in graph.nodes:
        if node.part is Part.FORWARD and node.id not in taken and short_name(node.op) in rule.around:
            place = JOINED[short_name(node.op)]
            found.setdefault((node.inputs[place], node.module.rpartition(".")[0]), []).append(node.id)
    yield from (tuple(members) for members in found.values() if len(members) > 1)


def _is_view(graph: OperatorGraph, node: Node) -> bool:
    return all(value is None or graph.values[value].storage != value for value in node.outputs)


def _grown(
    graph: OperatorGraph, rule: FusionRule, anchor: Node, maker: dict[int, Node], taken: set[int]
) -> set[int]:
    """What belongs to one kernel with `anchor`: neighbours that the rule absorbs, without the views at its ends."""
    names = rule.around | rule.absorbs
    side = graph.position[anchor.id] >= graph.late
    found, waiting = {anchor.id}, [anchor]
    while waiting:
        node = waiting.pop()
        for other, is_user in _neighbours(graph, node, maker):
            if (
                other.id not in found
                and other.id not in taken
                and other.part is Part.FORWARD
                and (graph.position[other.id] >= graph.late) == side
                and (short_name(other.op) in names or _is_view(graph, other))
                and _in_reach(rule.within, anchor.module, other.module)
                and not (
                    _leads_in(graph, other, found, maker) if is_user else _leads_out(graph, other, found)
                )
            ):
                found.add(other.id)
                waiting.append(other)
    return _without_ends(graph, found, maker)


def _neighbours(graph: OperatorGraph, node: Node, maker: dict[int, Node]) -> Iterator[tuple[Node, bool]]:
    """Makers of what a node uses, and users of what it makes: those with True."""
    for value in node.inputs:
        if value in maker:
            yield maker[value], False
    for value in node.outputs:
        if value is not None:
            yield from ((graph.nodes[user], True) for user in graph.consumers.get(value, ()))


def _leads_in(graph: OperatorGraph, node: Node, members: set[int], maker: dict[int, Node]) -> bool:
    """Whether what a user of members needs besides is made of what they make, so that it cannot be one of them."""
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
    """Whether what others make of a value that `node` makes for members goes to these too."""
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
    """Without the views that only lead into the kernel or out of it, unless it reads all of what they are views of."""
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
    """Whether members read every element of what a view is of: through the view or beside it."""
    base, made = view.inputs[0], [value for value in view.outputs if value is not None]
    elements = sum(graph.values[value].meta.num_elements for value in made)
    beside = {user for user in graph.consumers.get(base, ()) if not _is_view(graph, graph.nodes[user])}
    return elements == graph.values[base].meta.num_elements or bool(members & beside)


@dataclass
class _Unit:
    """Nodes that become one: of one group and part."""

    group: int
    part: Part
    nodes: list[Node] = field(default_factory=list)


class _Fused:
    """The graph with its groups contracted."""

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
        self.made = self._rewritten()
        self.order, self.blocked = self._ordered()

    def graph(self) -> OperatorGraph:
        """The rewritten graph, numbered in running order."""
        old = self.old
        leaders = {member: group.members[0] for group in self.groups for member in group.members}

        def home(node: int) -> int:
            return leaders.get(node, node)

        nodes = tuple(
            node if node.forward < 0 else replace(node, forward=home(node.forward)) for node in self.order
        )
        self._follow_storages(nodes)
        late = [node.id for node in nodes if node.part is Part.FORWARD and old.position[node.id] >= old.late]
        rewritten = replace(
            old,
            nodes=nodes,
            values=tuple(self.values),
            contributions={
                gradient: tuple((home(node), value) for node, value in found)
                for gradient, found in old.contributions.items()
            },
            facts=old.facts | ({"late": _number_before(nodes, late)} if late else {}),
        )
        return renumbered_graph(rewritten)

    def _needed_outside(self) -> set[int]:
        """Values that something other than nodes needs."""
        old = self.old
        found = {old.loss, *(value for _, value in old.mutations)}
        return found | {value for made in old.contributions.values() for _, value in made}

    def _units(self) -> dict[tuple[int, Part], _Unit]:
        units: dict[tuple[int, Part], _Unit] = {}
        for node in self.old.nodes:
            if node.part < Part.FORWARD:
                continue
            group = self.group_of.get(node.id if node.part is Part.FORWARD else node.forward)
            if group is None or self._adds_relayed(node, group) or self._stands_apart(node, group):
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
        """A product with several matrices adds what each of them gives."""
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
            through = [one for value in node.inputs for one in views[value]]
            if short_name(node.op) == "add":
                inside |= {one.id: one for one in (*through, node)}
                leaves(node, [])
            elif _is_view(old, node):
                leaves(node, [*through, node])
        unit.nodes = sorted(inside.values(), key=lambda node: node.id)

    def _adds_relayed(self, node: Node, group: int) -> bool:
        """Whether a node adds a gradient that comes from elsewhere to one of the kernel's: autograd's own work."""
        if node.part is not Part.INPUT_GRAD or short_name(node.op) != "add" or len(node.inputs) != 2:
            return False
        own = [self._is_backward_of(value, group) for value in node.inputs]
        users = (self.old.nodes[user] for user in _users(self.old, node))
        return sum(own) < 2 and not any(self._is_backward_of_node(user, group) for user in users)

    def _stands_apart(self, node: Node, group: int) -> bool:
        """Whether a view in the backward touches nothing else of the kernel's: that of an operator that is gone."""
        if node.part is Part.FORWARD or not _is_view(self.old, node):
            return False
        users = (self.old.nodes[user] for user in _users(self.old, node))
        return not any(self._is_backward_of(value, group) for value in node.inputs) and not any(
            self._is_backward_of_node(user, group) and not self._adds_relayed(user, group) for user in users
        )

    def _is_backward_of(self, value: int, group: int) -> bool:
        node = self.maker.get(value)
        return node is not None and self._is_backward_of_node(node, group)

    def _is_backward_of_node(self, node: Node, group: int) -> bool:
        return node.part > Part.FORWARD and self.group_of.get(node.forward) == group

    # -- what a kernel reads and leaves -----------------------------------------------------------------------------

    def _rewritten(self) -> dict[tuple[int, Part], Node]:
        """The node of every unit."""
        results = [self._leaving(self.units[index, Part.FORWARD]) for index in range(len(self.groups))]
        kept: list[list[int]] = [[] for _ in self.groups]
        reads = {}
        for key, unit in self.units.items():
            if unit.part is Part.FORWARD:
                continue
            reads[key], needed = self._backward_reads(unit, results[unit.group])
            kept[unit.group] += [value for value in needed if value not in kept[unit.group]]
        found = {}
        for key, unit in self.units.items():
            if unit.part is Part.FORWARD:
                outputs = self._rooted(results[unit.group] + kept[unit.group])
                if self.groups[unit.group].rule.kind == "matmul":
                    outputs = [self._join(outputs), *outputs]
                found[key] = self._node(unit, self._entering(unit), outputs)
            else:
                found[key] = self._node(unit, reads[key], self._rooted(self._leaving(unit)))
        return found

    def _entering(self, unit: _Unit) -> list[int]:
        inside = {value for node in unit.nodes for value in node.outputs}
        return list(
            dict.fromkeys(value for node in unit.nodes for value in node.inputs if value not in inside)
        )

    def _leaving(self, unit: _Unit) -> list[int]:
        """What others use: for a forward, all but the kernel's own backward."""
        inside = {node.id for node in unit.nodes}

        def is_used(value: int) -> bool:
            users = (user for user in self.old.consumers.get(value, ()) if user not in inside)
            return value in self.outside or any(self._group_of_unit(user) != unit.group for user in users)

        made = (value for node in unit.nodes for value in node.outputs if value is not None)
        return [value for value in made if is_used(value)]

    def _group_of_unit(self, node: int) -> int:
        """The group that a node is part of or a backward of; -1 where it stays for itself."""
        return self.unit_of.get(node, (-1, Part.FORWARD))[0]

    def _backward_reads(self, unit: _Unit, results: Sequence[int]) -> tuple[list[int], list[int]]:
        """What the backward reads, and which values inside of the forward must be kept for it."""
        rule = self.groups[unit.group].rule
        inside = {value for node in unit.nodes for value in node.outputs}
        forward = self.units[unit.group, Part.FORWARD]
        own = makers_of(forward.nodes)
        entering = set(self._entering(forward))
        other = self.units.get((unit.group, Part.INPUT_GRAD)) if unit.part is Part.WEIGHT_GRAD else None
        partner = {value for node in other.nodes for value in node.outputs} if other else set()
        reads: dict[int, None] = {}
        kept: dict[int, None] = {}

        def take(value: int) -> None:
            """Follows a value of the forward back to what is kept."""
            node = own.get(value)
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
                    for source in self._cotangents(other, own):
                        reads[source] = None
                elif value in own or value in entering:
                    take(value)
                else:
                    reads[value] = None
        if not any(self._is_cotangent(value) for value in reads):
            reads.update(dict.fromkeys(self._cotangents(unit, own)))
        return list(reads), [value for value in kept if value not in results]

    def _cotangents(self, unit: _Unit, own: dict[int, Node]) -> list[int]:
        return [value for value in self._entering(unit) if value not in own and self._is_cotangent(value)]

    def _is_cotangent(self, value: int) -> bool:
        made = self.maker.get(value)
        return (made is not None and made.part > Part.FORWARD) or value == self.old.seed

    def _is_free(self, value: int) -> bool:
        """Whether a value is there anyway: a parameter, or made of inputs alone."""
        made = self.maker.get(value)
        return made is None or made.part < Part.FORWARD

    def _rooted(self, outputs: list[int]) -> list[int]:
        """Results with storages of their own where the one they were in is gone."""
        roots = set(outputs)
        for value in outputs:
            found = self.values[value]
            made, unit = self.maker.get(found.storage), self.unit_of.get(self.maker[value].id)
            inside = made is not None and unit is not None and self.unit_of.get(made.id) == unit
            if found.storage not in roots and inside:
                meta = contiguous(found.meta.shape, found.meta.dtype)
                self.values[value] = replace(found, storage=value, meta=meta)
        return outputs

    def _join(self, outputs: list[int]) -> int:
        """A tensor that has all results one after the other."""
        number, offset = len(self.values), 0
        for value in outputs:
            found = self.values[value]
            meta = replace(contiguous(found.meta.shape, found.meta.dtype), offset=offset)
            self.values[value] = replace(found, storage=number, meta=meta)
            offset += found.meta.num_elements
        return self._new_value(contiguous((offset,), self.values[outputs[0]].meta.dtype))

    def _product(self, group: int, part: Part) -> tuple[tuple[str, Any], ...]:
        """FLOP of one direction, elements of the matrices, and rows, columns and inner dimension of their joint product."""
        rows, inner, weights = 0, 0, 0
        for member in self.groups[group].members:
            node = self.old.nodes[member]
            place = JOINED[short_name(node.op)]
            left, right = (self.old.values[value].meta for value in node.inputs[place : place + 2])
            inner = left.shape[-1]
            rows = left.num_elements // inner
            weights += right.num_elements
        outer = weights // inner
        shape = {Part.FORWARD: (rows, outer, inner), Part.INPUT_GRAD: (rows, inner, outer)}.get(
            part, (inner, outer, rows)
        )
        return ("flop", 2.0 * rows * weights), ("weights", weights), ("shape", shape)

    def _follow_storages(self, nodes: Iterable[Node]) -> None:
        """Views lie where what they are of lies now."""
        for node in nodes:
            if is_kernel(node.op):
                continue
            for value in node.outputs:
                root = value if value is None else self.old.values[value].storage
                if value is None or root == value:
                    continue
                base = next((one for one in node.inputs if self.old.values[one].storage == root), None)
                if base is not None:
                    found, moved = self.values[value], self.values[base]
                    offset = found.meta.offset + moved.meta.offset - self.old.values[base].meta.offset
                    meta = replace(found.meta, offset=offset)
                    self.values[value] = replace(found, storage=moved.storage, meta=meta)

    def _node(self, unit: _Unit, inputs: list[int], outputs: list[int]) -> Node:
        rule = self.groups[unit.group].rule
        first = unit.nodes[0]
        largest = max((self.values[value].meta.num_elements for value in (*inputs, *outputs)), default=0)
        is_forward = unit.part is Part.FORWARD
        per_element = rule.forward_bytes if is_forward else rule.backward_bytes
        kwargs: tuple[tuple[str, Any], ...] = (("kind", rule.kind),)
        if rule.kind == "matmul":
            kwargs += self._product(unit.group, unit.part)
        if per_element is not None:
            kwargs += (("bytes_moved", per_element * largest * (unit.part is not Part.WEIGHT_GRAD)),)
        scratch: list[int] = []
        if is_forward and rule.scratch_bytes:
            scratch = [self._new_value(TensorMeta((int(rule.scratch_bytes * largest),), (1,), "uint8"))]
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
        """All nodes in running order; or the groups that stand in the way of one."""
        old = self.old
        nodes: list[tuple[int, Node]] = []
        for node in old.nodes:
            key = self.unit_of.get(node.id)
            if key is None:
                nodes.append((node.id, node))
            elif self.units[key].nodes[-1].id == node.id:
                nodes.append((node.id, self.made[key]))
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
    """Of nodes that wait for each other, without those that nothing waits for."""
    waiting = set(waiting)
    while free := {index for index in waiting if not waiting.intersection(users[index])}:
        waiting -= free
    return waiting


def _number_before(nodes: Iterable[Node], late: Sequence[int]) -> int:
    """How many forward nodes run before the first of `late`."""
    body = [node.id for node in nodes if node.part is Part.FORWARD]
    return min(body.index(node) for node in late)
