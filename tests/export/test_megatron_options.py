"""Configurations as options of Megatron-LM: what every option must say."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest

from stagewright.cluster import load_cluster
from stagewright.estimation.megatron import Shape, shape_of
from stagewright.export.megatron import megatron_options, shell_lines
from stagewright.planning.configure.configuration import Configuration
from stagewright.planning.configure.search import configure
from stagewright.planning.configure.space import Bounds
from stagewright.planning.job import Job
from stagewright.tracing.models.reference import resolve

JOB = Job(global_batch=64, sequence_length=4096, dtype="bf16")
STACK = "megatron-core+te"


def found(name: str, bounds: Bounds, stack: str = STACK) -> tuple[Configuration, Shape]:
    config = resolve(name).config
    assert config is not None
    shape = shape_of(config)
    made = configure(shape, load_cluster("2x8x-h100"), JOB, stack=stack, bounds=bounds, keep=1)
    return made.configurations[0], shape


def options(one: Configuration, shape: Shape, stack: str = STACK) -> dict[str, str]:
    words = shlex.split(shell_lines(megatron_options(one, shape, JOB, stack)).replace("\\\n", " "))
    found: dict[str, str] = {}
    last = ""
    for word in words:
        if word.startswith("--"):
            found[word] = ""
            last = word
        else:
            found[last] = word
    return found


@pytest.fixture(scope="module")
def dense() -> tuple[Configuration, Shape]:
    return found("llama-3-8b", Bounds(tp=2, cp=1, pp=4))


def test_widths_and_batch_are_the_configuration_s(dense: tuple[Configuration, Shape]) -> None:
    given, layout = options(*dense), dense[0].layout
    assert given["--tensor-model-parallel-size"] == "2" and "--sequence-parallel" in given
    assert given["--pipeline-model-parallel-size"] == "4"
    assert given["--micro-batch-size"] == str(layout.microbatch_size)
    assert (given["--global-batch-size"], given["--seq-length"], given["--bf16"]) == ("64", "4096", "")
    assert ("--use-distributed-optimizer" in given) == layout.shards_optimizer
    assert not any("moe" in name or "expert" in name for name in given)


def test_chunks_of_equal_stages_are_numbered_and_others_drawn(dense: tuple[Configuration, Shape]) -> None:
    one, shape = dense
    equal = replace(one, layout=replace(one.layout, num_chunks=2, layers_per_stage=None))
    assert options(equal, shape)["--num-virtual-stages-per-pipeline-rank"] == "2"
    uneven = replace(one, layout=replace(one.layout, num_chunks=1, layers_per_stage=(7, 9, 9, 7)))
    given = options(uneven, shape)
    assert given["--pipeline-model-parallel-layout"] == "Et*7|(t*9|)*2t*7L"
    assert "--num-virtual-stages-per-pipeline-rank" not in given


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_recomputation_is_named(dense: tuple[Configuration, Shape], recompute: str) -> None:
    one, shape = dense
    given = options(replace(one, layout=replace(one.layout, recompute=recompute)), shape)  # type: ignore[arg-type]
    assert given.get("--recompute-granularity") == (None if recompute == "none" else recompute)


@pytest.mark.parametrize(("stack", "dispatcher"), [(STACK, "alltoall"), (f"{STACK}+deepep", "flex")])
def test_experts_are_spread_over_tensor_and_expert_widths(stack: str, dispatcher: str) -> None:
    one, shape = found("qwen3-30b-a3b", Bounds(tp=2, cp=1, pp=1, ep=4), stack)
    given = options(one, shape, stack)
    assert (given["--expert-model-parallel-size"], given["--expert-tensor-parallel-size"]) == ("8", "1")
    assert given["--moe-token-dispatcher-type"] == dispatcher
    assert ("--moe-enable-deepep" in given) == (dispatcher == "flex")
