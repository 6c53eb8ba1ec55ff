"""The answer of a search: its plans with all parallel degrees, what was left out, and cluster sizes."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import groupby, pairwise
from typing import Any

from stagewright.cluster import Cluster
from stagewright.cluster.prices import Price
from stagewright.estimation.runtime import STAGEWRIGHT
from stagewright.planning.assignment.device_order import devices_of_ranks
from stagewright.planning.assignment.placing import on_devices
from stagewright.planning.cost import PricedResult
from stagewright.planning.plan import Plan
from stagewright.planning.plan_stages import layers_per_stage
from stagewright.planning.ranking import AS_FAST
from stagewright.planning.search_result import LARGER, Excluded, SearchResult
from stagewright.report.plans import (
    MARKS,
    described_schedule,
    marks,
    plan_document,
    tokens_per_second,
)
from stagewright.report.tables import Table, byte_unit, table
from stagewright.units import format_bytes, format_seconds

_WIDTH = 100
"""Maximum columns of the table of plans."""


def configurations_table(plans: Sequence[Plan]) -> Table:
    """Return plans, best first, with all parallel degrees; tensor, context and expert parallelism only if used.

    With several sequence lengths times are means over all steps, and peaks those of the longest.
    """
    unit, size = byte_unit(rank.reserved_peak_bytes for plan in plans for rank in plan.predictions.ranks)
    used = {name for name in ("tp", "cp", "ep") if any(getattr(plan, name) > 1 for plan in plans)}
    rows = [_row(plan, used, size) for plan in plans]
    step = "mean\nstep" if any(plan.shorter_lengths for plan in plans) else "step"
    rate = f"{plans[0].job.unit}/s"
    headings = (
        "schedule", "tp", "cp", "pp", "dp", "ep", "zero", "micro-\nbatches\nx size", "recompute", step, rate, "MFU",
        "bubble", f"reserved\npeak\n{unit}",
    )  # fmt: skip
    return replace(table("", headings, rows), max_width=_WIDTH)


def _row(plan: Plan, used: Collection[str], size: float) -> Sequence[object]:
    tp, cp, ep = (getattr(plan, name) if name in used else None for name in ("tp", "cp", "ep"))
    is_own = plan.job.runtime == STAGEWRIGHT
    return (
        described_schedule(plan) if is_own else described_schedule(plan).removesuffix(" +R"),
        tp, cp, plan.pp, plan.dp, ep, max(plan.sharding), f"{plan.num_microbatches} x {plan.microbatch_size}",
        None if is_own else recomputed(plan), format_seconds(plan.mean_step_seconds),
        f"{plan.mean_rate(tokens_per_second):,.0f}", f"{plan.mean_rate(lambda step: step.mfu):.1%}",
        f"{plan.mean_rate(lambda step: step.bubble_fraction):.1%}",
        _range([rank.reserved_peak_bytes for rank in plan.predictions.ranks], size),
    )  # fmt: skip


def _range(counts: Sequence[int], size: float) -> str:
    """Return the range of `counts` in units of `size`.

    >>> _range([3 * 2**30, 4 * 2**30], 2**30), _range([5, 5], 1)
    ('3.0-4.0', '5.0')
    """
    low, high = (f"{count / size:.1f}" for count in (min(counts), max(counts)))
    return low if low == high else f"{low}-{high}"


def legend(plans: Sequence[Plan]) -> list[str]:
    """Return what the marks in the table of `plans` mean, and how equally fast plans are ordered, where either occurs."""
    if plans[0].job.runtime != STAGEWRIGHT:
        return []
    present = set().union(*map(marks, plans))
    texts = [f"+{mark} {text}" for mark, text in MARKS.items() if mark in present]
    hosts = [plan.host_bytes(plan.cluster.load()) for plan in plans if plan.host_optimizer or plan.streamed]
    if hosts:
        texts[-1] += f" ({format_bytes(max(hosts))} of host memory per node)"
    lines = ["; ".join(texts) + "."] if texts else []
    steps = sorted(plan.mean_step_seconds for plan in plans)
    if any(longer <= shorter * (1 + AS_FAST) for shorter, longer in pairwise(steps)):
        lines.append(
            f"Plans within {AS_FAST:.1%} count as equally fast; the simplest of these is first, then the smallest."
        )
    return lines


def considered_line(result: SearchResult) -> str:
    """Return how many configurations a search has considered, and what became of them."""
    num_simulated = max(result.num_simulated, len(result.plans))
    total = num_simulated + len(result.excluded) + result.num_bounded
    parts = [f"{num_simulated:,} simulated in full"]
    if result.excluded:
        parts.append(f"{len(result.excluded):,} ruled out ({_reasons(result)})")
    if result.num_bounded:
        parts.append(f"{result.num_bounded:,} pruned by their lower bound{_next_best(result)}")
    return f"Considered {total:,} {'configuration' if total == 1 else 'configurations'}: {', '.join(parts)}."


def _reasons(result: SearchResult) -> str:
    """Return the reasons to rule configurations out, with their numbers, the most frequent first."""
    counts = Counter(map(_kind, result.excluded))
    named = [f"{count:,} {reason}" for reason, count in counts.most_common(_NAMED)]
    others = counts.total() - sum(count for _, count in counts.most_common(_NAMED))
    return "; ".join([*named, *([f"{others:,} for other reasons, which --json lists"] if others else [])])


def _kind(excluded: Excluded) -> str:
    if excluded.lacks_memory:
        return "out of memory"
    if excluded.reason == LARGER:
        return "larger microbatches of those"
    return textwrap.shorten(excluded.reason.partition(": ")[0], _REASON, placeholder=" ...")


_NAMED = 4
"""Reasons that are named."""
_REASON = 80
"""Characters of a reason."""


def _next_best(result: SearchResult) -> str:
    nearest = result.next_best
    if nearest is None:
        return ""
    fastest = min(plan.predictions.step_seconds for plan in result.plans)
    return f" (the nearest, {nearest.seconds / fastest - 1:+.1%}: {nearest.configuration})"


def recomputed(plan: Plan) -> str:
    """Return what stages recompute: nothing, ``full`` layers, or ``selective`` parts of them."""
    policies = set(map(str, plan.memory_policy)) - {"keep"}
    return "" if not policies else "selective" if policies == {"selective"} else "full"


def stages_line(plan: Plan, cluster: Cluster) -> str | None:
    """Return layers and devices of the stages if the ranks have different devices; None if all are equal."""
    kinds = devices_of_ranks(on_devices(cluster, plan.devices), plan.pp)
    names = ["+".join(dict.fromkeys(device.name for device in devices)) for devices in kinds]
    if len({device for devices in kinds for device in devices}) == 1:
        return None
    ranks = [names[stage % plan.pp] for stage in range(plan.num_stages)]
    counts = layers_per_stage(plan)
    what = "Operators" if counts is None else "Layers"
    counts = counts or tuple(stage.stop - stage.start for stage in plan.predictions.stages)
    parts = [
        f"{'/'.join(str(num) for num, _ in group)} on {name}"
        for name, group in groupby(zip(counts, ranks, strict=True), key=lambda pair: pair[1])
    ]
    return f"{what} of the stages: {', then '.join(parts)}."


def left_out_table(result: SearchResult) -> Table | None:
    """Return the reasons for excluded configurations; None if none was excluded."""
    grouped: dict[str, list[Excluded]] = {}
    for excluded in result.excluded:
        kind = excluded.reason if excluded.missing_bytes is None else f"lacks memory, tp {excluded.tp}"
        grouped.setdefault(kind, []).append(excluded)
    if not grouped:
        return None
    rows = [(kind, _nearest(group), len(group)) for kind, group in sorted(grouped.items())]
    return table("Left out", ("reason", "nearest", "configurations"), rows, text=2)


def _nearest(group: Sequence[Excluded]) -> str:
    excluded = min(group, key=lambda item: item.missing_bytes or 0)
    if excluded.missing_bytes is None:
        return ""
    return (
        f"pp {excluded.pp} dp {excluded.dp} b {excluded.microbatch_size} {excluded.schedule} over by "
        f"{format_bytes(excluded.missing_bytes)}"
    )


def sizes_table(priced_results: Sequence[PricedResult]) -> Table:
    """Return days and dollars to the target, best first."""
    rows = [
        (
            priced.cluster.name, priced.bill.num_devices, priced.bill.global_batch,
            f"{priced.bill.tokens:.3g}".replace("e+", "e"),
            f"{priced.bill.days:,.2f}", "" if priced.bill.dollars is None else f"{priced.bill.dollars:,.0f}",
        )
        for priced in priced_results
    ]  # fmt: skip
    return table("", ("cluster", "devices", "batch", "tokens", "days", "dollars"), rows)


def price_lines(prices: Mapping[str, Price], terms: str) -> list[str]:
    """Return the prices used, with source and date."""
    return [
        f"Dollars at {price.dollars:.2f} per {name} and hour"
        + (f", {terms}: {price.source}, list of {price.date}" if price.date else f", of {price.source}")
        + "; --price overrides this."
        for name, price in prices.items()
    ]


def sizes_document(priced_results: Sequence[PricedResult]) -> dict[str, Any]:
    """Return all sizes for `plan --json`, best first."""
    return {"sizes": [_size(priced) for priced in priced_results]}


def _size(priced: PricedResult) -> dict[str, Any]:
    return {
        "devices": priced.bill.num_devices,
        **{name: getattr(priced.bill, name) for name in ("global_batch", "tokens", "days", "dollars")},
        "configurations": [
            plan_document(plan, None)
            | {"recompute": recomputed(plan) or "none", "zero": max(plan.sharding), "devices": list(plan.devices)}
            for plan in priced.result.plans
        ],
        "excluded": [asdict(item) for item in priced.result.excluded],
        "num_bounded": priced.result.num_bounded,
    }  # fmt: skip
