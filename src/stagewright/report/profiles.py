"""Operator profiles as tables."""

from __future__ import annotations

from collections import defaultdict

from stagewright.cluster import OperatorProfile
from stagewright.report.tables import Table, table
from stagewright.text import plural
from stagewright.units import format_seconds

_SHOWN = 12


def profile_heading(profile: OperatorProfile) -> str:
    """Return the number of measured operators and the device."""
    threads = "" if profile.num_threads is None else f", {profile.num_threads} threads each"
    at_once = f"{profile.processes} process{'es' if profile.processes > 1 else ''} at once{threads}"
    return f"{len(profile.seconds)} operators by their arguments' layouts on {profile.device}, {at_once}"


def profile_table(profile: OperatorProfile) -> Table:
    """Return the measured layouts, the fastest and the slowest, by operator name; the slowest operators first."""
    by_name: defaultdict[str, list[float]] = defaultdict(list)
    for signature, seconds in profile.seconds.items():
        by_name[signature.partition("(")[0].removeprefix("aten.")].append(seconds)
    slowest = sorted(by_name.items(), key=lambda item: -max(item[1]))
    rows = [
        (name, len(times), format_seconds(min(times)), format_seconds(max(times)))
        for name, times in slowest[:_SHOWN]
    ]
    if remaining := slowest[_SHOWN:]:
        other_times = [seconds for _, times in remaining for seconds in times]
        rows.append(
            (
                plural(len(remaining), "other"),
                len(other_times),
                format_seconds(min(other_times)),
                format_seconds(max(other_times)),
            )
        )
    return table("", ("operator", "layouts", "fastest", "slowest"), rows)
