"""Summary of a run: losses, and predicted and measured time and memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group

from stagewright.planning.plan import Plan
from stagewright.report.tables import Table, table
from stagewright.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from stagewright.execution.record import Record

ERROR = "(measured - predicted) / predicted"
"""The heading of errors of predictions, of which this is the definition."""

_BARS = "▁▂▃▄▅▆▇█"
AT_SPEED = "at the machine's speed"
"""The row of the step time predicted for the speed that the machine had during the run."""
_SHOWN_STEPS = 8
_COURSE = 20
"""Steps in the sparkline of losses."""
_VARIES = 0.1
"""Relative variation of a machine's speed above which it is reported."""


def as_timed(plan: Plan, record: Record) -> Plan:
    """Return `plan` for batches of the timed sequence length."""
    return plan if record.timed_length is None else plan.at_length(record.timed_length)


def longest_not_run(plan: Plan, record: Record) -> list[str]:
    """Return a note if no batch had the plan's longest sequence length."""
    length, longest = record.timed_length, plan.job.sequence_length
    if length is None or length == longest:
        return []
    return [
        f"no step had {longest} tokens per sample, the longest of the plan: steps of {length} tokens are compared; run "
        f"{len(plan.job.sequence_lengths)} steps or more"
    ]


def too_few_steps(num_steps: int) -> list[str]:
    """Return a note if a run had too few steps for measurements.

    >>> too_few_steps(3)
    []
    >>> too_few_steps(1)[0].partition(":")[0]
    '1 step is too few to compare with the prediction'
    """
    if num_steps > 2:
        return []
    steps = "1 step is" if num_steps == 1 else f"{num_steps} steps are"
    return [
        f"{steps} too few to compare with the prediction: the first warms up and creates the optimizer's state, the second "
        "is slow because its memory is counted; run 3 or more"
    ]


def run_document(plan: Plan, record: Record, path: str) -> dict[str, Any]:
    """Return the losses, and step time and peak memory per rank, predicted and measured; `path`: the record.

    With several sequence lengths, times and memory are of steps of ``timed_length`` tokens.
    """
    plan = as_timed(plan, record)
    tokens = plan.predictions.tokens_per_second * plan.predictions.step_seconds
    return {
        "path": path,
        "model": plan.model.name,
        "first_step": record.first_step,
        "timed_length": record.timed_length,
        "losses": list(record.losses),
        "learning_rates": list(record.learning_rates),
        "skipped_steps": list(record.skipped_steps),
        "went_back": [list(pair) for pair in record.went_back],
        "step_seconds": record.median_step_seconds,
        "predicted_step_seconds": plan.predictions.step_seconds,
        "machine_slowdown": record.slowdown,
        "tokens_per_second": tokens / record.median_step_seconds,
        "all_step_seconds": list(record.step_seconds),
        "ranks": [
            {
                "rank": rank.rank,
                "pipeline_rank": rank.pipeline_rank,
                "allocated_peak_bytes": rank.timed_peak_bytes,
                "predicted_allocated_peak_bytes": predicted
                and (
                    predicted.tensor_peak_bytes if record.device == "cpu" else predicted.allocated_peak_bytes
                ),
                "busy_seconds": rank.busy_seconds,
                "predicted_busy_seconds": predicted and predicted.busy_seconds,
                "slowdowns": record.slowdowns(rank),
            }
            for rank in record.ranks
            for predicted in (plan.predictions.ranks[rank.pipeline_rank] if plan.predictions.ranks else None,)
        ],
    }


def run_summary(document: dict[str, Any]) -> Group:
    """Return the document of a run as text."""
    ratios = [ratio for rank in document["ranks"] for ratio in rank["slowdowns"]]
    machine = machine_lines(document["machine_slowdown"], ratios)
    return Group(loss_table(document["losses"], document["first_step"]), comparison(document), *machine)


def loss_table(losses: Sequence[float | None], first: int = 0) -> Table:
    """Return the loss at a few steps, and a sparkline over all of them; `first` is the number of earlier steps."""
    steps = _spread(len(losses), _SHOWN_STEPS)
    shown = ["none" if loss is None else f"{loss:.3f}" for loss in losses]
    course = sparkline([losses[step] for step in _spread(len(losses), _COURSE)])
    rows = [["loss", *(shown[step] for step in steps), course]]
    return table("", ["step", *(str(first + step + 1) for step in steps), "course"], rows)


def comparison(document: dict[str, Any]) -> Table:
    """Return predicted and measured step time and peaks of allocated bytes."""
    length = document["timed_length"]
    of_length = "" if length is None else f" of {length} tokens"
    seconds = document["predicted_step_seconds"], document["step_seconds"]
    rows = [_compared(f"step time{of_length}", *seconds, format_seconds)]
    if (slowdown := document["machine_slowdown"]) is not None:
        rows.append(_compared(AT_SPEED, slowdown * seconds[0], seconds[1], format_seconds))
    for rank in document["ranks"]:
        pair = rank["predicted_allocated_peak_bytes"], rank["allocated_peak_bytes"]
        rows.append(_compared(f"allocated peak of rank {rank['rank']}", *pair, format_bytes))
    return table("", ("", "predicted", "measured", ERROR), rows)


def error_text(predicted: float | None, measured: float) -> str:
    """Return the error of a prediction, relative to the prediction; blank where nothing was predicted.

    >>> error_text(2.0, 3.0), error_text(None, 3.0)
    ('+50.0%', '')
    """
    if not predicted:
        return ""
    error = measured / predicted - 1
    return f"{error:+.1%}" if error < 10 else f"{error:+,.0%}"


def machine_lines(slowdown: float | None, ratios: Collection[float]) -> list[str]:
    """Return the speed of the machine relative to the probe, and whether it changed from step to step.

    >>> machine_lines(1.25, [1.25, 1.25])[0].partition(";")[0]
    'This machine took 25% longer for the same work than when it was probed'
    >>> machine_lines(1.25, [1.0, 1.25, 1.5])[1]
    'Its speed varied during the run, from 1.00 to 1.50 times the time when it was probed.'
    """
    if slowdown is None:
        return []
    change = f"{slowdown - 1:.0%} longer" if slowdown >= 1 else f"{1 - slowdown:.0%} less time"
    lines = [
        f"This machine took {change} for the same work than when it was probed; the row `{AT_SPEED}` corrects for that."
    ]
    low, high = min(ratios), max(ratios)
    if high > (1 + _VARIES) * low:
        lines.append(
            f"Its speed varied during the run, from {low:.2f} to {high:.2f} times the time when it was probed."
        )
    return lines


def on_other_devices(record: Record, kind: str, name: str) -> list[str]:
    """Return a warning if a plan for devices `name` of a `kind` was run on others."""
    if (kind == "cpu") == (record.device == "cpu"):
        return []
    return [
        f"the plan is for {name}, but was run on {record.device}: to plan for the machine it runs on, describe it with "
        "`stagewright probe`"
    ]


def diverged(losses: Sequence[float | None]) -> list[str]:
    """Return a warning if a loss was NaN or Inf.

    >>> diverged([2.0, 1.5])
    []
    >>> diverged([2.0, None, None])
    ['the loss was NaN or Inf in 2 of 3 steps, first in step 2: lower learning_rate in the job, or clip_norm']
    """
    lost = [step for step, loss in enumerate(losses, start=1) if loss is None]
    if not lost:
        return []
    return [
        f"the loss was NaN or Inf in {len(lost)} of {len(losses)} steps, first in step {lost[0]}: lower "
        "learning_rate in the job, or clip_norm"
    ]


def left_out(record: Record, is_scaled: bool) -> list[str]:
    """Return a warning if updates were skipped; with a scaled loss that is normal."""
    steps = [record.first_step + step + 1 for step in record.skipped_steps]
    if not steps or is_scaled:
        return []
    return [
        f"{len(steps)} of {len(record.losses)} updates were skipped because the loss or a gradient was NaN or Inf, "
        f"first step {steps[0]}: lower learning_rate, or clip_norm"
    ]


def sparkline(values: Sequence[float | None]) -> str:
    """Return `values` as one character each; missing ones as crosses.

    >>> sparkline([4.0, 3.0, None, 1.0])
    '█▆×▁'
    """
    present = [value for value in values if value is not None]
    low, high = min(present, default=0.0), max(present, default=0.0)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join("×" if value is None else _BARS[round((value - low) * scale)] for value in values)


def _compared(
    name: str, predicted: float | None, measured: float, written: Callable[[float], str]
) -> tuple[str, str, str, str]:
    if predicted is None:
        return name, "", written(measured), ""
    return name, written(predicted), written(measured), error_text(predicted, measured)


def _spread(count: int, wanted: int) -> list[int]:
    """Return at most `wanted` of `count` indices, evenly spread, including first and last.

    >>> _spread(20, 3), _spread(2, 8)
    ([0, 10, 19], [0, 1])
    """
    if count <= wanted:
        return list(range(count))
    return [round(index * (count - 1) / (wanted - 1)) for index in range(wanted)]
