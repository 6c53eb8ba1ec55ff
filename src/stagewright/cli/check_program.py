"""Checks of a schedule file, ours or a foreign one: would it hang, is its work whole, are gradients right?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from stagewright.cli.output import print_document, show
from stagewright.cli.program_file import is_program_file, read_promised_program
from stagewright.documents import read_json
from stagewright.errors import InputError, ScheduleError
from stagewright.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from stagewright.schedule import Program
    from stagewright.simulation.promise import Promise

_MOST_SHOWN = 5
_CLOSE = 1e-9
"""Part by which what a program takes may differ from what it promises; written and read, nothing changes."""


@dataclass(frozen=True)
class Finding:
    """What one check found."""

    check: str
    passed: bool
    detail: str


def holds_program(path: Path) -> bool:
    """Whether `path` is a schedule rather than a plan; JSON may be either, and a program says its placement."""
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
    """Prints the findings of every check; leaves with exit code 1 if one failed."""
    program, promise = read_promised_program(path)
    if num_microbatches is not None:
        program = replace(program, num_microbatches=num_microbatches)
    findings = list(findings_of(program, max_activations))
    if promise is not None and all(finding.passed for finding in findings):
        findings += _kept(program, promise)
    passed = all(finding.passed for finding in findings)
    if as_json:
        print_document({"passed": passed, "checks": [vars(finding) for finding in findings]})
    else:
        size = (
            f"{program.num_ranks} ranks, {program.num_stages} stages, {program.num_microbatches} microbatches"
        )
        show(f"{path}: {size}, {program.num_actions} actions", "")
        for finding in findings:
            show(f"{'ok ' if finding.passed else 'BAD'} {finding.check}: {finding.detail}")
    if not passed:
        raise typer.Exit(1)


def findings_of(program: Program, max_activations: int | None = None) -> Iterator[Finding]:
    """One finding per check; when actions are misplaced the checks that rely on their places are left out."""
    from stagewright.schedule.verify import check_placed

    placed = _outcome("placement", "every action is on the rank of its stage", lambda: check_placed(program))
    yield placed
    if not placed.passed:
        return
    yield _whole(program)
    yield _gradients(program)
    if program.is_lowered:
        yield _outcome("transfers", "every send has its receive, in one order", lambda: _matched(program))
    yield _order(program)
    yield _hang(program)
    yield _activations(program, max_activations)


def _outcome(check: str, passed: str, run: Callable[[], object]) -> Finding:
    try:
        run()
    except ScheduleError as error:
        return Finding(check, False, str(error))
    return Finding(check, True, passed)


def _whole(program: Program) -> Finding:
    """Every forward once, and every backward once, whole or in its two halves."""
    from stagewright.schedule import Kind

    parts = [part for action in program for part in action.parts]
    counts = Counter((part.kind, part.stage, part.microbatch) for part in parts)
    dropped, doubled = [], []
    for stage in range(program.num_stages):
        for m in range(program.num_microbatches):
            b, i, w = (counts[kind, stage, m] for kind in (Kind.B, Kind.I, Kind.W))
            halves = {"I": b + i, "W": b + w} if i or w else {"B": b}
            for kind, count in {"F": counts[Kind.F, stage, m], **halves}.items():
                if count != 1:
                    (dropped if count == 0 else doubled).append(f"{stage}{kind}{m}")
    problems = [
        f"{what} {_listed(which)}" for what, which in (("dropped", dropped), ("doubled", doubled)) if which
    ]
    count = f"{program.num_stages} stages x {program.num_microbatches} microbatches, each forward and backward once"
    return Finding("work", not problems, "; ".join(problems) or count)


def _gradients(program: Program) -> Finding:
    """Every microbatch adds to the gradients of every stage once, and before their last reduction."""
    from stagewright.schedule import Kind
    from stagewright.schedule.verify import check_reduced

    wrong = []
    for stage in range(program.num_stages):
        adds = Counter(
            part.microbatch
            for action in program
            for part in action.parts
            if part.stage == stage and part.kind in (Kind.B, Kind.W)
        )
        missing = [m for m in range(program.num_microbatches) if not adds[m]]
        several = [m for m, count in adds.items() if count > 1]
        if missing or several:
            total = sum(adds.values())
            wrong.append(f"stage {stage} sums {total} gradients of {program.num_microbatches} microbatches")
            wrong[-1] += f", {_listed(missing)} missing" if missing else ""
            wrong[-1] += f", {_listed(several)} more than once" if several else ""
    if wrong:
        return Finding("gradients", False, "; ".join(wrong[:_MOST_SHOWN]))
    right = f"every stage counts each microbatch once: scale by 1/{program.num_microbatches}"
    return _outcome("gradients", right, lambda: check_reduced(program))


def _matched(program: Program) -> None:
    from stagewright.schedule.verify import check_transfer_order, check_transfers_matched

    check_transfers_matched(program)
    check_transfer_order(program)


def _order(program: Program) -> Finding:
    from stagewright.schedule.verify import check_ordered

    passed = "every action comes after those of its rank that it needs"
    return _outcome("order", passed, lambda: check_ordered(program))


def _hang(program: Program) -> Finding:
    """Whether all ranks come to their end; if only with sends that do not wait, that is said."""
    from stagewright.schedule.verify import check_free_of_deadlock

    finding = _outcome(
        "hang",
        "all ranks come to their end",
        lambda: check_free_of_deadlock(program, sends_block=False),
    )
    if not finding.passed or not program.is_lowered:
        return finding
    strict = _outcome(
        "hang",
        "all ranks come to their end, even if every send waits for its receive",
        lambda: check_free_of_deadlock(program),
    )
    if strict.passed:
        return strict
    return Finding(
        "hang", True, f"{finding.detail}, but not if sends wait for their receives: {strict.detail}"
    )


def _activations(program: Program, limit: int | None) -> Finding:
    from stagewright.report.timelines import peak_activations

    peaks = peak_activations(program)
    fullest = max(range(len(peaks)), key=peaks.__getitem__)
    most = f"at most {peaks[fullest]} live activations (rank {fullest})"
    if limit is None:
        return Finding("activations", True, most)
    over = [f"rank {rank} holds {peak}" for rank, peak in enumerate(peaks) if peak > limit]
    if over:
        return Finding("activations", False, f"{_listed(over)}; the limit is {limit}")
    return Finding("activations", True, f"{most}, the limit is {limit}")


def _kept(program: Program, promise: Promise) -> Iterator[Finding]:
    """Whether the program takes what its document promises, and has the memory for it."""
    timeline = promise.timeline(program)
    taken, said = timeline.makespan_s, promise.makespan_seconds
    stated = f"{format_seconds(taken)} per batch at the costs that the file states"
    if abs(taken - said) <= _CLOSE * taken:
        yield Finding("time", True, stated)
    else:
        yield Finding("time", False, f"{stated}, but it promises {format_seconds(said)}: plan again")
    limits = promise.assumptions.memory_limits or (float("inf"),) * program.num_ranks
    peaks = timeline.peak_bytes.tolist()
    over = [
        f"rank {rank} needs {format_bytes(peak)}"
        for rank, peak in enumerate(peaks)
        if peak > limits[rank] * (1 + _CLOSE)
    ]
    more = [
        f"rank {rank} needs {format_bytes(peak)} and is promised to need {format_bytes(promise.peak_bytes[rank])}"
        for rank, peak in enumerate(peaks)
        if peak > promise.peak_bytes[rank] * (1 + _CLOSE)
    ]
    if over or more:
        yield Finding("memory", False, f"{_listed(over or more)}: plan again")
        return
    fullest = max(range(len(peaks)), key=peaks.__getitem__)
    limit = limits[fullest]
    of = "no limit was given" if limit == float("inf") else f"the limit is {format_bytes(limit)}"
    yield Finding("memory", True, f"at most {format_bytes(peaks[fullest])} (rank {fullest}), {of}")


def _listed(items: list[str] | list[int] | list[int | None]) -> str:
    """
    >>> _listed([1, 2]), _listed(list(range(9)))
    ('1, 2', '0, 1, 2, 3, 4 and 4 more')
    """
    more = f" and {len(items) - _MOST_SHOWN} more" if len(items) > _MOST_SHOWN else ""
    return ", ".join(map(str, items[:_MOST_SHOWN])) + more
