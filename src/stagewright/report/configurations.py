"""Plans with all their widths, and sizes of clusters and batches, as tables and documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from stagewright.cluster import Cluster
from stagewright.cluster.prices import Price
from stagewright.planning.assignment.device_order import devices_of_ranks
from stagewright.planning.assignment.placing import on_devices
from stagewright.planning.cost import Offer
from stagewright.planning.found import Excluded, Found
from stagewright.planning.plan import Plan
from stagewright.planning.plan_stages import layers_per_stage
from stagewright.report.plans import plan_document
from stagewright.report.tables import Table, table
from stagewright.units import GIB, format_bytes, format_seconds

_HEADINGS = (
    "schedule", "tp", "cp", "pp", "ep", "dp", "zero", "micro-\nbatch", "micro-\nbatches", "recompute", "step", "tokens/s",
    "MFU", "GiB",
)  # fmt: skip


def configurations_table(plans: Sequence[Plan]) -> Table:
    """Plans, fastest first, with all their widths; without those of context and experts where all are 1."""
    has_cp, has_ep = any(one.cp > 1 for one in plans), any(one.ep > 1 for one in plans)
    return table("", _HEADINGS, [_row(one, has_cp, has_ep) for one in plans])


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
    """What stages recompute: nothing, ``full`` layers, or ``selective`` parts of them."""
    found = set(map(str, plan.memory_policy)) - {"keep"}
    return "" if not found else "selective" if found == {"selective"} else "full"


def stages_line(plan: Plan, cluster: Cluster) -> str | None:
    """Layers and devices of the stages of a plan whose ranks differ in kind; None where all are equal."""
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


def left_out_table(found: Found) -> Table | None:
    """Why other configurations are none; nothing where none was left out."""
    grouped: dict[str, list[Excluded]] = {}
    for one in found.excluded:
        kind = one.reason if one.missing_bytes is None else f"lacks memory, tp {one.tp}"
        grouped.setdefault(kind, []).append(one)
    if not grouped:
        return None
    rows = [(kind, _nearest(group), len(group)) for kind, group in sorted(grouped.items())]
    return table("Left out", ("reason", "nearest", "configurations"), rows, text=2)


def _nearest(group: Sequence[Excluded]) -> str:
    one = min(group, key=lambda one: one.missing_bytes or 0)
    if one.missing_bytes is None:
        return ""
    return f"pp {one.pp} dp {one.dp} b {one.microbatch_size} {one.schedule} short by {format_bytes(one.missing_bytes)}"


def offers_table(offers: Sequence[Offer]) -> Table:
    """Days and dollars to the target, best first."""
    rows = [
        (
            one.cluster.name, one.bill.num_devices, one.bill.global_batch, f"{one.bill.tokens:.3g}",
            f"{one.bill.days:,.2f}", "" if one.bill.dollars is None else f"{one.bill.dollars:,.0f}",
        )
        for one in offers
    ]  # fmt: skip
    return table("", ("cluster", "devices", "batch", "tokens", "days", "dollars"), rows)


def price_lines(prices: Mapping[str, Price], terms: str) -> list[str]:
    """Which prices dollars are of, and of which day."""
    return [
        f"Dollars at {price.dollars:.2f} per {name} and hour"
        + (f", {terms}: {price.source}, list of {price.date}" if price.date else f", of {price.source}")
        + "; --price says otherwise."
        for name, price in prices.items()
    ]


def offers_document(found: Sequence[Offer]) -> dict[str, Any]:
    """All sizes of `plan --json`, best first."""
    return {"sizes": [_size(one) for one in found]}


def _size(one: Offer) -> dict[str, Any]:
    return {
        "devices": one.bill.num_devices,
        **{name: getattr(one.bill, name) for name in ("global_batch", "tokens", "days", "dollars")},
        "configurations": [
            plan_document(plan, None)
            | {"recompute": recomputed(plan) or "none", "zero": max(plan.sharding), "devices": list(plan.devices)}
            for plan in one.found.plans
        ],
        "excluded": [asdict(item) for item in one.found.excluded],
        "num_bounded": one.found.num_bounded,
    }  # fmt: skip
