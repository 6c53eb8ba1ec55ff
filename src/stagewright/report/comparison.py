"""Comparison of predicted and measured timelines of a plan, with their largest disagreements."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.text import Text

from stagewright.planning.plan import Plan
from stagewright.report.pictures.colours import NAMES
from stagewright.report.runs import AT_SPEED, ERROR, error_text
from stagewright.report.tables import Table, table
from stagewright.report.timelines import picture
from stagewright.schedule.action import COMPUTE, Kind
from stagewright.simulation import Timeline
from stagewright.text import plural
from stagewright.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from stagewright.execution.record import Record

_NUM_NAMED = 3
_UNEQUAL = 1.15
"""Ratio of slowdowns above which ranks count as unequal."""
_WORTH_NAMING = 0.05
"""Minimum share of the step, or of a rank's peak, for a disagreement to be reported."""


@dataclass(frozen=True)
class Disagreement:
    """A difference from the prediction; `weight` is its share of the whole."""

    text: str
    weight: float


def action_seconds(timeline: Timeline) -> dict[tuple[int, str], tuple[float, int]]:
    """Return the median seconds over microbatches, and their number, per stage and kind of computation.

    >>> from stagewright.schedule import build
    >>> from stagewright.simulation import StageCosts, simulate
    >>> seconds = action_seconds(simulate(build("1f1b", 2, 3), StageCosts.uniform(2, 1.0, 2.0, 1.0)))
    >>> seconds[1, "F"], seconds[1, "B"]
    ((1.0, 3), (3.0, 3))
    """
    seconds: dict[tuple[int, str], list[float]] = defaultdict(list)
    for rank in range(timeline.num_ranks):
        for event in timeline.events(rank):
            if event.action.kind in COMPUTE and not event.action.overlapped:
                seconds[event.action.stage, str(event.action.kind)].append(event.end_s - event.start_s)
    return {key: (statistics.median(times), len(times)) for key, times in sorted(seconds.items())}


def comparison_document(
    plan: Plan, record: Record, predicted: Timeline, measured: Timeline, clock_error_s: float = 0.0
) -> dict[str, Any]:
    """Return step time, batch, bubble, seconds per stage and action, and peak bytes per rank, predicted and measured.

    `predicted` and `measured` are timelines of one batch; the step is longer by gradient reductions and the update.
    ``step_seconds`` are medians over steps, ``drawn_step_seconds`` those of the step of the measured timeline. With several
    sequence lengths, `plan` is for batches of the timed length.
    """
    expected = action_seconds(predicted)
    # The replica with the highest peak counts.
    peaks = [
        (
            prediction.allocated_peak_bytes,
            max(r.timed_peak_bytes for r in record.ranks if r.pipeline_rank == prediction.rank),
        )
        for prediction in plan.predictions.ranks
    ]
    return {
        "model": plan.model.name,
        "schedule": plan.schedule,
        "step_seconds": _pair(plan.predictions.step_seconds, record.median_step_seconds),
        "machine_slowdown": record.slowdown,
        "drawn_step": record.first_step + record.timed_steps[-1] + 1,
        "drawn_step_seconds": _pair(plan.predictions.step_seconds, record.drawn_step_seconds),
        "batch_seconds": _pair(predicted.makespan_s, measured.makespan_s),
        "bubble_fraction": _pair(predicted.bubble_fraction, measured.bubble_fraction),
        "clock_error_seconds": clock_error_s,
        "actions": [
            {
                "stage": stage,
                "action": kind,
                "count": count,
                "seconds": _pair(expected[stage, kind][0], seconds),
            }
            for (stage, kind), (seconds, count) in action_seconds(measured).items()
        ],
        "ranks": [
            {
                "rank": rank,
                "busy_seconds": _pair(predicted.busy_s[rank], measured.busy_s[rank]),
                "idle_seconds": _pair(predicted.idle_s[rank], measured.idle_s[rank]),
                "allocated_peak_bytes": _pair(*peaks[rank]) if rank < len(peaks) else None,
            }
            for rank in range(plan.pp)
        ],
        "disagreements": [
            disagreement.text for disagreement in disagreements(predicted, measured, peaks, plan, record)
        ],
        "next": next_steps(predicted, measured, plan, record),
    }


def _pair(predicted: float, measured: float) -> dict[str, float]:
    return {"predicted": float(predicted), "measured": float(measured)}


# -- disagreements ------------------------------------------------------------------------------------------------


def disagreements(
    predicted: Timeline, measured: Timeline, peaks: Sequence[tuple[int, int]], plan: Plan, record: Record
) -> list[Disagreement]:
    """Return the largest differences: seconds as a share of the predicted step, bytes as a share of the peak."""
    candidates = (*_of_time(predicted, measured, plan, record), *_of_memory(peaks))
    large = [item for item in candidates if item.weight >= _WORTH_NAMING]
    return sorted(large, key=lambda item: item.weight, reverse=True)[:_NUM_NAMED]


def _of_time(predicted: Timeline, measured: Timeline, plan: Plan, record: Record) -> Iterator[Disagreement]:
    step, expected = plan.predictions.step_seconds, action_seconds(predicted)
    for (stage, kind), (now, count) in action_seconds(measured).items():
        was = expected[stage, kind][0]
        text = (
            f"stage {stage}'s {kind_in_words(kind)} takes {_factor(was, now)}: {format_seconds(now)} instead of "
            f"{format_seconds(was)}, {plural(count, 'time')} per batch"
        )
        yield Disagreement(text, abs(now - was) * count / step)
    # Waiting that differs more than the computations explain shows on the rank with the largest difference.
    rank = int(abs(measured.idle_s - predicted.idle_s).argmax())
    was, now = float(predicted.idle_s[rank]), float(measured.idle_s[rank])
    text = (
        f"rank {rank} waits {format_seconds(now)} per batch instead of {format_seconds(was)} "
        f"({_share(now, measured)} of it instead of {_share(was, predicted)})"
    )
    yield Disagreement(text, abs(now - was) / step)
    was, now = step - predicted.makespan_s, record.drawn_step_seconds - measured.makespan_s
    if was > 0 and now > 0:
        text = (
            f"the end of the step (gradient reductions, norm and update) takes {_factor(was, now)}: "
            f"{format_seconds(now)} instead of {format_seconds(was)}"
        )
        yield Disagreement(text, abs(now - was) / step)


def _of_memory(peaks: Sequence[tuple[int, int]]) -> Iterator[Disagreement]:
    for rank, (was, now) in enumerate(peaks):
        if was and now:
            text = (
                f"rank {rank}'s peak is {_times(now / was)} the predicted one: {format_bytes(now)} instead of "
                f"{format_bytes(was)}"
            )
            yield Disagreement(text, abs(now - was) / was)


# -- what to do about it ------------------------------------------------------------------------------------------


def next_steps(predicted: Timeline, measured: Timeline, plan: Plan, record: Record) -> list[str]:
    """Return suggestions to reconcile prediction and run, the most important first; empty if they agree."""
    steps = []
    slowdowns = {rank.rank: rank.pace for rank in record.ranks if rank.pace is not None}
    step = plan.predictions.step_seconds
    if slowdowns and max(slowdowns.values()) > _UNEQUAL * min(slowdowns.values()):
        slowest = max(slowdowns, key=slowdowns.__getitem__)
        steps.append(
            f"rank {slowest} computes {slowdowns[slowest] / min(slowdowns.values()):.1f} times as long as the fastest, "
            "relative to the plan: check its device, or plan again with --record and this record, which gives it less work"
        )
    elif abs(float(measured.busy_s.max() - predicted.busy_s.max())) > _WORTH_NAMING * step:
        steps.append(
            "computations differ on all ranks: `stagewright profile` times this model's operators for `plan "
            "--profile`, and `plan --record` with this record plans for the machine as it was in this run"
        )
    was, now = step - predicted.makespan_s, record.drawn_step_seconds - measured.makespan_s
    if abs(now - was) > _WORTH_NAMING * step:
        steps.append(
            "gradient reductions and the optimizer step took another time than predicted: run `stagewright probe` again on "
            "an idle machine to update link and memory bandwidth"
        )
    if not steps and abs(record.median_step_seconds - step) > _WORTH_NAMING * step:
        steps.append(
            "ranks wait for each other longer than computations explain: measure the links again with `stagewright "
            "probe`, or `probe --cluster` on several hosts"
        )
    return steps


def kind_in_words(kind: str) -> str:
    return f"{NAMES[Kind(kind)]} ({kind})"


def _factor(was: float, now: float) -> str:
    """Return a measured time relative to the predicted one.

    >>> _factor(2.0, 5.0), _factor(2.0, 1.0), _factor(0.0, 1.0)
    ('2.5x as long as predicted', '0.5x as long as predicted', 'time that was not predicted')
    """
    return f"{_times(now / was)} as long as predicted" if was else "time that was not predicted"


def _times(factor: float) -> str:
    return f"{factor:.2g}x" if factor < 10 else f"{factor:.0f}x"


def _share(seconds: float, timeline: Timeline) -> str:
    return f"{seconds / timeline.makespan_s:.0%}" if timeline.makespan_s else "0%"


# -- for people ---------------------------------------------------------------------------------------------------


def comparison_table(document: dict[str, Any]) -> Table:
    """Return the document as rows of predicted, measured and the error."""
    rows = [
        *(_row(name, pair) for name, pair in step_rows(document)),
        (*_row("bubble", document["bubble_fraction"], "{:.1%}".format)[:3], ""),
        *(
            _row(f"stage {a['stage']}: {kind_in_words(a['action'])}", a["seconds"])
            for a in document["actions"]
        ),
    ]
    for rank in document["ranks"]:
        rows.append(_row(f"rank {rank['rank']}: busy", rank["busy_seconds"]))
        rows.append(_row(f"rank {rank['rank']}: idle", rank["idle_seconds"]))
        if rank["allocated_peak_bytes"]:
            rows.append(
                _row(f"rank {rank['rank']}: allocated peak", rank["allocated_peak_bytes"], format_bytes)
            )
    return table("", ("", "predicted", "measured", ERROR), rows)


def step_rows(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the names and the pairs of step times, and of the batch of the step that is drawn."""
    yield "step, median", document["step_seconds"]
    if (slowdown := document["machine_slowdown"]) is not None:
        step = document["step_seconds"]
        yield AT_SPEED, _pair(slowdown * step["predicted"], step["measured"])
    yield f"step {document['drawn_step']}, drawn", document["drawn_step_seconds"]
    yield "its batch", document["batch_seconds"]


def _row(name: str, pair: dict[str, float], written: Any = format_seconds) -> tuple[str, str, str, str]:
    return name, written(pair["predicted"]), written(pair["measured"]), error_text(**pair)


def in_words(document: dict[str, Any]) -> str:
    """Return the largest disagreements as text, or that there are none."""
    texts = document["disagreements"]
    if not texts:
        return f"Nothing differs by more than {_WORTH_NAMING:.0%} of the step or of a rank's peak."
    lines = ["The largest disagreements:", *(f"  {text}" for text in texts)]
    return "\n".join(
        [*lines, *(["What to do:"] if document["next"] else []), *(f"  {text}" for text in document["next"])]
    )


def both_pictures(predicted: Timeline, measured: Timeline, width: int, colour: bool) -> list[Text]:
    """Return the predicted timetable above the measured one, on the same time scale."""
    longest = max(predicted.makespan_s, measured.makespan_s)
    return [
        Text("predicted"),
        *picture(predicted, width, colour, longest),
        Text("measured"),
        *picture(measured, width, colour, longest),
    ]
