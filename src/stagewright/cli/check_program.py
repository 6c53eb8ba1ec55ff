"""Checks of a schedule file: deadlock, complete work, correct gradients, lanes and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import typer

from stagewright.cli.output import print_document, show
from stagewright.cli.program_file import is_program_file, read_predicted_program
from stagewright.documents import read_json
from stagewright.errors import InputError, ScheduleError
from stagewright.text import plural
from stagewright.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from stagewright.schedule import Program
    from stagewright.simulation.prediction import ProgramPrediction

_MOST_SHOWN = 5
_CLOSE = 1e-9
"""Relative tolerance between the simulated and the predicted time of a program; writing and reading change nothing."""


class Finding(NamedTuple):
    """The result of one check."""

    check: str
    passed: bool
    detail: str


def holds_program(path: Path) -> bool:
    """Return whether `path` is a schedule rather than a plan; JSON may be either, but only a program has a placement."""
    if path.suffix != ".json":
        return is_program_file(path.name)
    try:
        document = read_json(path, "schedule")
    except InputError:
        return False
    return isinstance(document, dict) and "rank_of_stage" in document


def check_program(
    path: Path, num_microbatches: int | None, max_activations: int | None, as_json: bool
) -> None:
    """Print the findings of every check; exit with code 1 if one failed."""
    program, prediction = read_predicted_program(path)
    if num_microbatches is not None:
        program = replace(program, num_microbatches=num_microbatches)
    findings = list(_findings(program, max_activations))
    if prediction is not None and all(finding.passed for finding in findings):
        findings += _predicted_costs(program, prediction)
    passed = all(finding.passed for finding in findings)
    if as_json:
        print_document({"passed": passed, "checks": [finding._asdict() for finding in findings]})
    else:
        show(
            f"{path}: {plural(program.num_ranks, 'rank')}, {plural(program.num_stages, 'stage')}, "
            f"{plural(program.num_microbatches, 'microbatch', 'microbatches')}, "
            f"{program.num_actions} actions",
            "",
            *(
                f"{'ok ' if finding.passed else 'BAD'} {finding.check}: {finding.detail}"
                for finding in findings
            ),
        )
    if not passed:
        raise typer.Exit(1)


def _findings(program: Program, max_activations: int | None) -> Iterator[Finding]:
    """Yield one finding per check; if actions are misplaced, skip the checks that rely on their placement."""
    from stagewright.schedule.lanes import check_lanes
    from stagewright.schedule.verify import (
        check_ordered,
        check_placed,
        check_transfers_matched,
    )

    placed = _outcome("placement", "every action is on the rank of its stage", lambda: check_placed(program))
    yield placed
    if not placed.passed:
        return
    yield _whole(program)
    yield _gradients(program)
    if program.is_lowered:
        matched = "every send has its receive"
        yield _outcome("transfers", matched, lambda: check_transfers_matched(program))
        yield _with_stricter(
            "lanes",
            "transfers are in one order at both ends, and do not wait for each other on GPUs",
            lambda: check_lanes(program),
            "even if hosts wait for their devices",
            lambda: check_lanes(program, waits_for_device=True),
            "if hosts wait for their devices",
        )
    ordered = "every action comes after those on its rank that it needs"
    yield _outcome("order", ordered, lambda: check_ordered(program))
    yield _hang(program)
    yield _activations(program, max_activations)


def _outcome(check: str, passed: str, run: Callable[[], object]) -> Finding:
    try:
        run()
    except ScheduleError as error:
        return Finding(check, False, str(error))
    return Finding(check, True, passed)


def _whole(program: Program) -> Finding:
    """Check that every forward runs once, and every backward once, whole or in its two halves."""
    from stagewright.schedule import Kind

    parts = [part for action in program for part in action.parts]
    counts = Counter((part.kind, part.stage, part.microbatch) for part in parts)
    wrong: dict[str, list[str]] = {"dropped": [], "doubled": []}
    for stage in range(program.num_stages):
        for m in range(program.num_microbatches):
            b, i, w = (counts[kind, stage, m] for kind in (Kind.B, Kind.I, Kind.W))
            halves = {"I": b + i, "W": b + w} if i or w else {"B": b}
            for kind, count in {"F": counts[Kind.F, stage, m], **halves}.items():
                if count != 1:
                    wrong["doubled" if count else "dropped"].append(f"{stage}{kind}{m}")
    problems = [f"{what} {_listed(which)}" for what, which in wrong.items() if which]
    count = f"{program.num_stages} stages x {program.num_microbatches} microbatches, each forward and backward once"
    return Finding("work", not problems, "; ".join(problems) or count)


def _gradients(program: Program) -> Finding:
    """Check that every microbatch adds to every stage's gradients once, and before their last reduction."""
    from stagewright.schedule import Kind
    from stagewright.schedule.verify import check_reduced

    adding = [p for action in program for p in action.parts if p.kind in (Kind.B, Kind.W)]
    wrong = []
    for stage in range(program.num_stages):
        adds = Counter(part.microbatch for part in adding if part.stage == stage)
        missing = [m for m in range(program.num_microbatches) if not adds[m]]
        several = [m for m, count in adds.items() if count > 1]
        if missing or several:
            wrong.append(
                f"stage {stage} sums {adds.total()} gradients of {program.num_microbatches} microbatches"
                + (f", {_listed(missing)} missing" if missing else "")
                + (f", {_listed(several)} more than once" if several else "")
            )
    if wrong:
        return Finding("gradients", False, "; ".join(wrong[:_MOST_SHOWN]))
    right = f"every stage counts each microbatch once: scale by 1/{program.num_microbatches}"
    return _outcome("gradients", right, lambda: check_reduced(program))


def _with_stricter(
    check: str,
    passed: str,
    run: Callable[[], object],
    even: str,
    run_strictly: Callable[[], object],
    unless: str,
) -> Finding:
    """Return the outcome of `run`, with a note on whether it also passes under the stricter rule."""
    finding = _outcome(check, f"{passed}, {even}", run)
    strict = _outcome(check, f"{passed}, {even}", run_strictly)
    if not finding.passed or strict.passed:
        return finding
    return Finding(check, True, f"{passed}, but not {unless}: {strict.detail}")


def _hang(program: Program) -> Finding:
    """Check that all ranks finish, and note if they do so only with sends that do not block."""
    from stagewright.schedule.verify import check_free_of_deadlock

    end = "all ranks finish"
    if not program.is_lowered:
        return _outcome("hang", end, lambda: check_free_of_deadlock(program))
    return _with_stricter(
        "hang",
        end,
        lambda: check_free_of_deadlock(program, sends_block=False),
        "even if every send waits for its receive",
        lambda: check_free_of_deadlock(program),
        "if sends wait for their receives",
    )


def _activations(program: Program, limit: int | None) -> Finding:
    from stagewright.schedule.in_flight import peak_activations

    peaks = peak_activations(program)
    most = f"at most {max(peaks)} live activations (rank {peaks.index(max(peaks))})"
    if limit is None:
        return Finding("activations", True, most)
    over = [f"rank {rank} holds {peak}" for rank, peak in enumerate(peaks) if peak > limit]
    peaks_text = f"{_listed(over)};" if over else f"{most},"
    return Finding("activations", not over, f"{peaks_text} the limit is {limit}")


def _predicted_costs(program: Program, prediction: ProgramPrediction) -> Iterator[Finding]:
    """Check that the program takes the time its document predicts, and fits in memory."""
    timeline = prediction.timeline(program)
    taken_s, predicted_s = timeline.makespan_s, prediction.makespan_seconds
    stated = f"{format_seconds(taken_s)} per batch at the costs that the file states"
    agrees = abs(taken_s - predicted_s) <= _CLOSE * taken_s
    broken = f"{stated}, but it predicts {format_seconds(predicted_s)}: plan again"
    yield Finding("time", agrees, stated if agrees else broken)
    limits = prediction.assumptions.memory_limits or (float("inf"),) * program.num_ranks
    peaks = timeline.peak_bytes.tolist()
    needs = [f"rank {rank} needs {format_bytes(peak)}" for rank, peak in enumerate(peaks)]
    over = [
        need for need, peak, limit in zip(needs, peaks, limits, strict=True) if peak > limit * (1 + _CLOSE)
    ]
    more = [
        f"{need}, but its prediction is {format_bytes(predicted)}"
        for need, peak, predicted in zip(needs, peaks, prediction.peak_bytes, strict=True)
        if peak > predicted * (1 + _CLOSE)
    ]
    if over or more:
        yield Finding("memory", False, f"{_listed(over or more)}: plan again")
        return
    fullest = peaks.index(max(peaks))
    limit = limits[fullest]
    of = "no limit was given" if limit == float("inf") else f"the limit is {format_bytes(limit)}"
    yield Finding("memory", True, f"at most {format_bytes(peaks[fullest])} (rank {fullest}), {of}")


def _listed(items: Sequence[object]) -> str:
    """Return the first items as text, and the number of further ones.

    >>> _listed([1, 2]), _listed(range(9))
    ('1, 2', '0, 1, 2, 3, 4 and 4 more')
    """
    more = f" and {len(items) - _MOST_SHOWN} more" if len(items) > _MOST_SHOWN else ""
    return ", ".join(map(str, items[:_MOST_SHOWN])) + more
