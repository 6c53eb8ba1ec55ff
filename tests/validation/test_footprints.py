"""Published memory of pipelines, as far as the bounds go."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator

import footprints
import pytest
from verdict import Row, summary

Judge = Callable[[list[dict[str, str]]], Iterator[Row]]


def _records(name: str) -> list[dict[str, str]]:
    with (footprints.DATA / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("name", "mean", "worst"),
    [
        ("korthikanti_memory_fig1_fig7.csv", 0.01, 0.025),
        ("mist_tuned_configs.csv", 0.03, 0.07),
        ("megatron_core_b200.csv", 0.02, 0.025),
    ],
)
def test_published_footprints_stay_within_their_bounds(name: str, mean: float, worst: float) -> None:
    found = summary(name, list(footprints.SETS[name](_records(name))))
    assert found.mean <= mean
    assert abs(found.worst.error) <= worst


def test_runs_of_the_zero_bubble_paper_stay_within_their_bound() -> None:
    records = _records("zero_bubble_measured.csv")
    handmade = [record for record in records if record["schedule"] in ("1F1B", "1F1B-I", "ZB-V")]
    found = summary("handmade", list(footprints.zero_bubble(handmade)))
    assert found.mean <= footprints.BAR
    searched = [record for record in records if record["schedule"] == "ZB-1p"][:6]
    assert summary("searched", list(footprints.zero_bubble(searched))).mean <= 0.06
