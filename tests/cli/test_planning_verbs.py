"""The verbs that plan: tables, documents, files, and what they refuse; on one small model."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from stagewright.cli import estimate as estimating
from stagewright.cli.app import app
from stagewright.cluster import load_cluster, save_cluster
from stagewright.documents import read_sealed_json
from stagewright.planning.plan import Plan, load_plan

JOB = ("--global-batch", "8", "--sequence-length", "64", "--dtype", "fp32")
MODEL = ("tiny-llama", "--set", "num_hidden_layers=2")
CLUSTER = ("--cluster", "2x-rtx3090")


def call(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def document(*words: object) -> dict:
    done = call(*words, "--json")
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plans")


@pytest.fixture(scope="module")
def planned(folder: Path) -> dict:
    return document("plan", *MODEL, *CLUSTER, *JOB, "-o", folder / "plan.json", "--top", "2")


def test_a_host_that_falls_behind_is_told_with_what_would_help() -> None:
    words = ("estimate", *MODEL, *CLUSTER, *JOB, "--pp", "2")
    found = document(*words)
    told = f"Host-bound: for {found['host_bound_fraction']:.0%} of the step devices wait for the host"
    lines = call(*words).stdout
    assert 0.02 < found["host_bound_fraction"] < 1 and told in lines and "--compiled" in lines
    fused = call(
        *words, "--dtype", "bf16", "--runtime", "megatron-core+te"
    ).stdout  # which refuses --compiled
    assert "Host-bound" in fused and "CUDA graphs" in fused and "--compiled" not in fused
    slow = call(
        "estimate", "llama-3-8b", "--cluster", "8x-h100", "--sequence-length", "8192", "--global-batch", "8"
    )
    assert slow.exit_code == 0 and "Host-bound" not in slow.stdout


def test_the_plan_document_is_sorted_and_its_files_are_plans(planned: dict, folder: Path) -> None:
    plans = planned["plans"]
    assert [plan["path"] for plan in plans] == [str(folder / "plan.json"), str(folder / "plan-2.json")]
    assert plans[0]["step_seconds"] <= 1.005 * plans[1]["step_seconds"]
    for plan in plans:
        loaded = load_plan(plan["path"])
        assert plan["lower_bound_seconds"] <= plan["step_seconds"] == loaded.predictions.step_seconds
        assert plan["dp"] * plan["num_microbatches"] * plan["microbatch_size"] == 8
        assert plan["dp"] * plan["tp"] * plan["pp"] == 2
        assert plan["reserved_peak_bytes"] >= plan["allocated_peak_bytes"] > 0
        assert plan["num_stages"] == loaded.num_stages and plan["schedule"] in ("1f1b", "gpipe", "joint")


def test_configurations_that_do_not_fit_are_listed_with_the_reason(planned: dict) -> None:
    least = min(plan["reserved_peak_bytes"] for plan in planned["plans"])
    found = document("plan", *MODEL, *CLUSTER, *JOB, "--memory-limit", least)
    assert all(plan["reserved_peak_bytes"] <= least for plan in found["plans"])
    assert any("memory" in one["reason"] and (one["missing_bytes"] or 0) > 0 for one in found["excluded"])


def test_details_have_a_row_per_stage_and_the_peaks_of_ranks() -> None:
    words = ("plan", *MODEL, *CLUSTER, *JOB, "--recompute", "full", "--schedule", "1f1b")
    brief, whole = (call(*words, *more).stdout for more in ((), ("--details",)))
    assert "Recomputed or offloaded, per stage" in brief and "Memory at the peak of every rank" not in brief
    assert "Memory at the peak of every rank" in whole and "what enters each layer is kept" in whole
    assert len(brief.splitlines()) < len(whole.splitlines())


def test_dollars_are_at_a_list_price_that_is_named(planned: dict) -> None:
    words = ("plan", *MODEL, *CLUSTER, *JOB, "--tokens", "1e9", "--pp", "2", "--schedule", "1f1b")
    (size,) = document(*words)["sizes"]
    lines = " ".join(call(*words).stdout.split())
    assert (
        "Dollars at 0.18 per rtx3090 and hour, on-demand: OpenRelay" in lines
        and "list of 2026-09-20" in lines
    )
    assert document(*words)["prices"]["rtx3090"]["dollars"] == 0.18
    (own,) = document(*words, "--price", "1.8")["sizes"]
    assert own["dollars"] == pytest.approx(10 * size["dollars"])
    assert "did you mean 'spot'" in call(*words, "--price", "spt").stderr


def test_without_a_number_only_the_best_plan_is_written(planned: dict, tmp_path: Path) -> None:
    found = document("plan", *MODEL, *CLUSTER, *JOB, "-o", tmp_path / "best.json")
    assert [plan["path"] for plan in found["plans"][:2]] == [str(tmp_path / "best.json"), None]
    assert [file.name for file in tmp_path.iterdir()] == ["best.json"]


def test_the_plan_table_has_one_row_per_plan(planned: dict) -> None:
    words = "--pp", "2", "--microbatch", "1", "--schedule", "1f1b", "--schedule", "gpipe", "--top", "2"
    shown = call("plan", *MODEL, *CLUSTER, *JOB, *words).stdout
    rows = [line.split() for line in shown.splitlines() if " x 1 " in line]
    assert [row[1:3] for row in rows] == [["2", "1"]] * 2
    assert "tiny-llama on 2x-rtx3090" in shown


def test_an_estimate_of_a_plan_repeats_its_predictions(planned: dict, folder: Path) -> None:
    found = document("estimate", folder / "plan.json")
    assert found["step_seconds"] == pytest.approx(planned["plans"][0]["step_seconds"])
    for rank in found["ranks"]:
        assert sum(rank["categories"].values()) == rank["allocated_peak_bytes"]


def test_an_estimate_of_a_plan_refuses_what_it_would_ignore(planned: dict, folder: Path) -> None:
    done = call("estimate", folder / "plan.json", "--pp", "4")
    assert done.exit_code == 2
    assert "leave out --pp" in done.stderr


def test_an_estimate_of_a_model_takes_one_configuration(planned: dict) -> None:
    found = document("estimate", *MODEL, *CLUSTER, *JOB, "--pp", "2", "--schedule", "gpipe")
    assert (found["pp"], found["dp"], found["schedule"]) == (2, 1, "gpipe")
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    assert "Memory at the peak" in call("estimate", *MODEL, *CLUSTER, *JOB, "--pp", "2").stdout


def test_configurations_of_a_file_are_estimated_line_by_line(planned: dict, tmp_path: Path) -> None:
    path = tmp_path / "configurations.jsonl"
    path.write_text('{"pp": 2}\n\n{"pp": 2, "schedule": "gpipe"}\n{"pq": 2}\n[2]\nnot json\n{"dp": 64}\n')
    words = ("estimate", *MODEL, *CLUSTER, *JOB, "--microbatch", "1", "--configurations", path)
    done = call(*words)
    assert done.exit_code == 1 and not done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["line"] for line in lines] == [1, 3, 4, 5, 6, 7]
    for line, schedule in zip(lines, ("1f1b", "gpipe"), strict=False):
        alone = document(
            "estimate", *MODEL, *CLUSTER, *JOB, "--microbatch", "1", "--pp", "2", "--schedule", schedule
        )
        assert {"line": line["line"], **alone} == {
            **line,
            "compared_with_model": alone["compared_with_model"],
        }
    errors = [line["error"] for line in lines[2:]]
    assert "no 'pq'" in errors[0] and "no JSON object" in errors[1]
    assert "line 6 of" in errors[2] and "does not fit" in errors[3]
    path.write_text('{"pp": 2}\n')
    assert call(*words).exit_code == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that start as copies")
def test_configurations_of_a_file_are_the_same_from_several_processes(
    planned: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "configurations.jsonl"
    sizes = [{"pp": pp, "microbatch": microbatch} for pp in (1, 2) for microbatch in (1, 2, 4, 3)]
    path.write_text("".join(json.dumps(size) + "\n" for size in [{"pp": 2}, *sizes]))
    words = ("estimate", *MODEL, *CLUSTER, *JOB, "--configurations", path)
    printed = []
    for num_more in (0, 1):
        monkeypatch.setattr(estimating, "num_more_processes", lambda num=num_more: num)
        printed.append(call(*words))
    assert printed[0].stdout == printed[1].stdout and len(printed[1].stdout.splitlines()) == 9
    assert [done.exit_code for done in printed] == [1, 1]  # of microbatches that do not divide the batch


def test_an_estimate_of_a_model_knows_recomputation_and_sharding() -> None:
    words = ("estimate", *MODEL, *CLUSTER, *JOB, "--pp", "1", "--dp", "2")
    plain, sharded = document(*words)["ranks"][0], document(*words, "--zero", "3")["ranks"][0]
    assert sharded["categories"]["optimizer"] == pytest.approx(plain["categories"]["optimizer"] / 2, rel=0.01)
    words = ("estimate", *MODEL, *CLUSTER, *JOB, "--pp", "2")
    kept, recomputed = document(*words)["ranks"][0], document(*words, "--recompute", "full")["ranks"][0]
    assert recomputed["allocated_peak_bytes"] < kept["allocated_peak_bytes"]


def test_a_simulated_plan_is_the_program_of_the_plan(planned: dict, folder: Path) -> None:
    plan = load_plan(folder / "plan.json")
    found = document("simulate", folder / "plan.json")
    assert found["program"] == [list(actions) for actions in plan.program]
    assert found["bubble_fraction"] == pytest.approx(plan.predictions.bubble_fraction)
    assert found["makespan_seconds"] <= plan.predictions.step_seconds
    assert [r["peak_bytes"] for r in found["ranks"]] == [
        r.allocated_peak_bytes for r in plan.predictions.ranks
    ]
    assert "rank 0 " in call("simulate", folder / "plan.json").stdout


def test_a_good_plan_passes_every_check(planned: dict, folder: Path) -> None:
    found = document("check", folder / "plan.json")
    assert found["passed"]
    assert [one["check"] for one in found["checks"]][-2:] == ["transfers", "memory"]


def test_a_plan_for_a_cluster_of_ones_own_needs_no_cluster_file(planned: dict, tmp_path: Path) -> None:
    cluster = load_cluster("2x-rtx3090", {"name": "attic", "device.memory_bytes": "20GiB"})
    save_cluster(cluster, tmp_path / "attic.toml", "made up")
    words = ("--cluster", tmp_path / "attic.toml", *JOB, "--pp", 2, "--microbatch", 4)
    (best, *_) = document("plan", *MODEL, *words, "-o", tmp_path / "plan.json")["plans"]
    (tmp_path / "attic.toml").unlink()
    assert document("check", tmp_path / "plan.json")["passed"]
    assert document("simulate", tmp_path / "plan.json")["makespan_seconds"] <= best["step_seconds"]
    assert document("estimate", tmp_path / "plan.json")["step_seconds"] == best["step_seconds"]
    other = document("estimate", tmp_path / "plan.json", "--cluster", "2x-h100")
    assert other["step_seconds"] != best["step_seconds"]


def changed(folder: Path, name: str, **keys: object) -> Path:
    found = read_sealed_json(folder / "plan.json", "plan")
    path = folder / name
    path.write_text(json.dumps({**found, **keys}))
    return path


def test_a_plan_that_would_hang_or_not_fit_is_refused(planned: dict, folder: Path) -> None:
    plan: Plan = load_plan(folder / "plan.json")
    reversed_program = [list(reversed(actions)) for actions in plan.program]
    tight = plan.job.model_copy(update={"memory_limit": 10**6}).model_dump(mode="json")
    cases = {
        "order": ({"program": reversed_program}, "needs the"),
        "twice": ({"program": [[*actions, actions[0]] for actions in plan.program]}, "occurs 2 times"),
        "cut": (
            {"cuts": ["net.model.layers.7:0"] * (plan.num_stages - 1), "pp": plan.pp},
            "which the traced",
        ),
        "memory": ({"job": tight}, "more than it may use"),
        "batch": ({"num_microbatches": 3}, "global_batch"),
        "key": ({"schedul": "1f1b"}, "did you mean 'schedule'?"),
    }
    for name, (keys, message) in cases.items():
        if name == "cut" and plan.num_stages == 1:
            continue
        done = call("check", changed(folder, f"{name}.json", **keys))
        assert done.exit_code == 2, (name, done.stdout, done.stderr)
        assert message in done.stderr, (name, done.stderr)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("plan", *MODEL, "--cluster", "8x-h10", *JOB), "did you mean 'h100'?"),
        (("plan", *MODEL, *CLUSTER), "give --global-batch and --sequence-length"),
        (("plan", *MODEL, *CLUSTER, *JOB, "--memory-limit", "1 GBB"), "not an amount of memory"),
        (("plan", *MODEL, *CLUSTER, *JOB, "--memory-limit", "1MiB"), "no configuration fits"),
        (("plan", *MODEL, *CLUSTER, *JOB, "--pp", "3"), "does not divide the 2 devices"),
        (("plan", *MODEL, *CLUSTER, *JOB, "--schedule", "1fb1"), "did you mean '1f1b'?"),
        (("plan", *MODEL, *CLUSTER, *JOB, "-o", "no/such/plan.json"), "there is no folder"),
        (("plan", *MODEL, *CLUSTER, "--job", "no.toml"), "job file 'no.toml' cannot be read"),
        (("plan", *MODEL, "--cluster", "512x-h100", "--pp", "512", *JOB), "512 stages need 511 cuts"),
        (("plan", *MODEL, *CLUSTER, *JOB, "--objective", "costs"), "did you mean 'cost'?"),
        (
            ("plan", *MODEL, *CLUSTER, *JOB, "--sequence-lengths", "32,six"),
            "--sequence-lengths 32,six: give numbers",
        ),
        (("estimate", *MODEL, *JOB), "give --cluster"),
        (("estimate", *MODEL, *CLUSTER, *JOB, "--recompute", "ful"), "did you mean 'full'?"),
        (("estimate", *MODEL, *CLUSTER, *JOB, "--runtime", "torch-eagr"), "did you mean 'torch-eager'?"),
        (("run", "no.json"), "plan 'no.json' cannot be read"),
        (("simulate", __file__), "is not valid JSON"),
    ],
)
def test_bad_input_is_one_message(words: tuple[str, ...], message: str, planned: dict) -> None:
    done = call(*words)
    assert done.exit_code == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_documents_of_other_verbs_are_told_apart(tmp_path: Path, planned: dict) -> None:
    path = tmp_path / "program.json"
    path.write_text('{"name": "x", "num_microbatches": 1, "rank_of_stage": [0], "ranks": [["0F0", "0B0"]]}')
    assert "is a program, without a model: `stagewright schedule" in call("simulate", path).stderr
    plan = planned["plans"][0]["path"]
    assert "is a plan: the record of its run is" in call("compare", plan, plan).stderr
    assert "cannot be read (No such file or directory)" in call("compare", plan, "no.json").stderr


def test_a_wrong_key_of_a_job_is_named(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("global_batchh = 8\nsequence_length = 64\n")
    done = call("plan", *MODEL, *CLUSTER, "--job", path)
    assert done.exit_code == 2
    assert "did you mean 'global_batch'?" in done.stderr


def test_several_lengths_are_planned_for_and_shown(planned: dict, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    small = ("--microbatch", 2, "--pp", 2, "--schedule", "1f1b", "--dtype", "fp32")
    words = ("plan", *MODEL, *CLUSTER, "--global-batch", 8, *small)
    shown = call(*words, "--sequence-lengths", "32,64,32", "-o", file).stdout
    assert "8 samples of 32, 64 tokens" in shown and "mean" in shown and "By length" in shown
    known = document("estimate", file)
    assert [(row["sequence_length"], row["share"]) for row in known["lengths"]] == [(32, 2 / 3), (64, 1 / 3)]
    assert known["step_seconds"] == known["lengths"][1]["step_seconds"] >= known["mean_step_seconds"]
    assert "step of 64 tokens" in call("estimate", file).stdout
    job = tmp_path / "job.toml"
    job.write_text('global_batch = 8\ndtype = "fp32"\nsequence_lengths = [32, 64]\n')
    asked = ("estimate", *MODEL, *CLUSTER, "--microbatch", 2, "--job", job)
    assert [row["sequence_length"] for row in document(*asked)["lengths"]] == [32, 64]
    assert document(*asked, "--sequence-length", 64)["lengths"] == []
    job.write_text("global_batch = 8\nsequence_lengths = [32, 64]\n")
    refused = call(
        "plan", "llama-3-8b", "--runtime", "megatron-core+te", "--cluster", "8x-h100", "--job", job
    )
    assert refused.exit_code == 2 and "supports one length only" in refused.stderr


def test_a_missing_data_file_stops_a_run_before_it_starts(planned: dict, folder: Path) -> None:
    done = call("run", folder / "plan.json", "--data", "no.txt")
    assert done.exit_code == 2
    assert "data file 'no.txt' cannot be read" in done.stderr


def test_plans_are_found_for_other_runtimes(folder: Path) -> None:
    asked = ("tiny-llama", "--cluster", "4x-h100", "--global-batch", 8, "--sequence-length", 64, "--tp", 2)
    path = folder / "elsewhere.json"
    done = call("plan", *asked, "--runtime", "megatron-core+te", "--microbatch", 1, "-o", path)
    text = " ".join(done.stdout.split())  # a long path breaks the line elsewhere
    assert done.exit_code == 0
    assert "it is for megatron-core+te: `stagewright run` cannot execute it" in text
    plan = json.loads(path.read_text())
    assert (plan["tp"], plan["job"]["runtime"]) == (2, "megatron-core+te")
    known = document("estimate", path)
    assert known["step_seconds"] == pytest.approx(plan["predictions"]["step_seconds"])
    refused = call("run", path)
    assert refused.exit_code == 2 and "Stagewright does not run" in " ".join(refused.stderr.split())


def test_a_plan_that_predicts_nothing_of_its_ranks_is_checked_without(planned: dict, folder: Path) -> None:
    predictions = json.loads((folder / "plan.json").read_text())["predictions"]
    silent = changed(folder, "silent.json", predictions={**predictions, "ranks": []})
    assert call("check", silent).exit_code == 0
    half = changed(folder, "half.json", predictions={**predictions, "ranks": predictions["ranks"] * 2})
    done = call("check", half)
    assert done.exit_code == 2 and "predictions.ranks has" in done.stderr
