"""The largest batch: it trains, the next one does not, and giving up saved values makes it larger."""

from __future__ import annotations

from typing import Any

import pytest

from stagewright.cluster import load_cluster
from stagewright.errors import InputError, PlanError
from stagewright.planning.job import Job
from stagewright.planning.objectives.batch import largest_batch
from stagewright.planning.plan import Plan
from stagewright.planning.search import plan
from stagewright.units import MIB

CLUSTER = load_cluster("2x-h100")
WIDTHS: dict[str, Any] = {"pp": 2, "schedules": ["1f1b"], "host_optimizer": "never"}


def job(limit: int, batch: int = 4) -> Job:
    return Job(global_batch=batch, sequence_length=16, dtype="fp32", memory_limit=limit)


def largest(limit: int, **options: Any) -> Plan:
    return largest_batch("tiny-llama", CLUSTER, job(limit), **WIDTHS, **options).plans[0]


def test_the_largest_batch_trains_and_a_larger_one_does_not() -> None:
    limit = 82 * MIB
    kept, found = largest(limit, recompute="none"), largest(limit)
    assert found.microbatch_size > kept.microbatch_size >= 1
    assert found.num_microbatches == 4 and found.job.global_batch == 4 * found.microbatch_size
    assert max(rank.reserved_peak_bytes for rank in found.predictions.ranks) <= limit
    larger = found.microbatch_size + max(1, found.microbatch_size // 3)
    with pytest.raises(PlanError, match="no configuration fits"):
        plan("tiny-llama", CLUSTER, job(limit, 4 * larger), microbatch=larger, **WIDTHS)


def test_tensor_widths_that_leave_too_few_ranks_for_a_fixed_width_are_not_tried() -> None:
    found = largest_batch("tiny-llama", CLUSTER, job(82 * MIB), **WIDTHS, tp=None).plans
    assert all(one.tp == 1 and one.pp == 2 for one in found)
    with pytest.raises(InputError, match="pp = 3"):
        largest_batch("tiny-llama", CLUSTER, job(82 * MIB), pp=3, tp=None)


def test_what_cannot_be_asked_is_refused() -> None:
    with pytest.raises(PlanError, match="no configuration fits"):
        largest(40 * MIB)
    with pytest.raises(InputError, match="leave it out"):
        largest(90 * MIB, microbatch=2)
