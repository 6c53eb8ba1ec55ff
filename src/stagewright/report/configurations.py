"""Configurations with all parallel degrees, and cluster and batch sizes, as tables and documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from stagewright.cluster import Cluster
from stagewright.cluster.prices import Price
from stagewright.planning.assignment.device_order import devices_of_ranks
from stagewright.planning.assignment.placing import on_devices
from stagewright.planning.cost import PricedResult
from stagewright.planning.plan import Plan
from stagewright.planning.plan_stages import layers_per_stage
from stagewright.planning.search_result import Excluded, SearchResult
from stagewright.report.plans import plan_document
from stagewright.report.tables import Table, table
from stagewright.units import GIB, format_bytes, format_seconds

_HEADINGS = (
    "schedule", "tp", "cp", "pp", "ep", "dp", "zero", "micro-\nbatch", "micro-\nbatches", "recompute", "step", "tokens/s",
    "MFU", "GiB",
)  # fmt: skip


def configurations_table(plans: Sequence[Plan]) -> Table:
    """Return plans, fastest first, with all parallel degrees; without context and expert parallelism if all are 1."""
    has_cp, has_ep = any(plan.cp > 1 for plan in plans), any(plan.ep > 1 for plan in plans)
    return table("", _HEADINGS, [_row(plan, has_cp, has_ep) for plan in plans])


def _row(plan: Plan, has_cp: bool, has_ep: bool) -> Sequence[object]:
    chunks = plan.num_stages // plan.pp
    predictions = plan.predictions
    cp, ep = plan.cp if has_cp else None, plan.ep if has_ep else None
    return (
        f"{plan.schedule} x{chunks}" if chunks > 1 else plan.schedule, plan.tp, cp, plan.pp, ep, plan.dp,
        max(plan.sharding), plan.microbatch_size, plan.num_microbatches, recomputed(plan),
        format_seconds(predictions.step_seconds), f"{predictions.tokens_per_second:,.0f}", f"{predictions.mfu:.1%}",
        f"{predictions.reserved_peak_bytes / GIB:.1f}",
    )  # fmt: skip


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
            priced.cluster.name, priced.bill.num_devices, priced.bill.global_batch, f"{priced.bill.tokens:.3g}",
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
