"""Builders of schedules: one pure function per schedule, and their registry by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

from stagewright.errors import ScheduleError, nearest
from stagewright.limits import MOST_ACTIONS, MOST_PREDICTED
from stagewright.schedule.builders.asynchronous import pipedream, pipedream_2bw
from stagewright.schedule.builders.from_times import v_half, v_min, zb_auto
from stagewright.schedule.builders.greedy import greedy, hanayo
from stagewright.schedule.builders.linear import gpipe, one_f_one_b, zb_h1, zb_h2
from stagewright.schedule.builders.looped import breadth_first, interleaved_1f1b, interleaved_zero_bubble
from stagewright.schedule.builders.v_shaped import dualpipe_v, zb_v
from stagewright.schedule.program import Program, check_size

BUILDERS: dict[str, Callable[..., Program]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved-1f1b": interleaved_1f1b,
    "interleaved-zb": interleaved_zero_bubble,
    "breadth-first": breadth_first,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
    "zb-auto": zb_auto,
    "v-half": v_half,
    "v-min": v_min,
    "dualpipe-v": dualpipe_v,
    "hanayo": hanayo,
    "greedy": greedy,
    "pipedream": pipedream,
    "pipedream-2bw": pipedream_2bw,
}
"""Builders by name. Each takes `num_ranks`, `num_microbatches`, `num_chunks` if it places several stages on a rank, and its
own options as keywords."""


_OPTIONS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "int": (lambda value: type(value) is int and 0 <= value <= MOST_ACTIONS, f"a number from 0 to {MOST_ACTIONS:,}"),
    "float": (lambda value: type(value) in (int, float) and 0 <= value <= MOST_PREDICTED, "a number of at least 0"),
}  # fmt: skip
"""Check and description of the value of an option, by its annotated type."""


def options_of(name: str) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of the builder of the schedule `name`; empty if there is no such schedule."""
    builder = BUILDERS.get(name.lower())
    return {} if builder is None else inspect.signature(builder).parameters


def check_written(name: str, options: Iterable[str]) -> None:
    """Raise `ScheduleError` for options of the schedule `name` that are objects, which a command line cannot give."""
    accepted = options_of(name)
    for option in options:
        if option in accepted and _kind(accepted[option]) not in _OPTIONS:
            raise ScheduleError(
                f"option {option} of {name} is an object: give it from Python, to its builder"
            )


def build(
    name: str, num_ranks: int, num_microbatches: int, num_chunks: int | None = None, **options: Any
) -> Program:
    """Build the program of the schedule `name`, by default with its own number of stages per rank.

    Raises:
        ScheduleError: an unknown schedule or option, or sizes that the schedule does not support.

    >>> build("1f1b", 2, 2).lines()
    ['0F0 0F1 0B0 0B1', '1F0 1B0 1F1 1B1']
    >>> build("1f1", 2, 2)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    stagewright.errors.ScheduleError: unknown schedule '1f1' (did you mean '1f1b'?); known: ...
    """
    builder = BUILDERS.get(name.lower())
    if builder is None:
        names = ", ".join(sorted(BUILDERS))
        raise ScheduleError(f"unknown schedule '{name}'{nearest(name.lower(), BUILDERS)}; known: {names}")
    if num_ranks < 1:
        raise ScheduleError(f"{name}: a pipeline needs at least one rank, not {num_ranks}")
    check_size(name, num_ranks * (num_chunks or 1), num_microbatches)
    accepted = options_of(name)
    for option, value in options.items():
        if option not in accepted:
            raise ScheduleError(f"{name} has no option '{option}'{nearest(option, accepted)}")
        kind = _kind(accepted[option])
        if kind in _OPTIONS and value is not None and not _OPTIONS[kind][0](value):
            raise ScheduleError(f"option {option} of {name} is {_OPTIONS[kind][1]}, not {str(value)[:40]!r}")
    if "num_chunks" not in accepted:
        program = builder(num_ranks, num_microbatches, **options)
        chunks = program.num_stages // num_ranks
        if num_chunks not in (None, chunks):
            raise ScheduleError(
                f"{name} places {chunks} {'stage' if chunks == 1 else 'stages'} on each rank: "
                f"leave out num_chunks={num_chunks} (--chunks), or give {chunks}"
            )
        return program
    if num_chunks is not None:
        options["num_chunks"] = num_chunks
    return builder(num_ranks, num_microbatches, **options)


@lru_cache(maxsize=64)
def built(name: str, num_ranks: int, num_microbatches: int, num_chunks: int | None = None) -> Program:
    """Return `build` without options; cached, because all partitions of a search share a few programs."""
    return build(name, num_ranks, num_microbatches, num_chunks)


def _kind(option: inspect.Parameter) -> str:
    return str(option.annotation).removesuffix(" | None")
