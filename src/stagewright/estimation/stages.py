"""What any range of the body costs, near enough to search with, and what a split stage costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from stagewright.cluster import Device
from stagewright.estimation.liveness import Lookup
from stagewright.estimation.optimizer import optimizer_of
from stagewright.estimation.runtime import runtime_of
from stagewright.estimation.stage_memory import StageMemory
from stagewright.estimation.time import Costing
from stagewright.graph import Node, OperatorGraph, Origin, Part
from stagewright.graph.added_nodes import FETCH, FETCHED, MOVES, OFFLOAD, OFFLOADED
from stagewright.graph.cuts import Cuts, find_cuts
from stagewright.graph.messages import num_bytes
from stagewright.graph.repeat import Copies, expanded
from stagewright.graph.stage import Function, Stage
from stagewright.graph.tensor import ITEM_BYTES

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class StageSummary:
    """A stage and one microbatch: seconds of its functions, bytes it holds and sends."""

    start: int
    stop: int
    forward_s: float
    input_grad_s: float
    weight_grad_s: float
    backward_s: float
    rebuild_s: float
    recompute_s: float
    """Spent by both `input_grad_s` and `backward_s` on making saved values again."""
    parameter_bytes: int
    num_parameters: int
    saved_bytes: int
    recomputed_bytes: int
    offloaded_bytes: int
    waits_s: float
    """Of one F and one backward, for what goes to the host and comes back: part of their seconds."""
    behind_s: float
    """Of F, I, W and R, in which the device waits for the host to issue operators: part of their seconds."""
    sent_bytes: dict[int, int]
    """To each later stage, by one forward."""
    returned_bytes: dict[int, int]
    """To each earlier stage, by one backward."""


def summarise(memory: StageMemory, costing: Costing) -> StageSummary:
    """What the functions of a split stage take."""
    stage = memory.stage
    functions = (
        stage.forward, stage.input_grad, stage.weight_grad, stage.backward, stage.rebuild, stage.recomputed,
    )  # fmt: skip
    seconds = [costing.seconds(function.nodes, stage.value) for function in functions]
    waits = _waits(stage, costing) if stage.offloaded else (0.0,) * len(functions)
    metas = [stage.value(value).meta for value in stage.parameters]
    return StageSummary(
        stage.start,
        stage.stop,
        *(own + late for own, late in zip(seconds, waits, strict=True)),
        parameter_bytes=sum(meta.num_elements * meta.item_bytes for meta in metas),
        num_parameters=sum(meta.num_elements for meta in metas),
        saved_bytes=memory.saved_bytes,
        recomputed_bytes=stage.held_bytes(_recomputed(stage)),
        offloaded_bytes=stage.held_bytes(stage.offloaded),
        waits_s=waits[0] + waits[3] + waits[4],
        behind_s=sum(
            costing.behind_seconds(function.nodes, stage.value)
            for function in (stage.forward, stage.input_grad, stage.weight_grad, stage.rebuild)
        ),
        sent_bytes={t.stage: num_bytes([stage.value(v) for v in t.values]) for t in stage.sends},
        returned_bytes={t.stage: num_bytes([stage.value(v) for v in t.values]) for t in stage.grad_sends},
    )


def _recomputed(stage: Stage) -> list[int]:
    """Values that R and the backward recompute."""
    away = {stage.value(value).storage for value in stage.offloaded}
    made = (*stage.rebuild.outputs, *stage.recomputed.outputs)
    return [value for value in made if stage.value(value).storage not in away]


def _waits(stage: Stage, costing: Costing) -> tuple[float, ...]:
    """Of F, I, W, B, R and what the backward recomputes; what R begins to fetch may be late in the backward."""

    def late(*functions: Function) -> float:
        nodes = [node for function in functions for node in function.nodes]
        return waiting_seconds(nodes, stage.value, costing)

    rebuild = late(stage.rebuild)
    behind = [late(stage.rebuild, function) - rebuild for function in (stage.input_grad, stage.backward)]
    return late(stage.forward), behind[0], late(stage.weight_grad), behind[1], rebuild, 0.0


class BodyCosts:
    """Costs of ranges of the body: `seconds`, `state_bytes` and `saved_bytes` have an entry per position
    and one more, and the cost of the range ``[i, j)`` is ``array[j] - array[i]``.

    * `seconds`: forward, input gradient and weight gradient of one microbatch; `forward_seconds` (of F: without a late
      loss) and `weight_grad_seconds` of these;
    * `state_bytes`: parameters, gradients and optimizer state; `parameter_bytes` of these;
    * `saved_bytes`: what F leaves for the backward of one microbatch;
    * `boundary_bytes[i]`: what crosses a cut at `i` in one forward and one backward.

    A graph may leave layers out (`few`), `copies` of whose others then stand for them: the `graph` with all of them is made
    when it is first asked for.

    Ignores: prologue and derived values; that the gradients of a parameter used on both sides of a cut are
    on both sides; values saved in a stage that did not make them.
    """

    def __init__(self, graph: OperatorGraph, costing: Costing, copies: Copies | None = None) -> None:
        self.few = graph
        self.few_costing = costing
        self.copies = copies or Copies(np.arange(len(graph.forward_ids)), np.ones(len(graph.nodes), np.int64))
        self.size = len(self.copies.places)
        self._elsewhere: dict[Device, BodyCosts] = {costing.device: self}

    @cached_property
    def graph(self) -> OperatorGraph:
        first = next(iter(self._elsewhere.values()))
        if first is not self:
            return first.graph
        return expanded(self.few) if self.size > len(self.few.forward_ids) else self.few

    @cached_property
    def costing(self) -> Costing:
        """Of the nodes of `graph`."""
        return self.few_costing if self.graph is self.few else self.few_costing.of_graph(self.graph)

    @property
    def device(self) -> Device:
        return self.few_costing.device

    def on(self, device: Device) -> BodyCosts:
        """The same graph on another kind of device."""
        if device not in self._elsewhere:
            self._elsewhere[device] = BodyCosts(self.few, self.few_costing.on(device), self.copies)
            self._elsewhere[device]._elsewhere = self._elsewhere
        return self._elsewhere[device]

    @cached_property
    def _places(self) -> NDArray[np.int64]:
        """Position in the body of `few` of every node's forward node; -1 where it has none."""
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
        """Seconds of every node of `few`: of the device or of the host, whichever is busier with the whole graph."""
        device_s, host_s, *_ = self.few_costing.arrays
        counts = self.copies.counts
        return device_s if counts @ device_s >= counts @ host_s else host_s

    @cached_property
    def state_bytes(self) -> Floats:
        """A parameter that several places use counts where it is used first."""
        frozen = self._first_uses.keys() - self.few.gradients.keys()
        return self.trained_bytes + self._of_parameters(frozen, ITEM_BYTES.__getitem__)

    @cached_property
    def trained_bytes(self) -> Floats:
        """Of `state_bytes`, what belongs to parameters that are trained."""
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
        """Where the graph may be cut, and what crosses there."""
        return find_cuts(self.few).at([*self.copies.places, len(self.few.forward_ids)])

    @cached_property
    def boundary_bytes(self) -> Floats:
        """Index 0 and the last are no cuts and hold zero."""
        return (self.cuts.value_bytes + self.cuts.cotangent_bytes).astype(np.float64)

    @cached_property
    def legal_cuts(self) -> NDArray[np.int64]:
        """Positions where a cut is allowed."""
        return self.cuts.positions

    @cached_property
    def _first_uses(self) -> dict[int, int]:
        """Parameter -> first position of the body of `few` that uses it, directly or through derived values."""
        graph = self.few
        sources: dict[int, tuple[int, ...]] = defaultdict(tuple)
        first: dict[int, int] = {}
        for node in graph.nodes:
            found: list[int] = []
            for value in node.inputs:
                own = graph.values[value].origin is Origin.PARAMETER
                found.extend((value,) if own else sources.get(value, ()))
            if node.part is Part.DERIVED:
                for output in node.outputs:
                    if output is not None:
                        sources[output] = tuple(found)
            elif node.part is Part.FORWARD:
                for value in found:
                    first.setdefault(value, graph.position[node.id])
        return first

    def _prefix(self, places: NDArray[np.int64], amounts: Floats) -> Floats:
        """Of the whole body, what `amounts` at `places` of the body of `few` sum up to in front of every position."""
        inside = places >= 0
        totals = np.bincount(places[inside], weights=amounts[inside], minlength=len(self.few.forward_ids))
        return np.concatenate([[0.0], totals[self.copies.places].cumsum()])


def waiting_seconds(nodes: Iterable[Node], value: Lookup, costing: Costing) -> float:
    """Seconds by which `nodes`, run one after the other, take longer because the link to the host is late.

    Each direction of the link moves one storage after the other beside the computations, from when the device gets to
    `OFFLOAD` or `FETCH`; the device waits in front of `OFFLOADED` and `FETCHED`. A CPU copies in between.

    Ignores: transfers between stages and of the optimizer's state over the same link; the bandwidth of memory that the
    copies take; what comes back while a rank waits for other ranks between R and its backward.
    """
    nodes = list(nodes)
    if not any(node.op in MOVES for node in nodes):
        return 0.0
    costs = [costing.of(node, value) for node in nodes]
    by_device = sum(cost.device_s for cost in costs) >= sum(cost.host_s for cost in costs)
    device, now, waits = costing.device, 0.0, 0.0
    free = {OFFLOAD: 0.0, FETCH: 0.0}
    done: dict[int, float] = {}
    for node, cost in zip(nodes, costs, strict=True):
        now += cost.device_s if by_device else cost.host_s
        if node.op in free and node.outputs[0] is not None:
            num_bytes = _num_bytes(node, value)
            if device.kind == "cpu":
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
