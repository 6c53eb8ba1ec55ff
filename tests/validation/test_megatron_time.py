"""Published step times, as far as the bounds go."""

from __future__ import annotations

import csv

import megatron_core
import megatron_time
import pytest
import zero_bubble_runs
from verdict import grouped, summary


@pytest.mark.parametrize(
    ("name", "every"), [(name, 4 if "single" in name else 1) for name in megatron_time.BARS]
)
def test_published_step_times_stay_within_their_bounds(name: str, every: int) -> None:
    found = list(megatron_time.rows(name, every=every))
    assert summary(name, found).mean <= megatron_time.BARS[name]


def test_handmade_schedules_of_the_zero_bubble_paper_stay_within_their_bound() -> None:
    with (zero_bubble_runs.DATA / "zero_bubble_measured.csv").open(newline="", encoding="utf-8") as file:
        records = [row for row in csv.DictReader(file) if "2p" not in row["schedule"]]
    found = list(zero_bubble_runs.rows(records))
    assert all(group.mean <= zero_bubble_runs.BAR for group in grouped(found))
    wrong, num = zero_bubble_runs.swapped(records, found)
    assert num > 30
    assert wrong == []


@pytest.mark.parametrize("what", megatron_core.BARS)
def test_megatron_core_stays_within_its_bounds(what: str) -> None:
    assert summary(what, list(megatron_core.rows(what))).mean <= megatron_core.BARS[what]
