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


def test_a_known_configuration_is_predicted_as_it_ran_and_never_beats_ours() -> None:
    known = next(known for known in known_answers.KNOWN if known.name == "GPT 39.1B")
    found = known_answers.answer(known)["found"]
    assert isinstance(found, dict)
    assert found["ran"]["mfu"] == pytest.approx(known.published_mfu, rel=0.05)
    assert found["ours"]["step_s"] <= found["theirs"]["step_s"]
