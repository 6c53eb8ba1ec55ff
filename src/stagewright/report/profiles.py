"""Operator profiles as tables."""

from __future__ import annotations

from collections import defaultdict

from stagewright.cluster import OperatorProfile
from stagewright.report.tables import Table, table
from stagewright.units import format_seconds

_SHOWN = 12


def profile_heading(profile: OperatorProfile) -> str:
    """How much was measured, and on what."""
    threads = "" if profile.num_threads is None else f", {profile.num_threads} threads each"
    at_once = f"{profile.processes} process{'es' if profile.processes > 1 else ''} at once{threads}"
    return f"{len(profile.seconds)} operators by their arguments' layouts on {profile.device}, {at_once}"


def profile_table(profile: OperatorProfile) -> Table:
    """By name: layouts that were measured, the fastest and the slowest; those first that take longest."""
    by_name: defaultdict[str, list[float]] = defaultdict(list)
    for signature, seconds in profile.seconds.items():
        by_name[signature.partition("(")[0].removeprefix("aten.")].append(seconds)
    slowest = sorted(by_name.items(), key=lambda item: -max(item[1]))
    rows = [
        (name, len(found), format_seconds(min(found)), format_seconds(max(found)))
        for name, found in slowest[:_SHOWN]
    ]
    if rest := slowest[_SHOWN:]:
        every = [seconds for _, found in rest for seconds in found]
        rows.append(
            (f"{len(rest)} others", len(every), format_seconds(min(every)), format_seconds(max(every)))
        )
    return table("", ("operator", "layouts", "fastest", "slowest"), rows)
