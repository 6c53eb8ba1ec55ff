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


@pytest.mark.parametrize("name", ranking.BARS)
def test_trials_are_ordered_as_measured_and_the_best_is_picked(name: str) -> None:
    found = ranking.verdict(list(ranking.rows(name)))
    assert found["spearman"] >= ranking.BARS[name]
    assert found["picked_over_best"] <= ranking.PICKED
