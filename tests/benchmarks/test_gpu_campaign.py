"""The campaign for one device, small on the CPU: rows of every part, a part that fails, and the file of results."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from stagewright.cluster import load_cluster

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "gpu"))

import campaign

DESCRIBED = load_cluster("1x-rtx3090", {"device.kind": "cpu"})


@pytest.fixture(scope="module")
def found() -> list[campaign.Section]:
    models = ["tiny-llama", "no-such-model"]
    return list(campaign.campaign(torch.device("cpu"), [DESCRIBED, DESCRIBED], models, "fp32"))


def test_every_part_has_rows_of_every_description(found: list[campaign.Section]) -> None:
    products, attention, stages, _ = found
    assert len(products.rows) == 2 and len(attention.rows) == 2
    assert len(stages.rows) == 1 + 2 * campaign.NUM_STAGES  # the peak; F and B of each
    for part in (products, attention, stages):
        assert not part.error
        for _, predicted, measured in part.rows:
            assert measured > 0 and predicted[0] == predicted[1] > 0
    what, predicted, measured = stages.rows[0]
    assert what == "peak bytes" and predicted[0] == measured
    assert ": within" in stages.notes[0]


def test_a_part_that_fails_says_why_and_the_others_are_reported(found: list[campaign.Section]) -> None:
    assert "no-such-model" in found[-1].error
    text = "\n".join(campaign.report(found, ["probed", "h100"], ["# One device"]))
    assert "FAILED: InputError" in text and "| what | measured | probed | h100 |" in text
    assert text.count("| peak bytes |") == 1
