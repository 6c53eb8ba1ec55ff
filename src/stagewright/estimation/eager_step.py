"""Memory and time of a plain training loop on one device: its allocations in autograd's order, and its steps.

A runtime's `Loop` describes the part outside of the model: temporary memory of the optimizer step, addition of cotangents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stagewright.cluster import Device
from stagewright.estimation.allocator import Block, CachingAllocator
from stagewright.estimation.eager_order import (
    FORWARD,
    EagerCall,
    added_in_place,
    casts_parameter,
    checkpoint_segments,
    ends_of_backwards,
    in_order,
    with_repeats,
)
from stagewright.estimation.runtime import Loop
from stagewright.estimation.time import Costing
from stagewright.graph import Node, OperatorGraph, Origin
from stagewright.graph.graph import short_name

_NUM_STEPS = 3
_DECAY_COPIES, _DECAY_PASSES = 1, 3


@dataclass(frozen=True)
class StepMemory:
    """Peaks of a few steps on one device, in bytes; `at` is the phase and operator of the active peak."""

    active_peak_bytes: int
    reserved_peak_bytes: int
    at: str


def step_memory(
    graph: OperatorGraph,
    loop: Loop,
    workspace_bytes: int = 0,
    checkpointed: Sequence[str] = (),
    returned: Sequence[str] = (),
    decays_weights: bool = True,
) -> StepMemory:
    """Replay three training steps of `graph` on one device through the caching allocator.

    Args: workspace_bytes: the matmul library's workspace, one per thread, allocated before its first matmul and kept.
        checkpointed: paths of modules that save only their inputs and recompute other values in the backward; a module
        inside another of them belongs to the outer one, which comes first. returned: paths of linear layers whose results
        the model returns besides the loss (logits, keys and values of a cache), so that they stay until the end of the
        forward. decays_weights: whether the optimizer decays weights by adding them to copies of the gradients.
    """
    num_copies = loop.step_copies + decays_weights * _DECAY_COPIES
    replay = _EagerReplay(graph, loop, workspace_bytes, checkpointed, frozenset(returned), num_copies)
    for _ in range(_NUM_STEPS):
        replay.step()
    allocator = replay.allocator
    return StepMemory(allocator.peak_active_bytes, allocator.peak_reserved_bytes, replay.at)


def step_seconds(
    graph: OperatorGraph,
    loop: Loop,
    device: Device,
    checkpointed: Sequence[str] = (),
    decays_weights: bool = True,
) -> float:
    """Return the seconds of one training step of `graph` on `device`: the device's work or the host's, whichever takes
    longer.

    Ignores: fetching the batch; that the device may wait for the host in only a part of the step.
    """
    segments = checkpoint_segments(graph, checkpointed)
    nodes = [call.node for call in with_repeats(in_order(graph), segments)]
    parameters = [graph.values[value] for value in graph.parameter_values]
    num_bytes = sum(value.meta.payload_bytes for value in parameters if value.needs_grad)
    return Costing(graph, device).seconds(nodes) + optimizer_seconds(loop, num_bytes, device, decays_weights)


def optimizer_seconds(loop: Loop, num_bytes: float, device: Device, decays_weights: bool = True) -> float:
    """Return the seconds of one optimizer step on parameters of `num_bytes`."""
    return device.memory_seconds((loop.step_passes + decays_weights * _DECAY_PASSES) * num_bytes)


_MATMULS = frozenset({"mm", "addmm", "bmm", "baddbmm"})

Allocation = tuple[int, bool]
"""A storage of the graph, and whether the repetition of a checkpointed forward allocates it."""


class _EagerReplay:
    def __init__(
        self,
        graph: OperatorGraph,
        loop: Loop,
        workspace_bytes: int,
        checkpointed: Sequence[str],
        returned: frozenset[str],
        num_copies: int,
    ) -> None:
        self.num_copies = num_copies
        self.graph = graph
        self.returned = returned
        self.loop = loop
        self.workspace_bytes = workspace_bytes
        self.workspaces: set[bool] = set()
        self.allocator = CachingAllocator()
        self.at = ""
        self.peak = 0
        self.has_state = False
        order = list(in_order(graph))
        self.alias = added_in_place(graph, order) if loop.adds_in_place else {}
        self.segment = checkpoint_segments(graph, checkpointed)
        self.calls = list(with_repeats(order, self.segment))
        self.last_use = self._last_uses()
        self.gradients = self._gradients()
        self.trainable = [value for value in graph.parameter_values if graph.values[value].needs_grad]
        self._load()

    def step(self) -> None:
        """Replay one training step: batch, forward, backward, optimizer, freeing of gradients."""
        inputs = (self.graph.values[value] for value in self.graph.inputs.values())
        batch = [self._make(value.meta.storage_bytes, "inputs") for value in inputs]
        blocks: dict[Allocation, Block] = {}
        gradients = self._compute(blocks)
        self._optimize()
        for block in (*gradients.values(), *blocks.values(), *batch):
            self.allocator.free(block)

    def _load(self) -> None:
        graph = self.graph
        for value in graph.values:
            fixed = value.origin in (Origin.PARAMETER, Origin.BUFFER, Origin.CONSTANT)
            if fixed and value.storage == value.id:
                self._make(graph.storage_bytes[value.id], "loading")

    def _make(self, num_bytes: int, where: str) -> Block:
        block = self.allocator.allocate(num_bytes)
        if self.allocator.active_bytes > self.peak:
            self.peak, self.at = self.allocator.active_bytes, where
        return block

    def _root(self, value: int) -> int:
        storage = self.graph.values[value].storage
        while storage in self.alias:
            storage = self.alias[storage]
        return storage

    def _allocation(self, value: int, call: EagerCall) -> Allocation:
        """Return the storage of `value` in `call`: inside a checkpointed module, backwards and repetitions use the
        repetition's."""
        root = self._root(value)
        maker = self.graph.values[root].node
        inside = self.segment.get(maker, -1)
        if inside < 0:
            return root, False
        node = call.node
        segment = self.segment.get(node.id if node.part in FORWARD else node.forward, -1)
        return root, segment == inside and (call.again or node.part not in FORWARD)

    def _last_uses(self) -> dict[Allocation, int]:
        """Map each storage to the place of the call that frees it.

        Autograd runs the backward of an operator as one: its saved values and incoming gradients are freed when all its
        outgoing gradients exist.
        """
        last_use: dict[Allocation, int] = {}
        ends = ends_of_backwards(self.calls)
        first_call: dict[Allocation, int] = {}
        for place, call in enumerate(self.calls):
            outputs = [output for output in call.node.outputs if output is not None]
            for output in outputs:
                first_call.setdefault(self._allocation(output, call), place)
            for value in (*call.node.inputs, *outputs):
                allocation = self._allocation(value, call)
                first, end = ends[place]
                inside = first_call.get(allocation, -1) >= first
                last_use[allocation] = max(last_use.get(allocation, -1), place if inside else end)
        forward_end = next(
            (place for place, call in enumerate(self.calls) if call.node.part not in FORWARD), len(self.calls)
        )
        for allocation in self._until_forward_ends():
            last_use[allocation] = max(last_use[allocation], forward_end - 1)
        return last_use

    def _until_forward_ends(self) -> Iterator[Allocation]:
        """Yield results of the model, and casts of parameters that autocast keeps until the end of its context.

        Source: aten/src/ATen/autocast_mode.cpp, cached_cast.
        """
        for call in self.calls:
            node = call.node
            if call.again or node.part not in FORWARD:
                continue
            is_result = node.module in self.returned and short_name(node.op) in _MATMULS
            if is_result or casts_parameter(self.graph, node):
                yield from (self._allocation(output, call) for output in node.outputs if output is not None)

    def _gradients(self) -> set[int]:
        """Return the storages in which gradients of parameters are accumulated; they are freed only after the step."""
        return {
            self._accumulator(contributions[0][1])
            for target, gradient in self.graph.gradients.items()
            if self.graph.values[target].origin is Origin.PARAMETER
            and (contributions := self.graph.contributions.get(gradient, ()))
        }

    def _accumulator(self, value: int) -> int:
        """Return the storage in which a gradient is accumulated, given its first contribution, which may be a sum itself."""
        root = self._root(value)
        contributions = self.graph.contributions.get(root, ())
        return self._accumulator(contributions[0][1]) if contributions else root

    def _compute(self, blocks: dict[Allocation, Block]) -> dict[int, Block]:
        """Replay forward and backward; return the blocks of gradients, and leave blocks that outlive them in `blocks`."""
        gradients: dict[int, Block] = {}
        loss = self.graph.values[self.graph.loss].storage
        freed: dict[int, list[Allocation]] = {}
        for allocation, place in self.last_use.items():
            freed.setdefault(place, []).append(allocation)
        for place, call in enumerate(self.calls):
            node = call.node
            for output in node.outputs:
                if output is None:
                    continue
                allocation = root, _ = self._allocation(output, call)
                if root == output and allocation not in blocks and root not in gradients:
                    block = self._make(
                        self.graph.storage_bytes[root], f"{node.part.name.lower()} {node.name}"
                    )
                    if root in self.gradients:
                        gradients[root] = block
                    else:
                        blocks[allocation] = block
            self._workspace(node)
            for allocation in freed.get(place, ()):
                if allocation in blocks and allocation[0] != loss:
                    self.allocator.free(blocks.pop(allocation))
        return gradients

    def _workspace(self, node: Node) -> None:
        """Allocate a workspace for each thread that runs matmuls: that of the forward, and autograd's."""
        thread = node.part in FORWARD
        if thread not in self.workspaces and short_name(node.op) in _MATMULS:
            self.workspaces.add(thread)
            self._make(self.workspace_bytes, "workspace")

    def _optimize(self) -> None:
        """Allocate state in the first step; then temporary copies, list after list, as foreach kernels do."""
        sizes = [self.graph.storage_bytes[value] for value in self.trainable]
        if not self.has_state:
            for size in sizes:
                for _ in range(self.loop.num_moments):
                    self._make(size, "optimizer state")
            self.has_state = True
        copies = [self._make(size, "optimizer step") for _ in range(self.num_copies) for size in sizes]
        for block in copies:
            self.allocator.free(block)
