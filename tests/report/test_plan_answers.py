"""The answer of `plan`: a table that names every degree, what its marks mean, and like stages in one row."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from stagewright.cluster import load_cluster
from stagewright.planning.estimate import estimate
from stagewright.planning.job import Job
from stagewright.planning.plan import Plan, StagePolicy
from stagewright.planning.predictions import Predictions
from stagewright.report.configurations import configurations_table, legend
from stagewright.report.plans import host_memory_line, job_heading, tight_warnings
from stagewright.report.saved_values import saving_summary
from stagewright.report.tables import Table
from stagewright.tracing.models.lora import Lora

CLUSTER = load_cluster("2x4x-h100")
JOB = Job(global_batch=16, sequence_length=64, dtype="bf16")
GIB = 2**30


@pytest.fixture(scope="module")
def plan() -> Plan:
    return estimate("tiny-llama", CLUSTER, JOB, pp=2, tp=2, dp=2, zero=3, schedule="interleaved-1f1b")


def changed(plan: Plan, predictions: dict[str, Any], **update: Any) -> Plan:
    return plan.model_copy(update={"predictions": plan.predictions.model_copy(update=predictions), **update})


def on_rank_0(plan: Plan, **update: Any) -> dict[str, Any]:
    first, *others = plan.predictions.ranks
    return {"ranks": (first.model_copy(update=update), *others)}


def text_of(table: Table) -> list[str]:
    console = Console(width=200, file=io.StringIO())
    console.print(table)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def cells(table: Table) -> dict[str, tuple[str, ...]]:
    return {" ".join(column.heading.split()): column.cells for column in table.columns}


def test_every_degree_has_a_column(plan: Plan) -> None:
    table = configurations_table([plan, plan.model_copy(update={"loss_pieces": 4, "host_optimizer": (0,)})])
    shown = cells(table)
    assert shown["schedule"] == ("interleaved-1f1b x2", "interleaved-1f1b x2 +L +H")
    assert {name: shown[name][0] for name in ("tp", "pp", "dp", "zero")} == {
        "tp": "2", "pp": "2", "dp": "2", "zero": "3",
    }  # fmt: skip
    assert "cp" not in shown and "ep" not in shown and "recompute" not in shown
    assert shown["micro- batches x size"] == ("8 x 1", "8 x 1")
    assert max(map(len, text_of(table))) <= 100
    other = plan.model_copy(update={"cp": 2, "job": JOB.model_copy(update={"runtime": "megatron-core+te"})})
    assert cells(configurations_table([other]))["cp"] == ("2",)


def test_marks_and_ties_are_explained_where_there_are_any(plan: Plan) -> None:
    step_s = plan.predictions.step_seconds
    slower = changed(plan, {"step_seconds": 1.2 * step_s})
    assert legend([plan, slower]) == []
    policies = (StagePolicy(recompute=("a:1",)), *plan.memory_policy[1:])
    marked = changed(
        slower, on_rank_0(slower, host_bytes=3 * GIB), memory_policy=policies, host_optimizer=(0,)
    )
    (line,) = legend([plan, marked])
    assert line.startswith(
        "+R recomputes activations; +H keeps optimizer state and step on the host (12.00 GiB"
    )
    assert "+L" not in line and "+O" not in line
    (tie,) = legend([plan, changed(plan, {"step_seconds": 1.004 * step_s})])
    assert tie.startswith("Plans within 0.5% count as equally fast; the simplest")


def test_memory_of_hosts_is_counted_per_node(plan: Plan) -> None:
    """A pipeline rank is four devices, which are a node."""
    assert host_memory_line(plan) is None and plan.host_bytes(CLUSTER) == 0
    on_host = changed(plan, on_rank_0(plan, host_bytes=2 * GIB, offloaded_bytes=GIB), host_optimizer=(0,))
    assert on_host.host_bytes(CLUSTER) == 4 * 3 * GIB
    assert host_memory_line(on_host) == "Host memory: 12.00 GiB per node for optimizer state."
    scattered = on_host.model_copy(update={"devices": (0, 1, 4, 5, 2, 3, 6, 7)})
    assert scattered.host_bytes(CLUSTER) == 2 * 3 * GIB


def test_little_headroom_is_a_warning(plan: Plan) -> None:
    assert tight_warnings(plan) == []
    usable, *_ = plan.usable_bytes(CLUSTER)
    full = changed(plan, on_rank_0(plan, reserved_peak_bytes=usable - GIB))
    (warning,) = tight_warnings(full)
    assert warning.startswith("rank 0 has only 1.00 GiB of ") and "--memory-limit" in warning
    limited = JOB.model_copy(update={"memory_limit": usable})
    assert tight_warnings(full.model_copy(update={"job": limited})) == []
    over = changed(plan, on_rank_0(plan, reserved_peak_bytes=usable + GIB))
    assert tight_warnings(over) == []


def test_the_heading_names_adapters_precision_and_runtime(plan: Plan) -> None:
    adapted = plan.model_copy(
        update={"model": plan.model.model_copy(update={"lora": Lora(rank=8, alpha=16)})}
    )
    assert job_heading(adapted) == (
        "tiny-llama on 2x4x-h100: 16 samples of 64 tokens per step, bf16, adamw, LoRA of rank 8, runtime stagewright"
    )


def _recomputing(plan: Plan, num_stages: int, num_operators: list[int]) -> Plan:
    """`plan` with so many stages on one rank, of sizes `num_operators` in turn, each of which recomputes another amount."""
    stage = plan.predictions.stages[0]
    stages = tuple(
        stage.model_copy(
            update={
                "start": 0, "stop": num_operators[index % len(num_operators)],
                "recomputed_bytes": (1 + index) * 2**20, "recompute_seconds": 1e-3 * (1 + index),
            }
        )
        for index in range(num_stages)
    )  # fmt: skip
    policies = tuple(
        StagePolicy(recompute=(f"net.layers.{index}.mlp:1", f"net.layers.{index}.norm:{index}"))
        for index in range(num_stages)
    )
    predictions: Predictions = plan.predictions.model_copy(update={"stages": stages})
    return plan.model_copy(
        update={"predictions": predictions, "memory_policy": policies, "placement": (0,) * num_stages}
    )


def test_equal_layers_share_a_row_whatever_each_recomputes(plan: Plan) -> None:
    assert saving_summary(plan) == []
    (table,) = saving_summary(_recomputing(plan, 80, [10]))
    shown = cells(table)
    assert shown["stages"] == ("0-79",) and shown["modules"] == ("mlp, norm",)
    assert shown["recomputed"] == ("1.00-80.0",) and shown["takes"] == ("up to 80.0 ms",)


def test_many_kinds_of_stages_are_a_few_rows(plan: Plan) -> None:
    (table,) = saving_summary(_recomputing(plan, 80, list(range(1, 21))))
    assert len(table.columns[0].cells) == 8 and "(12 more: --details)" in table.title
    assert all(len(stages.split(",")) <= 4 for stages in table.columns[0].cells)
    assert max(map(len, text_of(table))) <= 100
