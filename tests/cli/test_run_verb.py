"""`stagewright run` as a user starts it: a process per rank, one JSON document, a record on disk."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from patience import patient
from stagewright.cli.run import DataOptions, _written
from stagewright.planning.plan import ModelSection, Plan
from stagewright.tracing.models.lora import Lora

JOB = ("--global-batch", "4", "--sequence-length", "32", "--dtype", "fp32")


def stagewright(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stagewright.cli", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=patient(200))


@pytest.mark.multiprocess
def test_a_plan_is_trained_and_compared_with_what_was_predicted(tmp_path: Path) -> None:
    plan, text = tmp_path / "plan.json", tmp_path / "text.txt"
    text.write_text("Call me Ishmael. " * 50)
    model = (
        "tiny-llama",
        "--set",
        "num_hidden_layers=1",
        "--pp",
        "2",
        "--microbatch",
        "2",
        "--schedule",
        "1f1b",
    )
    planned = stagewright("plan", *model, "--cluster", "2x-rtx3090", *JOB, "-o", plan)
    assert planned.returncode == 0, planned.stderr
    done = stagewright(
        "run", plan, "--data", text, "--steps", "3", "--device", "cpu", "--out", tmp_path / "out", "--json"
    )
    assert done.returncode == 0, done.stderr
    assert "the plan is for 2x-rtx3090, but was run on cpu" in done.stderr
    found = json.loads(done.stdout)
    assert len(found["losses"]) == len(found["all_step_seconds"]) == 3
    assert found["losses"][-1] < found["losses"][0]
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    for rank in found["ranks"]:
        assert rank["allocated_peak_bytes"] == pytest.approx(rank["predicted_allocated_peak_bytes"], rel=0.03)
    assert Path(found["path"]) == tmp_path / "out" / "record.json"
    assert json.loads(Path(found["path"]).read_text())["losses"] == found["losses"]


def plan_with(lora: Lora | None) -> Plan:
    return Plan.model_construct(model=ModelSection.model_construct(text="tiny-llama", lora=lora))


def test_a_run_ends_with_what_it_wrote_and_what_to_do_with_it(tmp_path: Path) -> None:
    (tmp_path / "step-000012").mkdir()
    data = DataOptions(data=["my chats.jsonl"], tokenizer=Path("tok"))
    record, page, newest = _written(
        plan_with(None), Path("plan.json"), Path("r/record.json"), Path("run.html"), tmp_path, data
    )
    assert record.startswith("Wrote r/record.json.") and page == "Wrote run.html."
    assert newest.startswith(f"Wrote {tmp_path}/step-000012. Evaluate: ")
    command = (
        f"`stagewright evaluate plan.json --data 'my chats.jsonl' --tokenizer tok --checkpoint {tmp_path}`"
    )
    assert command in newest
    assert newest.endswith(f"export: `stagewright checkpoint export {tmp_path}/step-000012 FOLDER`.")
    *_, newest = _written(
        plan_with(Lora(rank=4, alpha=8)), Path("plan.json"), Path("r.json"), None, tmp_path, data
    )
    assert newest.endswith(" FOLDER --adapter`.")
    assert len(list(_written(plan_with(None), Path("plan.json"), Path("record.json"), None, None, data))) == 1
