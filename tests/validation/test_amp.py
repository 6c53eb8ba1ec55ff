"""AMP's published predictions come out of its formula."""

from __future__ import annotations

import amp
from verdict import summary


def test_every_prediction_of_amp_is_reproduced() -> None:
    found = list(amp.rows())
    assert len(found) == 105
    assert abs(summary("all", found).worst.error) < amp.BAR
