"""What is said and kept of the steps of a run."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

from stagewright.execution.logs import StepLog, TrainingStep


def _steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (path / "steps.jsonl").read_text().splitlines()]


def test_a_new_run_begins_anew_and_one_that_goes_on_adds_to_it(tmp_path: Path) -> None:
    step = TrainingStep(1, 4, 1.5, math.inf, 1e-3, False, 0.1, 1e3, 0.4, 2**30, 3.0)
    for number in (1, 2):
        StepLog(tmp_path, 0)(replace(step, number=number))
    assert _steps(tmp_path) == [2]
    StepLog(tmp_path, 2)(replace(step, number=3))
    assert _steps(tmp_path) == [2, 3]
    assert json.loads((tmp_path / "steps.jsonl").read_text().splitlines()[0])["gradient_norm"] is None


def test_a_step_shows_the_memory_of_every_device_next_to_its_prediction() -> None:
    pairs = ((17 * 2**30, 18 * 2**30), (21 * 2**30, 20 * 2**30))
    step = TrainingStep(4, 4, 1.0, 1.0, 1e-3, False, 1.0, 1e3, 0.4, 21 * 2**30, 0.0, memory_by_rank=pairs)
    assert str(step).endswith("MFU 40.0%  reserved/predicted 17.0/18.0 21.0/20.0 GiB")
    assert str(replace(step, memory_by_rank=pairs * 9)).endswith("reserved 21.00 GiB")


def test_many_short_steps_are_all_kept_and_seldom_said(tmp_path: Path, capsys: object) -> None:
    log = StepLog(tmp_path, 0)
    for number in range(1, 101):
        log(TrainingStep(number, 100, 1.0, 1.0, 1e-3, False, 1e-3, 1e3, 0.4, 2**30, 3.0))
    assert _steps(tmp_path) == list(range(1, 101))
    said = capsys.readouterr().err.splitlines()  # type: ignore[attr-defined]
    assert (
        said[0]
        == "step 1/100  loss 1.0000  gradient norm 1.000  0.001 s  1,000 tokens/s  MFU 40.0%  reserved 1.00 GiB  3 s left"
    )
    assert said[-1].startswith("step 100/100") and "left" not in said[-1] and len(said) < 10
