"""The record of a run: what was measured, in the units and shapes of what was predicted."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from stagewright.cluster.strict import StrictModel, validated
from stagewright.documents import MOST_RECORD_BYTES, read_sealed_json, sealed
from stagewright.errors import InputError
from stagewright.files import write_whole
from stagewright.limits import MOST_PREDICTED, MOST_STEPS
from stagewright.planning.predictions import Bytes, Position, Seconds

Moment = Annotated[float, Field(ge=-MOST_PREDICTED, le=MOST_PREDICTED)]
"""Seconds from some beginning."""
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
    """Of gradients over the copies of what some of the replicas share out; `copy_sum_bytes` left this rank for them."""
    copy_sum_bytes: Bytes = 0
    actions: tuple[tuple[str, Moment, Moment], ...]
    """Text, start and end in seconds from this rank's beginning of the step."""
    began_seconds: Moment = 0.0
    """This rank's beginning of the step by the clock of the first rank."""
    clock_error_seconds: Seconds = 0.0
    """`began_seconds` is wrong by at most this."""
    optimizer_seconds: Seconds = 0.0
    """From the end of the batch to the end of the step: sums of gradients, norm and update."""

    @property
    def timed_peak_bytes(self) -> int:
        """Of metered steps as long as the one whose actions are recorded."""
        return (
            self.peak_of_length[max(self.peak_of_length)]
            if self.peak_of_length
            else self.allocated_peak_bytes
        )


class Record(StrictModel):
    """One run of a plan."""

    version: Literal[1] = 1
    stagewright: str
    model: str
    device: str
    versions: dict[str, str] = Field(default_factory=dict)
    first_step: Position = 0
    """Steps done before, by the runs whose checkpoint this one went on from; what follows is of its own steps."""
    stopped_by: str | None = None
    """The signal by which somebody ended the run before its last step; None where it came to that."""
    losses: tuple[float | None, ...]
    """None where the loss was no finite number."""
    gradient_norms: tuple[float | None, ...]
    """Before clipping; None where a gradient was not finite, as in a step of fp16 that therefore changed nothing."""
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
        for name in ("losses", "gradient_norms", "sequence_lengths"):
            found = len(getattr(self, name))
            if found != count and (found or name != "sequence_lengths"):
                raise ValueError(f"{name} has {found} entries where step_seconds has {count}: one per step")
        return self

    @property
    def median_step_seconds(self) -> float:
        """Median over the timed steps that were not metered (over all of them, if each was)."""
        timed = [step for step in self.timed_steps if step not in self.metered_steps] or self.timed_steps
        return statistics.median(self.step_seconds[step] for step in timed)

    @property
    def timed_length(self) -> int | None:
        """Tokens per sample of the steps whose times count: the most that were run; None where all steps are alike."""
        return max(self.sequence_lengths, default=None)

    @property
    def timed_steps(self) -> list[int]:
        """The steps of that length; the actions of the last of them are recorded."""
        steps = range(len(self.step_seconds))
        return [
            step
            for step in steps
            if not self.sequence_lengths or self.sequence_lengths[step] == self.timed_length
        ]

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
