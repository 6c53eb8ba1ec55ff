"""The verbs that need no torch, as a user types them: tables, documents, exit codes and messages."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from stagewright.cli.app import app
from stagewright.planning.joint.problem import JointProblem, LayerTable
from stagewright.planning.joint.starts import balanced
from stagewright.schedule.placement import linear


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
    (h100,) = (device for device in document("clusters")["devices"] if device["name"] in ("h100", "H100"))
    assert h100["peak_flops"]["bf16"] == pytest.approx(989.4e12)


def test_a_schedule_document_has_the_figures_of_theory() -> None:
    found = document("schedule", "1f1b", "--ranks", "4", "--microbatches", "8")
    assert found["makespan_seconds"] == 33.0
    assert found["bubble_fraction"] == pytest.approx(3 / 11)
    assert [rank["peak_activations"] for rank in found["ranks"]] == [4, 3, 2, 1]
    assert [rank["busy_seconds"] + rank["idle_seconds"] for rank in found["ranks"]] == [33.0] * 4
    assert found["program"][3][:2] == ["3F0", "3B0"]


def test_a_memory_limit_counts_the_activations_of_the_document() -> None:
    limits = range(1, 9)
    found = [document("schedule", "zb-auto", "-p", "4", "-m", "9", "--memory-limit", str(k)) for k in limits]
    for limit, each in zip(limits, found, strict=True):
        assert max(rank["peak_activations"] for rank in each["ranks"]) <= limit
    times = [each["makespan_seconds"] for each in found]
    assert times == sorted(times, reverse=True)


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


TABLE = """layer,forward_s,input_grad_s,weight_grad_s,activation_bytes,parameter_bytes
embedding,0.1,0.1,0.1,10,1
first,1,1,1,100,5
second,1,1,1,100,5
head,0.5,0.5,0.5,20,2
"""


def test_a_cost_table_is_shared_out_over_the_stages(tmp_path: Path) -> None:
    path = tmp_path / "costs.csv"
    path.write_text(TABLE)
    found = document("schedule", "gpipe", "-p", "2", "-m", "3", "--costs", path)
    assert [rank["busy_seconds"] for rank in found["ranks"]] == pytest.approx([3 * 3.3, 3 * 4.5])
    assert [rank["peak_bytes"] for rank in found["ranks"]] == [3 * 110 + 6, 3 * 120 + 7]
    rows = [
        dict(zip(TABLE.split()[0].split(","), line.split(","), strict=True)) for line in TABLE.split()[1:]
    ]
    other = tmp_path / "costs.json"
    other.write_text(json.dumps(rows))
    assert document("schedule", "gpipe", "-p", "2", "-m", "3", "--costs", other) == found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("forward_s", "forwards_s"), "did you mean 'forward_s'?"),
        (("first,1,", "first,fast,"), "row 2: forward_s = 'fast' is not a number"),
        (("second,1,", "second,,"), "row 3: forward_s is missing"),
        (("head,0.5", "head,-0.5"), "give seconds, 0 or from 1e-12 to 1e+09"),
    ],
)
def test_a_wrong_cost_table_is_refused_by_row(change: tuple[str, str], message: str, tmp_path: Path) -> None:
    path = tmp_path / "costs.csv"
    path.write_text(TABLE.replace(*change))
    done = call("schedule", "gpipe", "-p", "2", "-m", "3", "--costs", path)
    assert done.exit_code == 2
    assert message in done.stderr


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 8))
def test_balanced_parts_are_the_best_of_all(seconds: list[int], num_parts: int) -> None:
    if num_parts > len(seconds):
        return
    problem = JointProblem.of(LayerTable.of(seconds, 0.0, 0.0), num_parts, 1)
    layout = balanced(problem, linear(num_parts))
    assert layout is not None and layout.num_stages == num_parts and layout.ends[-1] == len(seconds)
    found = [range(start, end) for start, end in itertools.pairwise((0, *layout.ends))]
    assert all(found)
    every = itertools.combinations(range(1, len(seconds)), num_parts - 1)
    bounds = ([0, *cuts, len(seconds)] for cuts in every)
    best = min(max(sum(seconds[a:b]) for a, b in itertools.pairwise(ends)) for ends in bounds)
    assert max(sum(seconds[index] for index in part) for part in found) == best


@pytest.mark.parametrize("name", ["zb-auto", "v-half", "greedy"])
def test_schedules_made_for_given_times_get_them(name: str) -> None:
    equal = document("schedule", name, "-p", "2", "-m", "4")
    slow = document("schedule", name, "-p", "2", "-m", "4", "--forward", "3")
    assert slow["makespan_seconds"] > equal["makespan_seconds"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("schedule", "1f1"), "did you mean '1f1b'?"),
        (("schedule", "1f1b", "--set", "split=true"), "did you mean 'split_backward'?"),
        (("schedule", "1f1b", "--set", "split"), "write KEY=VALUE"),
        (("schedule", "1f1b", "--chunks", "2"), "places 1 stage on each rank"),
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


def test_a_memory_limit_that_is_missed_names_the_schedules_that_keep_it() -> None:
    size = ("--ranks", "4", "--microbatches", "8", "--memory-limit", "2")
    done = call("schedule", "1f1b", *size)
    assert done.exit_code == 2 and "1f1b holds 4 activations on rank 0" in done.stderr
    named = re.findall(r"\((.*)\)", done.stderr)[0].split(", ")
    assert "zb-auto" in named and "1f1b" not in named
    for name in named:
        assert call("schedule", name, *size).exit_code == 0, name
