"""Costs of stages: of split stages, and approximate costs of any range of forward operators, for searches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Floats
from stagewright.cluster import Device
from stagewright.estimation.optimizer import optimizer_of
from stagewright.estimation.runtime import runtime_of
from stagewright.estimation.stage_memory import StageMemory
from stagewright.estimation.time import Costing, Sums
from stagewright.graph import Node, OperatorGraph, Origin, Part
from stagewright.graph.added_nodes import FETCH, FETCHED, HOST_COPIES, OFFLOAD, OFFLOADED
from stagewright.graph.cuts import Cuts, find_cuts
from stagewright.graph.messages import num_bytes
from stagewright.graph.repeat import Copies, expanded
from stagewright.graph.stage import Function, Stage
from stagewright.graph.tensor import ITEM_BYTES
from stagewright.graph.views import Lookup


@dataclass(frozen=True)
class StageSummary:
    """Costs of a stage for one microbatch: seconds of its functions, bytes it saves and sends."""

    start: int
    stop: int
    forward_s: float
    input_grad_s: float
    weight_grad_s: float
    backward_s: float
    rebuild_s: float
    recompute_s: float
    """Recomputation that is part of both `input_grad_s` and `backward_s`."""
    parameter_bytes: int
    num_parameters: int
    saved_bytes: int
    recomputed_bytes: int
    offloaded_bytes: int
    waits_s: float
    """Waiting for offloads and fetches in one F and one backward: part of their seconds."""
    behind_s: float
    """Waiting of the device for the host to issue operators in F, I, W and R: part of their seconds."""
    sent_bytes: dict[int, int]
    """Bytes to each later stage per forward."""
    returned_bytes: dict[int, int]
    """Bytes to each earlier stage per backward."""


def summarise(memory: StageMemory, costing: Costing) -> StageSummary:
    """Return the costs of a split stage."""
    stage = memory.stage
    functions = stage.forward, stage.input_grad, stage.weight_grad, stage.backward, stage.rebuild
    columns = [costing.columns(function.nodes, stage.value) for function in functions]
    sums = [Sums.of(of_function) for of_function in columns]
    waits = _waits(stage, functions, columns, costing.device) if stage.offloaded else (0.0,) * len(functions)
    recompute_s = 0.0
    if again := {node.id for node in stage.recomputed.nodes if node.id >= 0}:
        once = [node for node in stage.backward.nodes if node.id not in again]
        recompute_s = sums[3].seconds - costing.sums(once, stage.value).seconds
    metas = [stage.value(value).meta for value in stage.parameters]
    return StageSummary(
        stage.start,
        stage.stop,
        *(function_sums.seconds + wait_s for function_sums, wait_s in zip(sums, waits, strict=True)),
        recompute_s=recompute_s,
        parameter_bytes=sum(meta.num_elements * meta.item_bytes for meta in metas),
        num_parameters=sum(meta.num_elements for meta in metas),
        saved_bytes=memory.saved_bytes,
        recomputed_bytes=stage.held_bytes(_recomputed(stage)),
        offloaded_bytes=stage.held_bytes(stage.offloaded),
        waits_s=waits[0] + waits[3] + waits[4],
        behind_s=sum(sums[place].behind_seconds for place in (0, 1, 2, 4)),  # of F, I, W and R
        sent_bytes={t.stage: num_bytes([stage.value(v) for v in t.values]) for t in stage.sends},
        returned_bytes={t.stage: num_bytes([stage.value(v) for v in t.values]) for t in stage.grad_sends},
    )


def _recomputed(stage: Stage) -> list[int]:
    """Return the values that R and the backward recompute."""
    away = {stage.value(value).storage for value in stage.offloaded}
    recomputed = (*stage.rebuild.outputs, *stage.recomputed.outputs)
    return [value for value in recomputed if stage.value(value).storage not in away]


def _waits(
    stage: Stage, functions: Sequence[Function], columns: Sequence[Floats], device: Device
) -> tuple[float, ...]:
    """Return the waiting seconds of F, I, W, B and R, the `functions`, whose operators have these `Costing.columns`; fetches
    that R starts may be late in the backward."""
    forward, input_grad, weight_grad, backward, rebuild = zip(functions, columns, strict=True)

    def wait(*parts: tuple[Function, Floats]) -> float:
        nodes = [node for function, _ in parts for node in function.nodes]
        together = np.concatenate([of_function for _, of_function in parts], axis=1)
        return _waiting_seconds(nodes, stage.value, together, device)

    rebuild_s = wait(rebuild)
    after_rebuild = [wait(rebuild, part) - rebuild_s for part in (input_grad, backward)]
    return wait(forward), after_rebuild[0], wait(weight_grad), after_rebuild[1], rebuild_s


class RangeCosts:
    """Costs of ranges of forward operators as prefix sums: `seconds`, `state_bytes` and `saved_bytes` have an entry per cut
    index, and the cost of the range ``[i, j)`` is ``array[j] - array[i]``.

    * `seconds`: forward, input gradient and weight gradient of one microbatch; of these, `forward_seconds` (of F: without a
      late loss) and `weight_grad_seconds`;
    * `state_bytes`: parameters, gradients and optimizer state; of these, `parameter_bytes`;
    * `saved_bytes`: what F saves for the backward of one microbatch;
    * `boundary_bytes[i]`: what crosses a cut at `i` in one forward and one backward.

    `few` is the graph, perhaps with layers left out; `copies` says which of its layers stand for them. The `graph` with all
    layers is built on first use.

    Ignores: prologue and derived values; that the gradients of a parameter used on both sides of a cut are on both sides;
    values saved in a stage that did not compute them.
    """

    def __init__(self, graph: OperatorGraph, costing: Costing, copies: Copies | None = None) -> None:
        self.few = graph
        self.few_costing = costing
        self.copies = copies or Copies(np.arange(len(graph.forward_ids)), np.ones(len(graph.nodes), np.int64))
        self.size = len(self.copies.places)
        self._elsewhere: dict[Device, RangeCosts] = {costing.device: self}

    @cached_property
    def graph(self) -> OperatorGraph:
        original = next(iter(self._elsewhere.values()))  # shares its graph with the costs on other devices
        if original is not self:
            return original.graph
        return expanded(self.few) if self.size > len(self.few.forward_ids) else self.few

    @cached_property
    def costing(self) -> Costing:
        """Costs of the nodes of `graph`."""
        return self.few_costing if self.graph is self.few else self.few_costing.of_graph(self.graph)

    @property
    def device(self) -> Device:
        return self.few_costing.device

    def on(self, device: Device) -> RangeCosts:
        """Return the costs of the same graph on another kind of device."""
        if device not in self._elsewhere:
            self._elsewhere[device] = RangeCosts(self.few, self.few_costing.on(device), self.copies)
            self._elsewhere[device]._elsewhere = self._elsewhere
        return self._elsewhere[device]

    @cached_property
    def _places(self) -> NDArray[np.int64]:
        """Index in `few` of every node's forward operator; -1 if it has none."""
        position = self.few.position
        return np.fromiter((position.get(node.forward, -1) for node in self.few.nodes), np.int64)

    @cached_property
    def seconds(self) -> Floats:
        return self._prefix(self._places, self._bound)

    @cached_property
    def forward_seconds(self) -> Floats:
        return self._seconds_of(Part.FORWARD)

    @cached_property
    def weight_grad_seconds(self) -> Floats:
        return self._seconds_of(Part.WEIGHT_GRAD)

    def _seconds_of(self, part: Part) -> Floats:
        is_part = np.fromiter((node.part is part for node in self.few.nodes), np.bool_)
        if part is Part.FORWARD:
            is_part &= self._places < self.few.late
        return self._prefix(self._places, np.where(is_part, self._bound, 0.0))

    @cached_property
    def _bound(self) -> Floats:
        """Seconds of every node of `few`: of the device or of the host, whichever is busier for the whole graph."""
        device_s, host_s = self.few_costing.device_seconds, self.few_costing.arrays.host_s
        counts = self.copies.counts
        return device_s if counts @ device_s >= counts @ host_s else host_s

    @cached_property
    def state_bytes(self) -> Floats:
        """Bytes of training state; a parameter that several operators use counts at its first use."""
        frozen = self._first_uses.keys() - self.few.gradients.keys()
        return self.trained_bytes + self._of_parameters(frozen, ITEM_BYTES.__getitem__)

    @cached_property
    def trained_bytes(self) -> Floats:
        """Part of `state_bytes` that belongs to trained parameters."""
        precision, moments = runtime_of(self.few).precision, optimizer_of(self.few).num_moments
        return self._of_parameters(
            self.few.gradients.keys(),
            lambda dtype: replace(precision(dtype), num_moments=moments).bytes_per_parameter,
        )

    @cached_property
    def parameter_bytes(self) -> Floats:
        return self._of_parameters(self._first_uses.keys(), ITEM_BYTES.__getitem__)

    def _of_parameters(self, counted: Collection[int], item_bytes: Callable[[str], float]) -> Floats:
        first = {value: place for value, place in self._first_uses.items() if value in counted}
        metas = [self.few.values[value].meta for value in first]
        sizes = [meta.num_elements * item_bytes(meta.dtype) for meta in metas]
        return self._prefix(np.array(list(first.values()), np.int64), np.array(sizes, np.float64))

    @cached_property
    def saved_bytes(self) -> Floats:
        graph, sizes = self.few, self.few.storage_bytes
        saved: dict[int, int] = {}
        for node in graph.nodes:
            if node.part < Part.INPUT_GRAD and graph.position.get(node.id, -1) < graph.late:
                continue
            for value in node.inputs:
                root = graph.values[value].storage
                place = graph.position.get(graph.values[root].node)
                if place is not None and place < graph.late:
                    saved[root] = place
        bytes_of = np.array([sizes[root] for root in saved], np.float64)
        return self._prefix(np.array(list(saved.values()), np.int64), bytes_of)

    @cached_property
    def cuts(self) -> Cuts:
        """Legal cuts, and what crosses them."""
        return find_cuts(self.few).at([*self.copies.places, len(self.few.forward_ids)])

    @cached_property
    def boundary_bytes(self) -> Floats:
        """Bytes across each cut; index 0 and the last are not cuts and have zero."""
        return (self.cuts.value_bytes + self.cuts.cotangent_bytes).astype(np.float64)

    @cached_property
    def legal_cuts(self) -> NDArray[np.int64]:
        """Indices of the legal cuts."""
        return self.cuts.positions

    @cached_property
    def _first_uses(self) -> dict[int, int]:
        """Index of the first operator of `few` that uses each parameter, directly or through derived values."""
        graph = self.few
        sources: dict[int, tuple[int, ...]] = defaultdict(tuple)
        first: dict[int, int] = {}
        for node in graph.nodes:
            parameters: list[int] = []
            for value in node.inputs:
                is_parameter = graph.values[value].origin is Origin.PARAMETER
                parameters.extend((value,) if is_parameter else sources.get(value, ()))
            if node.part is Part.DERIVED:
                for output in node.outputs:
                    if output is not None:
                        sources[output] = tuple(parameters)
            elif node.part is Part.FORWARD:
                for value in parameters:
                    first.setdefault(value, graph.position[node.id])
        return first

    def _prefix(self, places: NDArray[np.int64], amounts: Floats) -> Floats:
        """Return the sum before every cut index of the whole graph of `amounts` at `places` of `few`."""
        inside = places >= 0
        totals = np.bincount(places[inside], weights=amounts[inside], minlength=len(self.few.forward_ids))
        return np.concatenate([[0.0], totals[self.copies.places].cumsum()])


def _waiting_seconds(nodes: Sequence[Node], value: Lookup, columns: Floats, device: Device) -> float:
    """Return the seconds by which `nodes`, with these `Costing.columns`, take longer because the link to the host is late.

    Each direction of the link copies one storage after the other, overlapped with computations, from the time when the
    device reaches `OFFLOAD` or `FETCH`; the device waits before `OFFLOADED` and `FETCHED`. A CPU copies in between.

    Ignores: transfers between stages and of the optimizer's state over the same link; the memory bandwidth of the copies,
    which on the host all devices of a node share; fetches while a rank waits for other ranks between R and its backward.
    """
    if not any(node.op in HOST_COPIES for node in nodes):
        return 0.0
    device_s, host_s, _ = columns
    seconds = device_s if device_s.sum() >= host_s.sum() else host_s
    now, waits = 0.0, 0.0
    free = {OFFLOAD: 0.0, FETCH: 0.0}
    done: dict[int, float] = {}
    for node, node_s in zip(nodes, seconds.tolist(), strict=True):
        now += node_s
        if node.op in free and node.outputs[0] is not None:
            num_bytes = _num_bytes(node, value)
            if device.shares_host_memory:
                waits += device.memory_seconds(2.0 * num_bytes)
                continue
            free[node.op] = max(free[node.op], now) + num_bytes / device.host_link_bandwidth
            done[node.outputs[0]] = free[node.op]
        elif node.op in (OFFLOADED, FETCHED):
            late = max(0.0, done.get(node.inputs[0 if node.op == OFFLOADED else 1], 0.0) - now)
            now, waits = now + late, waits + late
    return waits


def _num_bytes(node: Node, value: Lookup) -> int:
    if node.op == OFFLOAD:
        return dict(node.kwargs)["num_bytes"]
    (storage,) = (output for output in node.outputs if output is not None)
    return value(storage).meta.storage_bytes
