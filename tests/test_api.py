"""Verbs as Python functions: the same answers as the command line gives."""

from __future__ import annotations

import json
import pydoc
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import stagewright
from records import record_of
from stagewright.cli.app import app
from stagewright.cluster import load_cluster
from stagewright.errors import InputError, PlanError
from stagewright.planning.estimate import estimate
from stagewright.planning.job import Job, load_job
from stagewright.planning.plan import Plan
from stagewright.report.comparison import comparison_table
from stagewright.report.pictures.comparison_panels import comparison_panels
from stagewright.report.pictures.plan_memory import measured_curves
from stagewright.report.runs import AT_SPEED, ERROR, run_document
from stagewright.report.runs import comparison as run_comparison
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


def test_functions_take_names_dicts_and_files_as_the_command_line_does(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    job = {"global_batch": 4, "sequence_length": 32, "dtype": "fp32"}
    found = stagewright.plan("tiny-llama", "2x1x-t4", job, pp=2, schedules=("1f1b",)).plans[0]
    assert found.job == JOB and found.cluster.name == "2x1x-t4"
    (tmp_path / "job.toml").write_text('global_batch = 4\nsequence_length = 32\ndtype = "fp32"\n')
    again = stagewright.estimate("tiny-llama", "2x1x-t4", tmp_path / "job.toml", pp=2, schedule="1f1b")
    assert again.predictions == plan.predictions
    for given in (path, str(path)):
        assert stagewright.estimate(given).predictions == plan.predictions
        assert stagewright.explain(given) == stagewright.explain(plan)
        assert stagewright.simulate(given).makespan_s == stagewright.simulate(plan).makespan_s


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: stagewright.plan("tiny-llama", 2, JOB),
            "cluster is of type int: pass a catalog name such as",
        ),
        (
            lambda: stagewright.plan("tiny-llama", "2x-t4", None),
            "job is of type NoneType: pass a stagewright.Job, a dict",
        ),
        (lambda: stagewright.estimate("tiny-llama", {}, JOB), "cluster is of type dict"),
        (lambda: stagewright.explain([]), "plan is of type list; pass a plan, or the path of one"),
        (lambda: stagewright.simulate(3), "plan is of type int"),
        (lambda: stagewright.check({}), "plan is of type dict"),
        (lambda: stagewright.verify("tiny-llama", None), "plan is of type NoneType"),
        (lambda: stagewright.profile("tiny-llama", 3), "job is of type int"),
    ],
)
def test_other_types_are_a_type_error_that_says_what_to_pass(call: Callable[[], object], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        call()


def test_a_search_result_in_place_of_a_plan_says_where_its_plans_are() -> None:
    found = stagewright.plan("tiny-llama", "2x1x-t4", JOB, pp=2, schedules=("1f1b",))
    with pytest.raises(TypeError, match=r"SearchResult: its plans are in \.plans, best first"):
        stagewright.explain(found)  # type: ignore[arg-type]


def test_help_shows_no_addresses() -> None:
    public = [name for name in stagewright.__all__ if name != "__version__"]
    texts = {name: pydoc.plain(pydoc.render_doc(getattr(stagewright, name))) for name in public}
    heads = {name: "\n".join(text.splitlines()[:6]) for name, text in texts.items()}
    assert not [name for name, head in heads.items() if " at 0x" in head or "lambda" in head]
    assert "report: 'Callable[[str], None] | None' = None" in heads["plan"]


def test_a_memory_limit_may_be_a_text() -> None:
    limited = {"global_batch": 4, "sequence_length": 32}
    assert load_job(None, {**limited, "memory_limit": "16 GiB"}).memory_limit == 16 * 2**30
    with pytest.raises(InputError, match="memory_limit"):
        load_job(None, {**limited, "memory_limit": "16 GB of it"})


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
    assert step[:3] == ["step, median", plan.predictions.step_seconds, 1.0]
    assert step[3] == pytest.approx(1.0 / plan.predictions.step_seconds - 1)


def test_measured_memory_is_drawn_action_by_action(plan: Plan) -> None:
    record = record_of(plan, stagewright.simulate(plan), [0.0, 0.0])
    held = [
        [
            ("waiting", 10, 9),
            *((text, 20 + place, 10 + place) for place, (text, _, _) in enumerate(rank.actions)),
        ]
        for rank in record.ranks
    ]
    assert measured_curves(record.ranks, stagewright.simulate(plan)) is None
    ranks = [
        rank.model_copy(update={"memory": (*memory, ("optimizer step", 99, 9))})
        for rank, memory in zip(record.ranks, held, strict=True)
    ]
    timeline = stagewright.compare(plan, record).measured
    others = [rank.model_copy(update={"memory": rank.memory[::-1]}) for rank in ranks]
    assert measured_curves(others, timeline) is None, "of a step in another order"
    for rank, curve in enumerate(measured_curves(ranks, timeline) or ()):
        computed = [event for event in timeline.events(rank) if event.action.kind.name in "FBIW"]
        assert curve.peak == 99
        assert list(curve.time_s[1::2]) == [event.start_s for event in computed]
        places = [
            held[rank].index(next(row for row in held[rank] if row[0] == str(event.action)))
            for event in computed
        ]
        assert list(curve.held[1::2]) == [held[rank][place][1] for place in places]
        assert curve.held[-1] == held[rank][places[-1]][2]
        assert curve.held[0] == held[rank][places[0] - 1][2]  # of a receive on the last rank


def test_errors_have_one_sign_and_batch_and_step_are_of_one_step(plan: Plan) -> None:
    """In the terminal, of a run and of a comparison, and on the page."""
    predicted_s = plan.predictions.step_seconds
    record = record_of(plan, stagewright.simulate(plan), [0.0, 0.0])
    seconds = (9.0, 4 * predicted_s, 4 * predicted_s, 2 * predicted_s)
    ranks = tuple(
        rank.model_copy(update={"slowdowns": ((1, 2.0), (2, 2.0), (3, 1.0))}) for rank in record.ranks
    )
    figures = dict.fromkeys(("losses", "gradient_norms"), (1.0,) * 4)
    record = record.model_copy(
        update={"step_seconds": seconds, "metered_steps": (0,), "ranks": ranks, **figures}
    )
    found = stagewright.compare(plan, record)
    assert found.document["drawn_step"] == 4
    assert found.document["drawn_step_seconds"]["measured"] == pytest.approx(2 * predicted_s)
    assert found.document["batch_seconds"]["measured"] <= found.document["drawn_step_seconds"]["measured"]
    table = comparison_panels(found.document, "a plan").tables[0]
    assert table.columns[-1].name == ERROR
    errors = {row[0]: row[-1] for row in table.rows}
    assert errors["step, median"] == pytest.approx(3.0) and errors[AT_SPEED] == pytest.approx(1.0)
    for shown in (
        comparison_table(found.document),
        run_comparison(run_document(plan, record, "record.json")),
    ):
        named, *_, column = shown.columns
        assert column.heading == ERROR
        texts = dict(zip(named.cells, column.cells, strict=True))
        assert "+300.0%" in texts.values() and texts[AT_SPEED] == "+100.0%"
