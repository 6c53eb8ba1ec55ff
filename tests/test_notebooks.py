"""What notebooks show of plans, timelines and explanations, and their rows as data frames."""

from __future__ import annotations

import sys

import pytest

import stagewright
from stagewright.cluster import load_cluster
from stagewright.errors import InputError
from stagewright.planning.estimate import estimate
from stagewright.planning.job import Job
from stagewright.planning.plan import Plan
from stagewright.planning.search_result import SearchResult

pandas = pytest.importorskip("pandas")
JOB = Job(global_batch=4, sequence_length=32, dtype="fp32")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return estimate("tiny-llama", load_cluster("2x1x-t4"), JOB, pp=2, schedule="1f1b")


def test_frames_have_the_plans_numbers(plan: Plan) -> None:
    stages = plan.to_dataframe()
    assert stages["forward_seconds"].tolist() == [one.forward_seconds for one in plan.predictions.stages]
    assert stages["starts_at"].tolist() == ["(start)", *plan.cuts] and stages["rank"].tolist() == [0, 1]
    found = SearchResult([plan, plan], []).to_dataframe()
    assert found["step_seconds"].tolist() == [plan.predictions.step_seconds] * 2
    actions = stagewright.simulate(plan).to_dataframe()
    assert len(actions) == sum(map(len, plan.program))
    assert actions["action"].tolist() == [text for texts in plan.program for text in texts]
    parts = stagewright.explain(plan).to_dataframe()
    seconds = [row["seconds"] for row in parts.to_dict("records") if row["kind"] == "part"]
    assert sum(seconds) == pytest.approx(plan.predictions.step_seconds)


def test_notebooks_show_tables(plan: Plan) -> None:
    timeline, explanation = stagewright.simulate(plan), stagewright.explain(plan)
    for shown in (plan, SearchResult([plan], []), timeline, explanation):
        html = shown._repr_html_()
        assert "<table>" in html and html.count("<tr>") == html.count("</tr>") > 1
        assert len(repr(shown)) < 300
    hostile = plan.model_copy(update={"cuts": ("<script>alert(1)</script>:0",)})
    assert "<script>" not in hostile._repr_html_()


def test_without_pandas_the_error_says_what_to_install(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(InputError, match="pip install pandas"):
        plan.to_dataframe()
