"""Published step times, as far as the bounds go."""

from __future__ import annotations

import csv

import megatron_core
import megatron_time
import pytest
import zero_bubble_runs
from verdict import summary


@pytest.mark.parametrize(
    ("name", "every"), [(name, 4 if "single" in name else 1) for name in megatron_time.BARS]
)
def test_published_step_times_stay_within_their_bounds(name: str, every: int) -> None:
    found = list(megatron_time.rows(name, every=every))
    assert summary(name, found).mean <= megatron_time.BARS[name]


def test_handmade_schedules_of_the_zero_bubble_paper_stay_within_their_bound() -> None:
    with (zero_bubble_runs.DATA / "zero_bubble_measured.csv").open(newline="", encoding="utf-8") as file:
        records = [row for row in csv.DictReader(file) if row["schedule"] in ("1F1B", "1F1B-I", "ZB-V")]
    assert summary("handmade", list(zero_bubble_runs.rows(records))).mean <= zero_bubble_runs.BAR


@pytest.mark.parametrize("what", megatron_core.BARS)
def test_megatron_core_stays_within_its_bounds(what: str) -> None:
    assert summary(what, list(megatron_core.rows(what))).mean <= megatron_core.BARS[what]
