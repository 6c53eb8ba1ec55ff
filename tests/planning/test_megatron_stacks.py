"""Memory under Megatron's stacks: which jobs they take."""

from __future__ import annotations

import pytest

from stagewright.cluster import load_cluster
from stagewright.errors import InputError
from stagewright.estimation.megatron import Layout
from stagewright.estimation.megatron.fusion import timed_stack
from stagewright.planning.job import Job
from stagewright.planning.megatron import MegatronFootprint, megatron_footprint
from stagewright.tracing.models.reference import resolve


def footprint(dtype: str, stack: str = "megatron-core+te") -> MegatronFootprint:
    job = Job.model_validate({"global_batch": 8, "sequence_length": 1024, "dtype": dtype})
    return megatron_footprint(resolve("gpt2"), load_cluster("2x-v100-32"), job, Layout(1024, dp=2), stack)


def test_both_half_precisions_take_as_much() -> None:
    assert footprint("fp16").ranks == footprint("bf16").ranks


@pytest.mark.parametrize(("stack", "dtype"), [("megatron-core+te", "fp32"), ("deepspeed-tf32", "bf16")])
def test_other_precisions_are_refused(stack: str, dtype: str) -> None:
    with pytest.raises(
        InputError, match=f"'{stack}'.* trains in .*, not in {dtype}: give --dtype".replace("+", r"\+")
    ):
        footprint(dtype, stack)


@pytest.mark.parametrize("name", ["mist", "megatron-lm"])
def test_configure_takes_stacks_whose_memory_and_times_are_both_known(name: str) -> None:
    with pytest.raises(InputError, match=f"no times are known of stack '{name}'") as refused:
        timed_stack(name)
    assert name not in str(refused.value).partition("use one of")[2]
