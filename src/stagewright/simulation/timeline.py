"""Timelines: times of every action and transfer of a program, and the statistics derived from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stagewright.arrays import Floats, Ints
from stagewright.frames import data_frame, html_table
from stagewright.schedule.action import Action
from stagewright.simulation.encoding import EncodedProgram
from stagewright.simulation.memory import MemoryCurve, PatternBytes, memory_curve, peaks_in_program_order
from stagewright.simulation.streams import COMPUTE_STREAM
from stagewright.simulation.structure import Structure
from stagewright.units import format_seconds

if TYPE_CHECKING:
    from pandas import DataFrame


class TimedAction(NamedTuple):
    """An action with its start and end in seconds."""

    rank: int
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, eq=False)
class Timeline:
    """Start and end of every action, all ranks concatenated as in `encoded`; seconds from the start of the batch.

    `base_bytes[r]` are allocated on rank `r` throughout. `token_s` is the time at which each token was available, as
    `structure` numbers them, and `slot_s` the transfer seconds of each kind of token.
    """

    encoded: EncodedProgram
    start_s: Floats
    end_s: Floats
    pattern_bytes: PatternBytes
    base_bytes: Floats
    structure: Structure
    token_s: Floats
    slot_s: Floats

    def __repr__(self) -> str:
        """Show length and bubble instead of the many actions."""
        return f"<Timeline of {self.num_ranks} ranks: {format_seconds(self.makespan_s)}, bubble {self.bubble_fraction:.1%}>"

    def _repr_html_(self) -> str:
        """Show busy and idle seconds of every rank in a notebook."""
        rows = zip(range(self.num_ranks), self.busy_s.tolist(), self.idle_s.tolist(), strict=True)
        return html_table(repr(self).strip("<>"), ("rank", "busy_s", "idle_s"), rows)

    def to_dataframe(self) -> DataFrame:
        """Return a row per action: rank, action, stage, microbatch (none for actions of a whole stage), start and end in
        seconds; for an overlapped pair those of the forward. Raises `InputError` without pandas."""
        columns = ("rank", "action", "stage", "microbatch", "start_s", "end_s")
        return data_frame(
            columns,
            (
                (
                    event.rank,
                    str(event.action),
                    event.action.stage,
                    event.action.microbatch,
                    event.start_s,
                    event.end_s,
                )
                for rank in range(self.num_ranks)
                for event in self.events(rank)
            ),
        )

    @property
    def num_ranks(self) -> int:
        return self.encoded.num_ranks

    @cached_property
    def makespan_s(self) -> float:
        """End of the last action of all ranks."""
        return float(self.end_s.max(initial=0.0))

    @cached_property
    def busy_s(self) -> Floats:
        """Seconds of computation per rank."""
        seconds = np.where(self.is_compute, self.end_s - self.start_s, 0.0)
        return np.array([seconds[self.encoded.rank_slice(rank)].sum() for rank in range(self.num_ranks)])

    @property
    def idle_s(self) -> Floats:
        """Seconds of the makespan without computation, per rank."""
        return self.makespan_s - self.busy_s

    @property
    def bubble_fraction(self) -> float:
        """Idle fraction of all ranks' time: sum of idle seconds / (ranks x makespan)."""
        return float(self.idle_s.sum() / (self.num_ranks * self.makespan_s)) if self.makespan_s else 0.0

    @cached_property
    def span_s(self) -> Floats:
        """Seconds per rank from the start of its first computation to the end of its last.

        Ranks that start late may also end late when batches follow each other: then the longest span, not the makespan, is
        the time of a batch.
        """
        spans = np.zeros(self.num_ranks)
        for rank in range(self.num_ranks):
            part = self.encoded.rank_slice(rank)
            computes = self.is_compute[part]
            if computes.any():
                spans[rank] = self.end_s[part][computes].max() - self.start_s[part][computes].min()
        return spans

    @cached_property
    def peak_bytes(self) -> Floats:
        """Peak bytes per rank."""
        table, encoded = self.pattern_bytes, self.encoded
        if table.follows_program_order:
            return peaks_in_program_order(
                encoded.pattern,
                encoded.offsets,
                table.at_start,
                table.at_end,
                table.transient,
                self.base_bytes,
            )
        return np.array([self.memory_curve(rank).peak_bytes for rank in range(self.num_ranks)])

    def memory_curve(self, rank: int) -> MemoryCurve:
        """Return the bytes on `rank` over time."""
        part = self.encoded.rank_slice(rank)
        return memory_curve(
            self.encoded.pattern[part],
            self.start_s[part],
            self.end_s[part],
            self.pattern_bytes,
            float(self.base_bytes[rank]),
        )

    def events(self, rank: int) -> Iterator[TimedAction]:
        """Yield the actions of `rank` in program order."""
        part = self.encoded.rank_slice(rank)
        for index in range(part.start, part.stop):
            yield TimedAction(
                rank, self.encoded.action(index), float(self.start_s[index]), float(self.end_s[index])
            )

    @cached_property
    def is_compute(self) -> NDArray[np.bool_]:
        """Whether each action runs on the compute stream."""
        return (self.structure.tables.stream == COMPUTE_STREAM)[self.encoded.pattern]


@dataclass(frozen=True, eq=False)
class TransferTimes:
    """Transfers of values and gradients between ranks, in seconds from the start of the batch.

    A value goes to a higher stage, a gradient to a lower one.
    """

    source_stage: Ints
    target_stage: Ints
    microbatch: Ints
    start_s: Floats
    end_s: Floats


def transfer_times(timeline: Timeline) -> TransferTimes:
    """Return all transfers of `timeline`, by edge and in the order of microbatches.

    >>> from stagewright.schedule import build
    >>> from stagewright.simulation import StageCosts, simulate
    >>> times = transfer_times(simulate(build("1f1b", 2, 2), StageCosts.uniform(2), 0.5))
    >>> times.source_stage.tolist(), times.start_s.tolist(), times.end_s.tolist()
    ([1, 1, 0, 0], [4.5, 7.5, 1.0, 2.0], [5.0, 8.0, 1.5, 2.5])
    """
    structure = timeline.structure
    slots = structure.sent_slots
    microbatches = np.arange(timeline.encoded.num_microbatches)
    tokens = structure.slot_base[slots][:, None] + microbatches * structure.slot_stride[slots][:, None]
    arrival = timeline.token_s[tokens]
    ends = np.array([ends for _, *ends in structure.transfers], np.int64).reshape(-1, 2)
    count = len(microbatches)
    return TransferTimes(
        np.repeat(ends[:, 0], count),
        np.repeat(ends[:, 1], count),
        np.tile(microbatches, len(slots)),
        (arrival - timeline.slot_s[slots][:, None]).ravel(),
        arrival.ravel(),
    )
