"""`schedule` writes its pictures where asked, and `check` judges schedule files, as users meet them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stagewright.cli.app import app
from stagewright.schedule import build, insert_communication

DATA = Path(__file__).resolve().parents[2] / "validation" / "data" / "pytorch_schedules"


def call(*words: str | Path) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, [str(word) for word in words])
    return done.exit_code, done.stdout, done.stderr


def test_schedule_writes_every_picture_asked_for(tmp_path: Path) -> None:
    files = {kind: tmp_path / f"out.{kind}" for kind in ("svg", "html", "trace")}
    options = [word for kind, path in files.items() for word in (f"--{kind}", path)]
    code, out, _ = call("schedule", "1f1b", "-p", "2", "-m", "2", *options, "--json")
    assert code == 0 and json.loads(out)["makespan_seconds"] == 9
    assert files["svg"].read_text().startswith("<svg ")
    assert files["html"].read_text().startswith("<!doctype html>")
    assert json.loads(files["trace"].read_text())["traceEvents"]


def test_png_without_its_renderer_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    code, _, err = call("schedule", "1f1b", "--png", tmp_path / "out.png")
    assert code == 2 and "stagewright[pictures]" in err
    assert not (tmp_path / "out.png").exists()


def test_a_picture_that_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    code, out, err = call("schedule", "1f1b", "--svg", tmp_path / "none" / "out.svg")
    assert code == 2 and "there is no folder" in err and not out


@pytest.mark.parametrize("path", sorted(DATA.glob("*_pp*.csv")), ids=lambda path: path.stem)
def test_published_schedules_pass(path: Path) -> None:
    code, out, _ = call("check", path, "--json")
    assert code == 0 and json.loads(out)["passed"]


def checked(tmp_path: Path, text: str, *options: str, ending: str = "csv") -> tuple[int, dict[str, dict]]:
    path = tmp_path / f"program.{ending}"
    path.write_text(text)
    code, out, _ = call("check", path, *options, "--json")
    return code, {each["check"]: each for each in json.loads(out)["checks"]}


def test_a_schedule_that_hangs_names_what_every_rank_is_blocked_at(tmp_path: Path) -> None:
    code, found = checked(tmp_path, "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    assert code == 1 and not found["hang"]["passed"]
    assert "rank 0 is blocked at 0B0" in found["hang"]["detail"]
    assert "rank 1 is blocked at 1F1" in found["hang"]["detail"]
    assert found["work"]["passed"] and found["gradients"]["passed"]


def test_dropped_and_doubled_work_is_named_and_spoils_the_gradients(tmp_path: Path) -> None:
    code, found = checked(tmp_path, "0F0,0F1,0B0,0B0\n1F0,1B0,1F1,1B1\n")
    assert code == 1
    assert found["work"]["detail"] == "dropped 0B1; doubled 0B0"
    assert "1 missing, 0 more than once" in found["gradients"]["detail"]


def test_a_backward_beside_its_halves_counts_twice(tmp_path: Path) -> None:
    code, found = checked(tmp_path, "0F0,0B0,0I0,0W0\n")
    assert code == 1 and found["work"]["detail"] == "doubled 0I0, 0W0"


def test_a_microbatch_that_no_line_names_is_found_when_the_number_is_given(tmp_path: Path) -> None:
    assert checked(tmp_path, "0F0,0B0\n")[0] == 0
    code, found = checked(tmp_path, "0F0,0B0\n", "--microbatches", "2")
    assert code == 1 and found["work"]["detail"] == "dropped 0F1, 0B1"


@pytest.mark.parametrize(("limit", "expected"), [(4, 0), (3, 1)])
def test_a_cap_on_live_activations(tmp_path: Path, limit: int, expected: int) -> None:
    text = build("1f1b", 4, 8).to_text()
    code, found = checked(tmp_path, text, "--max-activations", str(limit), ending="txt")
    assert code == expected and found["activations"]["passed"] == (expected == 0)


def test_a_lost_receive_is_found(tmp_path: Path) -> None:
    document = insert_communication(build("1f1b", 2, 2)).to_document()
    document["ranks"][1].remove("1RECV_F1")
    code, found = checked(tmp_path, json.dumps(document), ending="json")
    assert code == 1 and "1RECV_F1 is missing" in found["transfers"]["detail"]
    assert not found["hang"]["passed"]


def test_a_reduction_before_the_last_gradient_is_found(tmp_path: Path) -> None:
    text = "program p\nmicrobatches 2\nplacement 0\n0: 0F0 0B0 0REDUCE 0F1 0B1\n"
    code, found = checked(tmp_path, text, ending="txt")
    assert code == 1 and "after their last reduction" in found["gradients"]["detail"]


def test_limits_of_schedules_are_refused_for_plans(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("{}")
    code, _, err = call("check", path, "--max-activations", "3")
    assert code == 2 and "leave out --max-activations, or check a schedule file" in err


@pytest.mark.parametrize(
    "text", ['{"name": "p", "num_microbatches": 1, "ranks": [], "rank_of_stage": 5}', "[]"]
)
def test_a_program_of_other_types_is_bad_input(tmp_path: Path, text: str) -> None:
    path = tmp_path / "program.json"
    path.write_text(text)
    for verb in ("schedule", "check"):
        code, _, err = call(verb, path)
        assert code == 2 and "fault of Stagewright" not in err and err.startswith("error: ")
