"""What is said and kept of the steps of a run."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

from stagewright.execution.record import StepLog


def _result(loss: float, norm: float, seconds: float) -> SimpleNamespace:
    return SimpleNamespace(
        loss=loss, gradient_norm=norm, learning_rate=1e-3, is_skipped=False, seconds=seconds
    )


def _steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (path / "steps.jsonl").read_text().splitlines()]


def test_a_new_run_begins_anew_and_one_that_goes_on_adds_to_it(tmp_path: Path) -> None:
    result = _result(1.5, float("inf"), 0.1)
    for step in range(2):
        StepLog(tmp_path, 0, 4)(step, result)
    assert _steps(tmp_path) == [2]
    StepLog(tmp_path, 2, 4)(2, result)
    assert _steps(tmp_path) == [2, 3]
    assert json.loads((tmp_path / "steps.jsonl").read_text().splitlines()[0])["gradient_norm"] is None


def test_many_short_steps_are_all_kept_and_seldom_said(tmp_path: Path, capsys: object) -> None:
    log = StepLog(tmp_path, 0, 100)
    for step in range(100):
        log(step, _result(1.0, 1.0, 1e-3))
    assert _steps(tmp_path) == list(range(1, 101))
    said = capsys.readouterr().err.splitlines()  # type: ignore[attr-defined]
    assert said[0].startswith("step 1/100") and said[-1].startswith("step 100/100") and len(said) < 10
