"""AMP's published predictions come out of its formula."""

from __future__ import annotations

import amp
import pytest
import ranking
from verdict import summary


def test_every_prediction_of_amp_is_reproduced() -> None:
    found = list(amp.rows())
    assert len(found) == 105
    assert abs(summary("all", found).worst.error) < amp.BAR


@pytest.mark.slow
def test_trials_of_equal_devices_are_ordered_as_measured_and_the_best_is_picked() -> None:
    found = ranking.verdict(list(ranking.rows("amp_homogeneous.csv")))
    assert found["spearman"] >= ranking.BARS["amp_homogeneous.csv"]
    assert found["picked_over_best"] <= ranking.PICKED


def test_trials_of_mixed_devices_are_ordered_no_worse_than_is_said() -> None:
    """Below the bar of the script: `docs/design/0013-runtimes.md` states it."""
    found = ranking.verdict(list(ranking.rows("amp_het_cluster.csv")))
    assert 0.70 <= found["spearman"] < ranking.BARS["amp_het_cluster.csv"]
