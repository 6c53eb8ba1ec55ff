"""The record of a run's measurements, in the units and shapes of predictions."""

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
"""Seconds from an arbitrary origin."""
Slowdown = Annotated[float, Field(gt=0, le=MOST_PREDICTED)]
Count = Annotated[int, Field(ge=0, le=MOST_STEPS)]


class RankRecord(StrictModel):
    """The measurements of a global rank: peak bytes of live tensors in metered steps, and times of the actions of the last
    step; where there are several sequence lengths, of the last step of the longest.

    An action starts when what it needs has arrived, so waiting shows as the time between actions.
    """

    rank: Position
    pipeline_rank: Position
    replica: Position
    allocated_peak_bytes: Bytes
    peak_of_length: dict[int, Bytes] = Field(default_factory=dict)
    """Peak bytes by tokens per sample, where there are several sequence lengths."""
    reserved_peak_bytes: Bytes | None = None
    communicator_bytes: Bytes | None = None
    """Device memory taken by creating and connecting the communicators of transfers and collectives; None on CPUs. Ignores:
    the communicator of all ranks, which exists before."""
    busy_seconds: Seconds
    """Seconds of computations, without waiting, transfers and the optimizer."""
    sent_bytes: Bytes
    """Bytes sent to other pipeline ranks, over all steps."""
    num_gathers: Count = 0
    """Number of gathers of flat buffers of parameters, over all steps and checkpoints; `num_reductions` counts the gradient
    reductions over replicas."""
    num_reductions: Count = 0
    gathered_bytes: Bytes = 0
    """Bytes that this rank sent on a ring of replicas in gathers; `reduced_bytes` in gradient reductions."""
    reduced_bytes: Bytes = 0
    num_copy_sums: Count = 0
    """Number of gradient all-reduces over the copies of shards; `copy_sum_bytes` is what this rank sent in them."""
    copy_sum_bytes: Bytes = 0
    actions: tuple[tuple[str, Moment, Moment], ...]
    """Text, start and end of each action, in seconds from this rank's start of the step."""
    memory: tuple[tuple[str, Bytes, Bytes], ...] = ()
    """Peak bytes during each action and each other part of a metered step, in order, and the bytes that remained after it.
    Older records have none."""
    began_seconds: Moment = 0.0
    """This rank's start of the step by the clock of the first rank."""
    clock_error_seconds: Seconds = 0.0
    """Maximum error of `began_seconds`."""
    optimizer_seconds: Seconds = 0.0
    """Seconds from the end of the batch to the end of the step: gradient reductions, norm and update."""

    device: Position | None = None
    """Number of its device in the plan's cluster. Older records have none, and no pace."""
    pace: Slowdown | None = None
    """Ratio of the time of computations to that by the device's figures, the median over steps that were neither the first
    nor metered; None where there were none."""
    slowdowns: tuple[tuple[Position, Slowdown], ...] = ()
    """Ratios of the time of the reference computation after some steps of this run to its time when the machine was probed.
    Empty where the plan's cluster was not probed."""

    @property
    def timed_peak_bytes(self) -> int:
        """Peak bytes in metered steps of the same length as the one whose actions are recorded."""
        lengths = self.peak_of_length
        return lengths[max(lengths)] if lengths else self.allocated_peak_bytes


class Record(StrictModel):
    """The measurements of a run of a plan."""

    def __repr__(self) -> str:
        """Return a summary; a record is long."""
        return (
            f"<Record of {len(self.step_seconds)} steps on {len(self.ranks)} ranks, "
            f"{format_seconds(self.median_step_seconds)} a step>"
        )

    __str__ = __repr__

    version: Literal[1] = 1
    stagewright: str
    model: str
    plan: str | None = None
    """File of the plan of the last step; None where there is none, as for a plan made in Python."""
    device: str
    versions: dict[str, str] = Field(default_factory=dict)
    first_step: Position = 0
    """Number of steps done before, by the runs that this one continues; the other fields are of this run's steps."""
    stopped_by: str | None = None
    """Signal that ended the run before its last step; None where it reached that step."""
    is_going_on: bool = False
    """Whether this was written before the end of the run."""
    losses: tuple[float | None, ...]
    """Loss of every step; None in place of NaN and Inf."""
    gradient_norms: tuple[float | None, ...]
    """Norm of every step before clipping; None in place of NaN and Inf, as in a skipped fp16 step."""
    learning_rates: tuple[Annotated[float, Field(ge=0)], ...] = ()
    """Learning rate of every step. Older records have none."""
    skipped_steps: tuple[Position, ...] = ()
    """Steps of this run, counted from 0, that changed no parameter because the loss or a gradient was NaN or Inf."""
    went_back: tuple[tuple[Position, Position], ...] = ()
    """Steps, counted from the start of the first run, whose loss or gradients were NaN or Inf, each with the number of steps
    in the checkpoint to which the run then went back; figures are those of the steps that were kept."""
    step_seconds: tuple[Annotated[Seconds, Field(gt=0)], ...]
    sequence_lengths: tuple[Position, ...] = ()
    """Tokens per sample of every step, where there are several sequence lengths."""
    metered_steps: tuple[Position, ...]
    """Steps left out of the timing: the first, and those whose memory was metered."""
    predicted_step_seconds: Seconds
    """Predicted seconds of a step of `timed_length`."""
    ranks: tuple[RankRecord, ...]

    @model_validator(mode="after")
    def _one_figure_per_step(self) -> Record:
        count = len(self.step_seconds)
        for name in ("losses", "gradient_norms", "learning_rates", "sequence_lengths"):
            num_entries = len(getattr(self, name))
            if num_entries != count and (num_entries or name not in ("learning_rates", "sequence_lengths")):
                raise ValueError(
                    f"{name} has {num_entries} entries where step_seconds has {count}: one per step"
                )
        return self

    @property
    def median_step_seconds(self) -> float:
        """Median seconds of the timed steps that were not metered (of all timed steps, if all were)."""
        return statistics.median(self.step_seconds[step] for step in self._counted_steps)

    def slowdowns(self, rank: RankRecord) -> list[float]:
        """Return the slowdowns of a rank in the steps that count."""
        return [ratio for step, ratio in rank.slowdowns if step in self._counted_steps]

    @property
    def slowdown(self) -> float | None:
        """Ratio of the machine's time for the same work to its time when it was probed, the median over timed steps; for
        each step that of the slowest rank, for which the others wait. None where it was not measured."""
        slowest: dict[int, float] = {}
        for rank in self.ranks:
            for step, ratio in rank.slowdowns:
                slowest[step] = max(ratio, slowest.get(step, 0.0))
        at_once = [step for step in self._counted_steps if step in slowest]
        if not at_once:
            return None
        undelayed_seconds = statistics.median(self.step_seconds[step] / slowest[step] for step in at_once)
        return statistics.median(self.step_seconds[step] for step in at_once) / undelayed_seconds

    @property
    def device_slowdowns(self) -> dict[int, float]:
        """`RankRecord.pace` by the number of the device, where both are known."""
        return {
            rank.device: rank.pace for rank in self.ranks if rank.device is not None and rank.pace is not None
        }

    @property
    def timed_length(self) -> int | None:
        """Tokens per sample of the timed steps: the longest that were run; None where all steps are equally long."""
        return max(self.sequence_lengths, default=None)

    @property
    def _counted_steps(self) -> list[int]:
        """Timed steps without metered ones, unless all were metered."""
        return [step for step in self.timed_steps if step not in self.metered_steps] or self.timed_steps

    @property
    def timed_steps(self) -> list[int]:
        """Steps of `timed_length`; the actions of the last of them are recorded."""
        lengths, steps = self.sequence_lengths, range(len(self.step_seconds))
        return [step for step in steps if not lengths or lengths[step] == self.timed_length]

    @property
    def drawn_step_seconds(self) -> float:
        """Seconds of the step whose actions are recorded."""
        return self.step_seconds[self.timed_steps[-1]]

    def save(self, path: str | Path) -> None:
        write_whole(path, sealed(self.model_dump_json(indent=1)) + "\n")


def load_record(path: str | Path) -> Record:
    """Return the record in a file. Raises `InputError` where it cannot be read."""
    document = read_sealed_json(path, "record", most_bytes=MOST_RECORD_BYTES)
    if isinstance(document, Mapping) and document.keys() >= {"program", "cuts"}:
        raise InputError(
            f"{path} is a plan: the record of its run is the record.json that `stagewright run` wrote"
        )
    return validated(Record, document, str(path))


def finite(value: float) -> float | None:
    """Return `value`, or None for NaN and Inf, which JSON cannot represent."""
    return value if math.isfinite(value) else None


def timeline_of(record: Record, plan: Plan) -> Timeline:
    """Return the timeline of the computations of a run's last step of its longest length, on the first replica's ranks.

    Times are seconds by the first rank's clock, from the start of the first computation; between ranks they are wrong by at
    most `clock_error_seconds`. An action starts when its inputs have arrived, so waiting is idle time. Raises `InputError`
    where the record is not of a run of `plan`, or has no steps."""
    if not record.timed_steps:
        raise InputError("the record has no steps, so nothing was measured: run the plan for 3 steps or more")
    program = stage_program(plan)
    ranks = first_replica(record, plan)
    times = [_times(rank, program) for rank in ranks]
    first = min((start for rank in times for start, _ in rank), default=0.0)
    shifted = [[(start - first, end - first) for start, end in rank] for rank in times]
    return observed(program, shifted, [rank.timed_peak_bytes for rank in ranks])


def clock_error_seconds(record: Record) -> float:
    """Return the maximum difference between the corrected clocks of any two ranks."""
    errors = sorted((rank.clock_error_seconds for rank in record.ranks), reverse=True)
    return sum(errors[:2])


def first_replica(record: Record, plan: Plan) -> list[RankRecord]:
    """Return the measurements of the first replica, by pipeline rank. Raises `InputError` where they are of another plan."""
    wanted = {plan.global_rank(rank, 0): rank for rank in range(plan.pp)}
    by_rank = {rank.rank: rank for rank in record.ranks if rank.rank in wanted}
    is_placed = all(rank.pipeline_rank == wanted[number] for number, rank in by_rank.items())
    if len(record.ranks) != plan.num_ranks or len(by_rank) != plan.pp or not is_placed:
        raise InputError(
            f"the record has {len(record.ranks)} ranks, not the plan's {plan.num_ranks} "
            f"(pp {plan.pp} x dp {plan.dp} x tp {plan.tp}): give the plan that was run"
        )
    return [by_rank[rank] for rank in wanted]


def _times(rank: RankRecord, program: Program) -> list[tuple[float, float]]:
    """Return the start and end of the computations of one rank, in program order."""
    wanted = [str(action) for action in program.actions(rank.pipeline_rank)]
    texts = set(wanted)
    ran = [(text, start, end) for text, start, end in rank.actions if text in texts]
    if [text for text, _, _ in ran] != wanted:
        raise InputError(
            f"rank {rank.rank} of the record did not run the plan's actions in the plan's order: "
            "give the plan that was run"
        )
    return [(rank.began_seconds + start, rank.began_seconds + end) for _, start, end in ran]
