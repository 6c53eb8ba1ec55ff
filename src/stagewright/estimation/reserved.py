"""Memory that PyTorch's caching allocator reserves on a pipeline rank, by replay of its program storage by storage."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np

from stagewright.estimation.allocator import NONE, Block, CachingAllocator, Ints, Scripts
from stagewright.estimation.flat_bytes import SHARDS, FlatBuffers
from stagewright.estimation.liveness import FREED
from stagewright.estimation.memory import loss_bytes
from stagewright.estimation.memory_events import Key
from stagewright.estimation.microbatch_memory import MemoryEvents, microbatch_states, slot_bytes
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
    """Peaks of a rank in the allocator, in bytes; active blocks are rounded to 512 bytes."""

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
    is_expandable: bool = False,
    num_dropped: int = 0,
) -> Reserved:
    """Replay `num_steps` optimizer steps of the lowered `program` on `rank`, with `resident` bytes.

    Storages are allocated in the order of the executor: parameters, gradients and master weights at the start, the matmul
    library's workspace before the first forward, the user inputs of the batch, then those of every action, temporary flat
    buffers included; the optimizer's state in the first optimizer step, among blocks that the batch has left in the cache.

    Resident bytes other than parameters, gradients, moments and master weights are modelled as one storage. With
    `host_optimizer` there are neither moments nor master weights. Gradients that are not sharded are one storage per flat
    buffer. `is_expandable`: with expandable segments. `num_dropped` further microbatches repeat states of the program; only
    their inputs and losses count.

    Ignores: several streams.

    Raises:
        ScheduleError: the program uses a value before it exists.
    """
    return _AllocatorReplay(
        memories, program, rank, resident, workspace_bytes, host_optimizer, is_expandable, num_dropped
    ).run(num_steps)


class _AllocatorReplay:
    def __init__(
        self,
        memories: Sequence[StageMemory],
        program: Program,
        rank: int,
        resident: ResidentBytes,
        workspace_bytes: int,
        host_optimizer: bool,
        is_expandable: bool,
        num_dropped: int,
    ) -> None:
        self.rank = rank
        self.host_optimizer = host_optimizer
        self.flats = resident.flats
        self.actions = program.actions(rank)
        self.num_microbatches = program.num_microbatches
        placed = program.placement.rank_of_stage
        self.microbatches = microbatch_states(tuple(memories), placed, rank, is_scripted=True)
        self.stages = [memory.stage for memory in memories if placed[memory.stage.index] == rank]
        self.allocator = CachingAllocator(is_expandable=is_expandable)
        self.buffers = _Buffers(resident, self.actions, self.allocator)
        self.keys: dict[Key, int] = {}
        self.requests: list[list[tuple[int, int]]] = []
        self.inputs = self._script(list(self.microbatches.start_sizes.items()))
        self.runs = self._runs(resident.has_slots)
        self.scripts = _concatenated(self.requests)
        self.held = np.full((self.num_microbatches + num_dropped, len(self.keys)), NONE, np.int64)
        self.dropped_losses = [loss_bytes(memories, program, rank)] * num_dropped
        self.resident_bytes = resident.total
        self.slots = slot_bytes(memories, self.actions) if resident.has_slots else ()
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
        """Allocate parameters, buffers and constants, then gradients, then master weights; return the bytes of the tensors
        that the optimizer will allocate in its first step."""
        runtime = runtime_of(self.stages[0].graph)
        trained = {value: stage.value(value).meta for stage in self.stages for value, _ in stage.gradients}
        trained_flats = [buffer for buffer in self.flats if buffer.is_trained]
        sharded_flats = [buffer for buffer in self.flats if buffer.level >= OPTIMIZER]
        in_flats = {value for buffer in self.flats for value in buffer.values}
        sharded = {value for buffer in sharded_flats for value in buffer.values}
        unsharded = {value: meta for value, meta in trained.items() if value not in sharded}
        fixed = [
            *_fixed(self.stages, sharded),
            *(kept_parameters(buffer, runtime) for buffer in sharded_flats),
        ]
        separate = [meta for value, meta in unsharded.items() if value not in in_flats]
        gradients = [m.num_elements * ITEM_BYTES[runtime.precision(m.dtype).gradient] for m in separate]
        gradients += [
            self.buffers.sizes.gradient(buffer) for buffer in trained_flats if buffer.level < GRADIENTS
        ]
        if self.host_optimizer:
            self._allocate(fixed, gradients, self.resident_bytes)
            return []
        names = {value: stage.value(value).name for stage in self.stages for value in stage.parameters}
        updated = [
            (meta.shape, runtime.precision(meta.dtype), 1, names[value]) for value, meta in unsharded.items()
        ]
        for buffer in sharded_flats:
            if buffer.is_trained:
                precision, num_spans = runtime.precision(buffer.dtype), len(buffer.groups)
                updated += [
                    ((count,), precision, num_spans, "") for count in _state_elements(buffer, runtime)
                ]
        optimizer = optimizer_of(self.stages[0].graph)
        states = [
            num_bytes
            for shape, precision, num_spans, name in updated
            for num_bytes in optimizer.storages(shape, ITEM_BYTES[precision.state], num_spans, name)
        ]
        masters = [
            math.prod(shape) * ITEM_BYTES[precision.state]
            for shape, precision, *_ in updated
            if precision.has_master
        ]
        originals: list[Block] = []
        if runtime.optimizer.moves_parameters and all(buffer.level >= OPTIMIZER for buffer in trained_flats):
            originals = [self.allocator.allocate(num_bytes) for num_bytes in _fixed(self.stages, frozenset())]
            fixed = [sum(fixed)]
        self._allocate(fixed, gradients, self.resident_bytes - sum(states) - sum(masters))
        for block in originals:
            self.allocator.free(block)
        for num_bytes in masters:
            self.allocator.allocate(num_bytes)
        return states

    def _allocate(self, first: Sequence[int], last: Sequence[int], total: int) -> None:
        """Allocate `first`, the part of `total` beyond both lists, and `last`."""
        others = total - sum(first) - sum(last)
        for num_bytes in (*first, *([others] if others > 0 else []), *last):
            if num_bytes:  # streamed buffers have none
                self.allocator.allocate(num_bytes)

    def _runs(self, has_slots: bool) -> list[tuple[int, Ints, Ints]]:
        """Return indices of actions before which flat buffers change, and the scripts from there to the next with their
        microbatches."""
        runs: list[tuple[int, list[int], list[int]]] = []
        states, events = [0] * self.num_microbatches, MemoryEvents(has_slots)
        of_step: dict[int, int] = {}  # by the identity of steps, which `microbatches` keeps
        for index, action in enumerate(self.actions):
            if index == 0 or self.buffers.changes(index):
                runs.append((index, [], []))
            _, numbers, holders = runs[-1]
            for microbatch, event in events.of(action):
                step = self.microbatches.step(states[microbatch], event)
                states[microbatch] = step.after
                number = of_step.get(id(step))
                if number is None:
                    requests = [(request.key, request.num_bytes) for request in step.script]
                    number = of_step[id(step)] = self._script(requests)
                numbers.append(number)
                holders.append(microbatch)
        return [
            (index, np.array(numbers, np.int64), np.array(holders, np.int64))
            for index, numbers, holders in runs
        ]

    def _script(self, requests: Sequence[tuple[Key, int]]) -> int:
        """Return the number of a new script with these storages and their bytes."""
        self.requests.append([(self.keys.setdefault(key, len(self.keys)), size) for key, size in requests])
        return len(self.requests) - 1

    def _batch(self) -> None:
        """Replay all actions of one batch; free its remaining storages at the end."""
        microbatches = np.arange(len(self.held))
        self.allocator.run(self.scripts, np.full(len(self.held), self.inputs), microbatches, self.held)
        losses = [self.allocator.allocate(num_bytes) for num_bytes in self.dropped_losses if num_bytes]
        for index, numbers, holders in self.runs:
            self.buffers.before(index)
            self.allocator.run(self.scripts, numbers, holders, self.held)
        self.buffers.end()
        remaining = [[(int(key), FREED) for key in np.flatnonzero(blocks != NONE)] for blocks in self.held]
        self.allocator.run(_concatenated(remaining), microbatches, microbatches, self.held)
        for block in losses:
            self.allocator.free(block)


def _concatenated(lists: Sequence[Sequence[tuple[int, int]]]) -> Scripts:
    """Return lists of keys and sizes as scripts."""
    requests = np.array([request for requests in lists for request in requests], np.int64).reshape(-1, 2)
    bounds = np.cumsum([0, *map(len, lists)])
    return Scripts(requests[:, 0].copy(), requests[:, 1].copy(), bounds)


class _Buffers(FlatBuffers):
    """Temporary flat buffers as blocks of the allocator."""

    def __init__(
        self, resident: ResidentBytes, actions: Sequence[Action], allocator: CachingAllocator
    ) -> None:
        super().__init__(resident, actions)
        self.allocator = allocator
        self._blocks: dict[tuple[str, FlatLayout | int], Block] = {}

    def step(self) -> None:
        """Free the shards of gradients after the optimizer step."""
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

    def _allocate_briefly(self, num_bytes: int) -> None:
        if num_bytes:
            self.allocator.free(self.allocator.allocate(num_bytes))


def _state_elements(flat: FlatLayout, runtime: Runtime) -> list[int]:
    """Return the elements of the tensors that hold the optimizer state of the first shard of a buffer."""
    if runtime.optimizer.gathers_masters:
        return [entry.meta.num_elements // flat.num_shards for entry in flat.entries]
    if not runtime.optimizer.moves_parameters:
        return [flat.shard_elements]
    ends = [*(entry.offset for entry in flat.entries[1:]), flat.num_elements]
    counts = [
        min(end, flat.shard_elements) - entry.offset for entry, end in zip(flat.entries, ends, strict=True)
    ]
    return [count for count in counts if count > 0]


def _fixed(stages: Sequence[Stage], sharded: Set[int]) -> list[int]:
    """Return the bytes of every parameter, buffer and constant of `stages`, each once, except `sharded` parameters."""
    sizes: dict[int, int] = {}
    for stage in stages:
        for value in (*stage.parameters, *stage.buffers, *stage.constants):
            if value not in sharded:
                sizes[value] = stage.graph.storage_bytes[stage.value(value).storage]
    return list(sizes.values())
