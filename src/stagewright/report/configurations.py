"""Configurations as tables and documents."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich.table import Table

from stagewright.planning.configure.assignment import Assignment
from stagewright.planning.configure.configuration import Configuration
from stagewright.planning.configure.objective import Offer
from stagewright.planning.configure.search import Configured
from stagewright.report.tables import table
from stagewright.units import GIB, format_seconds

_HEADINGS = (
    "schedule", "tp", "cp", "pp", "ep", "dp", "micro-\nbatch", "micro-\nbatches", "recompute", "step", "tokens/s",
    "MFU", "GiB",
)  # fmt: skip


def configurations_table(configured: Configured) -> Table:
    """Configurations, fastest first."""
    return table("", _HEADINGS, [_row(one) for one in configured.configurations])


def _row(one: Configuration) -> Sequence[object]:
    layout = one.layout
    schedule = f"{layout.schedule} x{layout.num_chunks}" if layout.num_chunks > 1 else layout.schedule
    return (
        schedule, layout.tp, layout.cp, layout.pp, layout.ep, layout.dp, layout.microbatch_size,
        layout.num_microbatches, "" if layout.recompute == "none" else layout.recompute,
        format_seconds(one.step_s), f"{one.tokens_per_second:,.0f}", f"{one.mfu:.1%}",
        f"{one.memory.peak_bytes / GIB:.1f}",
    )  # fmt: skip


def stages_line(one: Configuration) -> str | None:
    """Layers and devices of every stage of a configuration whose ranks differ in kind; None where all are equal."""
    names = ["+".join(dict.fromkeys(device.name for device in devices)) for devices in one.devices]
    if len({device for devices in one.devices for device in devices}) == 1:
        return None
    layout = one.layout
    ranks = [names[stage % layout.pp] for stage in range(layout.num_stages)]
    parts = [
        f"{'/'.join(str(num) for num, _ in group)} on {name}"
        for name, group in groupby(
            zip(layout.layers_per_stage or (), ranks, strict=True), key=lambda pair: pair[1]
        )
    ]
    return f"Layers of the stages: {', then '.join(parts)}."


def left_out_table(configured: Configured) -> Table | None:
    """Why other configurations are none; nothing where none was left out."""
    if not configured.left_out:
        return None
    rows = [(one.reason, one.example, one.num) for one in configured.left_out]
    return table("Left out", ("reason", "nearest", "configurations"), rows, text=2)


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


def configuration_document(one: Configuration) -> dict[str, Any]:
    """One configuration of `configure --json`."""
    layout = one.layout
    return {
        "step_seconds": one.step_s,
        "lower_bound_seconds": one.bound_s,
        "pipeline_seconds": one.time.pipeline_s,
        "reduce_seconds": one.time.reduce_s,
        "optimizer_seconds": one.time.optimizer_s,
        "tokens_per_second": one.tokens_per_second,
        "mfu": one.mfu,
        "reserved_peak_bytes": one.memory.peak_bytes,
        "usable_bytes": one.memory.usable_bytes,
        "tp": layout.tp,
        "cp": layout.cp,
        "pp": layout.pp,
        "ep": layout.ep,
        "dp": layout.dp,
        "microbatch_size": layout.microbatch_size,
        "num_microbatches": layout.num_microbatches,
        "schedule": layout.schedule,
        "num_chunks": layout.num_chunks,
        "recompute": layout.recompute,
        "shards_optimizer": layout.shards_optimizer,
        "sequence_parallel": layout.sequence_parallel,
        "layers_per_stage": list(layout.layers_per_stage or ()),
        "devices": [[device.name for device in devices] for devices in one.devices],
    }


def offer_document(one: Offer) -> dict[str, Any]:
    """One size of `configure --json`."""
    return {
        "devices": one.bill.num_devices,
        "global_batch": one.bill.global_batch,
        "tokens": one.bill.tokens,
        "days": one.bill.days,
        "dollars": one.bill.dollars,
        "configurations": [configuration_document(item) for item in one.configured.configurations],
        "excluded": [
            {"reason": item.reason, "configurations": item.num, "nearest": item.example}
            for item in one.configured.left_out
        ],
    }


def offers_document(found: Sequence[Offer]) -> dict[str, Any]:
    """All sizes, and the units of devices that take the places of the best configuration, replica after replica."""
    assignment = found[0].configured.configurations[0].assignment
    units = [] if assignment is None else list(assignment.units)
    return {"sizes": [offer_document(one) for one in found], "units": units}


def assignment_line(found: Assignment) -> str:
    """What giving places to devices saves."""
    saved = found.seconds_by_default - found.seconds
    proof = ", which no other does faster" if found.is_proved else ""
    return (
        f"Ranks are placed by the links: {format_seconds(found.seconds)} a step on links and rings{proof}; "
        f"in Megatron's order it is {format_seconds(saved)} more."
    )
