"""Figures that nothing has are refused by name, wherever they come from, before anything is computed with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from stagewright.cli.app import app
from stagewright.cli.cost_table import read_cost_table
from stagewright.cluster import load_cluster
from stagewright.errors import InputError, ScheduleError, StagewrightError
from stagewright.planning.configuration import Configuration
from stagewright.planning.job import load_job
from stagewright.planning.search import plan
from stagewright.planning.space import Space, pipelines
from stagewright.schedule import Program, build
from stagewright.simulation.prediction import Assumptions
from stagewright.tracing.models.reference import bundled_names, resolve
from stagewright.units import parse_bytes

JOB = {"global_batch": 8, "sequence_length": 32}


def of_cluster(key: str, value: Any) -> Callable[[], object]:
    return lambda: load_cluster("8x-h100", {key: value})


def of_job(**changes: Any) -> Callable[[], object]:
    return lambda: load_job(None, {**JOB, **changes})


def of_model(**changes: Any) -> Callable[[], object]:
    return lambda: resolve("llama-3-8b", changes)


def of_text(rest: str) -> Callable[[], object]:
    return lambda: Program.from_text(f"program p\n{rest}")


IMPOSSIBLE: dict[str, tuple[Callable[[], object], str]] = {
    "devices of a name": (lambda: load_cluster(f"{2**63}x-h100"), "number of devices of '9223372036854775808x-h100'"),
    "digits of a name": (lambda: load_cluster("9" * 5000 + "x-h100"), "number of devices"),
    "devices of nodes": (lambda: load_cluster("1000000x1000000x-h100"), "number of devices"),
    "nodes of a file": (of_cluster("count", 2**63), "count = 9223372036854775808"),
    "nodes and devices": (of_cluster("count", 2**16), "524,288 devices are more than"),
    "bandwidth": (of_cluster("inter_node.bandwidth", 1e-300), "bandwidth = 1e-300"),
    "latency": (of_cluster("inter_node.latency_s", 5e-324), "latency_s = 5e-324: give seconds, 0 or from 1e-12"),
    "long latency": (of_cluster("inter_node.latency_s", 1e308), "latency_s = 1e\\+308: give seconds"),
    "memory": (of_cluster("device.memory_bytes", "1e400GiB"), "memory_bytes = '1e400GiB'"),
    "peak": (of_cluster("device.peak_flops.bf16", 1e308), "peak_flops.bf16 = 1e\\+308"),
    "efficiency": (of_cluster("device.memory_efficiency", 1e-300), "memory_efficiency = 1e-300"),
    "tokens": (of_job(sequence_length=10**12), "sequence_length = 1000000000000"),
    "tokens of one length": (of_job(sequence_lengths=[10**12], sequence_length=10**12), "sequence_lengths"),
    "samples": (of_job(global_batch=10**18), "global_batch = 1000000000000000000"),
    "seed": (of_job(seed=2**70), "seed"),
    "momentum": (of_job(betas=[1.5, -1]), r"betas\[0\] = 1.5"),
    "memory limit": (of_job(memory_limit="1e400GiB"), "memory_limit = '1e400GiB'"),
    "bytes": (lambda: parse_bytes("1e30"), "'1e30' = 1e\\+30: give bytes"),
    "ranks": (lambda: build("1f1b", 10**9, 8), "1,000,000,000 stages of 8 microbatches"),
    "microbatches": (lambda: build("1f1b", 4, 10**9), "4 stages of 1,000,000,000 microbatches"),
    "microbatches of a file": (of_text(f"microbatches {10**9}\nplacement 0\n0:"), "program 'p': 1 stages of 1,000,000,000"),
    "digits of an action": (of_text("microbatches 1\nplacement 0\n0: " + "9" * 5000 + "F0"), "not an action"),
    "layers": (of_model(num_hidden_layers=-3), "number of layers is -3"),
    "no layers": (of_model(num_hidden_layers=0), "number of layers is 0"),
    "many layers": (of_model(num_hidden_layers=10**6), "num_hidden_layers = 1000000"),
    "no vocabulary": (of_model(vocab_size=0), "vocab_size = 0: give a whole number from 1"),
    "a large vocabulary": (of_model(vocab_size=10**12), "vocab_size = 1000000000000"),
    "part of a column": (of_model(hidden_size=64.5), "hidden_size = 64.5"),
    "a switch of heads": (of_model(num_attention_heads=True), "num_attention_heads = True"),
    "a list of sizes": (of_model(intermediate_size=[128, -1]), "intermediate_size = -1"),
    "no finite size": (of_model(intermediate_size=float("inf")), "intermediate_size = inf"),
    "a nested size": (of_model(text_config={"hidden_size": 0}), "hidden_size = 0"),
    "experts": (of_model(num_local_experts=-8), "num_local_experts = -8"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "message"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_what_nothing_has_is_refused_by_name(make: Callable[[], object], message: str) -> None:
    with pytest.raises(StagewrightError, match=message):
        make()


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("5e-324", "forward_s = 5e-324: give seconds"),
        ("1e308", "forward_s = 1e\\+308: give seconds"),
        ("9" * 400, "forward_s"),
        ("nan", "forward_s = nan: give seconds"),
    ],
)
def test_costs_that_no_layer_has_are_refused_by_row(cell: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "costs.csv"
    path.write_text(f"layer,forward_s,input_grad_s,weight_grad_s\na,1,1,1\nb,{cell},1,1\n")
    with pytest.raises(InputError, match=f"row 2: {message}"):
        read_cost_table(path)


def test_a_batch_of_too_many_microbatches_is_refused_and_larger_ones_are_tried() -> None:
    job = load_job(None, {**JOB, "global_batch": 2**24})
    cluster, space = load_cluster("8x-h100"), Space(tp=1, pp=8, dp=1)
    assert next(pipelines(Configuration(microbatch=2**6), cluster, job, space, 8), None) is None
    assert next(pipelines(Configuration(microbatch=2**7), cluster, job, space, 8)).pp == 8
    with pytest.raises(InputError, match="a global batch of 16,777,216 in microbatches of 1 makes programs"):
        plan("tiny-llama", cluster, job, replace(space, microbatch=1))


def test_a_program_without_microbatches_is_refused() -> None:
    with pytest.raises(ScheduleError, match="at least one microbatch, not 0"):
        Program.from_text("program p\nmicrobatches 0\nplacement 0\n0:")


def test_legitimate_configurations_are_within_the_limits() -> None:
    for name in bundled_names():
        resolve(name)
    absent = {"num_key_value_heads": None, "pad_token_id": -1, "n_shared_experts": 0, "chunk_size": -1}
    resolve("llama-3-8b", {**absent, "tie_word_embeddings": True})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--set", "memory_limit=x"), "option memory_limit of zb-auto is a number of at least 0, not 'x'"),
        (("--set", "num_moves=-1"), "option num_moves of zb-auto is a number from 0"),
        (("--set", "by_span=1"), "option by_span of zb-auto is true or false, not '1'"),
        (("--set", "times=3"), "option times of zb-auto is an object"),
        (("--forward", "1e308"), "--forward = 1e+308: give seconds"),
        (("--transfer", "5e-324"), "--transfer = 5e-324: give seconds"),
    ],
)
def test_an_option_of_a_schedule_is_what_its_builder_takes(words: tuple[str, ...], message: str) -> None:
    done = CliRunner().invoke(app, ["schedule", "zb-auto", *words])
    assert done.exit_code == 2 and message in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--ranks", "1000000000"), "--ranks is 1,000,000,000, but must be from 1 to 16,384"),
        (("--microbatches", "1000000000"), "--microbatches is 1,000,000,000, but must be from 1 to 524,288"),
        (("--speeds", "1,1e308"), "--speeds 1,1e308: give 2 numbers"),
        (("--speeds", "1,nan"), "--speeds 1,nan: give 2 numbers"),
        (("--bandwidth", "1e-300"), "--bandwidth 1e-300: give at least 1 byte a second"),
        (("--seed", "-1"), "--seed"),
    ],
)
def test_what_no_plan_of_costs_has_is_refused_by_option(
    words: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    table = "layer,forward_s,input_grad_s,weight_grad_s,boundary_bytes\n" + "a,1,1,1,1\n" * 4
    (tmp_path / "costs.csv").write_text(table)
    given = ["plan-costs", str(tmp_path / "costs.csv"), "--ranks", "2", "--microbatches", "4", *words]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 2 and message in done.stderr


def test_what_is_planned_from_a_long_table_can_be_kept() -> None:
    assumed = {
        "num_layers": 2000, "bytes_per_second": None, "bandwidth": "none", "speeds": [1.0], "memory_limits": None,
    }  # fmt: skip
    assert Assumptions.model_validate(assumed).num_layers == 2000
