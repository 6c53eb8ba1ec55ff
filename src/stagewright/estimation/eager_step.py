"""The allocations of a plain training loop on one device, in autograd's order, and what its steps take.

A runtime's `Loop` says what happens around the model: what an optimizer step makes for a moment, how cotangents are added.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stagewright.cluster import Device
from stagewright.estimation.allocator import Block, CachingAllocator
from stagewright.estimation.eager_order import (
    FORWARD,
    Call,
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
    """Peaks of a few steps on one device, in bytes; `at` says during which phase and operator the active peak is."""

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

    Args:
        workspace_bytes: the matrix library's workspace, one per thread, made in front of its first product and kept.
        checkpointed: paths of modules that keep only their inputs and compute the rest again in the backward; a module
            inside another of them belongs to the outer one, which comes first.
        returned: paths of linear layers whose results the model returns beside the loss (logits, keys and values of a
            cache), so that they stay until the forward is over.
        decays_weights: whether the optimizer decays weights by adding them to copies of the gradients.
    """
    num_copies = loop.step_copies + decays_weights * _DECAY_COPIES
    replay = _Replay(graph, loop, workspace_bytes, checkpointed, frozenset(returned), num_copies)
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
    """Time of one training step of `graph` on `device`: the device's work or the host's, whichever takes longer.

    Ignores: fetching the batch; that the device waits where the host falls behind for a while only.
    """
    segments = checkpoint_segments(graph, checkpointed)
    nodes = [call.node for call in with_repeats(in_order(graph), segments)]
    parameters = [graph.values[value] for value in graph.parameter_values]
    num_bytes = sum(value.meta.payload_bytes for value in parameters if value.needs_grad)
    return Costing(graph, device).seconds(nodes) + optimizer_seconds(loop, num_bytes, device, decays_weights)


def optimizer_seconds(loop: Loop, num_bytes: float, device: Device, decays_weights: bool = True) -> float:
    """Of one optimizer step on parameters of `num_bytes`."""
    return device.memory_seconds((loop.step_passes + decays_weights * _DECAY_PASSES) * num_bytes)


_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})

Held = tuple[int, bool]
"""A storage of the graph, and whether it is the one made when a checkpointed forward is repeated."""


class _Replay:
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
        self.gradient_of = self._gradients()
        self.trainable = [value for value in graph.parameter_values if graph.values[value].needs_grad]
        self._load()

    def step(self) -> None:
        """One training step: batch, forward, backward, optimizer, gradients freed."""
        graph, batch = self.graph, {}
        for value in graph.inputs.values():
            batch[value] = self._make(graph.values[value].meta.storage_bytes, "inputs")
        blocks: dict[Held, Block] = {}
        gradients = self._compute(blocks)
        self._optimize()
        for block in (*gradients.values(), *blocks.values(), *batch.values()):
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

    def _held(self, value: int, call: Call) -> Held:
        """The storage that `call` means by `value`: inside a checkpointed module backwards and repeats use the repeat's."""
        root = self._root(value)
        maker = self.graph.values[root].node
        inside = self.segment.get(maker, -1)
        if inside < 0:
            return root, False
        node = call.node
        own = self.segment.get(node.id if node.part in FORWARD else node.forward, -1)
        return root, own == inside and (call.again or node.part not in FORWARD)

    def _last_uses(self) -> dict[Held, int]:
        """Storage -> place in the order of the call that frees it.

        Autograd differentiates an operator in one go: what it saved and the gradients that came in are freed when all
        gradients that go out are there.
        """
        found: dict[Held, int] = {}
        ends = ends_of_backwards(self.calls)
        made: dict[Held, int] = {}
        for place, call in enumerate(self.calls):
            outputs = [output for output in call.node.outputs if output is not None]
            for output in outputs:
                made.setdefault(self._held(output, call), place)
            for value in (*call.node.inputs, *outputs):
                held = self._held(value, call)
                first, end = ends[place]
                inside = made.get(held, -1) >= first
                found[held] = max(found.get(held, -1), place if inside else end)
        forward_end = next(
            (place for place, call in enumerate(self.calls) if call.node.part not in FORWARD), len(self.calls)
        )
        for held in self._until_forward_ends():
            found[held] = max(found[held], forward_end - 1)
        return found

    def _until_forward_ends(self) -> Iterator[Held]:
        """What the model returns, and the casts of parameters that autocast keeps until its context is left.

        Source: aten/src/ATen/autocast_mode.cpp, cached_cast.
        """
        for call in self.calls:
            node = call.node
            if call.again or node.part not in FORWARD:
                continue
            is_result = node.module in self.returned and short_name(node.op) in _PRODUCTS
            if is_result or casts_parameter(self.graph, node):
                yield from (self._held(output, call) for output in node.outputs if output is not None)

    def _gradients(self) -> dict[int, int]:
        """Storage of the first contribution to a gradient -> the parameter; it is freed after the step only."""
        found: dict[int, int] = {}
        for target, gradient in self.graph.gradients.items():
            contributions = self.graph.contributions.get(gradient, ())
            if contributions and self.graph.values[target].origin is Origin.PARAMETER:
                found[self._first_share(contributions[0][1])] = target
        return found

    def _first_share(self, value: int) -> int:
        """The storage a gradient is collected in; that of a derived value is the first share of its own gradient."""
        root = self._root(value)
        shares = self.graph.contributions.get(root, ())
        return self._first_share(shares[0][1]) if shares else root

    def _compute(self, blocks: dict[Held, Block]) -> dict[int, Block]:
        """Forward and backward; returns the blocks of gradients, and leaves in `blocks` what outlives them."""
        gradients: dict[int, Block] = {}
        loss = self.graph.values[self.graph.loss].storage
        freed: dict[int, list[Held]] = {}
        for held, place in self.last_use.items():
            freed.setdefault(place, []).append(held)
        for place, call in enumerate(self.calls):
            node = call.node
            for output in node.outputs:
                if output is None:
                    continue
                held = root, _ = self._held(output, call)
                if root == output and held not in blocks and root not in gradients:
                    made = self._make(self.graph.storage_bytes[root], f"{node.part.name.lower()} {node.name}")
                    if root in self.gradient_of:
                        gradients[root] = made
                    else:
                        blocks[held] = made
            self._workspace(node)
            for held in freed.get(place, ()):
                if held in blocks and held[0] != loss:
                    self.allocator.free(blocks.pop(held))
        return gradients

    def _workspace(self, node: Node) -> None:
        """A workspace for each thread that multiplies: the one that runs the forward, and autograd's."""
        thread = node.part in FORWARD
        if thread not in self.workspaces and short_name(node.op) in _PRODUCTS:
            self.workspaces.add(thread)
            self._make(self.workspace_bytes, "workspace")

    def _optimize(self) -> None:
        """State on the first step; then copies of everything, list after list, as foreach kernels make them."""
        sizes = [self.graph.storage_bytes[value] for value in self.trainable]
        if not self.has_state:
            for size in sizes:
                for _ in range(self.loop.num_moments):
                    self._make(size, "optimizer state")
            self.has_state = True
        copies = [self._make(size, "optimizer step") for _ in range(self.num_copies) for size in sizes]
        for block in copies:
            self.allocator.free(block)
