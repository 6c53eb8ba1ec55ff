"""Errors a user can act on: each names the rule that was broken, the value that broke it and the change to make."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Iterable, Iterator


class StagewrightError(Exception):
    """Base of every error raised for something the user can change; the command line prints it and exits with 2."""

    is_told = False
    """Whether a rank has reported it to its launcher, which prints it."""


class InputError(StagewrightError):
    """A file, name or option that cannot be used as given."""


class UnevenDegreeError(InputError):
    """A parallel degree by which a model cannot be split, whatever else is asked."""


class TraceError(StagewrightError):
    """A model that cannot be turned into an operator graph."""


class ContractError(StagewrightError):
    """A traced graph that breaks an invariant of the graph contract."""


class PlanError(StagewrightError):
    """No plan satisfies the request, or a plan does not fit what it is used with."""


class ScheduleError(StagewrightError):
    """A program that is incomplete, misordered, misplaced or would deadlock."""


class RunError(StagewrightError):
    """A run that stopped: names the rank, the action and what it waited for."""

    lost: tuple[int, ...] = ()
    """Ranks whose processes were killed from outside; nothing is wrong with the others."""


class StagewrightWarning(RuntimeWarning):
    """A warning about a run that continues; ranks print it."""


TRACEBACK = "STAGEWRIGHT_TRACEBACK"
"""Environment variable, inherited by the processes of ranks: ``1`` shows the traceback of every error."""


def wants_traceback() -> bool:
    """Return whether to show tracebacks."""
    return os.environ.get(TRACEBACK, "") not in ("", "0")


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield `error`, the error it was raised from, and so on to the first."""
    while error is not None:
        yield error
        error = error.__cause__


_MOST_LONGER = 3
"""Maximum number of names that begin with the given word to list in a hint."""


def nearest(word: str, names: Iterable[str]) -> str:
    """Return a hint such as `` (did you mean '8x-h100'?)`` for a misspelt `word`, or an empty string.

    >>> nearest("8x-h10", ["8x-h100", "8x-a100"])
    " (did you mean '8x-h100'?)"
    >>> nearest("a100", ["h100", "a100-40", "a100-80"])
    " (did you mean 'a100-40' or 'a100-80'?)"
    >>> nearest("zzz", ["8x-h100"])
    ''
    """
    names = list(names)
    longer = sorted(name for name in names if word and name.lower().startswith(f"{word.lower()}-"))
    if 0 < len(longer) <= _MOST_LONGER:
        return f" (did you mean {' or '.join(map(repr, longer))}?)"
    match = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return f" (did you mean '{match[0]}'?)" if match else ""


def check_names(given: Iterable[str], names: Collection[str], owner: str) -> None:
    """Raise `InputError` for the first of `given` that is not among `names`, those that `owner` has.

    >>> check_names(["tp", "sequense"], ["tp", "sequence"], "a search")
    Traceback (most recent call last):
    stagewright.errors.InputError: a search has no 'sequense' (did you mean 'sequence'?); it has tp, sequence
    """
    for name in given:
        if name not in names:
            raise InputError(f"{owner} has no '{name}'{nearest(name, names)}; it has {', '.join(names)}")
