"""Verbs as Python functions: the same answers as the command line gives."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import stagewright
from records import record_of
from stagewright.cli.app import app
from stagewright.cluster import load_cluster
from stagewright.errors import InputError, PlanError
from stagewright.planning.estimate import estimate
from stagewright.planning.job import Job
from stagewright.planning.plan import Plan
from stagewright.schedule import build
from stagewright.simulation import StageCosts

JOB = Job(global_batch=4, sequence_length=32, dtype="fp32")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return estimate("tiny-llama", load_cluster("2x1x-t4"), JOB, pp=2, schedule="1f1b")


def test_a_plan_is_simulated_as_it_is(plan: Plan) -> None:
    timeline = stagewright.simulate(plan)
    assert plan.predictions.step_seconds >= timeline.makespan_s > 0.9 * plan.predictions.step_seconds
    program = build("gpipe", 2, 3)
    assert stagewright.simulate(program, StageCosts.uniform(2)).makespan_s == 12.0
    with pytest.raises(InputError, match="states its own costs"):
        stagewright.simulate(plan, StageCosts.uniform(2))  # type: ignore[call-overload]


def test_check_says_what_it_found(plan: Plan, tmp_path: Path) -> None:
    found = stagewright.check(plan)
    assert found and found.fault is None and not found.left_out
    assert list(found.passed) == ["document", "gradients", "program", "time", "model", "transfers", "memory"]
    path = tmp_path / "plan.json"
    plan.save(path)
    document = json.loads(CliRunner().invoke(app, ["check", str(path), "--json"]).stdout)
    assert {one["check"]: one["detail"] for one in document["checks"]} == found.passed


def test_check_keeps_what_passed_before_a_fault(plan: Plan) -> None:
    ranks = tuple(one.model_copy(update={"allocated_peak_bytes": 10**6}) for one in plan.predictions.ranks)
    wrong = plan.model_copy(update={"predictions": plan.predictions.model_copy(update={"ranks": ranks})})
    found = stagewright.check(wrong)
    assert not found and isinstance(found.fault, PlanError) and "but the plan predicts" in str(found.fault)
    assert "program" in found.passed and "memory" not in found.passed
    assert "but the plan predicts" in repr(found)
    assert isinstance(stagewright.check(plan, "no-such-cluster").fault, InputError)


def test_compare_is_what_the_verb_prints_and_a_page(plan: Plan, tmp_path: Path) -> None:
    record = record_of(plan, stagewright.simulate(plan), [0.0, 0.0])
    found = stagewright.compare(plan, record)
    assert found.document["batch_seconds"]["measured"] == pytest.approx(
        found.document["batch_seconds"]["predicted"]
    )
    assert repr(found).startswith("<Comparison of tiny-llama: step +")
    path, ran, page = tmp_path / "plan.json", tmp_path / "record.json", tmp_path / "page.html"
    plan.save(path)
    ran.write_text(record.model_dump_json())
    done = CliRunner().invoke(app, ["compare", str(path), str(ran), "--json", "--html", str(page)])
    assert json.loads(done.stdout) == found.document
    text = page.read_text()
    (data,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    shown = json.loads(data)
    assert shown["name"] == "measured" and list(shown["others"]) == ["predicted"]
    assert shown["others"]["predicted"]["makespan"] == pytest.approx(shown["makespan"])
    assert [table["key"] for table in shown["report"]["tables"]] == ["times", "peaks"]
    step = shown["report"]["tables"][0]["rows"][0]
    assert step[:3] == ["step", plan.predictions.step_seconds, 1.0]
    assert step[3] == pytest.approx(1.0 / plan.predictions.step_seconds - 1)
