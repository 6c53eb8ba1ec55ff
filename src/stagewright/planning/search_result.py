"""The result of a search: plans, configurations left out, and warnings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from stagewright.frames import data_frame, html_table
from stagewright.planning.plan import Plan

if TYPE_CHECKING:
    from pandas import DataFrame

    from stagewright.planning.configuration import Configuration

_INTERRUPTED = "interrupted: these are the best plans so far, not all configurations were tried"


@dataclass(frozen=True)
class Excluded:
    """A configuration that was excluded, and why; `missing_bytes` where it does not fit."""

    reason: str
    dp: int
    pp: int
    microbatch_size: int | None = None
    schedule: str | None = None
    missing_bytes: int | None = None
    tp: int = 1

    @classmethod
    def of(cls, configuration: Configuration, reason: str, missing_bytes: int | None = None) -> Self:
        """Return the record that `configuration` was excluded."""
        return cls(
            reason,
            configuration.dp,
            configuration.pp,
            configuration.microbatch,
            configuration.schedule,
            missing_bytes,
            configuration.tp,
        )


@dataclass(frozen=True)
class NextBest:
    """A configuration that was not evaluated, and a lower bound on the seconds of its step."""

    configuration: str
    seconds: float


@dataclass(frozen=True)
class SearchResult:
    """The result of a search: plans, best first, and the configurations that were left out."""

    plans: list[Plan]
    excluded: list[Excluded]
    warnings: list[str] = field(default_factory=list)
    num_bounded: int = 0
    """Number of configurations that were not evaluated, because they cannot be faster than the last of the plans."""
    next_best: NextBest | None = None
    """The most promising of these."""

    def __repr__(self) -> str:
        """Return the best plan and the number of plans."""
        if not self.plans:
            return f"<SearchResult no plan; {len(self.excluded)} configurations left out>"
        return f"<SearchResult {len(self.plans)} plans, the best {self.plans[0]!r}; {len(self.excluded)} left out>"

    def _repr_html_(self) -> str:
        """Return the table of plans, best first, for a notebook."""
        return html_table(repr(self).strip("<>"), *self._rows())

    def to_dataframe(self) -> DataFrame:
        """Return one row per plan, best first, in seconds and bytes. Raises `InputError` without pandas."""
        return data_frame(*self._rows())

    def _rows(self) -> tuple[list[str], list[list[Any]]]:
        """Return the names of the columns and one row per plan."""
        names = [
            "pp", "dp", "tp", "cp", "ep", "schedule", "num_stages", "microbatch_size", "num_microbatches", "zero",
            "step_seconds", "tokens_per_second", "mfu", "bubble_fraction", "reserved_peak_bytes",
        ]  # fmt: skip
        return names, [
            [
                plan.pp, plan.dp, plan.tp, plan.cp, plan.ep, plan.schedule, plan.num_stages, plan.microbatch_size,
                plan.num_microbatches, max(plan.sharding), plan.mean_step_seconds,
                plan.mean_rate(lambda step: step.tokens_per_second), plan.mean_rate(lambda step: step.mfu),
                plan.predictions.bubble_fraction, plan.predictions.reserved_peak_bytes,
            ]
            for plan in self.plans
        ]  # fmt: skip

    @property
    def is_interrupted(self) -> bool:
        """Whether Ctrl-C ended the search."""
        return _INTERRUPTED in self.warnings

    def interrupted(self) -> SearchResult:
        """Return this result with the warning that Ctrl-C ended the search."""
        return replace(self, warnings=[_INTERRUPTED, *self.warnings])


class UntilCtrlC:
    """A context in which Ctrl-C ends a search, if it `may` be ended and `so_far` is not empty; otherwise
    `KeyboardInterrupt` is raised.

    >>> with UntilCtrlC(True, ["a plan"]) as searching:
    ...     raise KeyboardInterrupt
    >>> searching.is_ended
    True
    """

    def __init__(self, may: bool, so_far: Sequence[object]) -> None:
        self.may = may
        self.so_far = so_far
        self.is_ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.is_ended = isinstance(error, KeyboardInterrupt) and self.may and bool(self.so_far)
        return self.is_ended

    def annotated(self, result: SearchResult) -> SearchResult:
        """Return `result`, with the warning if Ctrl-C has ended its search."""
        return result.interrupted() if self.is_ended else result


def operator_warnings(without_rule: Iterable[str]) -> list[str]:
    """Return a warning for each operator without a cost rule."""
    return [
        f"operator {name} has no cost rule: its time is that of its bytes" for name in sorted(without_rule)
    ]
