"""`stagewright plan` for other runtimes, and for what a training run costs, on small jobs."""

from __future__ import annotations

import json
import re
from pathlib import Path

from typer.testing import CliRunner

from stagewright.cli.app import app

JOB = [
    "--cluster", "16x-h100", "--global-batch", "16", "--sequence-length", "4096", "--microbatch", "1", "--cp", "1",
    "--runtime", "megatron-core+te",
]  # fmt: skip


def test_the_document_has_configurations_reasons_and_places(tmp_path: Path) -> None:
    ranks = tmp_path / "ranks.csv"
    done = CliRunner().invoke(app, ["plan", "llama-3-8b", *JOB, "--json", "--ranks", str(ranks)])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    best = document["plans"][0]
    assert best["tp"] * best["pp"] * best["dp"] == 16
    assert best["lower_bound_seconds"] <= best["step_seconds"]
    assert all(one["reason"] for one in document["excluded"])
    assert best["runtime"] == "megatron-core+te" and "sizes" not in document
    assert len(ranks.read_text().splitlines()) == 17


def test_the_tables_name_the_objective_s_sizes() -> None:
    done = CliRunner().invoke(app, ["plan", "llama-3-8b", *JOB, "--objective", "cost", "--price", "2"])
    assert done.exit_code == 0, done.output
    assert "dollars" in done.stdout and "ruled out" in done.stdout


def test_an_unknown_objective_and_a_factory_are_refused() -> None:
    done = CliRunner().invoke(app, ["plan", "llama-3-8b", *JOB, "--objective", "sped"])
    assert done.exit_code == 2


def test_mixed_devices_are_named_with_their_layers() -> None:
    job = ["--cluster", "8x-h100+8x-a100-80", *JOB[2:], "--pp", "2"]
    done = CliRunner().invoke(app, ["plan", "llama-3-8b", *job])
    assert done.exit_code == 0, done.output
    assert {"on h100, then", "on a100-80, then"} <= set(
        re.findall(r"on [\w-]+, then", " ".join(done.stdout.split()))
    )


def test_a_limit_beyond_the_device_is_warned_of() -> None:
    job = ["--cluster", "8x-h100", *JOB[2:], "--tp", "8", "--pp", "1"]
    done = CliRunner().invoke(app, ["plan", "llama-3-8b", *job, "--memory-limit", "200GiB"])
    assert done.exit_code == 0, done.output
    assert "more than the" in done.stderr and "do not run on it" in done.stderr


def test_nodes_of_other_sizes_with_the_same_device_are_no_mixture() -> None:
    job = [
        "--cluster",
        "8x-h100+4x-h100",
        "--global-batch",
        "24",
        "--sequence-length",
        "4096",
        *JOB[6:],
        "--tp",
        "1",
    ]
    done = CliRunner().invoke(app, ["plan", "llama-3-8b", *job])
    assert done.exit_code == 0, done.output
    assert "Layers of the stages" not in done.stdout


def test_what_is_found_for_our_own_runtime_passes_check(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    job = ["--cluster", "2x-h100", "--global-batch", "4", "--sequence-length", "64", "--tp", "1", "--cp", "1"]
    done = CliRunner().invoke(
        app,
        ["plan", "tiny-llama", *job, "--microbatch", "1", "-o", str(path)],
    )
    assert done.exit_code == 0, done.output
    assert "Options for Megatron-LM" not in done.stdout
    checked = CliRunner().invoke(app, ["check", str(path)])
    assert checked.exit_code == 0, checked.output
