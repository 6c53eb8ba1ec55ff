"""The verbs that need no torch, as a user types them: tables, documents, exit codes and messages."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from stagewright.cli.app import app


def call(*words: str) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def document(*words: str) -> dict:
    done = call(*words, "--json")
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def test_help_lists_the_verbs_and_starts_fast() -> None:
    code = "import sys; from stagewright.cli.app import app; app(['--help'], standalone_mode=False)"
    code += "; print(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    begun = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "schedule" in done.stdout and done.stdout.splitlines()[-1] == "[]"
    assert time.perf_counter() - begun < 3.0  # 0.2 s on an idle machine; this one may be busy


def test_models_and_clusters_are_listed() -> None:
    assert "llama-3-8b" in call("models").stdout.split()
    assert "llama-3-8b" in document("models")["models"]
    assert "h100" in call("clusters").stdout
    (h100,) = (
        device for device in document("clusters")["devices"] if device["name"].lower().startswith("h100")
    )
    assert h100["peak_flops"]["bf16"] == pytest.approx(989.4e12)


def test_a_schedule_document_has_the_figures_of_theory() -> None:
    found = document("schedule", "1f1b", "--ranks", "4", "--microbatches", "8")
    assert found["makespan_seconds"] == 33.0
    assert found["bubble_fraction"] == pytest.approx(3 / 11)
    assert [rank["peak_activations"] for rank in found["ranks"]] == [4, 3, 2, 1]
    assert [rank["busy_seconds"] + rank["idle_seconds"] for rank in found["ranks"]] == [33.0] * 4
    assert found["program"][3][:2] == ["3F0", "3B0"]


def test_a_schedule_takes_its_own_options_and_costs() -> None:
    split = document("schedule", "1f1b", "-p", "2", "-m", "2", "--set", "split_backward=true")
    assert "0I0" in split["program"][0]
    slow = document("schedule", "1f1b", "-p", "2", "-m", "2", "--transfer", "0.5", "--forward", "2")
    assert slow["makespan_seconds"] == 13.0


def test_a_timetable_is_plain_text_where_there_is_no_terminal() -> None:
    shown = call("schedule", "gpipe", "-p", "2", "-m", "2").stdout.splitlines()
    assert shown[0] == "gpipe: 2 ranks, 2 microbatches, 9 s, bubble 33.3%"
    assert shown[2] == "rank 0 F0 F1 .........B0--- B1--- "
    assert shown[3] == "rank 1 ...F0 F1 B0--- B1--- ......"


def test_a_program_file_is_simulated(tmp_path: Path) -> None:
    path = tmp_path / "torch.csv"
    path.write_text("0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n")
    assert document("schedule", path)["makespan_seconds"] == 9.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("schedule", "1f1"), "did you mean '1f1b'?"),
        (("schedule", "1f1b", "--set", "split=true"), "did you mean 'split_backward'?"),
        (("schedule", "1f1b", "--set", "split"), "write KEY=VALUE"),
        (("schedule", "1f1b", "--chunks", "2"), "one stage per rank"),
        (("schedule", "gpipe", "-m", "8", "--memory-limit", "4"), "holds 8 activations on rank 0"),
        (("schedule", "1f1b", "--ranks", "0"), "at least one rank"),
        (("schedule", "nowhere.csv"), "nowhere.csv' cannot be read"),
        (("trace", "llama-3-9b"), "did you mean 'llama-3-8b'?"),
        (("trace", "no/such/config.json"), "there is no file or directory"),
        (("trace", "tiny-llama", "--dtype", "bf61"), "did you mean 'bf16'?"),
        (("trace", "tiny-llama", "-o", "no/such/folder/graph.json"), "there is no folder"),
        (("schdule", "1f1b"), "No such command 'schdule'"),
        (("schedule", "1f1b", "--rank", "4"), "--rank"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(words: tuple[str, ...], message: str) -> None:
    done = call(*words)
    assert done.exit_code == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_malformed_config_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama",\n "hidden_size": }')
    done = call("trace", path)
    assert done.exit_code == 2
    assert "line 2" in done.stderr


def test_a_traceback_is_shown_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGEWRIGHT_TRACEBACK", "0")
    done = call("schedule", "1f1", "--traceback")
    assert done.exit_code == 2
    assert "Traceback" in done.stderr
