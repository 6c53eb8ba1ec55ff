"""Carving: the stages of a graph between cuts, each under its memory policy."""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

from stagewright.errors import PlanError
from stagewright.graph.added import ARRIVED, FETCH, copied
from stagewright.graph.cutting import Cutting, Routes
from stagewright.graph.graph import Node, OperatorGraph, Origin, Part, Value, made_by, makers_of
from stagewright.graph.locate import Located
from stagewright.graph.moving import Parcel, with_leaving, with_returning
from stagewright.graph.policy import KEEP, Policy
from stagewright.graph.recompute import rerunning, woven
from stagewright.graph.stage import Function, Stage, Transfer, part
from stagewright.graph.tensor import TensorMeta
from stagewright.graph.weight_grads import weight_grads, with_finishing


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
        self._carvers: dict[tuple[int, bool], _StageCarver] = {}
        self._located: list[Located] = []
        """Where each stage holds its values. What it sends lies in the same places whatever its policy."""

    def stages(self, policies: Sequence[Policy] = ()) -> list[Stage]:
        """All stages; `policies` as for `carve`."""
        num_stages = self._cutting.num_stages
        if policies and len(policies) != num_stages:
            raise PlanError(f"{len(policies)} memory policies for {num_stages} stages: give one for each")
        self._located, stages = [], []
        for index, policy in enumerate(policies or [KEEP] * num_stages):
            stage, here = self._carve(index, policy)
            self._located.append(here)
            stages.append(stage)
        return [self._at(stage, self._located[stage.index]) for stage in reversed(stages)][::-1]

    def stage(self, index: int, policy: Policy) -> Stage:
        """One of `stages`, which have been carved before."""
        return self._at(*self._carve(index, policy))

    def _carve(self, index: int, policy: Policy) -> tuple[Stage, Located]:
        """Stages in front of it have been carved."""
        key = index, policy.recomputes
        if key not in self._carvers:
            self._carvers[key] = _StageCarver(self._cutting, *key)
        carver = self._carvers[key].under(policy)
        here = carver.located()
        self._arrive(here, carver.receives)
        here.follow(carver.nodes.forward)
        return carver.carve(here), here

    def _at(self, stage: Stage, here: Located) -> Stage:
        """`stage` with the places of its values, once those behind it have theirs."""
        self._arrive(here, stage.grad_receives)
        here.follow(stage.backward.nodes)
        return replace(stage, extra=here.values, local_bytes=here.storage_bytes)

    def _arrive(self, here: Located, transfers: Iterable[Transfer]) -> None:
        for transfer in transfers:
            here.arrive(self._located[transfer.stage].value(value) for value in transfer.values)


@dataclass(frozen=True)
class _Nodes:
    """The nodes of a stage by the time they run; all in running order."""

    static: tuple[Node, ...]
    derived: tuple[Node, ...]
    forward: tuple[Node, ...]
    late: tuple[Node, ...]
    input_grad: tuple[Node, ...]
    weight_grad: tuple[Node, ...]
    finishing: tuple[Node, ...]

    def __iter__(self) -> Iterator[Node]:
        for field in fields(self):
            yield from getattr(self, field.name)


@dataclass(frozen=True)
class _Again:
    """What F leaves; the whole `backward` with `nodes` of the forward that run again in it; and what I and W, each for
    itself, run again `once`."""

    saved: tuple[int, ...]
    backward: list[Node]
    nodes: tuple[Node, ...]
    once: Function


class _StageCarver:
    """What a stage is made of, whatever its policy says but whether it `recomputes`; carves it `under` one."""

    policy = KEEP

    def __init__(self, cutting: Cutting, index: int, recomputes: bool) -> None:
        self.cutting = cutting
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
        self.nodes = self._with_copies(self._nodes(), recomputes)
        changed = [value for _, value in self.mutations]
        trained = [value for value, _ in self.weights.gradients]  # also where its gradient alone is made here
        self.parameters = self._sources(Origin.PARAMETER, trained)
        self.buffers = self._sources(Origin.BUFFER, [buffer for buffer, _ in self.mutations])
        self.constants = self._sources(Origin.CONSTANT, changed)
        self.inputs = self._sources(Origin.INPUT, changed)
        self.read_buffers, self.read_constants = self._sources(Origin.BUFFER), self._sources(Origin.CONSTANT)

    def under(self, policy: Policy) -> _StageCarver:
        found = copy.copy(self)
        found.policy, found.added = policy, dict(self.added)
        return found

    def located(self) -> Located:
        return Located(self.graph, self.added, {**self.weights.instead, **self.copies})

    def carve(self, here: Located) -> Stage:
        nodes, inputs = self.nodes, self.inputs
        changed = [value for _, value in self.mutations]
        made = made_by((*nodes.static, *nodes.derived))
        resident = {*self.parameters, *self.read_buffers, *self.read_constants, *made}
        arrived, cotangents = _values(self.receives), _values(self.grad_receives)
        at_hand = {*arrived, *inputs, *made_by(nodes.forward)} - resident
        weight_grad = with_finishing(nodes.weight_grad, nodes.finishing)
        both = sorted((*nodes.input_grad, *nodes.weight_grad), key=lambda node: node.id)
        backward = with_finishing(both, nodes.finishing)
        by_input_grad = {*cotangents, *made_by(nodes.input_grad), *made_by(nodes.late)}
        needed = _used((*backward, *nodes.late), at_hand)
        loss = [self.graph.loss] if self.computes_loss else []
        late_loss = loss if self.graph.loss in made_by(nodes.late) else []
        loss = [] if late_loss else loss
        again = self._again(backward, needed, late_loss, at_hand, resident, here)
        saved = again.saved
        parcels = self._parcels(saved, inputs, here)
        away = {value for parcel in parcels for value in parcel.values}
        kept = (*(value for value in saved if value not in away), *(parcel.handle for parcel in parcels))
        ahead = self.policy.fetch_ahead
        whole = with_returning(again.backward, parcels, ahead)
        first = _first_run(whole, again.nodes, again.once.nodes) if self.grad_receives else []
        at_first, is_first = made_by(first), {id(node) for node in first}
        begun = {parcel.storage for parcel in parcels if parcel.storage in at_first}
        missing = [parcel for parcel in parcels if not at_first.intersection(parcel.values)]
        later = [node for node in again.once.nodes if id(node) not in is_first]
        remade = [node for node in again.nodes if id(node) not in is_first]
        backward = [node for node in whole if id(node) not in is_first]
        weight_grad = with_returning(weight_grad, missing, ahead, begun)
        relayed = _used(weight_grad, (at_hand | by_input_grad | {*kept} | begun) - made_by(weight_grad))
        extra = _in_order(later, nodes.late)
        input_grad = woven(nodes.input_grad, extra, (*relayed, *late_loss))
        input_grad = with_returning(input_grad, missing, ahead, begun)
        by_input_grad |= made_by(later)
        there = {*kept} | at_first
        used = (*_used(backward, there), *_used(input_grad, there), *relayed)
        leaving = with_leaving(nodes.forward, parcels, ahead, lambda value: here.value(value).storage)
        sent, grad_sent = _values(self.sends), _values(self.grad_sends)
        return Stage(
            index=self.index,
            start=self.cutting.bounds[self.index],
            stop=self.cutting.bounds[self.index + 1],
            graph=self.graph,
            extra=self.added,
            parameters=self.parameters,
            buffers=self.buffers,
            constants=self.constants,
            inputs=inputs,
            static=nodes.static,
            derived=nodes.derived,
            forward=Function(tuple(leaving), (*arrived, *inputs), _distinct((*sent, *kept, *loss, *changed))),
            input_grad=Function(
                tuple(input_grad),
                _distinct((*_used(input_grad, there), *cotangents)),
                _distinct((*grad_sent, *(v for v in relayed if v in by_input_grad), *late_loss)),
            ),
            weight_grad=Function(tuple(weight_grad), relayed, ()),
            backward=Function(
                tuple(backward), _distinct((*_used(backward, there), *cotangents)), (*grad_sent, *late_loss)
            ),
            rebuild=part(first, resident, _distinct(used)),
            receives=self.receives,
            sends=self.sends,
            grad_receives=self.grad_receives,
            grad_sends=self.grad_sends,
            saved=kept,
            offloaded=tuple(value for value in saved if value in away),
            relayed=relayed,
            gradients=self.weights.gradients,
            mutations=self.mutations,
            computes_loss=self.computes_loss,
            remade=part(remade, resident, again.once.outputs),
            late=nodes.late,
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
        forward, late = self._divided(forward, changed)
        every = (*forward, *late, *gradient_nodes, *after)
        return _Nodes(
            static=self._closure(every, Part.STATIC, changed),
            derived=self._closure(every, Part.DERIVED, changed),
            forward=forward,
            late=late,
            input_grad=tuple(gradient_nodes),
            weight_grad=self.weights.own,
            finishing=self.weights.finishing,
        )

    def _divided(
        self, forward: tuple[Node, ...], changed: Sequence[int]
    ) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
        """The nodes that F runs, and those that run with the backward, with what of the prologue these alone need."""
        position, start = self.graph.position, self.graph.late
        body = [node for node in forward if node.part is Part.FORWARD]
        early = [node for node in body if position[node.id] < start]
        if len(early) == len(body):
            return forward, ()
        first = {node.id for node in (*early, *self._closure(early, Part.PROLOGUE, changed))}
        late = tuple(node for node in forward if node.id not in first)
        return tuple(node for node in forward if node.id in first), late

    def _again(
        self,
        backward: Sequence[Node],
        needed: Sequence[int],
        late_loss: Sequence[int],
        at_hand: set[int],
        resident: set[int],
        here: Located,
    ) -> _Again:
        """What runs again for `backward`, whose values `needed` are `at_hand` if all are kept."""
        forward, late = self.nodes.forward, self.nodes.late
        if not self.policy.reruns:
            wanted, kept = self._wanted(forward, needed)
            once = self._recomputed(forward, wanted, kept, resident)
            # Of what operators that run again make, some is kept where others of their results are not.
            kept &= made_by(once.nodes) & {*needed, *once.inputs}
            once = replace(once, nodes=tuple(self._beside(node, kept, here) for node in once.nodes))
            made = made_by(once.nodes)
            saved = tuple(value for value in _distinct((*needed, *once.inputs)) if value not in made)
            return _Again(saved, woven(backward, _in_order(once.nodes, late), late_loss), once.nodes, once)
        returned = _values(self.grad_sends), (value for _, value in self.weights.gradients), [self.graph.loss]
        found = rerunning(
            woven(backward, late, late_loss), forward, self.policy.reruns, self.graph.position,
            storage=lambda value: here.value(value).storage,
            number=lambda value, root: self._another(value, root, here),
            returned=itertools.chain(*returned),
        )  # fmt: skip
        kept = {*found.taken} & at_hand
        once = self._recomputed(forward, needed, kept, resident)
        once = replace(once, nodes=tuple(self._beside(node, kept, here) for node in once.nodes))
        return _Again(tuple(v for v in found.taken if v in kept), found.nodes, tuple(found.again), once)

    def _another(self, value: int, storage: int | None, here: Located) -> int:
        """A value like one of the graph, in a storage of its own unless one is given."""
        made = self._fresh(here.value(value), storage)
        here.add(self.added[made])
        return made

    def _beside(self, node: Node, kept: Collection[int], here: Located) -> Node:
        """`node`, with other names for what it makes that is `kept` from elsewhere."""
        outputs = tuple(
            self._another(value, None, here) if value is not None and value in kept else value
            for value in node.outputs
        )
        return node if outputs == node.outputs else replace(node, outputs=outputs)

    def _wanted(self, forward: Sequence[Node], needed: Sequence[int]) -> tuple[list[int], set[int]]:
        """The values of `needed` that the policy does not keep, and those it keeps."""
        makers = made_by(forward)
        fixed = set(self.copies.values())  # of buffers that have changed since
        wanted = needed if self.policy.everything else self._of_storages(needed, self.policy.recompute)
        checkpoints = set(self._of_storages(makers, self.policy.checkpoints))
        made_here = [value for value in wanted if self._storage(value) in makers and value not in checkpoints]
        outputs = [value for value in made_here if self._storage(value) not in fixed]
        return outputs, (set(needed) - set(outputs)) | checkpoints | fixed

    def _recomputed(
        self, forward: Sequence[Node], wanted: Sequence[int], kept: set[int], resident: set[int]
    ) -> Function:
        """The nodes of F that make the values `wanted` from those `kept`; its inputs must be saved."""
        makers = makers_of(forward)
        outputs = [value for value in wanted if value in makers and value not in kept]
        chosen: set[int] = set()
        inputs: dict[int, None] = {}
        stack = list(outputs)
        while stack:
            value = stack.pop()
            if value in resident:
                continue
            node = makers.get(value)
            if node is None or value in kept:
                inputs[value] = None
            elif node.id not in chosen:
                chosen.add(node.id)
                stack.extend(node.inputs)
        return Function(tuple(n for n in forward if n.id in chosen), tuple(sorted(inputs)), tuple(outputs))

    def _parcels(self, saved: Sequence[int], inputs: Sequence[int], here: Located) -> tuple[Parcel, ...]:
        """The storages of `saved` that the policy offloads; those of user inputs stay, because they are there anyway."""
        groups: dict[int, list[int]] = defaultdict(list)
        for value in self._of_storages(saved, self.policy.offload):
            groups[here.value(value).storage].append(value)
        moved = ((values, root) for root, values in groups.items() if root not in inputs)
        return tuple(self._parcel(values, root, here) for values, root in moved)

    def _parcel(self, values: Sequence[int], root: int, here: Located) -> Parcel:
        first, num_bytes = here.value(values[0]), here.bytes_of(root)
        like = Value(-1, TensorMeta((0,), (1,), "uint8"), -1, Origin.NODE)
        handle = self._fresh(like)
        storage = self._fresh(replace(like, meta=TensorMeta((num_bytes,), (1,), "uint8")))
        here.add(self.added[handle])
        here.add(replace(self.added[storage], storage=root))
        return Parcel(tuple(values), handle, storage, first.meta.offset * first.meta.item_bytes, num_bytes)

    def _storage(self, value: int) -> int:
        return (self.added[value] if value in self.added else self.graph.values[value]).storage

    def _of_storages(self, values: Iterable[int], chosen: Iterable[int]) -> tuple[int, ...]:
        """Those of `values` that lie in a storage of one of `chosen`."""
        storages = {self._storage(value) for value in chosen if value < len(self.graph.values)}
        return tuple(value for value in values if self._storage(value) in storages)

    def _with_copies(self, nodes: _Nodes, recomputes: bool) -> _Nodes:
        """F first copies every changing buffer whose value, or a view of it, must outlast F: the next F changes it."""
        after = (*nodes.late, *nodes.input_grad, *nodes.weight_grad)
        after += nodes.forward if recomputes else ()
        later = {value for node in after for value in node.inputs}
        lasting = (value for value in (*later, *_values(self.sends)) if value < len(self.graph.values))
        for buffer in sorted({self.graph.values[value].storage for value in lasting} & self.cutting.changing):
            self.copies[buffer] = self._fresh(replace(self.graph.values[buffer], origin=Origin.NODE))
        if not self.copies:
            return nodes

        names = "forward", "late", "input_grad", "weight_grad"
        renamed = {name: tuple(n.renamed(self.copies) for n in getattr(nodes, name)) for name in names}
        copies = [copied(buffer, made) for buffer, made in self.copies.items()]
        return replace(nodes, **renamed | {"forward": (*copies, *renamed["forward"])})

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

    def _sources(self, origin: Origin, also: Sequence[int] = ()) -> tuple[int, ...]:
        values = self.graph.values
        used = self._used_values.union(also)
        return tuple(sorted(v for v in used if v not in self.added and values[v].origin is origin))

    @cached_property
    def _used_values(self) -> frozenset[int]:
        return frozenset(value for node in self.nodes for value in node.inputs)

    def _fresh(self, like: Value, storage: int | None = None) -> int:
        """A new value, numbered apart from the graph's, in a storage of its own or in `storage`; stages number theirs each
        for themselves."""
        index = len(self.graph.values) + len(self.added)
        self.added[index] = replace(like, id=index, storage=index if storage is None else storage)
        return index

    def _transfers(self, routes: Routes, outgoing: bool) -> tuple[Transfer, ...]:
        mine, other = (0, 1) if outgoing else (1, 0)
        own = ((hop, values) for hop, values in sorted(routes.items()) if hop[mine] == self.index)
        return tuple(Transfer(hop[other], tuple(values)) for hop, values in own)


def _values(transfers: Iterable[Transfer]) -> list[int]:
    return [value for transfer in transfers for value in transfer.values]


def _distinct(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(values))


def _used(nodes: Iterable[Node], among: set[int]) -> tuple[int, ...]:
    return _distinct(value for node in nodes for value in node.inputs if value in among)


def _in_order(*groups: Iterable[Node]) -> list[Node]:
    return sorted((node for group in groups for node in group), key=lambda node: node.id)


def _first_run(nodes: Sequence[Node], again: Sequence[Node], once: Sequence[Node]) -> list[Node]:
    """What can run while the rank waits: those of `again` that come first in `nodes` with no others between them, up to one
    that is not also among `once`, and what comes back up to there."""
    of_all, own = {id(node) for node in again}, {id(node) for node in once}
    comes = [id(node) in own or node.op in (FETCH, ARRIVED) for node in nodes]
    start = next((index for index, node in enumerate(nodes) if id(node) in of_all), 0)
    stop = comes.index(False, start) if False in comes[start:] else len(nodes)
    return [node for node, extra in zip(nodes[:stop], comes, strict=False) if extra]


def _prune(gradient_nodes: list[Node], weight: Iterable[Node], sent: list[int]) -> list[Node]:
    """Without the input-gradient nodes that neither a sent cotangent nor a weight gradient needs."""
    needed = set(sent) | {value for node in weight for value in node.inputs}
    kept: list[Node] = []
    for node in reversed(gradient_nodes):
        if any(value in needed for value in node.outputs):
            kept.append(node)
            needed.update(node.inputs)
    return kept[::-1]
