"""Memory of a rank by exact replay of its program's actions over the liveness of each stage function.

The replay follows the executor: values of one microbatch are saved from F to its backward, values for other stages of the
rank are passed without a copy, receive buffers exist from the posting of a receive, sent values are kept until two more
transfers of their channel are sent or the batch ends, and user inputs and losses stay for the batch. Permanent transfer
buffers, if used, exist all the time instead.

Microbatches share only resident storages, and all go through the same few states, so each transition is computed once
(`stagewright.estimation.microbatch_memory`) and then looked up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stagewright.errors import ScheduleError
from stagewright.estimation.flat_bytes import FlatBytes
from stagewright.estimation.memory_events import Event
from stagewright.estimation.microbatch_memory import MemoryEvents, microbatch_states, slot_bytes
from stagewright.estimation.stage_memory import StageMemory
from stagewright.estimation.state import ResidentBytes
from stagewright.graph.stage import Stage
from stagewright.schedule import Action, Program


@dataclass(frozen=True, slots=True)
class Alive:
    """Bytes that one microbatch has saved in one stage."""

    stage: int
    microbatch: int
    num_bytes: int


@dataclass(frozen=True)
class RankMemory:
    """Memory of one rank: the peak, its position, and the bytes alive then."""

    rank: int
    peak_bytes: int
    at: str
    """Text of the action of the peak; `operator` is the operator that runs then."""
    categories: dict[str, int]
    """Bytes by category; their sum is `peak_bytes`."""
    after_action: tuple[int, ...] = ()
    """Bytes alive after every action of the lowered program; `saved_after`: saved activations among these."""
    saved_after: tuple[int, ...] = ()
    flat_after: tuple[dict[str, int], ...] = ()
    """The same for temporary flat buffers, by category, if there are any."""
    alive: tuple[Alive, ...] = ()
    """Saved activations before the action of the peak, without user inputs."""
    operator: str = ""


def stage_edges(stages: Sequence[Stage]) -> tuple[tuple[int, int], ...]:
    """Return pairs of stages (earlier, later) between which values or cotangents are sent; neighbours always."""
    forward = {(stage.index, transfer.stage) for stage in stages for transfer in stage.sends}
    backward = {(transfer.stage, stage.index) for stage in stages for transfer in stage.grad_sends}
    return tuple(sorted(forward | backward | {(i, i + 1) for i in range(len(stages) - 1)}))


def replay_rank(
    memories: Sequence[StageMemory],
    program: Program,
    rank: int,
    resident: ResidentBytes,
    num_dropped: int = 0,
) -> RankMemory:
    """Replay the memory of `rank` over one batch of the lowered `program`, on top of `resident` bytes.

    `num_dropped` further microbatches repeat states of the program; only their inputs and losses count.

    Raises:
        ScheduleError: the program uses a value before it exists.
    """
    return _MemoryReplay(memories, program, rank, resident, num_dropped).run()


@dataclass(frozen=True, slots=True)
class _Peak:
    total: int
    at: Action | str
    activations: int
    transient: int
    states: tuple[int, ...]
    """State of every microbatch before the action of the peak."""
    flat: dict[str, int]
    """Bytes of temporary flat buffers, by category."""
    again: int = 0
    operator: str = ""


class _MemoryReplay:
    def __init__(
        self,
        memories: Sequence[StageMemory],
        program: Program,
        rank: int,
        resident: ResidentBytes,
        num_dropped: int,
    ) -> None:
        self.rank = rank
        self.resident = resident
        self.lasting = resident.total
        if resident.has_slots:
            self.lasting += sum(slot_bytes(memories, program.actions(rank)))
        self.fixed = self.lasting
        """Bytes that do not depend on microbatches, including temporary flat buffers."""
        self.actions = program.actions(rank)
        self.microbatches = microbatch_states(tuple(memories), program.placement.rank_of_stage, rank)
        self.states = [0] * program.num_microbatches
        self.events = MemoryEvents(resident.has_slots)
        self.inputs = self.microbatches.input_bytes * (program.num_microbatches + num_dropped)
        self.live = self.inputs + num_dropped * loss_bytes(memories, program, rank)
        self.activations = 0
        self.flat = FlatBytes(resident, self.actions, self._observe_flat) if resident.flats else None
        self.at: Action | str = "begin"
        self.peak = _Peak(-1, "", 0, 0, (), {})

    def run(self) -> RankMemory:
        self._observe(self.resident.rederived, 0, self.resident.rederived)
        after: list[int] = []
        saved: list[int] = []
        flat: list[dict[str, int]] = []
        for index, action in enumerate(self.actions):
            self.at = action
            if self.flat is not None:
                self.flat.before(index)
                self.fixed = self.lasting + self.flat.total
            for microbatch, event in self.events.of(action):
                self._step(microbatch, event)
            after.append(self.live + self.fixed)
            saved.append(self.activations)
            if self.flat is not None:
                flat.append(dict(self.flat.categories))
        if self.flat is not None:
            self.at = "end of batch"
            self.flat.end()
            self.fixed = self.lasting + self.flat.total
        for state, count in Counter(self.states).items():
            self.live -= count * self.microbatches.sending_bytes(state)
        transient = self.resident.step_transient
        self.at = "optimizer step"
        self._observe(transient, 0, transient)
        return replace(
            self._described(), after_action=tuple(after), saved_after=tuple(saved), flat_after=tuple(flat)
        )

    def _observe_flat(self, above: int) -> None:
        """Record new flat buffers, with `above` temporary bytes."""
        assert self.flat is not None
        self.fixed = self.lasting + self.flat.total
        self._observe(above, 0, above)

    def _step(self, microbatch: int, event: Event) -> None:
        try:
            step = self.microbatches.step(self.states[microbatch], event)
        except ScheduleError as error:
            raise ScheduleError(f"rank {self.rank}: {self.at}: {error}") from None
        if self.live + step.above + self.fixed > self.peak.total:
            self._observe(step.above, step.activations, step.transient, step.again, step.operator)
        self.live += step.live
        self.activations += step.held
        self.states[microbatch] = step.after

    def _observe(
        self, above: int, activations: int, transient: int, again: int = 0, operator: str = ""
    ) -> None:
        """Record a moment with `above` bytes beyond those listed, if it is a new peak."""
        total = self.live + above + self.fixed
        if total > self.peak.total:
            states, flat = tuple(self.states), dict(self.flat.categories) if self.flat is not None else {}
            held = self.activations + activations
            self.peak = _Peak(total, self.at, held, transient, states, flat, again, operator)

    def _described(self) -> RankMemory:
        """Return the peak, with its bytes by category."""
        peak = self.peak
        listed = self.inputs + peak.activations + peak.transient + sum(peak.flat.values())
        categories = {
            **self.resident.categories,
            **peak.flat,
            "inputs": self.inputs,
            "activations": peak.activations,
            "recomputed": peak.again,
            "transient": peak.transient - peak.again,
            "boundary": peak.total - self.resident.total - listed,
        }
        saved_bytes = {state: self.microbatches.saved_bytes(state) for state in {*peak.states}}
        alive = tuple(
            Alive(stage, microbatch, num_bytes)
            for microbatch, state in enumerate(peak.states)
            for stage, num_bytes in saved_bytes[state].items()
        )
        return RankMemory(
            self.rank, peak.total, str(peak.at), categories, alive=alive, operator=peak.operator
        )


def loss_bytes(memories: Sequence[StageMemory], program: Program, rank: int) -> int:
    """Return the bytes of one microbatch's loss, if `rank` computes it."""
    graph, placed = memories[0].stage.graph, program.placement.rank_of_stage
    is_here = any(m.stage.computes_loss and placed[m.stage.index] == rank for m in memories)
    return graph.storage_bytes[graph.values[graph.loss].storage] if is_here else 0
