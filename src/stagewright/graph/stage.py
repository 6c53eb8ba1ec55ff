"""Stages: what is left of the joint graph between two cuts, as functions with explicit inputs, outputs and saved values.

Nothing is traced again. A stage's functions are

* `static`, once per run: values that depend on constants only (positions, masks, rotary tables);
* `derived`, once per step: views and casts of parameters;
* `forward` (F), `input_grad` (I), `weight_grad` (W), and `backward` (B: I and W interleaved), once per microbatch.

A value that several stages need travels along the chain of its consumers; its cotangent travels back along the same
chain, so that every stage adds its contributions to the relayed cotangent in the order in which autograd would.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from stagewright.errors import PlanError
from stagewright.graph.graph import Node, OperatorGraph, Origin, Part, Ref, Value
from stagewright.graph.simplify import rename_refs

ACCUMULATE = "stagewright.accumulate"


@dataclass(frozen=True)
class Function:
    """Nodes in running order; `inputs` arrive from outside (resident values excepted), `outputs` stay alive."""

    nodes: tuple[Node, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Transfer:
    """Values that travel from this stage to `stage`, or arrive from it, as one message group per microbatch."""

    stage: int
    values: tuple[int, ...]


@dataclass(frozen=True)
class Stage:
    index: int
    start: int
    stop: int
    graph: OperatorGraph
    extra: dict[int, Value]  # values made by carving: sums of gradients, copies of buffers
    parameters: tuple[int, ...]
    buffers: tuple[int, ...]
    constants: tuple[int, ...]
    inputs: tuple[int, ...]  # user inputs this stage reads
    static: tuple[Node, ...]
    derived: tuple[Node, ...]
    forward: Function
    input_grad: Function
    weight_grad: Function
    backward: Function
    receives: tuple[Transfer, ...]
    sends: tuple[Transfer, ...]
    grad_receives: tuple[Transfer, ...]
    grad_sends: tuple[Transfer, ...]
    saved: tuple[int, ...]  # what F leaves for I and W
    relayed: tuple[int, ...]  # what I leaves for W, kept values of F included
    gradients: tuple[tuple[int, int], ...]  # parameter -> its gradient for one microbatch
    mutations: tuple[tuple[int, int], ...]
    computes_loss: bool

    def value(self, index: int) -> Value:
        return self.extra[index] if index in self.extra else self.graph.values[index]

    @property
    def resident(self) -> frozenset[int]:
        """Values alive between actions: parameters, buffers, constants, static and derived values."""
        made = {output for node in (*self.static, *self.derived) for output in node.outputs if output is not None}
        return frozenset({*self.parameters, *self.buffers, *self.constants, *made})


def carve(graph: OperatorGraph, cuts: Sequence[int]) -> list[Stage]:
    """Cut the body at `cuts` (strictly increasing positions between 1 and ``len(body) - 1``).

    Raises:
        PlanError: a cut is out of range, repeated, or separates an operator from the buffer it updates.
    """
    bounds = [0, *cuts, len(graph.body)]
    for low, high in itertools.pairwise(bounds):
        if low >= high:
            raise PlanError(
                f"cuts must increase strictly between 1 and {len(graph.body) - 1} (the model has {len(graph.body)} "
                f"forward operators), got {list(cuts)}"
            )
    return [_StageCarver(plan, index).carve() for plan in [_Cutting(graph, bounds)] for index in range(len(bounds) - 1)]


class _Cutting:
    """What all stages of one cutting share: the stage of every node and the routes of crossing values."""

    def __init__(self, graph: OperatorGraph, bounds: list[int]) -> None:
        self.graph = graph
        self.bounds = bounds
        stage_at = [index for index, (low, high) in enumerate(itertools.pairwise(bounds)) for _ in range(low, high)]
        self.body_stage = {node: stage_at[position] for node, position in graph.position.items()}
        self.stage: dict[int, int] = {}  # node -> stage, for F, I and W that belong to one stage
        for node in graph.nodes:
            found = self.body_stage.get(node.forward)
            if found is not None and node.part >= Part.FORWARD:
                self.stage[node.id] = found
        self.nodes_of: list[list[Node]] = [[] for _ in bounds[1:]]
        self.floating: list[Node] = []  # backward of derived values: in every stage that contributes
        for node in graph.nodes:
            if node.id in self.stage:
                self.nodes_of[self.stage[node.id]].append(node)
            elif node.part is Part.WEIGHT_GRAD:
                self.floating.append(node)
        self.next_value = len(graph.values)
        self._check_buffers()
        self.forward_routes, self.grad_routes = self._routes()

    def _check_buffers(self) -> None:
        changing = {buffer for buffer, _ in self.graph.mutations}
        for buffer, made in self.graph.mutations:
            maker = self.graph.values[made].node
            if maker not in self.stage:
                continue
            users = {self.stage[node] for node in self.graph.consumers.get(buffer, ()) if node in self.stage}
            if users - {self.stage[maker]}:
                raise PlanError(
                    f"a cut separates the users of buffer '{self.graph.values[buffer].name}', which changes with every "
                    f"microbatch: stages {sorted(users | {self.stage[maker]})} use it; move the cut"
                )
        self.changing = changing

    def _routes(self) -> tuple[dict[tuple[int, int], list[int]], dict[tuple[int, int], list[int]]]:
        """(from stage, to stage) -> values, for forward values and for cotangents."""
        users: dict[int, set[int]] = defaultdict(set)
        for node in self.graph.nodes:
            stage = self.stage.get(node.id)
            if stage is not None:
                for value in node.inputs:
                    users[value].add(stage)
        for found in self.graph.contributions.values():
            for node, value in found:
                if node in self.body_stage:
                    users[value].add(self.body_stage[node])
        forward: dict[tuple[int, int], list[int]] = defaultdict(list)
        backward: dict[tuple[int, int], list[int]] = defaultdict(list)
        for value in self.graph.values:
            if value.node < 0 or value.node not in self.stage:
                continue
            origin = self.stage[value.node]
            part = self.graph.nodes[value.node].part
            others = users[value.id] - {origin}
            if not others:
                continue
            if part is Part.FORWARD:
                for hop in itertools.pairwise([origin, *sorted(others)]):
                    forward[hop].append(value.id)
            elif part is Part.INPUT_GRAD:
                for hop in itertools.pairwise([origin, *sorted(others, reverse=True)]):
                    backward[hop].append(value.id)
        return dict(forward), dict(backward)


class _StageCarver:
    def __init__(self, cutting: _Cutting, index: int) -> None:
        self.cutting = cutting
        self.graph = cutting.graph
        self.index = index
        self.extra: dict[int, Value] = {}
        self.part_of = {n: node.part for node in self.graph.nodes for n in node.outputs if n is not None}

    def carve(self) -> Stage:
        forward, gradient_nodes = self._own_nodes()
        weight, finishing, gradients = self._weight_nodes()
        grad_sends = self._transfers(self.cutting.grad_routes, outgoing=True)
        sent = [value for transfer in grad_sends for value in transfer.values]
        gradient_nodes = _prune(gradient_nodes, (*weight, *finishing), sent)
        mutations = self._mutations(forward)
        prologue = self._closure((*forward, *gradient_nodes, *weight), Part.PROLOGUE, [v for _, v in mutations])
        copies, gradient_nodes, weight = self._copy_changing_buffers(gradient_nodes, weight)
        forward_nodes = (*copies, *sorted((*prologue, *forward), key=lambda node: node.id))
        static = self._closure((*forward_nodes, *gradient_nodes, *weight), Part.STATIC, [])
        derived = self._closure((*forward_nodes, *gradient_nodes, *weight), Part.DERIVED, [])
        every = (*static, *derived, *forward_nodes, *gradient_nodes, *weight)
        stage = Stage(
            index=self.index,
            start=self.cutting.bounds[self.index],
            stop=self.cutting.bounds[self.index + 1],
            graph=self.graph,
            extra=self.extra,
            parameters=self._sources(every, Origin.PARAMETER),
            buffers=self._sources(every, Origin.BUFFER, [buffer for buffer, _ in mutations]),
            constants=self._sources(every, Origin.CONSTANT),
            inputs=self._sources(every, Origin.INPUT, [v for _, v in mutations]),
            static=static,
            derived=derived,
            forward=Function((), (), ()),
            input_grad=Function((), (), ()),
            weight_grad=Function((), (), ()),
            backward=Function((), (), ()),
            receives=self._transfers(self.cutting.forward_routes, outgoing=False),
            sends=self._transfers(self.cutting.forward_routes, outgoing=True),
            grad_receives=self._transfers(self.cutting.grad_routes, outgoing=False),
            grad_sends=grad_sends,
            saved=(),
            relayed=(),
            gradients=tuple(gradients),
            mutations=tuple(mutations),
            computes_loss=self.graph.values[self.graph.loss].node in {node.id for node in forward},
        )
        return self._with_functions(stage, forward_nodes, gradient_nodes, weight, finishing)

    # -- nodes ------------------------------------------------------------------------------------------------------

    def _own_nodes(self) -> tuple[list[Node], list[Node]]:
        own = self.cutting.nodes_of[self.index]
        return [node for node in own if node.part is Part.FORWARD], [
            node for node in own if node.part is Part.INPUT_GRAD
        ]

    def _weight_nodes(self) -> tuple[list[Node], list[Node], list[tuple[int, int]]]:
        """Weight-gradient nodes of the stage; nodes that finish gradients, to run as soon as they can: sums of
        contributions, the backward of derived values, accumulations; and the gradient of every parameter."""
        own = [node for node in self.cutting.nodes_of[self.index] if node.part is Part.WEIGHT_GRAD]
        floating = self._active_floating(own)
        trained = {gradient: value for value, gradient in self.graph.gradients.items()}
        sums: dict[int, int] = {}
        finishing: list[Node] = []
        gradients: list[tuple[int, int]] = []
        chains = self._chains((*own, *floating))

        def settle(gradient: int) -> int:
            if gradient not in sums:
                addends = [settle(value) if value in chains else value for value in chains[gradient]]
                sums[gradient] = self._sum(addends, gradient, finishing)
            return sums[gradient]

        for gradient in chains:
            settle(gradient)
            value = trained.get(gradient)
            if value is not None and self.graph.values[value].origin is Origin.PARAMETER:
                gradients.append((value, sums[gradient]))
                finishing.append(_synthetic(ACCUMULATE, (sums[gradient],), (), (("parameter", value),)))
        for node in floating:
            self._root_outputs(node, sums)
            finishing.append(replace(node, **_renamed(node, sums)))
        return own, finishing, gradients

    def _active_floating(self, own: list[Node]) -> list[Node]:
        """Backward nodes of derived values that this stage's contributions reach."""
        made = {output for node in own for output in node.outputs if output is not None}
        active: list[Node] = []
        for node in self.cutting.floating:
            if all(self._reaches(value, made) for value in node.inputs):
                active.append(node)
                made.update(output for output in node.outputs if output is not None)
        return active

    def _reaches(self, value: int, made: set[int]) -> bool:
        graph = self.graph
        if graph.values[value].origin is Origin.GRADIENT:
            return self._is_contributed(value, made)
        producer = graph.values[value].node
        return value in made or producer < 0 or graph.nodes[producer].part in (Part.STATIC, Part.DERIVED)

    def _is_local(self, node: int, value: int, made: set[int]) -> bool:
        stage = self.cutting.body_stage.get(node)
        if stage is not None:
            return stage == self.index
        return value in made or self._is_contributed(value, made)

    def _is_contributed(self, value: int, made: set[int]) -> bool:
        """Whether `value` is the gradient of a parameter or derived value to which this stage contributes."""
        return any(self._is_local(node, item, made) for node, item in self.graph.contributions.get(value, ()))

    def _chains(self, nodes: Iterable[Node]) -> dict[int, list[int]]:
        """GRADIENT value -> the contributions of this stage, in autograd's order."""
        made = _outputs(nodes)
        chains = {
            gradient: [value for node, value in found if self._is_local(node, value, made)]
            for gradient, found in self.graph.contributions.items()
        }
        return {gradient: found for gradient, found in chains.items() if found}

    def _sum(self, contributions: list[int], gradient: int, finishing: list[Node]) -> int:
        total = contributions[0]
        for value in contributions[1:]:
            like = replace(self.graph.values[gradient], meta=self.graph.values[value].meta, origin=Origin.NODE)
            fresh = self._fresh(like)
            finishing.append(_synthetic("aten.add.Tensor", (total, value), (fresh,)))
            total = fresh
        return total

    def _root_outputs(self, node: Node, sums: dict[int, int]) -> None:
        """A view of a summed gradient shares the storage the sum has in this stage."""
        for output in node.outputs:
            if output is None:
                continue
            value = self.graph.values[output]
            if value.storage in sums:
                total = sums[value.storage]
                root = self.extra[total] if total in self.extra else self.graph.values[total]
                self.extra[output] = replace(value, storage=root.storage)

    def _fresh(self, like: Value) -> int:
        index = self.cutting.next_value
        self.cutting.next_value += 1
        self.extra[index] = replace(like, id=index, storage=index)
        return index

    def _copy_changing_buffers(
        self, gradient_nodes: list[Node], weight: list[Node]
    ) -> tuple[list[Node], list[Node], list[Node]]:
        """A buffer that a later microbatch changes is copied by F when the backward needs its value."""
        used = {value for node in (*gradient_nodes, *weight) for value in node.inputs} & self.cutting.changing
        copies: list[Node] = []
        names: dict[int, int] = {}
        for buffer in sorted(used):
            names[buffer] = self._fresh(replace(self.graph.values[buffer], origin=Origin.NODE))
            copies.append(_synthetic("aten.clone.default", (buffer,), (names[buffer],), part=Part.FORWARD))
        if not names:
            return [], gradient_nodes, weight
        return (
            copies,
            [replace(node, **_renamed(node, names)) for node in gradient_nodes],
            [replace(node, **_renamed(node, names)) for node in weight],
        )

    def _closure(self, nodes: Iterable[Node], part: Part, also: list[int]) -> tuple[Node, ...]:
        """Nodes of `part` that `nodes` need, directly or through each other."""
        found: set[int] = set()
        stack = [value for node in nodes for value in node.inputs] + list(also)
        while stack:
            value = stack.pop()
            if value in self.extra:
                continue
            producer = self.graph.values[value].node
            if producer >= 0 and producer not in found and self.graph.nodes[producer].part is part:
                found.add(producer)
                stack.extend(self.graph.nodes[producer].inputs)
        return tuple(self.graph.nodes[node] for node in sorted(found))

    def _sources(self, nodes: Iterable[Node], origin: Origin, also: Iterable[int] = ()) -> tuple[int, ...]:
        used = {value for node in nodes for value in node.inputs} | set(also)
        return tuple(
            sorted(value for value in used if value not in self.extra and self.graph.values[value].origin is origin)
        )

    def _mutations(self, forward: list[Node]) -> list[tuple[int, int]]:
        own = {node.id for node in forward}
        modules = {node.module for node in forward}
        found = []
        for buffer, value in self.graph.mutations:
            maker = self.graph.values[value].node
            if maker in self.cutting.stage:
                if maker in own:
                    found.append((buffer, value))
                continue
            readers = {
                self.cutting.stage[node]
                for node in self.graph.consumers.get(buffer, ())
                if node in self.cutting.stage
            }
            owner = self.graph.values[buffer].name.rpartition(".")[0]
            here = self.index in readers or (not readers and self._owns(owner, modules))
            if here:
                found.append((buffer, value))
        return found

    def _owns(self, owner: str, modules: set[str]) -> bool:
        """Whether this is the first stage that runs the module a buffer belongs to (the first stage if none does)."""
        for stage, nodes in enumerate(self.cutting.nodes_of):
            if any(node.part is Part.FORWARD and node.module == owner for node in nodes):
                return stage == self.index
        return self.index == 0

    # -- functions --------------------------------------------------------------------------------------------------

    def _transfers(self, routes: dict[tuple[int, int], list[int]], outgoing: bool) -> tuple[Transfer, ...]:
        mine, other = (0, 1) if outgoing else (1, 0)
        return tuple(
            Transfer(hop[other], tuple(values)) for hop, values in sorted(routes.items()) if hop[mine] == self.index
        )

    def _with_functions(
        self,
        stage: Stage,
        forward: Sequence[Node],
        gradient_nodes: list[Node],
        weight: list[Node],
        finishing: list[Node],
    ) -> Stage:
        resident = stage.resident
        arrived = [value for transfer in stage.receives for value in transfer.values]
        cotangents = [value for transfer in stage.grad_receives for value in transfer.values]
        if stage.computes_loss and gradient_nodes:
            cotangents.append(self.graph.seed)
        at_hand = {*arrived, *stage.inputs, *_outputs(forward)} - resident
        backward = _with_finishing(sorted((*gradient_nodes, *weight), key=lambda node: node.id), finishing)
        weight = _with_finishing(weight, finishing)
        saved = _used(backward, at_hand)
        by_input_grad = {*cotangents, *_outputs(gradient_nodes)}
        relayed = _used(weight, at_hand | by_input_grad)
        sent = [value for transfer in stage.sends for value in transfer.values]
        grad_sent = [value for transfer in stage.grad_sends for value in transfer.values]
        loss = [self.graph.loss] if stage.computes_loss else []
        changed = [value for _, value in stage.mutations]
        kept = tuple(dict.fromkeys((*sent, *saved, *loss, *changed)))
        return replace(
            stage,
            saved=saved,
            relayed=relayed,
            forward=Function(tuple(forward), (*arrived, *stage.inputs), kept),
            input_grad=Function(
                tuple(gradient_nodes),
                tuple(dict.fromkeys((*_used(gradient_nodes, at_hand), *cotangents))),
                tuple(dict.fromkeys((*grad_sent, *(value for value in relayed if value in by_input_grad)))),
            ),
            weight_grad=Function(tuple(weight), relayed, ()),
            backward=Function(tuple(backward), tuple(dict.fromkeys((*saved, *cotangents))), tuple(grad_sent)),
        )


def _outputs(nodes: Iterable[Node]) -> set[int]:
    return {value for node in nodes for value in node.outputs if value is not None}


def _used(nodes: Iterable[Node], among: set[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(value for node in nodes for value in node.inputs if value in among))


def _renamed(node: Node, names: dict[int, int]) -> dict[str, object]:
    return {
        "args": rename_refs(node.args, names),
        "kwargs": tuple((key, rename_refs(value, names)) for key, value in node.kwargs),
        "inputs": tuple(names.get(value, value) for value in node.inputs),
    }


def _synthetic(
    op: str,
    inputs: tuple[int, ...],
    outputs: tuple[int, ...],
    kwargs: tuple[tuple[str, object], ...] = (),
    part: Part = Part.WEIGHT_GRAD,
) -> Node:
    """A node that carving adds: not part of the graph, so it has no number, module or signature of its own."""
    return Node(-1, op, tuple(Ref(value) for value in inputs), kwargs, inputs, outputs, part, -1, "", -1, -1)


def _prune(gradient_nodes: list[Node], weight: Iterable[Node], sent: list[int]) -> list[Node]:
    """Without the input-gradient nodes that neither a sent cotangent nor a weight gradient needs."""
    needed = set(sent) | {value for node in weight for value in node.inputs}
    kept: list[Node] = []
    for node in reversed(gradient_nodes):
        if any(value in needed for value in node.outputs):
            kept.append(node)
            needed.update(node.inputs)
    return kept[::-1]


def _with_finishing(nodes: Sequence[Node], finishing: Sequence[Node]) -> list[Node]:
    """`nodes` in order, each `finishing` node as soon as its inputs are made, so that gradients live shortly."""
    making = _outputs((*nodes, *finishing))
    missing = [len(making.intersection(node.inputs)) for node in finishing]
    users: dict[int, list[int]] = defaultdict(list)
    for index, node in enumerate(finishing):
        for value in making.intersection(node.inputs):
            users[value].append(index)
    merged: list[Node] = []

    def run(node: Node) -> None:
        merged.append(node)
        for output in node.outputs:
            for index in users.get(output, ()) if output is not None else ():
                missing[index] -= 1
                if missing[index] == 0:
                    run(finishing[index])

    for index, node in enumerate(finishing):
        if missing[index] == 0:
            missing[index] = -1
            run(node)
    for node in nodes:
        run(node)
    return merged
