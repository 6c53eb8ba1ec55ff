"""Why a plan takes what it takes: parts that add up, and changes that are what simulating them gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from stagewright.cli.app import app
from stagewright.cluster import load_cluster
from stagewright.errors import InputError
from stagewright.planning.estimate import estimate
from stagewright.planning.explanation import Explanation, explain
from stagewright.planning.job import Job
from stagewright.planning.plan import Plan

JOB = Job(global_batch=8, sequence_length=64, dtype="fp32")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return estimate("tiny-llama", load_cluster("4x-t4"), JOB, pp=4, schedule="1f1b")


def at(plan: Plan, **columns: Any) -> Plan:
    """`plan` with stages of one second forward and two backward, no other time, but for `columns`."""
    assert plan.predictions.costs is not None
    still = [
        one.model_copy(update={"value_seconds": 0.0, "gradient_seconds": 0.0})
        for one in plan.predictions.costs.transfers
    ]
    costs = plan.predictions.costs.model_copy(
        update={
            "forward_seconds": (1.0,) * 4, "input_grad_seconds": (1.0,) * 4, "weight_grad_seconds": (1.0,) * 4,
            "backward_seconds": (2.0,) * 4, "transfers": tuple(still), "sum_seconds": (0.0,) * 4, "norm_seconds": 0.0,
            "optimizer_seconds": (0.0,) * 4, **columns,
        }
    )  # fmt: skip
    predictions = plan.predictions.model_copy(update={"costs": costs})
    return plan.model_copy(update={"predictions": predictions})


def of(found: Explanation) -> dict[str, float]:
    return {change.what: change.seconds for change in (*found.changes, *found.errors)}


def test_parts_are_the_critical_path(plan: Plan) -> None:
    found = explain(at(plan))
    assert found.seconds == (8 + 4 - 1) * 3
    # Three forwards down the pipeline, eight of each on the last rank, three backwards up.
    assert {part.what: (part.count, part.seconds) for part in found.parts} == {
        "backwards": (11, 22.0),
        "forwards": (11, 11.0),
    }


def test_parts_add_up_to_the_step(plan: Plan) -> None:
    found = explain(plan)
    assert found.seconds == pytest.approx(plan.predictions.step_seconds)
    assert sum(part.seconds for part in found.parts) == pytest.approx(found.seconds)
    names = {part.what for part in found.parts}
    assert {"transfers between stages", "optimizer, and updated parameters"} <= names


def test_changes_are_what_gains(plan: Plan) -> None:
    slow = (1.0, 2.0, 1.0, 1.0)
    found = explain(
        at(plan, forward_seconds=slow, backward_seconds=(2.0, 4.0, 2.0, 2.0), optimizer_seconds=(3.0,) * 4)
    )
    named = of(found)
    assert found.slowest_rank == 1
    assert named["devices compute 10 % faster"] == pytest.approx((found.seconds - 3) / 1.1 + 3)
    assert named["optimizer twice as fast"] == pytest.approx(found.seconds - 1.5)
    assert named["stages of equal length"] == pytest.approx((8 + 4 - 1) * 3.75 + 3)
    # Rank 1 works all the time but for the first forward and the last backward, which are rank 0's.
    assert named["rank 1 10 % slower"] == pytest.approx(found.seconds + 0.1 * 8 * 6, rel=0.01)
    (least,) = [one for one in found.errors if one.note == "the rank that matters least"]
    assert found.seconds <= least.seconds < found.seconds + 1
    assert "collectives twice as fast" not in named  # there are none
    gains = [change.seconds for change in found.changes]
    assert gains == sorted(gains) and max(gains) < found.seconds


def test_other_schedules_say_what_they_hold(plan: Plan) -> None:
    found = explain(at(plan))
    other = {change.what: change for change in found.changes}
    # Weight gradients fill the end of the bubble. ZB-H2 fills its beginning too, which helps where a rank may begin the next
    # step before others have ended this one.
    assert other["schedule zb-h1"].seconds == other["schedule zb-h2"].seconds == 8 * 3 + 3
    assert other["schedule zb-h1"].note == "rank 3 holds 3 more microbatches"
    assert other["schedule zb-h2"].note == "rank 3 holds 6 more microbatches"
    assert "schedule gpipe" not in other and "schedule pipedream" not in other


def test_what_is_recomputed_says_the_memory_it_saves() -> None:
    again = estimate("tiny-llama", load_cluster("4x-t4"), JOB, pp=4, schedule="1f1b", recompute="full")
    found = explain(again)
    kept = estimate("tiny-llama", load_cluster("4x-t4"), JOB, pp=4, schedule="1f1b", recompute="none")
    (change,) = [one for one in found.changes if one.what == "nothing recomputed"]
    assert change.seconds < found.seconds
    assert change.seconds == pytest.approx(kept.predictions.step_seconds, rel=0.1)
    assert change.note.startswith("needs ") and " more on rank " in change.note


def test_a_plan_without_costs_is_refused(plan: Plan) -> None:
    silent = plan.model_copy(update={"predictions": plan.predictions.model_copy(update={"costs": None})})
    with pytest.raises(InputError, match="plan again"):
        explain(silent)


def test_the_verb_prints_tables_and_one_document(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    shown = CliRunner().invoke(app, ["explain", str(path)])
    assert shown.exit_code == 0
    for text in ("Critical path of the ", "What would make it faster", "If the estimate is wrong"):
        assert text in shown.stdout
    document = json.loads(CliRunner().invoke(app, ["explain", str(path), "--json"]).stdout)
    assert document["seconds"] == pytest.approx(plan.predictions.step_seconds)
    assert {"parts", "changes", "errors", "slowest_rank"} <= document.keys()
