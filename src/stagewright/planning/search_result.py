"""The result of a search: plans, configurations left out, and warnings."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from stagewright.compiled import is_in_kernel, module_of, with_callers
from stagewright.errors import InputError
from stagewright.frames import data_frame, html_table
from stagewright.planning.plan import Plan

if TYPE_CHECKING:
    from pandas import DataFrame

    from stagewright.planning.configuration import Configuration

_SO_FAR = "these are the best plans so far, not all configurations were tried"
_INTERVAL_S, _AGAIN_S = 0.2, 5.0
"""Seconds between looks for a first plan once the time is up, and between attempts to end the search then."""
_IN_KERNEL_S = 0.001
"""Seconds between looks whether a kernel has returned."""


LARGER = "does not fit in smaller microbatches"
"""The reason to exclude all larger microbatches of a configuration."""


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
    lacks_memory: bool = False

    @classmethod
    def of(
        cls, configuration: Configuration, reason: str, missing_bytes: int | None, lacks_memory: bool
    ) -> Self:
        """Return the record that `configuration` was excluded."""
        return cls(
            reason,
            configuration.dp,
            configuration.pp,
            configuration.microbatch,
            configuration.schedule,
            missing_bytes,
            configuration.tp,
            lacks_memory,
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
    num_simulated: int = 0
    """Number of configurations that were simulated, of which `plans` are the best."""
    num_bounded: int = 0
    """Number of configurations that were not evaluated, because they cannot be faster than the last of the plans."""
    next_best: NextBest | None = None
    """The most promising of these."""
    ended_early: str | None = None
    """What ended the search before it had tried everything."""
    gap: float = 0.0
    """By what share of the best plan's time a configuration that was not tried could be faster, by its lower bound."""

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

    def ended(self, what: str, gap: float) -> SearchResult:
        """Return this result of a search that `what` ended early, with a warning."""
        shortest = f"; none of the others can be more than {gap:.1%} faster" if 0 < gap < 1 else ""
        warnings = [f"{what}: {_SO_FAR}{shortest}", *self.warnings]
        return replace(self, warnings=warnings, ended_early=what, gap=gap)


def _is_in_finalizer(frame: FrameType | None) -> bool:
    """Whether `frame` runs for a ``__del__`` or in the module of weak references, which calls back for dead objects."""
    return any(
        caller.f_code.co_name == "__del__" or module_of(caller) in ("weakref", "_weakrefset")
        for caller in with_callers(frame)
    )


class EarlyEnd:
    """A context that Ctrl-C, SIGTERM, or the end of a finite time leaves once there is a plan. Before that Ctrl-C and
    SIGTERM raise `KeyboardInterrupt`, as they always do where `patience_s` is None.

    Signals that come in a compiled kernel wait until it has returned: numba does not check for exceptions there, and the
    process would crash. So do those in a finalizer, whose exceptions Python prints and ignores.

    >>> with EarlyEnd(math.inf, has_plan=lambda: True) as searching:
    ...     raise KeyboardInterrupt
    >>> searching.what
    'interrupted'

    Raises:
        InputError: a finite time in another thread than the main one, which alone gets signals.
    """

    def __init__(self, patience_s: float | None, has_plan: Callable[[], bool]) -> None:
        self.patience_s = patience_s
        self.has_plan = has_plan
        self.what: str | None = None
        """What ended the search early."""
        self._why = "interrupted"
        self._waiting: int | None = None
        """A signal that came in a kernel."""
        self._before: dict[int, Any] = {}
        self._timer = 0.0, 0.0

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            if self.patience_s is not None and self.patience_s < math.inf:
                raise InputError(
                    "a search within a time needs the main thread: leave the time out, or plan there"
                )
            return self
        numbers = [signal.SIGALRM]
        # Otherwise somebody else answers Ctrl-C.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            numbers.append(signal.SIGINT)
        if self.patience_s is not None:
            numbers.append(signal.SIGTERM)
        self._before = {number: signal.signal(number, self._hear) for number in numbers}
        self._timer = signal.getitimer(signal.ITIMER_REAL)
        if self.patience_s is not None and self.patience_s < math.inf:
            signal.setitimer(signal.ITIMER_REAL, max(self.patience_s, 0.001), _INTERVAL_S)
        return self

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGALRM or self._waiting is None:
            waiting = number
        else:
            waiting, self._waiting = self._waiting, None
        is_over = frame is not None and frame.f_code is EarlyEnd.__exit__.__code__
        if is_over or (waiting == signal.SIGALRM and not self.has_plan()):
            return
        if is_in_kernel(frame) or _is_in_finalizer(frame):
            self._waiting = waiting
            signal.setitimer(signal.ITIMER_REAL, _IN_KERNEL_S, _IN_KERNEL_S)
            return
        if waiting == signal.SIGALRM:
            self._why = f"ended after {self.patience_s:g} s"
        elif waiting == signal.SIGTERM:
            self._why = "ended by SIGTERM"
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S, _AGAIN_S)  # some code swallows what handlers raise
        raise KeyboardInterrupt(self._why)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self._before:
            signal.setitimer(signal.ITIMER_REAL, *self._timer)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if not (isinstance(error, KeyboardInterrupt) and self.patience_s is not None and self.has_plan()):
            return False
        self.what = self._why
        return True

    def annotated(self, result: SearchResult, gap: float) -> SearchResult:
        """Return `result`, with a warning if its search was ended early."""
        return result if self.what is None else result.ended(self.what, gap)


def operator_warnings(without_rule: Iterable[str]) -> list[str]:
    """Return a warning for each operator without a cost rule."""
    return [
        f"operator {name} has no cost rule: its time is that of its bytes" for name in sorted(without_rule)
    ]
