"""What `plan-costs` promises is what every later verb shows of the program that it wrote."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from torch.distributed.pipelining.schedules import _Action, _validate_schedule
from typer.testing import CliRunner, Result

from stagewright.cli import plan_costs
from stagewright.cli.app import app
from stagewright.cli.program_file import program_text, read_predicted_program
from stagewright.documents import read_sealed_json
from stagewright.planning.joint.prediction import prediction_of
from stagewright.planning.joint.problem import JointProblem, LayerTable
from stagewright.planning.joint.search import Effort, search
from stagewright.schedule import read_torch_csv, verify

SIZE = ("--ranks", "3", "--microbatches", "5", "--seconds", "0.1")
SECONDS = some.floats(1e-6, 10, allow_nan=False) | some.just(0.5)


def call(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def document(*words: object) -> dict[str, Any]:
    done = call(*words, "--json")
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def written_table(path: Path, *, bytes_of: tuple[float, float, float] = (1e9, 3e8, 7e7)) -> Path:
    dice = random.Random(3)
    rows = ["layer,forward_s,input_grad_s,weight_grad_s,parameter_bytes,activation_bytes,boundary_bytes"]
    for layer in range(9):
        seconds = [dice.uniform(0.1, 0.7) for _ in range(3)]
        rows.append(
            ",".join(map(str, [f"layer{layer}", *seconds, *(size * dice.random() for size in bytes_of)]))
        )
    path.write_text("\n".join(rows) + "\n")
    return path


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written_table(tmp_path_factory.mktemp("table") / "layers.csv")


@pytest.fixture(scope="module")
def written(table: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `plan-costs` prints, and what it writes."""
    path = table.parent / "program.json"
    return document("plan-costs", table, *SIZE, "-o", path), read_sealed_json(path, "program")


@given(
    some.lists(
        some.tuples(SECONDS, SECONDS, SECONDS, some.floats(0, 1e9), some.floats(0, 1e9)),
        min_size=4,
        max_size=9,
    ),
    some.lists(some.floats(0.1, 3), min_size=1, max_size=4),
    some.integers(1, 6),
    some.sampled_from([float("inf"), 1e6, 50e9]),
    some.sampled_from([0.0, 1e-3]),
)
@settings(max_examples=12)
def test_what_is_written_is_simulated_as_promised(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[float, ...]], speeds: list[float],
    num_microbatches: int, bytes_per_s: float, latency_s: float,
) -> None:  # fmt: skip
    forward, input_grad, weight_grad, saved, boundary = map(list, zip(*rows, strict=True))
    layers = LayerTable.of(
        forward, input_grad, weight_grad, parameter_bytes=saved, saved_bytes=saved, held_bytes=[size / 3 for size in saved],
        boundary_bytes=boundary,
    )  # fmt: skip
    problem = JointProblem.of(
        layers, len(speeds), num_microbatches, speed=speeds, bytes_per_s=bytes_per_s, latency_s=latency_s,
        overhead_s=latency_s,
    )  # fmt: skip
    found = search(problem, Effort(rounds=1))
    path = tmp_path_factory.mktemp("promised") / "program.json"
    for plan in (found.best, *found.runners_up[:4]):
        promise = prediction_of(plan, found.bound.seconds, "given")
        path.write_text(program_text(path, plan.program, promise))
        program, read = read_predicted_program(path)
        assert read == promise and program == plan.program and read is not None
        timeline = read.timeline(program)
        assert timeline.makespan_s == plan.makespan_s == read.makespan_seconds
        assert timeline.peak_bytes.tolist() == plan.timeline.peak_bytes.tolist() == list(read.peak_bytes)
        assert timeline.start_s.tolist() == plan.timeline.start_s.tolist()


@pytest.mark.parametrize(
    "more", [(), ("--speeds", "1,0.5,2"), ("--memory-limit", "40GB"), ("--bandwidth", "100MB")]
)
def test_schedule_and_check_show_what_plan_promised(
    more: tuple[str, ...], table: Path, tmp_path: Path
) -> None:
    path = tmp_path / "program.json"
    planned = document("plan-costs", table, *SIZE, *more, "-o", path)
    drawn = document("schedule", path)
    assert drawn["makespan_seconds"] == planned["makespan_seconds"]
    for key in ("busy_seconds", "idle_seconds", "peak_bytes"):
        assert [rank[key] for rank in drawn["ranks"]] == [rank[key] for rank in planned["ranks"]]
    assert drawn["costs"] == f"costs as {path} states them"
    again = document("schedule", path, "--costs", table)
    assert again["makespan_seconds"] == planned["makespan_seconds"]
    assert "at the cuts, speeds and bandwidth of" in again["costs"]
    found = document("check", path)
    assert found["passed"] and [one["check"] for one in found["checks"]][-2:] == ["time", "memory"]


def test_options_take_the_place_of_stated_costs_and_say_so(
    written: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path
) -> None:
    path, planned = tmp_path / "program.json", written[0]
    path.write_text(json.dumps(written[1]))
    slower = document("schedule", path, "--transfer", 1)
    assert slower["makespan_seconds"] > planned["makespan_seconds"] + 1
    assert slower["costs"].endswith("states them, but 1 s for every transfer")
    uniform = document("schedule", path, "--forward", 1)  # at its default, and given
    assert uniform["makespan_seconds"] > 15 and uniform["costs"].startswith("uniform costs instead of")
    shown = call("schedule", path, "--forward", 1).stdout.splitlines()
    assert shown[1] == uniform["costs"]
    other = written_table(tmp_path / "other.csv")
    other.write_text("\n".join(other.read_text().splitlines()[:-1]))
    done = call("schedule", path, "--costs", other)
    assert done.exit_code == 2 and "has 8 layers, but" in done.stderr and "is for 9" in done.stderr
    limited = call("schedule", path, "--memory-limit", 1)
    assert limited.exit_code == 2 and "the limit is 1" in limited.stderr


def test_a_program_without_costs_says_what_is_assumed(
    written: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path
) -> None:
    path, stated = tmp_path / "program.json", written[1]
    path.write_text(json.dumps({key: value for key, value in stated.items() if key != "costs"}))
    assert "states no costs: uniform ones are assumed" in call("schedule", path).stdout.splitlines()[1]
    assert [one["check"] for one in document("check", path)["checks"]][-1] == "activations"
    assert "costs" not in document("schedule", "1f1b")


@pytest.mark.parametrize("ending", ["txt", "csv"])
def test_what_a_file_has_no_place_for_is_said(ending: str, table: Path, tmp_path: Path) -> None:
    path = tmp_path / f"program.{ending}"
    done = call("plan-costs", table, *SIZE, "--json", "-o", path)
    assert done.exit_code == 0 and "has only the order of actions: cuts, costs and predictions" in done.stderr
    program, promise = read_predicted_program(path)
    assert promise is None
    assert list(verify(program).placement.rank_of_stage) == json.loads(done.stdout)["rank_of_stage"]
    if ending == "csv":
        assert read_torch_csv(path.read_text(), program.name) == program
        lines = [line.split(",") for line in path.read_text().splitlines()]
        actions: Any = {rank: [_Action.from_str(cell) for cell in cells] for rank, cells in enumerate(lines)}
        found = _validate_schedule(actions, program.num_ranks, program.num_stages, program.num_microbatches)
        assert found == dict(enumerate(program.placement.rank_of_stage))


@pytest.mark.parametrize("name", ["program.yaml", "program", "program.JSON", "program.html"])
def test_other_files_are_refused_before_the_search(
    name: str, table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def searched(*_: object) -> None:
        raise AssertionError("searched")

    monkeypatch.setattr(plan_costs, "_problem", searched)
    done = call("plan-costs", table, *SIZE, "-o", tmp_path / name)
    assert done.exit_code == 2 and "end its name in .json" in done.stderr and not (tmp_path / name).exists()


def test_what_is_assumed_is_printed(
    table: Path, written: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path
) -> None:
    words = ("plan-costs", table, *SIZE)
    shown = " ".join(call(*words).stdout.split())
    assert (
        "Assumed: 50 GB/s between ranks, one port of 400 Gb/s InfiniBand (--bandwidth), no latency" in shown
    )
    assert "any amount of memory (--memory-limit); equal ranks (--speeds)" in shown
    assumed = written[0]["assumptions"]
    assert assumed == written[1]["assumptions"]
    assert assumed["bytes_per_second"] == 50e9 and assumed["bandwidth"] == "assumed"
    assert assumed["memory_limits"] is None and assumed["speeds"] == [1.0] * 3
    given_ = document(*words, "--bandwidth", "2GB", "--speeds", "1,1,0.5", "--memory-limit", "50GB")[
        "assumptions"
    ]
    assert given_["bytes_per_second"] == 2e9 and given_["bandwidth"] == "given"
    assert given_["memory_limits"] == [50e9] * 3 and given_["speeds"] == [1.0, 1.0, 0.5]
    bare = written_table(tmp_path / "bare.csv", bytes_of=(0, 0, 0))
    assert document("plan-costs", bare, *SIZE)["assumptions"]["bandwidth"] == "none"
    assert "transfers are free, as the table has no boundary_bytes" in " ".join(
        call("plan-costs", bare, *SIZE).stdout.split()
    )


def test_assumed_transfers_take_their_time(tmp_path: Path) -> None:
    table = written_table(tmp_path / "layers.csv", bytes_of=(1e9, 3e8, 5e10))
    path = tmp_path / "program.json"
    document("plan-costs", table, *SIZE, "-o", path)
    stated = json.loads(path.read_text())["costs"]
    assert stated["transfer_seconds"] == [size / 50e9 for size in stated["transfer_bytes"]]
    assert max(stated["transfer_seconds"]) > 0.01


@pytest.mark.parametrize("option", [("--bandwidth", "25GiB"), ("--memory-limit", "40GiB")])
def test_options_that_the_table_gives_nothing_to_are_refused(option: tuple[str, str], tmp_path: Path) -> None:
    bare = written_table(tmp_path / "bare.csv", bytes_of=(0, 0, 0))
    done = call("plan-costs", bare, *SIZE, *option)
    assert done.exit_code == 2 and option[0] in done.stderr and "add them" in done.stderr


def test_the_plan_keeps_the_limit_and_baselines_that_break_it_are_marked(tmp_path: Path) -> None:
    table = tmp_path / "layers.csv"
    rows = ["layer,forward_s,input_grad_s,weight_grad_s,activation_bytes,boundary_bytes"]
    table.write_text(
        "\n".join([*rows, *(f"layer{n},1,1,1,{1000 if n < 3 else 10},1" for n in range(9))]) + "\n"
    )
    found = document("plan-costs", table, *SIZE, "--memory-limit", "6000")
    assert max(rank["peak_bytes"] for rank in found["ranks"]) <= 6000
    assert not next(each for each in found["baselines"] if each["schedule"] == "1f1b, even")["fits"]
    for baseline in found["baselines"]:
        assert baseline["fits"] == (baseline["peak_bytes"] <= 6000)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"makespan_seconds": 1e-3}, "but it predicts"),
        ({"peak_bytes": [0, 0, 0]}, "its prediction is"),
        ({"assumptions": {"memory_limits": [1, 1, 1]}}, "rank 0 needs"),
    ],
)
def test_a_promise_that_does_not_hold_is_found(
    change: dict[str, Any], message: str, written: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path
) -> None:
    path, stated = tmp_path / "program.json", written[1]
    if "assumptions" in change:
        change = {"assumptions": stated["assumptions"] | change["assumptions"]}
    path.write_text(json.dumps(stated | change))
    done = call("check", path)
    assert done.exit_code == 1 and message in done.stdout


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("cuts", [3], "cuts has 1 entries"),
        ("cuts", "backwards", "are not in order within 9 layers"),
        ("peak_bytes", [1.0], "peak_bytes has 1 entries where 3 belong"),
        ("makespan_seconds", -1, "makespan_seconds"),
        ("costs", {}, "costs.forward_seconds is missing"),
        ("costs.base_bytes", [1.0], "costs.base_bytes has 1 entries"),
        ("costs.transfer_seconds", [], "costs.transfer_seconds has 0 entries"),
        ("costs.forward_secs", [], "did you mean 'forward_seconds'"),
        ("assumptions.speeds", [1.0], "assumptions.speeds has 1 entries"),
        ("assumptions.memory_limits", [1.0], "assumptions.memory_limits has 1 entries"),
    ],
)
def test_a_promise_that_makes_no_sense_is_refused_by_key(
    key: str, value: Any, message: str, written: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path
) -> None:
    path, stated = tmp_path / "program.json", json.loads(json.dumps(written[1]))
    if value == "backwards":
        value = stated["cuts"][::-1]
    section, _, name = key.rpartition(".")
    (stated[section] if section else stated)[name] = value
    path.write_text(json.dumps(stated))
    for verb in ("schedule", "check"):
        done = call(verb, path)
        assert done.exit_code == 2 and message in done.stderr, done.stderr
