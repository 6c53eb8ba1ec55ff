"""What a search for plans comes back with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from stagewright.planning.plan import Plan

_INTERRUPTED = "interrupted: these are the best plans so far, not all configurations were tried"


@dataclass(frozen=True)
class Excluded:
    """A configuration that is no plan, and why; `missing_bytes` where it lacks memory."""

    reason: str
    dp: int
    pp: int
    microbatch_size: int | None = None
    schedule: str | None = None
    missing_bytes: int | None = None
    tp: int = 1


@dataclass(frozen=True)
class Found:
    """Plans, best first, and what was left out."""

    plans: list[Plan]
    excluded: list[Excluded]
    warnings: list[str] = field(default_factory=list)

    @property
    def is_interrupted(self) -> bool:
        """Whether Ctrl-C ended the search."""
        return _INTERRUPTED in self.warnings

    def interrupted(self) -> Found:
        """The same, of a search that Ctrl-C has ended; a warning says so."""
        return replace(self, warnings=[_INTERRUPTED, *self.warnings])


def operator_warnings(without_rule: Iterable[str]) -> list[str]:
    """What to know of operators whose costs nobody has described."""
    return [f"operator {name} has no rule: its time is that of its bytes" for name in sorted(without_rule)]
