"""The history of a run's steps on a rank: the log entry of each step, and the record of all."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagewright.execution.logs import TrainingStep
from stagewright.execution.record import Record, finite
from stagewright.planning.plan import Plan
from stagewright.version import __version__

if TYPE_CHECKING:
    from stagewright.execution.session import StepResult
    from stagewright.planning.predictions import Predictions

_RECENT_STEPS = 20
"""Number of recent steps from which the remaining time is estimated."""


class History:
    """The results of the steps of a run, without those that were undone.

    Args:
        first_step: number of steps done before, by the runs that this one continues.
        num_steps: number of steps at the end of the run.
        metered: numbers of the steps, counted from 0, whose memory is metered.
    """

    def __init__(self, first_step: int, num_steps: int, metered: Iterable[int]) -> None:
        self.first_step = first_step
        self.num_steps = num_steps
        self.metered = set(metered)
        self.results: list[StepResult] = []
        self.returns: list[tuple[int, int]] = []
        """Returns to checkpoints: the step, counted from 1, after which the run went back, and the checkpoint's steps."""

    def went_back(self, step: int, done: int) -> None:
        """Record that the run went back, after step number `step` (from 0), to a checkpoint of `done` steps."""
        del self.results[max(0, done - self.first_step) :]
        self.first_step = min(self.first_step, done)
        self.metered.add(done)
        self.returns.append((step + 1, done))

    def log_entry(self, plan: Plan, number: int, result: StepResult, is_cpu: bool) -> TrainingStep:
        """Return the log entry of step `number`, counted from 0."""
        length = plan.job.length_of(number)
        predicted = plan.by_length.get(length, plan.predictions)
        speed = predicted.step_seconds / result.seconds
        recent = [step.seconds for step in self.results[-_RECENT_STEPS:]]
        return TrainingStep(
            number + 1,
            self.num_steps,
            result.loss,
            result.gradient_norm,
            result.learning_rate,
            result.is_skipped,
            result.seconds,
            predicted.tokens_per_second * speed,
            predicted.mfu * speed,
            max(result.memory_by_rank, default=0),
            statistics.median(recent) * (self.num_steps - number - 1),
            plan.job.unit,
            "RSS" if is_cpu else "reserved",
            () if is_cpu else self._of_predicted(predicted, result),
        )

    @staticmethod
    def _of_predicted(predicted: Predictions, result: StepResult) -> tuple[tuple[int, int], ...]:
        """Return the bytes that every rank has reserved, each with its predicted peak; nothing without predictions."""
        per_stage = len(result.memory_by_rank) // max(len(predicted.ranks), 1)
        return tuple(
            (reserved, predicted.ranks[rank // per_stage].reserved_peak_bytes)
            for rank, reserved in enumerate(result.memory_by_rank if predicted.ranks else ())
        )

    def slowdowns(self, rank: int) -> list[float]:
        """Return the ratio of a rank's computing time to the planned time in every step but the first; zero for metered
        steps."""
        return [result.slowdowns[rank] for result in self.results[1:]]

    @property
    def is_short(self) -> bool:
        """Whether steps remain to be done."""
        return self.first_step + len(self.results) < self.num_steps

    def record(
        self,
        plan: Plan,
        path: Path | None,
        device: str,
        ranks: Sequence[Any],
        stopped_by: str | None,
        is_going_on: bool,
    ) -> Record:
        """Return the record of all steps so far, the last of them under `plan`, whose file is `path`; `ranks` are the
        records of the ranks."""
        import torch

        first, results = self.first_step, self.results
        steps_run = range(first, first + len(results))
        sequence_lengths = tuple(map(plan.job.length_of, steps_run)) if plan.job.sequence_lengths else ()
        timed = plan.at_length(max(sequence_lengths)) if sequence_lengths else plan
        return Record(
            stagewright=__version__,
            model=plan.model.name,
            plan=None if path is None else str(path),
            first_step=first,
            device=device,
            versions={"torch": torch.__version__, "python": sys.version.split()[0]},
            losses=tuple(finite(result.loss) for result in results),
            gradient_norms=tuple(finite(result.gradient_norm) for result in results),
            learning_rates=tuple(result.learning_rate for result in results),
            skipped_steps=tuple(step for step, result in enumerate(results) if result.is_skipped),
            went_back=tuple(self.returns),
            step_seconds=tuple(result.seconds for result in results),
            sequence_lengths=sequence_lengths,
            stopped_by=stopped_by,
            is_going_on=is_going_on,
            metered_steps=tuple(sorted({0, *(step - first for step in self.metered if step in steps_run)})),
            predicted_step_seconds=timed.predictions.step_seconds,
            ranks=tuple(ranks),
        )
