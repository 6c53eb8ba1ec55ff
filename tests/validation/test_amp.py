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


def test_trials_of_amp_are_ordered_better_than_by_its_own_formula() -> None:
    found = ranking.verdict(list(ranking.rows("amp_het_cluster.csv")))
    assert found["spearman"] > 0.55  # AMP's formula: 0.39


def test_published_throughput_of_megatron_is_predicted() -> None:
    folder = throughput.DATA
    found = [row for row in throughput.rows(folder) if row.group.startswith("meg")]
    assert len(found) >= 15
    assert summary("all", found).median <= 0.1
