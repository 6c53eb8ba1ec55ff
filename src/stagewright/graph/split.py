"""Splitting of a graph into stages at cuts, each stage under its memory policy."""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

from stagewright.errors import PlanError
from stagewright.graph.added_nodes import FETCH, FETCHED, copied
from stagewright.graph.graph import Node, OperatorGraph, Origin, Part, Value, made_by, makers_of
from stagewright.graph.messages import messages
from stagewright.graph.offload import OffloadedStorage, with_fetches, with_offloads
from stagewright.graph.partition import Partition
from stagewright.graph.policy import KEEP, Policy
from stagewright.graph.recompute import interleaved, rerunning
from stagewright.graph.stage import Function, Stage, Transfer, part
from stagewright.graph.tensor import TensorMeta
from stagewright.graph.weight_grads import weight_grads, with_finishing


def split_graph(graph: OperatorGraph, cuts: Sequence[int], policies: Sequence[Policy] = ()) -> list[Stage]:
    """Cut the forward operators at `cuts` (strictly increasing indices between 1 and their number - 1).

    `policies` has one entry per stage; empty means that every stage keeps what it saves.

    Raises:
        PlanError: a cut is out of range, repeated, or separates an operator from the buffer it updates.
    """
    return SplitGraph(graph, cuts).stages(policies)


class SplitGraph:
    """A graph cut at `cuts`, whose stages can be built under one policy after another; raises as `split_graph`."""

    def __init__(self, graph: OperatorGraph, cuts: Sequence[int]) -> None:
        self._partition = Partition(graph, cuts)
        self._builders: dict[tuple[int, bool], _StageBuilder] = {}
        self._located: list[_Storages] = []
        """Storages of the values of each stage; those of the values that it sends do not depend on its policy."""

    def stages(self, policies: Sequence[Policy] = ()) -> list[Stage]:
        """Return all stages; `policies` as for `split_graph`."""
        num_stages = self._partition.num_stages
        if policies and len(policies) != num_stages:
            raise PlanError(f"{len(policies)} memory policies for {num_stages} stages: give one for each")
        self._located, stages = [], []
        for index, policy in enumerate(policies or [KEEP] * num_stages):
            stage, storages = self._build(index, policy)
            self._located.append(storages)
            stages.append(stage)
        return [self._at(stage, self._located[stage.index]) for stage in reversed(stages)][::-1]

    def stage(self, index: int, policy: Policy) -> Stage:
        """Return one stage under `policy`; call `stages` first."""
        return self._at(*self._build(index, policy))

    def _build(self, index: int, policy: Policy) -> tuple[Stage, _Storages]:
        """Return a stage, and the storages of its values so far; earlier stages must have been built."""
        key = index, policy.recomputes
        if key not in self._builders:
            self._builders[key] = _StageBuilder(self._partition, *key)
        builder = self._builders[key].under(policy)
        storages = builder.located()
        self._arrive(storages, builder.receives)
        storages.follow(builder.nodes.forward)
        return builder.build(storages), storages

    def _at(self, stage: Stage, storages: _Storages) -> Stage:
        """Return `stage` with the storages of its values, once the later stages have theirs."""
        self._arrive(storages, stage.grad_receives)
        storages.follow(stage.backward.nodes)
        return replace(stage, extra=storages.values, local_bytes=storages.storage_bytes)

    def _arrive(self, storages: _Storages, transfers: Iterable[Transfer]) -> None:
        """Add the values of `transfers` in the storages that their senders describe."""
        for transfer in transfers:
            storages.arrive(self._located[transfer.stage].value(value) for value in transfer.values)


class _Storages:
    """The values of one stage that are not in the graph, or in another storage than there, with their storages.

    The graph has the storages of the undivided model. A stage that receives one of three pieces of a storage has only that
    piece; a stage that receives all three has them in one storage (see `messages`). Views lie where their bases lie.

    Args:
        added: values added by splitting, by id.
        instead: value of the graph -> the value this stage uses in its place.
    """

    def __init__(self, graph: OperatorGraph, added: dict[int, Value], instead: dict[int, int]) -> None:
        self.graph = graph
        self.values = dict(added)
        self.storage_bytes = {value.id: value.meta.storage_bytes for value in added.values()}
        self._stands_for: dict[int, list[int]] = defaultdict(list)
        for original, substitute in instead.items():
            self._stands_for[substitute].append(original)

    def value(self, index: int) -> Value:
        return self.values[index] if index in self.values else self.graph.values[index]

    def add(self, value: Value) -> None:
        """Add a value, in a new storage or in that of a value added before."""
        self.values[value.id] = value
        if value.storage == value.id:
            self.storage_bytes[value.id] = value.meta.storage_bytes

    def bytes_of(self, storage: int) -> int:
        size = self.storage_bytes.get(storage)
        return self.graph.storage_bytes[storage] if size is None else size

    def arrive(self, sent: Iterable[Value]) -> None:
        """Add received values, as their sender describes them, in the storages of their `messages`."""
        for message in messages(sent):
            together = len(message.values) > 1
            first = message.values[0]
            size = message.num_elements if together else first.meta.extent
            self.storage_bytes[first.id] = size * first.meta.item_bytes
            for value in message.values:
                meta = value.meta if together else replace(value.meta, offset=0)
                self.values[value.id] = replace(value, storage=first.id, meta=meta)

    def follow(self, nodes: Iterable[Node]) -> None:
        """Move views to the storages of their bases; `nodes` are in running order."""
        for node in nodes:
            inputs = node.inputs
            if not (self.values.keys().isdisjoint(inputs) and self._stands_for.keys().isdisjoint(inputs)):
                for output in node.outputs:
                    if output is not None and output not in self.values:
                        self._follow(self.graph.values[output], node)

    def _follow(self, view: Value, node: Node) -> None:
        if view.storage == view.id:
            return
        for argument in node.inputs:
            names = [argument] if argument < len(self.graph.values) else []
            for name in (*self._stands_for.get(argument, ()), *names):
                base = self.graph.values[name]
                if base.storage == view.storage:
                    moved = self.value(argument)
                    meta = replace(view.meta, offset=view.meta.offset + moved.meta.offset - base.meta.offset)
                    self.values[view.id] = replace(view, storage=moved.storage, meta=meta)
                    return


@dataclass(frozen=True)
class _Nodes:
    """The nodes of a stage, grouped by when they run; each group in running order."""

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
class _Recomputation:
    """Recomputation of a stage: the values `saved` by F, the full `backward` with the forward `nodes` that it repeats, and
    the part of the forward that, if the backward is split, I repeats `once` for itself and W."""

    saved: tuple[int, ...]
    backward: list[Node]
    nodes: tuple[Node, ...]
    once: Function


class _StageBuilder:
    """Builder of one stage under any policy; only whether the policy `recomputes` is fixed."""

    policy = KEEP

    def __init__(self, partition: Partition, index: int, recomputes: bool) -> None:
        self.partition = partition
        self.graph = partition.graph
        self.index = index
        self.added: dict[int, Value] = {}
        self.weights = weight_grads(partition, index, self._fresh)
        self.sends = _transfers(partition.forward_routes.sent[index])
        self.receives = _transfers(partition.forward_routes.received[index])
        self.grad_sends = _transfers(partition.grad_routes.sent[index])
        self.grad_receives = _transfers(partition.grad_routes.received[index])
        self.mutations = tuple(pair for pair in self.graph.mutations if index in partition.updaters[pair[0]])
        self.computes_loss = partition.stage.get(self.graph.values[self.graph.loss].node) == index
        self.copies: dict[int, int] = {}  # changing buffer -> its copy
        self.nodes = self._with_copies(self._nodes(), recomputes)
        changed = [value for _, value in self.mutations]
        # A parameter that this stage only computes the gradient of is among its parameters too.
        trained = [value for value, _ in self.weights.gradients]
        self.parameters = self._sources(Origin.PARAMETER, trained)
        self.buffers = self._sources(Origin.BUFFER, [buffer for buffer, _ in self.mutations])
        self.constants = self._sources(Origin.CONSTANT, changed)
        self.inputs = self._sources(Origin.INPUT, changed)
        self.read_buffers, self.read_constants = self._sources(Origin.BUFFER), self._sources(Origin.CONSTANT)

    def under(self, policy: Policy) -> _StageBuilder:
        """Return a builder for `policy` that adds no values to this one."""
        builder = copy.copy(self)
        builder.policy, builder.added = policy, dict(self.added)
        return builder

    def located(self) -> _Storages:
        return _Storages(self.graph, self.added, {**self.weights.instead, **self.copies})

    def build(self, storages: _Storages) -> Stage:
        nodes, inputs = self.nodes, self.inputs
        changed = [value for _, value in self.mutations]
        prepared = made_by((*nodes.static, *nodes.derived))
        resident = {*self.parameters, *self.read_buffers, *self.read_constants, *prepared}
        arrived, cotangents = _values(self.receives), _values(self.grad_receives)
        at_hand = {*arrived, *inputs, *made_by(nodes.forward)} - resident
        weight_grad = with_finishing(nodes.weight_grad, nodes.finishing)
        backward = with_finishing(_in_order(nodes.input_grad, nodes.weight_grad), nodes.finishing)
        needed = _used((*backward, *nodes.late), at_hand)
        loss = [self.graph.loss] if self.computes_loss else []
        late_loss, loss = (loss, []) if self.graph.loss in made_by(nodes.late) else ([], loss)
        recomputation = self._recomputation(backward, needed, late_loss, at_hand, resident, storages)
        saved, once = recomputation.saved, recomputation.once
        parcels = self._parcels(saved, inputs, storages)
        offloaded = {value for parcel in parcels for value in parcel.values}
        kept = (*(value for value in saved if value not in offloaded), *(parcel.handle for parcel in parcels))
        ahead = self.policy.fetch_ahead
        full_backward = with_fetches(recomputation.backward, parcels, ahead)

        # R runs the beginning of the backward; B, I and W run the remaining nodes.
        rebuild = (
            _before_cotangents(full_backward, recomputation.nodes, once.nodes) if self.grad_receives else []
        )
        by_rebuild, rebuild_ids = made_by(rebuild), {id(node) for node in rebuild}
        begun = {parcel.storage for parcel in parcels if parcel.storage in by_rebuild}
        to_fetch = [parcel for parcel in parcels if not by_rebuild.intersection(parcel.values)]
        backward = [node for node in full_backward if id(node) not in rebuild_ids]
        recomputed = [node for node in recomputation.nodes if id(node) not in rebuild_ids]

        # In a split backward, I recomputes for itself and W.
        by_input_grad = {*cotangents, *made_by(nodes.input_grad), *made_by(nodes.late)}
        weight_grad = with_fetches(weight_grad, to_fetch, ahead, begun)
        for_weight_grad = _used(
            weight_grad, (at_hand | by_input_grad | {*kept} | begun) - made_by(weight_grad)
        )
        repeated = [node for node in once.nodes if id(node) not in rebuild_ids]
        by_input_grad |= made_by(repeated)
        extra = _in_order(repeated, nodes.late)
        input_grad = interleaved(nodes.input_grad, extra, (*for_weight_grad, *late_loss))
        input_grad = with_fetches(input_grad, to_fetch, ahead, begun)

        available = {*kept} | by_rebuild
        used = (*_used(backward, available), *_used(input_grad, available), *for_weight_grad)
        with_copies = with_offloads(
            nodes.forward, parcels, ahead, lambda value: storages.value(value).storage
        )
        sent, grad_sent = _values(self.sends), _values(self.grad_sends)
        return Stage(
            index=self.index,
            start=self.partition.bounds[self.index],
            stop=self.partition.bounds[self.index + 1],
            graph=self.graph,
            extra=self.added,
            parameters=self.parameters,
            buffers=self.buffers,
            constants=self.constants,
            inputs=inputs,
            static=nodes.static,
            derived=nodes.derived,
            forward=Function(
                tuple(with_copies), (*arrived, *inputs), _distinct((*sent, *kept, *loss, *changed))
            ),
            input_grad=Function(
                tuple(input_grad),
                _distinct((*_used(input_grad, available), *cotangents)),
                _distinct((*grad_sent, *(v for v in for_weight_grad if v in by_input_grad), *late_loss)),
            ),
            weight_grad=Function(tuple(weight_grad), for_weight_grad, ()),
            backward=Function(
                tuple(backward),
                _distinct((*_used(backward, available), *cotangents)),
                (*grad_sent, *late_loss),
            ),
            rebuild=part(rebuild, resident, _distinct(used)),
            receives=self.receives,
            sends=self.sends,
            grad_receives=self.grad_receives,
            grad_sends=self.grad_sends,
            saved=kept,
            offloaded=tuple(value for value in saved if value in offloaded),
            saved_for_weight_grad=for_weight_grad,
            gradients=self.weights.gradients,
            mutations=self.mutations,
            computes_loss=self.computes_loss,
            recomputed=part(recomputed, resident, once.outputs),
            late=nodes.late,
        )

    # -- nodes ------------------------------------------------------------------------------------------------------

    def _nodes(self) -> _Nodes:
        nodes = self.partition.nodes_of[self.index]
        changed = [value for _, value in self.mutations]
        forward_nodes = [node for node in nodes if node.part is Part.FORWARD]
        gradient_nodes = [node for node in nodes if node.part is Part.INPUT_GRAD]
        after = (*self.weights.nodes, *self.weights.finishing)
        gradient_nodes = _prune(gradient_nodes, after, _values(self.grad_sends))
        prologue = self._closure((*forward_nodes, *gradient_nodes, *after), Part.PROLOGUE, changed)
        forward, late = self._divided(tuple(_in_order(prologue, forward_nodes)), changed)
        stage_nodes = (*forward, *late, *gradient_nodes, *after)
        return _Nodes(
            static=self._closure(stage_nodes, Part.STATIC, changed),
            derived=self._closure(stage_nodes, Part.DERIVED, changed),
            forward=forward,
            late=late,
            input_grad=tuple(gradient_nodes),
            weight_grad=self.weights.nodes,
            finishing=self.weights.finishing,
        )

    def _divided(
        self, forward: tuple[Node, ...], changed: Sequence[int]
    ) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
        """Return the nodes that F runs, and those that run with the backward, with prologue nodes that only these need."""
        position, start = self.graph.position, self.graph.late
        forward_nodes = [node for node in forward if node.part is Part.FORWARD]
        early = [node for node in forward_nodes if position[node.id] < start]
        if len(early) == len(forward_nodes):
            return forward, ()
        first = {node.id for node in (*early, *self._closure(early, Part.PROLOGUE, changed))}
        late = tuple(node for node in forward if node.id not in first)
        return tuple(node for node in forward if node.id in first), late

    def _recomputation(
        self,
        backward: Sequence[Node],
        needed: Sequence[int],
        late_loss: Sequence[int],
        at_hand: set[int],
        resident: set[int],
        storages: _Storages,
    ) -> _Recomputation:
        """Return the recomputation for `backward`, which needs the values `needed`; `at_hand` are all that F could keep."""
        forward, late = self.nodes.forward, self.nodes.late
        if not self.policy.reruns:
            wanted, kept = self._wanted(forward, needed)
            once = self._recomputed(forward, wanted, kept, resident)
            # An operator that runs again may have kept results besides those that are recomputed.
            kept &= made_by(once.nodes) & {*needed, *once.inputs}
            once = replace(once, nodes=tuple(self._with_new_ids(node, kept, storages) for node in once.nodes))
            recomputed = made_by(once.nodes)
            saved = tuple(value for value in _distinct((*needed, *once.inputs)) if value not in recomputed)
            return _Recomputation(
                saved, interleaved(backward, _in_order(once.nodes, late), late_loss), once.nodes, once
            )
        returned = _values(self.grad_sends), (value for _, value in self.weights.gradients), [self.graph.loss]
        rerun = rerunning(
            interleaved(backward, late, late_loss), forward, self.policy.reruns, self.graph.position,
            storage=lambda value: storages.value(value).storage,
            number=lambda value, root: self._add_copy(value, root, storages),
            returned=itertools.chain(*returned),
        )  # fmt: skip
        kept = {*rerun.taken} & at_hand
        once = self._recomputed(forward, needed, kept, resident)
        once = replace(once, nodes=tuple(self._with_new_ids(node, kept, storages) for node in once.nodes))
        return _Recomputation(
            tuple(v for v in rerun.taken if v in kept), rerun.nodes, tuple(rerun.again), once
        )

    def _add_copy(self, value: int, storage: int | None, storages: _Storages) -> int:
        """Add a copy of a value, in a new storage unless one is given."""
        copy = self._fresh(storages.value(value), storage)
        storages.add(self.added[copy])
        return copy

    def _with_new_ids(self, node: Node, kept: Collection[int], storages: _Storages) -> Node:
        """Return `node` with new ids for the outputs that are already `kept`."""
        outputs = tuple(
            self._add_copy(value, None, storages) if value is not None and value in kept else value
            for value in node.outputs
        )
        return node if outputs == node.outputs else replace(node, outputs=outputs)

    def _wanted(self, forward: Sequence[Node], needed: Sequence[int]) -> tuple[list[int], set[int]]:
        """Divide `needed` into values that the policy does not keep and values that it keeps."""
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
        """Return the nodes of F that compute `wanted` from `kept`; its inputs must be saved."""
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

    def _parcels(
        self, saved: Sequence[int], inputs: Sequence[int], storages: _Storages
    ) -> tuple[OffloadedStorage, ...]:
        """Return the storages of `saved` that the policy offloads, except those of user inputs, which stay alive anyway."""
        groups: dict[int, list[int]] = defaultdict(list)
        for value in self._of_storages(saved, self.policy.offload):
            groups[storages.value(value).storage].append(value)
        moved = ((values, root) for root, values in groups.items() if root not in inputs)
        return tuple(self._parcel(values, root, storages) for values, root in moved)

    def _parcel(self, values: Sequence[int], root: int, storages: _Storages) -> OffloadedStorage:
        first, num_bytes = storages.value(values[0]), storages.bytes_of(root)
        like = Value(-1, TensorMeta((0,), (1,), "uint8"), -1, Origin.NODE)
        handle = self._fresh(like)
        storage = self._fresh(replace(like, meta=TensorMeta((num_bytes,), (1,), "uint8")))
        storages.add(self.added[handle])
        storages.add(replace(self.added[storage], storage=root))
        return OffloadedStorage(
            tuple(values), handle, storage, first.meta.offset * first.meta.item_bytes, num_bytes
        )

    def _storage(self, value: int) -> int:
        return (self.added[value] if value in self.added else self.graph.values[value]).storage

    def _of_storages(self, values: Iterable[int], chosen: Iterable[int]) -> tuple[int, ...]:
        """Return those of `values` that share a storage with one of `chosen`."""
        storages = {self._storage(value) for value in chosen if value < len(self.graph.values)}
        return tuple(value for value in values if self._storage(value) in storages)

    def _with_copies(self, nodes: _Nodes, recomputes: bool) -> _Nodes:
        """Let F first copy every changing buffer whose value, or a view of it, is used after F: the next F changes it."""
        after = (*nodes.late, *nodes.input_grad, *nodes.weight_grad)
        after += nodes.forward if recomputes else ()
        later = {value for node in after for value in node.inputs}
        lasting = (value for value in (*later, *_values(self.sends)) if value < len(self.graph.values))
        for buffer in sorted(
            {self.graph.values[value].storage for value in lasting} & self.partition.changing
        ):
            self.copies[buffer] = self._fresh(replace(self.graph.values[buffer], origin=Origin.NODE))
        if not self.copies:
            return nodes

        names = "forward", "late", "input_grad", "weight_grad"
        renamed = {name: tuple(n.renamed(self.copies) for n in getattr(nodes, name)) for name in names}
        copies = [copied(buffer, copy) for buffer, copy in self.copies.items()]
        return replace(nodes, **renamed | {"forward": (*copies, *renamed["forward"])})

    def _closure(self, nodes: Iterable[Node], part: Part, also: Sequence[int]) -> tuple[Node, ...]:
        """Return the nodes of `part` that `nodes` need, directly or indirectly."""
        made_in_part, needed = self.graph.made_by_part[part], set[int]()
        stack = [
            *made_in_part.intersection(also),
            *(v for node in nodes for v in node.inputs if v in made_in_part),
        ]
        while stack:
            producer = self.graph.values[stack.pop()].node
            if producer not in needed:
                needed.add(producer)
                stack.extend(value for value in self.graph.nodes[producer].inputs if value in made_in_part)
        return tuple(self.graph.nodes[node] for node in sorted(needed))

    def _sources(self, origin: Origin, also: Sequence[int] = ()) -> tuple[int, ...]:
        values = self.graph.values
        used = self._used_values.union(also)
        return tuple(sorted(v for v in used if v not in self.added and values[v].origin is origin))

    @cached_property
    def _used_values(self) -> frozenset[int]:
        return frozenset(value for node in self.nodes for value in node.inputs)

    def _fresh(self, like: Value, storage: int | None = None) -> int:
        """Add a value in a new storage or in `storage`. Its id follows those of the graph; every stage counts separately."""
        index = len(self.graph.values) + len(self.added)
        self.added[index] = replace(like, id=index, storage=index if storage is None else storage)
        return index


def _transfers(routes: Iterable[tuple[int, list[int]]]) -> tuple[Transfer, ...]:
    return tuple(Transfer(stage, tuple(values)) for stage, values in routes)


def _values(transfers: Iterable[Transfer]) -> list[int]:
    return [value for transfer in transfers for value in transfer.values]


def _distinct(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(values))


def _used(nodes: Iterable[Node], among: set[int]) -> tuple[int, ...]:
    return _distinct(value for node in nodes for value in node.inputs if value in among)


def _in_order(*groups: Iterable[Node]) -> list[Node]:
    return sorted((node for group in groups for node in group), key=lambda node: node.id)


def _before_cotangents(nodes: Sequence[Node], repeated: Sequence[Node], once: Sequence[Node]) -> list[Node]:
    """Return the nodes of a backward that can run while the rank waits for a cotangent: its first uninterrupted run of
    `repeated` nodes, as far as they are among `once`, with the fetches before and in it.

    They end before the first wait for a fetch, which the backward hides if the cotangent is there already.
    """
    repeated_ids, once_ids = {id(node) for node in repeated}, {id(node) for node in once}
    can_run = [id(node) in once_ids or node.op in (FETCH, FETCHED) for node in nodes]
    start = next((index for index, node in enumerate(nodes) if id(node) in repeated_ids), 0)
    stop = can_run.index(False, start) if False in can_run[start:] else len(nodes)
    run = [node for node, can in zip(nodes[:stop], can_run, strict=False) if can]
    return list(itertools.takewhile(lambda node: node.op != FETCHED, run))


def _prune(gradient_nodes: list[Node], weight: Iterable[Node], sent: list[int]) -> list[Node]:
    """Drop input-gradient nodes that neither a sent cotangent nor a weight gradient needs."""
    needed = set(sent) | {value for node in weight for value in node.inputs}
    kept: list[Node] = []
    for node in reversed(gradient_nodes):
        if any(value in needed for value in node.outputs):
            kept.append(node)
            needed.update(node.inputs)
    return kept[::-1]
