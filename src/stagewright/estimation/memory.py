"""Memory of a rank by exact replay: its program's actions over what is alive in each stage function.

The replay follows the executor: values of one microbatch are held from F to its backward, what other stages
of the rank need changes hands without a copy, receive buffers exist from the moment a receive is posted,
what is sent is kept until two more transfers of its channel are sent or the batch ends, and user inputs and
losses stay for the batch. Where transfers have buffers that stay, these are there all the time instead.

Microbatches share no storages but the resident ones, and all go through the same few states, so each change
of state is worked out once (`stagewright.estimation.in_flight`) and then looked up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stagewright.errors import ScheduleError
from stagewright.estimation.change import Event
from stagewright.estimation.flat_bytes import FlatBytes
from stagewright.estimation.in_flight import MemoryEvents, in_flight, slot_bytes
from stagewright.estimation.stage_memory import StageMemory
from stagewright.estimation.state import ResidentBytes
from stagewright.graph.stage import Stage
from stagewright.schedule import Action, Program


@dataclass(frozen=True, slots=True)
class Alive:
    """What one microbatch has saved in one stage, in bytes."""

    stage: int
    microbatch: int
    num_bytes: int


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank: the peak, where it is and what is alive then."""

    rank: int
    peak_bytes: int
    at: str
    """Text of the action during which the peak is reached, and `operator`, the one that runs then."""
    categories: dict[str, int]
    """Adds up to `peak_bytes`."""
    after_action: tuple[int, ...] = ()
    """Bytes alive after every action of the lowered program; `saved_after`: of these, activations saved."""
    saved_after: tuple[int, ...] = ()
    flat_after: tuple[dict[str, int], ...] = ()
    """And those of flat buffers that come and go, by category, where there are any."""
    alive: tuple[Alive, ...] = ()
    """Saved activations in front of the action of the peak; user inputs apart."""
    operator: str = ""


def stage_edges(stages: Sequence[Stage]) -> tuple[tuple[int, int], ...]:
    """Pairs of stages (earlier, later) between which values or cotangents travel, neighbours always."""
    forward = {(stage.index, transfer.stage) for stage in stages for transfer in stage.sends}
    backward = {(transfer.stage, stage.index) for stage in stages for transfer in stage.grad_sends}
    return tuple(sorted(forward | backward | {(i, i + 1) for i in range(len(stages) - 1)}))


def replay_rank(
    memories: Sequence[StageMemory], program: Program, rank: int, resident: ResidentBytes, left_out: int = 0
) -> RankMemory:
    """The memory of `rank` over one batch of the lowered `program`, on top of what is `resident`.

    `left_out` microbatches, whose inputs and losses count, repeat states that the program shows.

    Raises:
        ScheduleError: the program uses a value before it is made.
    """
    return _Replay(memories, program, rank, resident, left_out).run()


@dataclass(frozen=True, slots=True)
class _Peak:
    total: int
    at: Action | str
    activations: int
    transient: int
    states: tuple[int, ...]
    """Of every microbatch, in front of the action of the peak."""
    flat: dict[str, int]
    """Of flat buffers that come and go, by category."""
    again: int = 0
    operator: str = ""


class _Replay:
    def __init__(
        self,
        memories: Sequence[StageMemory],
        program: Program,
        rank: int,
        resident: ResidentBytes,
        left_out: int,
    ) -> None:
        self.rank = rank
        self.resident = resident
        self.lasting = resident.total
        if resident.has_slots:
            self.lasting += sum(slot_bytes(memories, program.actions(rank)))
        self.fixed = self.lasting
        """What is there whatever the microbatches hold; while flat buffers are whole, these too."""
        self.actions = program.actions(rank)
        self.flight = in_flight(tuple(memories), program.placement.rank_of_stage, rank)
        self.states = [0] * program.num_microbatches
        self.events = MemoryEvents(resident.has_slots)
        self.inputs = self.flight.input_bytes * (program.num_microbatches + left_out)
        self.live = self.inputs + left_out * _loss_bytes(memories, program, rank)
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
        self.live -= sum(self.flight.sending_bytes(state) for state in self.states)
        transient = self.resident.step_transient
        self.at = "optimizer step"
        self._observe(transient, 0, transient)
        return replace(
            self._described(), after_action=tuple(after), saved_after=tuple(saved), flat_after=tuple(flat)
        )

    def _observe_flat(self, above: int) -> None:
        """Flat buffers have come, with so many bytes more for a moment."""
        assert self.flat is not None
        self.fixed = self.lasting + self.flat.total
        self._observe(above, 0, above)

    def _step(self, microbatch: int, event: Event) -> None:
        try:
            step = self.flight.step(self.states[microbatch], event)
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
        """Note a moment with `above` more bytes than are listed, where that is more than ever before."""
        total = self.live + above + self.fixed
        if total > self.peak.total:
            states, flat = tuple(self.states), dict(self.flat.categories) if self.flat is not None else {}
            held = self.activations + activations
            self.peak = _Peak(total, self.at, held, transient, states, flat, again, operator)

    def _described(self) -> RankMemory:
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
        alive = tuple(
            Alive(stage, microbatch, num_bytes)
            for microbatch, state in enumerate(peak.states)
            for stage, num_bytes in self.flight.saved_bytes(state).items()
        )
        return RankMemory(
            self.rank, peak.total, str(peak.at), categories, alive=alive, operator=peak.operator
        )


def _loss_bytes(memories: Sequence[StageMemory], program: Program, rank: int) -> int:
    """Bytes of one microbatch's loss, if `rank` computes it."""
    graph, placed = memories[0].stage.graph, program.placement.rank_of_stage
    here = any(m.stage.computes_loss and placed[m.stage.index] == rank for m in memories)
    return graph.storage_bytes[graph.values[graph.loss].storage] if here else 0
