"""The scripts for GPUs, small and on the CPU: rows of every part, the time they keep to, failures, and the results file."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from multiprocess import run_ranks
from stagewright.cluster import load_cluster
from stagewright.errors import RunError
from stagewright.tracing.cache import trace
from stagewright.tracing.models.reference import resolve

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "gpu"))
sys.path.append(str(Path(__file__).parents[1] / "execution"))

import calls
import one
import stages
import two
from results_file import Part, Results, Section, TimeUp, measured, report, time_limit

import executor

DESCRIBED = load_cluster("1x-rtx3090", {"device.kind": "cpu"})
MODEL = "tiny-llama"
SETTING = one.setting_of("cpu", True, [DESCRIBED, DESCRIBED])


@pytest.fixture(scope="module")
def sections() -> dict[str, Section]:
    """Of all parts of `one.py`, with functions that are not compiled in place of compiled ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda call, **_: call)
        return {section.name: section for section in measured(one.parts_of(SETTING), 600.0)}


def rows_of(section: Section) -> dict[str, tuple[list[float], float]]:
    assert not any("FAILED" in note for note in section.notes)
    return {what: (predictions, value) for what, predictions, value in section.rows}


def test_every_part_has_rows_with_every_prediction(sections: dict[str, Section]) -> None:
    sizes = {name: len(rows_of(section)) for name, section in sections.items()}
    # a row per call; step, peak and all passes, of four policies and of training; two more for F, I and W of two stages
    assert sizes == {"names": 0, "waits": 8, "offload": 12, "memory": 3, "host": 8, "stages": 16}
    for name, section in sections.items():
        for _, predictions, value in section.rows:
            assert value > 0 and len(predictions) == (0 if name == "waits" else 2)
            assert all(prediction == predictions[0] > 0 for prediction in predictions)


def test_gradients_are_those_of_plain_autograd(sections: dict[str, Section]) -> None:
    for name, count in (("offload", 4), ("stages", 2)):
        judged = [note for note in sections[name].notes if "gradients: largest difference" in note]
        assert len(judged) == count and all(": within" in note for note in judged)
    assert sections["names"].notes[0].endswith("names and kinds equal; 0 layouts differ")


def test_attention_is_offloaded_and_peaks_are_those_predicted(sections: dict[str, Section]) -> None:
    rows = rows_of(sections["offload"])
    peaks = {what.partition(":")[0]: row for what, row in rows.items() if what.endswith("active peak bytes")}
    assert len(peaks) == 4
    assert all(predictions == [pytest.approx(value, rel=1e-3)] * 2 for predictions, value in peaks.values())
    saved = (peaks[f"{MODEL}, breadth-first, {policy}"][1] for policy in stages.POLICIES)
    keep, recompute, attention, everything = saved
    assert everything < attention < keep and recompute < keep


def test_what_differs_between_the_graphs_of_plan_and_run_is_named() -> None:
    planned, here = (
        trace(resolve(MODEL, {"num_hidden_layers": layers}), 1, 16, target="cuda") for layers in (1, 2)
    )
    assert one.unlike(planned, planned) == []
    differences = one.unlike(planned, here)
    assert differences and all(one.endswith("here") for one in differences)
    assert (
        differences[0].startswith("net.model.layers.1.") and ": nothing in the plan, aten." in differences[0]
    )


def test_a_call_that_waits_is_told_from_one_that_does_not() -> None:
    ended: list[bool] = []

    def begin(seconds: float) -> calls.HasEnded:
        ended.clear()
        return lambda: bool(ended) or ended.append(True)  # type: ignore[func-returns-value]

    def verdict(during: calls.Call) -> str:
        _, note = calls.waits(torch.device("cpu"), "call", lambda: None, during, begin)
        assert isinstance(note, str)
        return note.split(";")[0]

    assert verdict(lambda: None) == "call: does not wait"
    assert verdict(lambda: ended.append(True)) == "call: WAITS for the device"


# -- time, failures and the file ------------------------------------------------------------------------------------------


def case(error: str = "", seconds: float = 0.0) -> Results:
    yield "row", [2.0], 1.0
    time.sleep(seconds)
    if error:
        raise ValueError(error)
    yield "done"


def test_a_case_that_fails_or_has_no_time_is_reported_and_the_others_go_on() -> None:
    def cut() -> Results:
        yield "row", [2.0], 1.0
        raise TimeUp("no time left")

    kept: list[int] = []
    parts = [
        Part("first", 1, {"bad": lambda: case("no such kernel"), "long": cut, "good": case}),
        Part("second", 1, {"next": case}),
    ]
    first, second = measured(parts, 60.0, lambda all_: kept.append(sum(len(one.rows) for one in all_)))
    assert first.notes == [
        "bad FAILED: ValueError: no such kernel",
        "long FAILED: TimeUp: no time left",
        "done",
    ]
    assert len(first.rows) == 3 and second.notes == ["done"]
    assert kept == [1, 2, 3, 4], "what was measured is kept after every case"


def test_the_time_of_a_script_is_kept_to() -> None:
    (section,) = measured([Part("late", 1, {"case": lambda: case(seconds=300.0)})], 0.0)
    assert section.notes == ["case FAILED: TimeUp: no time left"]


def test_time_is_up_also_for_code_that_catches_every_exception() -> None:
    with pytest.raises(TimeUp), time_limit(0.05):
        while True:
            try:
                time.sleep(10.0)
            except Exception:
                continue


def test_results_have_predictions_and_their_errors() -> None:
    sections = [Section("saving", [("peak bytes", [4.0, 2.0], 4.0), ("seconds", [], 1.0)], ["a note"])]
    text = "\n".join(report(sections, ["probed", "h100"], ["# One device"]))
    assert "| what | measured | probed | h100 |" in text and "a note" in text
    assert "| peak bytes | 4 | 4 (+0.0%) | 2 (-50.0%) |" in text and "| seconds | 1 |  |  |" in text


def run_script(script: object, patch: pytest.MonkeyPatch, output: Path, *words: str) -> str:
    given = ["script.py", "--device", "cpu", "--small", "--output", str(output), *words]
    patch.setattr(sys, "argv", given)
    script.main()  # type: ignore[attr-defined]
    return output.read_text()


def test_one_writes_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = run_script(one, monkeypatch, tmp_path / "results.md", "--parts", "host")
    assert text.startswith("# benchmarks/gpu/one.py") and "--parts host" in text and "## waits" not in text
    assert "| what | measured | h100 |" in text and "| add, overload: s | " in text


@pytest.mark.multiprocess
def test_two_runs_every_schedule_next_to_its_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--parts", "communicators", "schedules", "torch")
    text = run_script(two, monkeypatch, tmp_path / "results.md", *words)
    assert "FAILED" not in text
    for schedule in two.SCHEDULES:
        assert text.count(f"| {schedule}: step s | ") == len(two.SMALL_SIZES)
    assert text.count("first losses are equal") == len(two.SMALL_SIZES)
    assert "bytes of the first lane | " in text and "| 1f1b: ratio | " in text


def results_on_lanes(
    rank: int, num_ranks: int, tasks: list[tuple[str, str, dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Of one rank under NCCL's rules of ordering."""
    from nccl_simulation import BACKEND, register

    register()
    dist.init_process_group(BACKEND)
    watch: Any = SimpleNamespace(at=lambda *_, **__: None, rank=rank, num_ranks=num_ranks)
    results = [two.TASKS[task](watch, torch.device("cpu"), name, **given) for task, name, given in tasks]
    dist.destroy_process_group()
    return results


@pytest.mark.multiprocess
def test_every_task_of_two_ranks_ends_under_the_rules_of_nccl(tmp_path: Path) -> None:
    machine = two.Machine("cpu", 2, True, [load_cluster("2x-rtx3090", {"device.kind": "cpu"})])
    sizes = executor.Sizes(64, 4, 32, 4, 1)
    tasks: list[tuple[str, str, dict[str, Any]]] = [("communicators", "communicators", {})]
    for name in two.SCHEDULES:
        machine.boundary_plan(name, 2**8, machine.described[0]).save(tmp_path / name)
        tasks.append(("steps", name, {"plan": str(tmp_path / name)}))
    for name in ("1f1b", "interleaved-1f1b"):
        executor.plan_of("llama", name, sizes, 2, machine.described[0]).save(tmp_path / f"{name}-llama")
        tasks.append(("torch", name, {"plan": str(tmp_path / f"{name}-llama"), "sizes": sizes}))
    first, second = run_ranks(results_on_lanes, 2, tasks, timeout=120.0)
    assert set(first[0]) == set(second[0]) and len(first[0]) == 4
    losses = {result["first loss"] for result in first[1 : 1 + len(two.SCHEDULES)]}
    assert len(losses) == 1 and all(loss > 0 for loss in losses)
    assert all(result["batch s"] > 0 and result["ratio"] > 0 for result in first[-2:])


def test_a_schedule_that_fails_is_named_and_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[list[str]] = []

    def start_ranks(module: str, arguments: list[str], ranks: range, start_s: float) -> None:
        _, _, tasks, out = json.loads(arguments[0])
        starts.append([name for name, _ in tasks])
        is_first = len(starts) == 1
        done = starts[-1][:1] if is_first else starts[-1]
        Path(out).write_text("".join(f'{{"step s": {len(starts)}.0}}\n' for _ in done))
        if is_first:
            raise RunError("rank 1 hangs at 1RECV_F0")

    monkeypatch.setattr(two, "start_ranks", start_ranks)
    machine = two.Machine("cpu", 2, True, [DESCRIBED])
    results = list(machine._in_ranks("steps", {"a": {}, "b": {}, "c": {}}, {"c: step s": [3.0]}))
    assert starts == [["a", "b", "c"], ["c"]]
    assert results == [
        ("a: step s", [], 1.0),
        "b FAILED: rank 1 hangs at 1RECV_F0",
        ("c: step s", [3.0], 2.0),
    ]


def test_the_log_of_nccl_becomes_a_line() -> None:
    log = """host:1:2 [0] NCCL INFO NCCL version 2.29.7+cuda13.0
host:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
host:1:2 [0] NCCL INFO Channel 01/1 : 1[1] -> 0[0] [send] via NET/IB/0
host:1:2 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM
host:1:2 [0] NCCL INFO 24 coll channels, 0 collnet channels, 0 nvls channels, 32 p2p channels, 2 p2p channels per peer
host:1:2 [0] misc.cc:1 NCCL WARN Error while creating shared memory segment
"""
    assert two.nccl_summary(log) == (
        "NCCL version 2.29.7+cuda13.0; 2 p2p channels per peer; NCCL WARN Error while creating shared memory segment; "
        "2 channels via P2P/CUMEM; 1 channels via NET/IB/0"
    )
