"""What a run leaves: the record of what was measured, in the units and shapes of what was predicted."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from stagewright.cluster.schema import StrictModel, validated
from stagewright.documents import MOST_RECORD_BYTES, read_sealed_json, sealed
from stagewright.errors import InputError
from stagewright.files import write_whole
from stagewright.limits import MOST_PREDICTED, MOST_STEPS
from stagewright.planning.plan import Plan
from stagewright.planning.plan_stages import stage_program
from stagewright.planning.predictions import Bytes, Position, Seconds
from stagewright.schedule.program import Program
from stagewright.simulation import Timeline
from stagewright.simulation.simulate import observed
from stagewright.units import format_seconds

Moment = Annotated[float, Field(ge=-MOST_PREDICTED, le=MOST_PREDICTED)]
"""Seconds from some beginning."""
Slowdown = Annotated[float, Field(gt=0, le=MOST_PREDICTED)]
Count = Annotated[int, Field(ge=0, le=MOST_STEPS)]


class RankRecord(StrictModel):
    """One global rank: peak bytes of tensors alive in metered steps, and when each action of the last step ran; where there
    are several lengths, of the last step of the longest that was run.

    An action starts when what it needs has arrived, so waiting shows as the time between actions.
    """

    rank: Position
    pipeline_rank: Position
    replica: Position
    allocated_peak_bytes: Bytes
    peak_of_length: dict[int, Bytes] = Field(default_factory=dict)
    """The same by tokens per sample, where there are several lengths."""
    reserved_peak_bytes: Bytes | None = None
    communicator_bytes: Bytes | None = None
    """That creating and connecting the communicators of transfers and collectives took of the device; None on CPUs. The one
    of all ranks, which exists before, is not in it."""
    busy_seconds: Seconds
    """Of computations; without waiting, transfers and the optimizer."""
    sent_bytes: Bytes
    """To other pipeline ranks, over all steps."""
    num_gathers: Count = 0
    """Of flat buffers of parameters, over all steps and checkpoints; `num_reductions`: sums of gradients over replicas."""
    num_reductions: Count = 0
    gathered_bytes: Bytes = 0
    """That left this rank on a ring of replicas; `reduced_bytes` for sums of gradients."""
    reduced_bytes: Bytes = 0
    num_copy_sums: Count = 0
    """Of gradients over the copies of what some replicas shard; `copy_sum_bytes` left this rank for them."""
    copy_sum_bytes: Bytes = 0
    actions: tuple[tuple[str, Moment, Moment], ...]
    """Text, start and end in seconds from this rank's beginning of the step."""
    began_seconds: Moment = 0.0
    """This rank's beginning of the step by the clock of the first rank."""
    clock_error_seconds: Seconds = 0.0
    """`began_seconds` is wrong by at most this."""
    optimizer_seconds: Seconds = 0.0
    """From the end of the batch to the end of the step: sums of gradients, norm and update."""

    device: Position | None = None
    """Its number in the plan's cluster. Records of before have none, and no pace."""
    pace: Slowdown | None = None
    """How many times as long as its device's figures say computations took, in the middle of the steps that were neither the
    first nor metered; None where there were none."""
    slowdowns: tuple[tuple[Position, Slowdown], ...] = ()
    """Behind some steps of this run: how many times as long as when the machine was probed a fixed computation took. None
    where the plan's cluster was not probed."""

    @property
    def timed_peak_bytes(self) -> int:
        """Of metered steps as long as the one whose actions are recorded."""
        lengths = self.peak_of_length
        return lengths[max(lengths)] if lengths else self.allocated_peak_bytes


class Record(StrictModel):
    """One run of a plan."""

    def __repr__(self) -> str:
        """How much is in it; a record is long."""
        return (
            f"<Record of {len(self.step_seconds)} steps on {len(self.ranks)} ranks, "
            f"{format_seconds(self.median_step_seconds)} a step>"
        )

    __str__ = __repr__

    version: Literal[1] = 1
    stagewright: str
    model: str
    plan: str | None = None
    """The file of the plan that the last step was run under; None where there was none, as of a plan made in Python."""
    device: str
    versions: dict[str, str] = Field(default_factory=dict)
    first_step: Position = 0
    """Steps done before, by the runs whose checkpoint this one went on from; what follows is of its own steps."""
    stopped_by: str | None = None
    """The signal by which somebody ended the run before its last step; None where it came to that."""
    is_going_on: bool = False
    """Whether this was written while the run still went on."""
    losses: tuple[float | None, ...]
    """None where the loss was no finite number."""
    gradient_norms: tuple[float | None, ...]
    """Before clipping; None where a gradient was not finite, as in a step of fp16 that therefore changed nothing."""
    learning_rates: tuple[Annotated[float, Field(ge=0)], ...] = ()
    """Of every step. Records of before have none."""
    skipped_steps: tuple[Position, ...] = ()
    """Steps of this run, counted from 0, that changed no parameter because the loss or a gradient was not finite."""
    went_back: tuple[tuple[Position, Position], ...] = ()
    """Steps, counted from the first of all, whose loss or gradients were not finite, and the steps done in the checkpoints
    to which the run then went back; the figures of steps are of those that count."""
    step_seconds: tuple[Annotated[Seconds, Field(gt=0)], ...]
    sequence_lengths: tuple[Position, ...] = ()
    """Tokens per sample of every step, where there are several lengths."""
    metered_steps: tuple[Position, ...]
    """Steps left out of the timing: the first, and those whose memory was counted."""
    predicted_step_seconds: Seconds
    """Of a step of `timed_length`."""
    ranks: tuple[RankRecord, ...]

    @model_validator(mode="after")
    def _one_figure_per_step(self) -> Record:
        count = len(self.step_seconds)
        for name in ("losses", "gradient_norms", "learning_rates", "sequence_lengths"):
            found = len(getattr(self, name))
            if found != count and (found or name not in ("learning_rates", "sequence_lengths")):
                raise ValueError(f"{name} has {found} entries where step_seconds has {count}: one per step")
        return self

    @property
    def median_step_seconds(self) -> float:
        """Median over the timed steps that were not metered (over all of them, if each was)."""
        return statistics.median(self.step_seconds[step] for step in self._counted_steps)

    def slowdowns(self, rank: RankRecord) -> list[float]:
        """Of a rank, of the steps whose times count."""
        return [ratio for step, ratio in rank.slowdowns if step in self._counted_steps]

    @property
    def slowdown(self) -> float | None:
        """How many times as long as when it was probed the machine took for the same work, in the middle of the timed
        steps; of each step on the rank where that is most: ranks wait for the slowest. None where that was not looked at."""
        slowest: dict[int, float] = {}
        for rank in self.ranks:
            for step, ratio in rank.slowdowns:
                slowest[step] = max(ratio, slowest.get(step, 0.0))
        at_once = [step for step in self._counted_steps if step in slowest]
        if not at_once:
            return None
        left = statistics.median(self.step_seconds[step] / slowest[step] for step in at_once)
        return statistics.median(self.step_seconds[step] for step in at_once) / left

    @property
    def paces(self) -> dict[int, float]:
        """`RankRecord.pace` by the number of the device, as far as that is known."""
        return {
            rank.device: rank.pace for rank in self.ranks if rank.device is not None and rank.pace is not None
        }

    @property
    def timed_length(self) -> int | None:
        """Tokens per sample of the steps whose times count: the most that were run; None where all steps are alike."""
        return max(self.sequence_lengths, default=None)

    @property
    def _counted_steps(self) -> list[int]:
        """Those whose times count."""
        return [step for step in self.timed_steps if step not in self.metered_steps] or self.timed_steps

    @property
    def timed_steps(self) -> list[int]:
        """The steps of that length; the actions of the last of them are recorded."""
        lengths, steps = self.sequence_lengths, range(len(self.step_seconds))
        return [step for step in steps if not lengths or lengths[step] == self.timed_length]

    def save(self, path: str | Path) -> None:
        write_whole(path, sealed(self.model_dump_json(indent=1)) + "\n")


def load_record(path: str | Path) -> Record:
    """The record in a file; raises `InputError` when it cannot be read."""
    document = read_sealed_json(path, "record", most_bytes=MOST_RECORD_BYTES)
    if isinstance(document, Mapping) and document.keys() >= {"program", "cuts"}:
        raise InputError(
            f"{path} is a plan: the record of its run is the record.json that `stagewright run` wrote"
        )
    return validated(Record, document, str(path))


def finite(value: float) -> float | None:
    """None for what JSON has no number for."""
    return value if math.isfinite(value) else None


def timeline_of(record: Record, plan: Plan) -> Timeline:
    """When the computations of a run's last step, of its longest length, took place on the ranks of the first replica.

    Seconds by the first rank's clock, from the start of the first computation; between ranks they are wrong by at most
    `clock_error_seconds`. An action starts when what it needs has arrived, so waiting is idle time. Raises `InputError`
    where the record is not of a run of `plan`, or of none of its steps."""
    if not record.timed_steps:
        raise InputError("the record has no step, so nothing was measured: run the plan for 3 steps or more")
    program = stage_program(plan)
    ranks = _ranks_of(record, plan)
    times = [_times(rank, program) for rank in ranks]
    first = min((start for rank in times for start, _ in rank), default=0.0)
    shifted = [[(start - first, end - first) for start, end in rank] for rank in times]
    return observed(program, shifted, [rank.timed_peak_bytes for rank in ranks])


def clock_error_seconds(record: Record) -> float:
    """How far the clocks of any two ranks may be apart after correction."""
    errors = sorted((rank.clock_error_seconds for rank in record.ranks), reverse=True)
    return sum(errors[:2])


def _ranks_of(record: Record, plan: Plan) -> list[RankRecord]:
    wanted = {plan.global_rank(rank, 0): rank for rank in range(plan.pp)}
    found = {rank.rank: rank for rank in record.ranks if rank.rank in wanted}
    is_placed = all(rank.pipeline_rank == wanted[number] for number, rank in found.items())
    if len(record.ranks) != plan.num_ranks or len(found) != plan.pp or not is_placed:
        raise InputError(
            f"the record is of {len(record.ranks)} ranks, and not of the {plan.num_ranks} that the plan has "
            f"(pp {plan.pp} x dp {plan.dp} x tp {plan.tp}): give the plan that was run"
        )
    return [found[rank] for rank in wanted]


def _times(rank: RankRecord, program: Program) -> list[tuple[float, float]]:
    """Start and end of the computations of one rank, in program order."""
    wanted = [str(action) for action in program.actions(rank.pipeline_rank)]
    known = set(wanted)
    ran = [(text, start, end) for text, start, end in rank.actions if text in known]
    if [text for text, _, _ in ran] != wanted:
        raise InputError(
            f"rank {rank.rank} of the record did not run the plan's actions in the plan's order: "
            "give the plan that was run"
        )
    return [(rank.began_seconds + start, rank.began_seconds + end) for _, start, end in ran]
