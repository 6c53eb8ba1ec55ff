"""Configurations as requests: what is left open follows, and values that cannot be are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from stagewright.cluster import load_cluster
from stagewright.errors import InputError
from stagewright.planning.configuration import Configuration
from stagewright.planning.job import Job

CLUSTER, JOB = load_cluster("8x-h100"), Job(global_batch=16, sequence_length=8)


@pytest.mark.parametrize(
    ("request_", "degrees"),
    [
        ({}, (1, 8, 16)),
        ({"pp": 2}, (4, 2, 4)),
        ({"dp": 2}, (2, 4, 8)),
        ({"tp": 2, "cp": 2, "pp": 1, "microbatch": 2}, (2, 1, 4)),
    ],
)
def test_what_a_request_leaves_open_follows(request_: dict[str, Any], degrees: tuple[int, int, int]) -> None:
    completed = Configuration.of(**request_).completed(CLUSTER, JOB)
    assert (completed.dp, completed.pp, completed.num_microbatches) == degrees


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("ppp", 2, "has no 'ppp' \\(did you mean 'pp'\\?\\)"),
        ("num_microbatches", 2, "has no 'num_microbatches'"),
        ("host_optimizer", True, "has no 'host_optimizer'"),
        ("pp", 0, "pp = 0: give a whole number of at least 1"),
        ("tp", "2", "tp = '2': give a whole number"),
        ("zero", 7, "zero = 7: give one of 0, 1, 2, 3"),
        ("zero", True, "zero = True: give one of"),
        ("recompute", "some", "recompute = 'some': give one of none, full"),
        ("reduce_dtype", "fp16", "reduce_dtype = 'fp16': give one of fp32, bf16"),
        ("layers_per_stage", [3, -1], "layers_per_stage = \\[3, -1\\]: give a list"),
        ("loss_pieces", -1, "loss_pieces = -1: give a whole number"),
        ("sequence_parallel", 1, "sequence_parallel = 1: give true or false"),
        ("program", "1f1b", "program = '1f1b': give a Program"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(name: str, value: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Configuration.of(**{name: value})
