"""Published memory of pipelines, as far as the bounds go."""

from __future__ import annotations

import csv
from collections import Counter

import footprints
import pytest
from verdict import summary


@pytest.mark.parametrize(
    ("name", "mean", "worst", "num_left_out"),
    [
        pytest.param("korthikanti_memory_fig1_fig7.csv", 0.005, 0.015, 1, marks=pytest.mark.slow),
        ("mist_tuned_configs.csv", 0.01, 0.02, 13),
    ],
)
def test_published_footprints_stay_within_their_bounds(
    name: str, mean: float, worst: float, num_left_out: int
) -> None:
    """Of Korthikanti et al. the smaller model; the script judges the larger one too, which takes a minute."""
    left_out: Counter[str] = Counter()
    with (footprints.DATA / name).open(newline="", encoding="utf-8") as file:
        records = [record for record in csv.DictReader(file) if record.get("model") != "530B"]
    found = summary(name, list(footprints.SETS[name](records, left_out)))
    assert found.mean <= mean
    assert abs(found.worst.error) <= worst
    assert left_out.total() == num_left_out
