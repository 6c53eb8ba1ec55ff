"""What PyTorch's caching allocator reserves on a pipeline rank: its program, storage by storage."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import partial

import numpy as np

from stagewright.estimation.allocator import NONE, Block, CachingAllocator, Ints
from stagewright.estimation.change import Key
from stagewright.estimation.flat_bytes import SHARDS, FlatBuffers
from stagewright.estimation.in_flight import MemoryEvents, in_flight, slot_bytes
from stagewright.estimation.liveness import FREED
from stagewright.estimation.optimizer import optimizer_of
from stagewright.estimation.runtime import Runtime, runtime_of
from stagewright.estimation.stage_memory import StageMemory
from stagewright.estimation.state import ResidentBytes, kept_parameters
from stagewright.graph.flat_buffers import GRADIENTS, OPTIMIZER, FlatLayout
from stagewright.graph.stage import Stage
from stagewright.graph.tensor import ITEM_BYTES
from stagewright.schedule import Action, Program


@dataclass(frozen=True)
class Reserved:
    """Peaks of a rank as the allocator counts them, in bytes; active blocks are rounded to 512 bytes."""

    rank: int
    active_peak_bytes: int
    reserved_peak_bytes: int


def reserved_on(
    memories: Sequence[StageMemory],
    program: Program,
    rank: int,
    resident: ResidentBytes,
    workspace_bytes: int = 0,
    num_steps: int = 2,
    *,
    host_optimizer: bool = False,
) -> Reserved:
    """Replay `num_steps` optimizer steps of the lowered `program` on `rank`, which keeps what is `resident`.

    Storages are made in the order of the executor: parameters, gradients and master weights at the start, the matrix
    library's workspace in front of the first pass, the user inputs of the batch, then every action's, flat buffers that
    come and go among them; the optimizer's state in the first optimizer step, between what the batch has left in the cache.

    What is not a parameter, gradient, moment or master weight of the resident bytes is taken to be one storage. With
    `host_optimizer` there are neither moments nor master weights. Gradients that replicas hold whole are one storage for
    each flat buffer.

    Ignores: several streams.

    Raises:
        ScheduleError: the program uses a value before it is made.
    """
    return _Replay(memories, program, rank, resident, workspace_bytes, host_optimizer).run(num_steps)


class _Replay:
    def __init__(
        self,
        memories: Sequence[StageMemory],
        program: Program,
        rank: int,
        resident: ResidentBytes,
        workspace_bytes: int,
        host_optimizer: bool,
    ) -> None:
        self.rank = rank
        self.host_optimizer = host_optimizer
        self.flats = resident.flats
        self.actions = program.actions(rank)
        self.num_microbatches = program.num_microbatches
        placed = program.placement.rank_of_stage
        self.flight = in_flight(tuple(memories), placed, rank, is_scripted=True)
        self.stages = [memory.stage for memory in memories if placed[memory.stage.index] == rank]
        self.allocator = CachingAllocator()
        self.buffers = _Buffers(resident, self.actions, self.allocator)
        self.numbers: dict[Key, int] = {}
        self.scripts: dict[int, tuple[Ints, Ints]] = {}  # by the identity of steps, which `flight` keeps
        self.held = np.full((self.num_microbatches, 64), NONE, np.int64)
        self.state_bytes = resident.total
        self.slots = slot_bytes(memories, self.actions) if resident.has_slots else ()
        self.events = partial(MemoryEvents, resident.has_slots)
        self.workspace_bytes = workspace_bytes

    def run(self, num_steps: int) -> Reserved:
        state = self._load()
        if self.workspace_bytes:
            self.allocator.allocate(self.workspace_bytes)
        for num_bytes in self.slots:
            self.allocator.allocate(num_bytes)
        for step in range(num_steps):
            self._batch()
            if step == 0:
                for num_bytes in state:
                    self.allocator.allocate(num_bytes)
            self.buffers.step()
        return Reserved(self.rank, self.allocator.peak_active_bytes, self.allocator.peak_reserved_bytes)

    def _load(self) -> list[int]:
        """Parameters, buffers and constants, then gradients, then master weights; returns the bytes of what the optimizer
        will make in its first step."""
        runtime = runtime_of(self.stages[0].graph)
        trained = {value: stage.value(value).meta for stage in self.stages for value, _ in stage.gradients}
        flat = {value for buffer in self.flats for value in buffer.values}
        shared = [buffer for buffer in self.flats if buffer.level >= OPTIMIZER]
        trained_flats = [buffer for buffer in self.flats if buffer.is_trained]
        moved = {value for buffer in shared for value in buffer.values}
        own = {value: meta for value, meta in trained.items() if value not in moved}
        fixed = [*_fixed(self.stages, moved), *(kept_parameters(one, runtime) for one in shared)]
        alone = [meta for value, meta in own.items() if value not in flat]
        gradients = [m.num_elements * ITEM_BYTES[runtime.precision(m.dtype).gradient] for m in alone]
        gradients += [self.buffers.sizes.gradient(one) for one in trained_flats if one.level < GRADIENTS]
        if self.host_optimizer:
            self._allocate(fixed, gradients, self.state_bytes)
            return []
        names = {value: stage.value(value).name for stage in self.stages for value in stage.parameters}
        updated = [
            (meta.shape, runtime.precision(meta.dtype), 1, names[value]) for value, meta in own.items()
        ]
        for one in shared:
            if one.is_trained:
                kind, num_spans = runtime.precision(one.dtype), len(one.groups)
                updated += [((count,), kind, num_spans, "") for count in _cut(one, runtime)]
        kept = optimizer_of(self.stages[0].graph)
        states = [
            num_bytes
            for shape, kind, num_spans, name in updated
            for num_bytes in kept.storages(shape, ITEM_BYTES[kind.state], num_spans, name)
        ]
        masters = [
            math.prod(shape) * ITEM_BYTES[kind.state] for shape, kind, *_ in updated if kind.has_master
        ]
        made: list[Block] = []
        if runtime.optimizer.moves_parameters and all(one.level >= OPTIMIZER for one in trained_flats):
            made = [self.allocator.allocate(num_bytes) for num_bytes in _fixed(self.stages, frozenset())]
            fixed = [sum(fixed)]
        self._allocate(fixed, gradients, self.state_bytes - sum(states) - sum(masters))
        for block in made:
            self.allocator.free(block)
        for num_bytes in masters:
            self.allocator.allocate(num_bytes)
        return states

    def _allocate(self, first: Sequence[int], last: Sequence[int], total: int) -> None:
        """Storages of `first`, of what `total` has beyond both, and of `last`."""
        rest = total - sum(first) - sum(last)
        for num_bytes in (*first, *([rest] if rest > 0 else []), *last):
            self.allocator.allocate(num_bytes)

    def _batch(self) -> None:
        """All actions of one batch; what is left of it goes at its end."""
        states, events = [0] * self.num_microbatches, self.events()
        inputs = self._script(list(self.flight.start_sizes.items()))
        for own in self.held:
            self.allocator.run(*inputs, own)
        for index, action in enumerate(self.actions):
            self.buffers.before(index)
            for microbatch, event in events.of(action):
                step = self.flight.step(states[microbatch], event)
                states[microbatch] = step.after
                script = self.scripts.get(id(step))
                if script is None:
                    requests = [(request.key, request.num_bytes) for request in step.script]
                    script = self.scripts[id(step)] = self._script(requests)
                self.allocator.run(*script, self.held[microbatch])
        self.buffers.end()
        for own in self.held:
            left = np.flatnonzero(own != NONE)
            self.allocator.run(left, np.full(len(left), FREED), own)

    def _script(self, requests: Sequence[tuple[Key, int]]) -> tuple[Ints, Ints]:
        """Storages by numbers for which `held` has room, and their bytes."""
        keys = [self.numbers.setdefault(key, len(self.numbers)) for key, _ in requests]
        lacking = len(self.numbers) - self.held.shape[1]
        if lacking > 0:
            more = np.full((self.num_microbatches, max(lacking, self.held.shape[1])), NONE, np.int64)
            self.held = np.concatenate([self.held, more], axis=1)
        return np.array(keys, np.int64), np.array([size for _, size in requests], np.int64)


class _Buffers(FlatBuffers):
    """Flat buffers that come and go, as blocks of the allocator."""

    def __init__(
        self, resident: ResidentBytes, actions: Sequence[Action], allocator: CachingAllocator
    ) -> None:
        super().__init__(resident, actions)
        self.allocator = allocator
        self._blocks: dict[tuple[str, FlatLayout | int], Block] = {}

    def step(self) -> None:
        """The optimizer has used the parts of gradients."""
        for flat in self._has_shard:
            self._drop(SHARDS, flat)
        self._has_shard.clear()

    def _make(self, kind: str, of: FlatLayout | int, num_bytes: int, then: str | None = None) -> None:
        if num_bytes:
            self._blocks[kind, of] = self.allocator.allocate(num_bytes)
        if then is not None:
            self._drop(then, of)

    def _drop(self, kind: str, of: FlatLayout | int) -> int:
        block = self._blocks.pop((kind, of), None)
        if block is None:
            return 0
        self.allocator.free(block)
        return block.size

    def _rename(self, kind: str, of: FlatLayout, other: str) -> None:
        if (kind, of) in self._blocks:  # parameters without elements have none
            self._blocks[other, of] = self._blocks.pop((kind, of))

    def _take_for_a_moment(self, num_bytes: int) -> None:
        if num_bytes:
            self.allocator.free(self.allocator.allocate(num_bytes))


def _cut(flat: FlatLayout, runtime: Runtime) -> list[int]:
    """Elements of the tensors in which optimizer state of the first shard of a buffer is kept."""
    if runtime.optimizer.gathers_masters:
        return [entry.meta.num_elements // flat.num_shards for entry in flat.entries]
    if not runtime.optimizer.moves_parameters:
        return [flat.shard_elements]
    ends = [*(entry.offset for entry in flat.entries[1:]), flat.num_elements]
    cut = [
        min(end, flat.shard_elements) - entry.offset for entry, end in zip(flat.entries, ends, strict=True)
    ]
    return [count for count in cut if count > 0]


def _fixed(stages: Sequence[Stage], moved: Set[int]) -> list[int]:
    """Bytes of every parameter, buffer and constant of `stages`, each once, but for parameters that are `moved`."""
    found: dict[int, int] = {}
    for stage in stages:
        for value in (*stage.parameters, *stage.buffers, *stage.constants):
            if value not in moved:
                found[value] = stage.graph.storage_bytes[stage.value(value).storage]
    return list(found.values())
