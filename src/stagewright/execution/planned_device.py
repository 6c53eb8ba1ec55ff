"""A plan's description of a process's device: its threads, its slowdown, and its probed reference time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from stagewright.planning.plan import Plan

if TYPE_CHECKING:
    from stagewright.cluster import Device


def num_threads(plan: Plan, device: int) -> int | None:
    """Return the number of compute threads of a device of the plan's cluster, or None where it is not described."""
    described = _described(plan, device)
    return None if described is None else described.num_threads


def probed_reference(plan: Plan, device: int, kind: str) -> float | None:
    """Return the seconds of the reference computation when the device was probed; None if unknown, or if the probed device
    was of another `kind`."""
    described = _described(plan, device)
    return described.reference_s if described is not None and described.kind == kind else None


def measured_slowdown(plan: Plan, device: int, slowdowns: Sequence[float]) -> float | None:
    """Return the median of `slowdowns`, the factors by which computations of some steps took longer than planned, as
    `Device.pace`; None where no step was measured."""
    seen = [slowdown for slowdown in slowdowns if slowdown]
    described = _described(plan, device)
    planned = (described and described.pace) or 1.0
    return planned * statistics.median(seen) if seen else None


def _described(plan: Plan, device: int) -> Device | None:
    """Return a device of the plan's cluster, or None where the plan does not describe it."""
    cluster = plan.cluster.description
    return cluster.device_of(device) if cluster is not None and device < cluster.num_devices else None
