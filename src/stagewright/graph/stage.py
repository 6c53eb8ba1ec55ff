"""Stages: what is left of the joint graph between two cuts, as functions with explicit inputs, outputs and saved values.

Nothing is traced again. A stage's functions are

* `static`, once per run: values that depend on constants only (positions, masks, rotary tables);
* `derived`, once per step: views and casts of parameters;
* `forward` (F), `input_grad` (I), `weight_grad` (W), and `backward` (B: I and W interleaved), once per microbatch;
* `rebuild` (R), which makes again what a policy did not let F keep, from what it kept: the operators of F a second time,
  on the same inputs and with the same random numbers, so that I and W cannot tell the difference.

R makes everything at once if nothing is kept. Values that a policy names are made again one by one (`remade`), each inside
B or I right before it is used, so that only those are alive that lie between two kept ones; then R has nothing to do.

A value that several stages need travels along the chain of its consumers; its cotangent travels back along the same
chain, so that every stage adds its contributions to the relayed cotangent in the order in which autograd would. The
cotangent of the loss does not travel: it is a constant, resident on every stage that uses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from stagewright.errors import PlanError
from stagewright.graph.added import ACCUMULATE, copy
from stagewright.graph.cutting import Cutting, Routes
from stagewright.graph.graph import Node, OperatorGraph, Origin, Part, Value
from stagewright.graph.locate import Located
from stagewright.graph.policy import KEEP, Policy
from stagewright.graph.weaving import woven
from stagewright.graph.weight_grads import weight_grads, with_finishing

__all__ = ["ACCUMULATE", "Carving", "Function", "Stage", "Transfer", "carve"]


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
    extra: dict[
        int, Value
    ]  # values that differ from the graph's: made by carving, or lying in a received storage
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
    rebuild: Function
    receives: tuple[Transfer, ...]
    sends: tuple[Transfer, ...]
    grad_receives: tuple[Transfer, ...]
    grad_sends: tuple[Transfer, ...]
    saved: tuple[int, ...]  # what F leaves for R, I and W
    offloaded: tuple[int, ...]  # those of `saved` that spend the time until the backward on the host
    relayed: tuple[int, ...]  # what I leaves for W, kept values of F included
    gradients: tuple[tuple[int, int], ...]  # parameter -> its gradient for one microbatch
    mutations: tuple[tuple[int, int], ...]
    computes_loss: bool
    local_bytes: dict[int, int] = field(default_factory=dict)  # storages the graph does not know -> bytes
    remade: Function = Function((), (), ())  # what B and I make again on their way

    def value(self, index: int) -> Value:
        return self.extra[index] if index in self.extra else self.graph.values[index]

    @property
    def uses_seed(self) -> bool:
        """Whether the backward of this stage starts from the cotangent of the loss, or uses it again."""
        return any(self.graph.seed in node.inputs for node in self.backward.nodes)

    @property
    def resident(self) -> frozenset[int]:
        """Values alive between actions: parameters, buffers, constants, static and derived values, the loss's cotangent."""
        made = _outputs((*self.static, *self.derived))
        return frozenset({*self.parameters, *self.buffers, *self.constants, *made, self.graph.seed})

    def held_bytes(self, values: Iterable[int]) -> int:
        """Bytes of the distinct storages behind `values`, none of them resident, as this stage holds them."""
        roots = {self.value(value).storage for value in values}
        return sum(
            self.local_bytes[root] if root in self.local_bytes else self.graph.storage_bytes[root]
            for root in roots
        )


def carve(graph: OperatorGraph, cuts: Sequence[int], policies: Sequence[Policy] = ()) -> list[Stage]:
    """Cut the body at `cuts` (strictly increasing positions between 1 and ``len(body) - 1``).

    `policies` has one entry per stage; none means that every stage keeps what it saves.

    Raises:
        PlanError: a cut is out of range, repeated, or separates an operator from the buffer it updates.
    """
    return Carving(graph, cuts).stages(policies)


class Carving:
    """A graph cut at `cuts`, whose stages can be carved under one policy after another; raises as `carve`."""

    def __init__(self, graph: OperatorGraph, cuts: Sequence[int]) -> None:
        self._cutting = Cutting(graph, cuts)
        self._located: list[Located] = []
        """Where each stage holds its values. What it sends lies in the same places whatever its policy."""

    def stages(self, policies: Sequence[Policy] = ()) -> list[Stage]:
        """All stages; `policies` as for `carve`."""
        num_stages = self._cutting.num_stages
        if policies and len(policies) != num_stages:
            raise PlanError(f"{len(policies)} memory policies for {num_stages} stages: give one for each")
        chosen = policies or [KEEP] * num_stages
        carvers = [_StageCarver(self._cutting, index, policy) for index, policy in enumerate(chosen)]
        stages = [carver.carve() for carver in carvers]
        self._located = [carver.located() for carver in carvers]
        for stage in stages:
            self._follow_forward(stage, self._located[stage.index])
        for stage in reversed(stages):
            self._follow_backward(stage, self._located[stage.index])
        return [_at(stage, here) for stage, here in zip(stages, self._located, strict=True)]

    def stage(self, index: int, policy: Policy) -> Stage:
        """One of `stages`, which have been carved before."""
        carver = _StageCarver(self._cutting, index, policy)
        stage, here = carver.carve(), carver.located()
        self._follow_forward(stage, here)
        self._follow_backward(stage, here)
        return _at(stage, here)

    def _follow_forward(self, stage: Stage, here: Located) -> None:
        for transfer in stage.receives:
            here.arrive(self._located[transfer.stage].value(value) for value in transfer.values)
        here.follow(stage.forward.nodes)

    def _follow_backward(self, stage: Stage, here: Located) -> None:
        for transfer in stage.grad_receives:
            here.arrive(self._located[transfer.stage].value(value) for value in transfer.values)
        here.follow(stage.backward.nodes)


def _at(stage: Stage, here: Located) -> Stage:
    return replace(stage, extra=here.values, local_bytes=here.storage_bytes)


@dataclass(frozen=True)
class _Nodes:
    """The nodes of a stage by the time they run; all in running order."""

    static: tuple[Node, ...]
    derived: tuple[Node, ...]
    forward: tuple[Node, ...]
    input_grad: tuple[Node, ...]
    weight_grad: tuple[Node, ...]
    finishing: tuple[Node, ...]

    def __iter__(self) -> Iterator[Node]:
        yield from (
            *self.static,
            *self.derived,
            *self.forward,
            *self.input_grad,
            *self.weight_grad,
            *self.finishing,
        )


class _StageCarver:
    def __init__(self, cutting: Cutting, index: int, policy: Policy) -> None:
        self.cutting = cutting
        self.policy = policy
        self.graph = cutting.graph
        self.index = index
        self.added: dict[int, Value] = {}
        self.weights = weight_grads(cutting, index, self._fresh)
        self.sends = self._transfers(cutting.forward_routes, outgoing=True)
        self.receives = self._transfers(cutting.forward_routes, outgoing=False)
        self.grad_sends = self._transfers(cutting.grad_routes, outgoing=True)
        self.grad_receives = self._transfers(cutting.grad_routes, outgoing=False)
        self.mutations = tuple(pair for pair in self.graph.mutations if index in cutting.updaters[pair[0]])
        self.computes_loss = cutting.stage.get(self.graph.values[self.graph.loss].node) == index
        self.copies: dict[int, int] = {}  # changing buffer -> its copy

    def located(self) -> Located:
        return Located(self.graph, self.added, {**self.weights.instead, **self.copies})

    def carve(self) -> Stage:
        nodes = self._with_copies(self._nodes())
        changed = [value for _, value in self.mutations]
        inputs = self._sources(nodes, Origin.INPUT, changed)
        resident = {
            *self._sources(nodes, Origin.PARAMETER),
            *self._sources(nodes, Origin.BUFFER),
            *self._sources(nodes, Origin.CONSTANT),
            *_outputs((*nodes.static, *nodes.derived)),
        }
        arrived, cotangents = _values(self.receives), _values(self.grad_receives)
        at_hand = {*arrived, *inputs, *_outputs(nodes.forward)} - resident
        weight_grad = with_finishing(nodes.weight_grad, nodes.finishing)
        both = sorted((*nodes.input_grad, *nodes.weight_grad), key=lambda node: node.id)
        backward = with_finishing(both, nodes.finishing)
        by_input_grad = {*cotangents, *_outputs(nodes.input_grad)}
        needed = _used(backward, at_hand)
        rebuild = self._rebuild(nodes.forward, needed, resident)
        saved = _distinct((*(value for value in needed if value not in rebuild.outputs), *rebuild.inputs))
        relayed = _used(weight_grad, at_hand | by_input_grad)
        input_grad = nodes.input_grad
        remade = Function((), (), ())
        if not self.policy.everything:
            remade, rebuild = rebuild, remade
            again = _outputs(remade.nodes)
            backward = woven(backward, remade.nodes)
            input_grad = tuple(woven(input_grad, remade.nodes, relayed))
            needed = _distinct((*(value for value in needed if value not in again), *remade.inputs))
            by_input_grad |= again
            at_hand -= again
        sent, grad_sent = _values(self.sends), _values(self.grad_sends)
        loss = [self.graph.loss] if self.computes_loss else []
        return Stage(
            index=self.index,
            start=self.cutting.bounds[self.index],
            stop=self.cutting.bounds[self.index + 1],
            graph=self.graph,
            extra=self.added,
            parameters=self._sources(nodes, Origin.PARAMETER),
            buffers=self._sources(nodes, Origin.BUFFER, [buffer for buffer, _ in self.mutations]),
            constants=self._sources(nodes, Origin.CONSTANT, changed),
            inputs=inputs,
            static=nodes.static,
            derived=nodes.derived,
            forward=Function(nodes.forward, (*arrived, *inputs), _distinct((*sent, *saved, *loss, *changed))),
            input_grad=Function(
                input_grad,
                _distinct((*_used(input_grad, at_hand), *cotangents)),
                _distinct((*grad_sent, *(value for value in relayed if value in by_input_grad))),
            ),
            weight_grad=Function(tuple(weight_grad), relayed, ()),
            backward=Function(tuple(backward), _distinct((*needed, *cotangents)), tuple(grad_sent)),
            rebuild=rebuild,
            receives=self.receives,
            sends=self.sends,
            grad_receives=self.grad_receives,
            grad_sends=self.grad_sends,
            saved=saved,
            offloaded=self._of_storages(saved, self.policy.offload),
            relayed=relayed,
            gradients=self.weights.gradients,
            mutations=self.mutations,
            computes_loss=self.computes_loss,
            remade=remade,
        )

    # -- nodes ------------------------------------------------------------------------------------------------------

    def _nodes(self) -> _Nodes:
        own = self.cutting.nodes_of[self.index]
        changed = [value for _, value in self.mutations]
        body = [node for node in own if node.part is Part.FORWARD]
        gradient_nodes = [node for node in own if node.part is Part.INPUT_GRAD]
        after = (*self.weights.own, *self.weights.finishing)
        gradient_nodes = _prune(gradient_nodes, after, _values(self.grad_sends))
        prologue = self._closure((*body, *gradient_nodes, *after), Part.PROLOGUE, changed)
        forward = tuple(sorted((*prologue, *body), key=lambda node: node.id))
        every = (*forward, *gradient_nodes, *after)
        return _Nodes(
            static=self._closure(every, Part.STATIC, changed),
            derived=self._closure(every, Part.DERIVED, changed),
            forward=forward,
            input_grad=tuple(gradient_nodes),
            weight_grad=self.weights.own,
            finishing=self.weights.finishing,
        )

    def _rebuild(self, forward: Sequence[Node], needed: Sequence[int], resident: set[int]) -> Function:
        """R: the nodes of F that make the values of `needed` the policy does not keep; its inputs must be saved."""
        makers = {output: node for node in forward for output in node.outputs if output is not None}
        fixed = set(self.copies.values())  # of buffers that have changed since
        wanted = needed if self.policy.everything else self._of_storages(needed, self.policy.recompute)
        made_here = [value for value in wanted if self._storage(value) in makers]
        outputs = [value for value in made_here if self._storage(value) not in fixed]
        kept = set(needed) - set(outputs)
        chosen: set[int] = set()
        inputs: dict[int, None] = {}
        stack = list(outputs)
        while stack:
            value = stack.pop()
            if value in resident:
                continue
            node = makers.get(value)
            if node is None or value in kept or value in fixed:
                inputs[value] = None
            elif node.id not in chosen:
                chosen.add(node.id)
                stack.extend(node.inputs)
        return Function(tuple(n for n in forward if n.id in chosen), tuple(sorted(inputs)), tuple(outputs))

    def _storage(self, value: int) -> int:
        return (self.added[value] if value in self.added else self.graph.values[value]).storage

    def _of_storages(self, values: Iterable[int], chosen: Iterable[int]) -> tuple[int, ...]:
        """Those of `values` that lie in a storage of one of `chosen`."""
        storages = {self._storage(value) for value in chosen if value < len(self.graph.values)}
        return tuple(value for value in values if self._storage(value) in storages)

    def _with_copies(self, nodes: _Nodes) -> _Nodes:
        """F first copies every changing buffer whose value, or a view of it, must outlast F: the next F changes it."""
        after = (
            *nodes.input_grad,
            *nodes.weight_grad,
            *(nodes.forward if self.policy.recomputes else ()),
        )
        later = {value for node in after for value in node.inputs}
        lasting = (value for value in (*later, *_values(self.sends)) if value < len(self.graph.values))
        for buffer in sorted({self.graph.values[value].storage for value in lasting} & self.cutting.changing):
            self.copies[buffer] = self._fresh(replace(self.graph.values[buffer], origin=Origin.NODE))
        if not self.copies:
            return nodes

        def renew(group: tuple[Node, ...]) -> tuple[Node, ...]:
            return tuple(node.renamed(self.copies) for node in group)

        copies = [copy(buffer, made) for buffer, made in self.copies.items()]
        return replace(
            nodes,
            forward=(*copies, *renew(nodes.forward)),
            input_grad=renew(nodes.input_grad),
            weight_grad=renew(nodes.weight_grad),
        )

    def _closure(self, nodes: Iterable[Node], part: Part, also: Sequence[int]) -> tuple[Node, ...]:
        """Nodes of `part` that `nodes` need, directly or through each other."""
        found: set[int] = set()
        stack = [value for node in nodes for value in node.inputs] + list(also)
        while stack:
            value = stack.pop()
            if value in self.added:
                continue
            producer = self.graph.values[value].node
            if producer >= 0 and producer not in found and self.graph.nodes[producer].part is part:
                found.add(producer)
                stack.extend(self.graph.nodes[producer].inputs)
        return tuple(self.graph.nodes[node] for node in sorted(found))

    def _sources(self, nodes: Iterable[Node], origin: Origin, also: Sequence[int] = ()) -> tuple[int, ...]:
        used = {value for node in nodes for value in node.inputs} | set(also)
        return tuple(
            sorted(
                value
                for value in used
                if value not in self.added and self.graph.values[value].origin is origin
            )
        )

    def _fresh(self, like: Value) -> int:
        """A new value, numbered apart from the graph's; stages number theirs each for themselves."""
        index = len(self.graph.values) + len(self.added)
        self.added[index] = replace(like, id=index, storage=index)
        return index

    def _transfers(self, routes: Routes, outgoing: bool) -> tuple[Transfer, ...]:
        mine, other = (0, 1) if outgoing else (1, 0)
        return tuple(
            Transfer(hop[other], tuple(values))
            for hop, values in sorted(routes.items())
            if hop[mine] == self.index
        )


def _values(transfers: Iterable[Transfer]) -> list[int]:
    return [value for transfer in transfers for value in transfer.values]


def _distinct(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(values))


def _outputs(nodes: Iterable[Node]) -> set[int]:
    return {value for node in nodes for value in node.outputs if value is not None}


def _used(nodes: Iterable[Node], among: set[int]) -> tuple[int, ...]:
    return _distinct(value for node in nodes for value in node.inputs if value in among)


def _prune(gradient_nodes: list[Node], weight: Iterable[Node], sent: list[int]) -> list[Node]:
    """Without the input-gradient nodes that neither a sent cotangent nor a weight gradient needs."""
    needed = set(sent) | {value for node in weight for value in node.inputs}
    kept: list[Node] = []
    for node in reversed(gradient_nodes):
        if any(value in needed for value in node.outputs):
            kept.append(node)
            needed.update(node.inputs)
    return kept[::-1]
