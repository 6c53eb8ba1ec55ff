"""Plans as options of Megatron-LM: what every option must say."""

from __future__ import annotations

import shlex
from functools import cache
from typing import Any

import pytest
from option_table import table

from stagewright.cluster import load_cluster
from stagewright.export.megatron import megatron_options, shell_lines
from stagewright.planning.estimate import estimate
from stagewright.planning.job import Job
from stagewright.planning.plan import Plan
from stagewright.tracing.models.reference import resolve

JOB = Job(global_batch=64, sequence_length=512, runtime="megatron-core+te")
SMALL = {"num_hidden_layers": 8, "hidden_size": 1024, "intermediate_size": 2048, "vocab_size": 8192}


@cache
def plan(**widths: Any) -> Plan:
    reference = resolve("llama-3-8b", SMALL)
    options: Any = {"zero": 1, "sequence_parallel": True} | widths
    return estimate(reference, load_cluster("2x8x-h100"), JOB, **{"tp": 2, "pp": 4, "dp": 2} | options)


def options(one: Plan) -> dict[str, str]:
    return table(shlex.split(shell_lines(megatron_options(one)).replace("\\\n", " ")))


def test_widths_and_batch_are_the_plan_s() -> None:
    given = options(plan())
    assert given["--tensor-model-parallel-size"] == "2" and "--sequence-parallel" in given
    assert given["--pipeline-model-parallel-size"] == "4"
    assert given["--micro-batch-size"] == "1"
    assert (given["--global-batch-size"], given["--seq-length"], given["--bf16"]) == ("64", "512", "")
    assert "--use-distributed-optimizer" in given
    assert not any("moe" in name or "expert" in name for name in given)


def test_chunks_of_equal_stages_are_numbered_and_others_drawn() -> None:
    equal = plan(schedule="interleaved-1f1b", chunks=2)
    assert options(equal)["--num-virtual-stages-per-pipeline-rank"] == "2"
    given = options(plan(layers_per_stage=(1, 3, 3, 1)))
    assert given["--pipeline-model-parallel-layout"] == "Et|(t*3|)*2tL"
    assert "--num-virtual-stages-per-pipeline-rank" not in given
    ends = options(plan(layers_per_stage=(0, 4, 4, 0)))
    assert ends["--pipeline-model-parallel-layout"] == "E|(t*4|)*2L"


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_recomputation_is_named(recompute: str) -> None:
    given = options(plan(recompute=recompute))
    assert given.get("--recompute-granularity") == (None if recompute == "none" else recompute)


def test_experts_are_spread_as_the_plan_says() -> None:
    given = options(
        estimate(
            "tiny-mixtral",
            load_cluster("8x-h100"),
            JOB,
            tp=2,
            pp=1,
            dp=4,
            ep=4,
            sequence_parallel=True,
            zero=1,
        )
    )
    assert (given["--expert-model-parallel-size"], given["--expert-tensor-parallel-size"]) == ("4", "1")
    assert given["--moe-token-dispatcher-type"] == "alltoall"


def test_other_runtimes_have_no_options_of_megatron() -> None:
    job = Job(global_batch=8, sequence_length=64)
    assert megatron_options(estimate("tiny-llama", load_cluster("8x-h100"), job, dp=8)) == ()
