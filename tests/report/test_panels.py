"""What a page says around the timeline of a plan: the plan's own numbers, safe to open elsewhere."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stagewright.cli.app import app
from stagewright.cluster import load_cluster
from stagewright.planning.estimate import estimate
from stagewright.planning.job import Job
from stagewright.planning.plan import Plan
from stagewright.planning.plan_stages import stage_program
from stagewright.planning.prediction.step_times import simulated
from stagewright.planning.search_result import NextBest, SearchResult
from stagewright.report.pictures import html_page, plan_panels, scene_of
from stagewright.report.pictures.panels import PanelTable


@pytest.fixture(scope="module")
def plan() -> Plan:
    job = Job(global_batch=8, sequence_length=32, dtype="fp32")
    return estimate("tiny-llama", load_cluster("2x1x-t4"), job, pp=2, schedule="1f1b")


def tables(plan: Plan, found: SearchResult | None = None) -> dict[str, PanelTable]:
    costs = plan.predictions.costs
    assert costs is not None
    return {one.key: one for one in plan_panels(plan, simulated(stage_program(plan), costs), found).tables}


def column(table: PanelTable, name: str) -> list:
    return [row[[one.name for one in table.columns].index(name)] for row in table.rows]


def usable_bytes(plan: Plan) -> list[int]:
    """Of each rank's device, beside communicators."""
    device = load_cluster("2x1x-t4").device
    return [device.usable_with_communicators(rank.communicator_bytes) for rank in plan.predictions.ranks]


def test_tables_are_the_plans_numbers(plan: Plan) -> None:
    shown, predictions = tables(plan), plan.predictions
    assert predictions.costs is not None
    assert column(shown["stages"], "starts at") == ["(start)", *plan.cuts]
    assert column(shown["stages"], "F") == [one.forward_seconds for one in predictions.stages]
    memory = shown["memory"]
    assert [sum(int(size or 0) for size in row[5:]) for row in memory.rows] == [
        one.allocated_peak_bytes for one in predictions.ranks
    ]
    assert column(memory, "capacity") == usable_bytes(plan)
    busy, idle = column(shown["ranks"], "busy"), column(shown["ranks"], "idle")
    assert busy[0] + idle[0] == pytest.approx(busy[1] + idle[1]) and min(idle) > 0
    assert column(shown["links"], "value") == [one.value_bytes for one in predictions.costs.transfers]
    assert "alternatives" not in shown and all(
        len(r) == len(t.columns) for t in shown.values() for r in t.rows
    )


def test_alternatives_lose_what_they_are_slower_by(plan: Plan) -> None:
    step = plan.predictions.step_seconds
    slower = plan.model_copy(
        update={"predictions": plan.predictions.model_copy(update={"step_seconds": 1.5 * step})}
    )
    found = SearchResult([plan, slower], [], next_best=NextBest("dp 2", 2 * step))
    losses = column(tables(plan, found)["alternatives"], "slower by")
    assert losses == pytest.approx([0.0, 0.5, 1.0])


def test_plan_writes_the_report_of_its_best(tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    words = ["plan", "tiny-llama", "--cluster", "2x1x-t4", "--global-batch", "4", "--sequence-length", "32"]
    words += ["--dtype", "fp32", "--microbatch", "1", "--schedule", "1f1b", "--pp", "2", "--html", str(path)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0 and f"Wrote {path}." in done.stdout, done.output
    text = path.read_text().split('type="application/json">', 1)[1].split("</script>", 1)[0]
    data = json.loads(text)
    assert data["curvesAreBytes"] and data["report"]["title"].startswith("tiny-llama on 2x1x-t4")
    assert data["report"]["answer"].startswith("Fits with ")
    same = CliRunner().invoke(app, [*words, "-o", str(path)])
    assert same.exit_code == 2 and "name another file" in same.stderr


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_a_name_is_no_formula_in_a_csv_file() -> None:
    script = files("stagewright.report.pictures").joinpath("panels.js").read_text(encoding="utf-8")
    table = {
        "columns": [{"name": "step", "unit": "s"}, {"name": "name", "unit": ""}],
        "rows": [[-1, '=a"b'], [None, "c,d"]],
    }
    code = f"const page = {{}};\n{script}\nprocess.stdout.write(csvOf({json.dumps(table)}));"
    done = subprocess.run(["node", "-e", code], capture_output=True, text=True, check=True)
    assert done.stdout == 'step (s),name\n-1,"\'=a""b"\n,"c,d"\n'


def test_a_page_without_a_plan_has_its_timeline(plan: Plan) -> None:
    costs = plan.predictions.costs
    assert costs is not None
    assert '"report":null' in html_page(scene_of(simulated(stage_program(plan), costs)))


def test_what_is_held_lies_below_what_a_rank_has(plan: Plan, tmp_path: Path) -> None:
    path, page = tmp_path / "plan.json", tmp_path / "page.html"
    plan.save(path)
    assert CliRunner().invoke(app, ["simulate", str(path), "--html", str(page)]).exit_code == 0
    shown = json.loads(page.read_text().split('type="application/json">')[1].split("</script>")[0])
    assert shown["capacities"] == usable_bytes(plan)
    keys = [table["key"] for table in shown["report"]["tables"]]
    assert keys[:4] == ["parts", "changes", "errors", "stages"]
