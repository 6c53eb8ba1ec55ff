"""What a plan says of the device that a process has: its threads, its pace, and what it took when it was probed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from stagewright.planning.plan import Plan

if TYPE_CHECKING:
    from stagewright.cluster import Device


def num_threads(plan: Plan, device: int) -> int | None:
    """Threads that the process of a device of the plan's cluster computes with; None where nothing says so."""
    described = _described(plan, device)
    return None if described is None else described.num_threads


def probed_reference(plan: Plan, device: int, kind: str) -> float | None:
    """What the reference took when the device was probed; None where that is not known, or was another `kind` of device."""
    described = _described(plan, device)
    return described.reference_s if described is not None and described.kind == kind else None


def measured_pace(plan: Plan, device: int, beside_plan: Sequence[float]) -> float | None:
    """`Device.pace` as some steps showed it, of computations that took so many times as long as planned, in the middle; None
    where none was looked at."""
    seen = [pace for pace in beside_plan if pace]
    described = _described(plan, device)
    planned = (described and described.pace) or 1.0
    return planned * statistics.median(seen) if seen else None


def _described(plan: Plan, device: int) -> Device | None:
    """A device of the plan's cluster; None where the plan does not describe it."""
    cluster = plan.cluster.description
    return cluster.device_of(device) if cluster is not None and device < cluster.num_devices else None
