"""What FSDP trained on 80 GB without recomputation: predicted to fit where the loss is a small part."""

from __future__ import annotations

import fsdp_memory


def test_seven_billion_parameters_fit_where_fsdp_trained_them() -> None:
    found = list(fsdp_memory.rows(only="MPT-7b"))
    assert len(found) == 2
    assert all(one.share <= 1 for one in found)
    assert all(one.num_units > 30 for one in found)
    assert all(one.seconds < one.measured_seconds for one in found)
