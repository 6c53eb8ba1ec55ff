"""Published configurations: which are judged, what is left out and why, and how near a known one comes."""

from __future__ import annotations

import csv
from collections import Counter

import known_answers
import pytest
import runtimes

FOLDER = runtimes.DATA / "throughput"


def test_as_many_rows_of_megatron_bridge_are_judged_and_left_out_as_the_results_say() -> None:
    """`validation/results/runtimes-2026-11-23.md` states these numbers: change both or neither."""
    with (FOLDER / "megatron_bridge_performance.csv").open(newline="", encoding="utf-8") as file:
        asked = [runtimes.bridge(record) for record in csv.DictReader(file)]
    judged = [one[0] for one in asked if not isinstance(one, str)]
    assert len(judged) == 71
    assert sorted(Counter(one for one in asked if isinstance(one, str)).values()) == [3, 17, 57]
    devices = {one.cluster.rpartition("-")[2] for one in judged}
    assert devices == {"h100", "b200", "b300", "gb200", "gb300"}


@pytest.mark.parametrize("name", ["GPT 1.7B", "GPT 39.1B"])
def test_a_known_configuration_is_predicted_as_it_ran(name: str) -> None:
    known = next(known for known in known_answers.KNOWN if known.name == name)
    predicted = known_answers.as_it_ran(known).predictions
    assert predicted.mfu == pytest.approx(known.published_mfu, rel=0.05)
