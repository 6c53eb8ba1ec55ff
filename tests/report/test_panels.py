"""A plan's page has the plan's own figures around its timeline, as text that no name of a model can break."""

from __future__ import annotations

import base64
import json
import re
from typing import Any

import pytest

from stagewright.cluster import load_cluster
from stagewright.planning.estimate import estimate
from stagewright.planning.job import Job
from stagewright.planning.plan import Plan
from stagewright.report.pictures.panels import page_title, plan_panels
from stagewright.report.plans import answer_line
from stagewright.units import format_seconds

JOB = Job(global_batch=8, sequence_length=64, dtype="bf16")


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    """The faster one keeps all, the other recomputes."""
    cluster = load_cluster("2x-a10g")
    ways: tuple[dict[str, Any], ...] = ({}, {"recompute": "full"})
    return [estimate("tiny-llama", cluster, JOB, pp=2, microbatch=1, schedule="1f1b", **way) for way in ways]


def test_panels_say_what_the_plan_does(plans: list[Plan]) -> None:
    best, other = (one.predictions.step_seconds for one in plans)
    above, below = plan_panels(plans)
    assert answer_line(plans[0]) in above and format_seconds(best) in above
    assert above.count('class="stage"') == plans[0].num_stages
    assert "recomputes or offloads" not in above
    assert "recomputes or offloads" in plan_panels(plans[::-1])[0]
    assert below.count("<tbody>") == 2 and f"{other / best - 1:+.1%}" in below
    assert page_title(plans[0]).startswith("tiny-llama on 2x-a10g: ")


def test_all_figures_can_be_taken_along(plans: list[Plan]) -> None:
    _, below = plan_panels(plans[:1])
    assert "Alternatives" not in below
    packed = re.search(r'base64,([^"]+)', below)
    assert packed is not None
    document = json.loads(base64.b64decode(packed[1]))
    assert [rank["busy_seconds"] for rank in document["ranks"]] == [
        rank.busy_seconds for rank in plans[0].predictions.ranks
    ]
    assert len(document["stages"]) == plans[0].num_stages


def test_names_are_text(plans: list[Plan]) -> None:
    cuts = tuple(f"<script>{cut}" for cut in plans[0].cuts)
    above, _ = plan_panels([plans[0].model_copy(update={"cuts": cuts})])
    assert "<script>" not in above and "&lt;script&gt;" in above
