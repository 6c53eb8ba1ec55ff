"""The loss in pieces as a choice of the search: taken where memory is short and it pays, and nowhere else."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from stagewright.cluster import load_cluster
from stagewright.errors import InputError, PlanError
from stagewright.planning import search
from stagewright.planning.estimate import estimate
from stagewright.planning.job import Job
from stagewright.planning.ranking import AS_FAST
from stagewright.planning.search_result import SearchResult
from stagewright.planning.space import LossPieces
from stagewright.report.plans import described_schedule
from stagewright.report.saved_values import loss_lines
from stagewright.tracing.models.reference import resolve
from stagewright.units import MIB

CLUSTER = load_cluster("4x-h100")
MODEL = resolve("tiny-llama", {"vocab_size": 32768})
"""Its logits of 4,096 tokens take 512 MiB in float32, everything else of a stage less."""


def job(limit: int, sequence_length: int = 4096) -> Job:
    return Job(global_batch=8, sequence_length=sequence_length, dtype="fp32", memory_limit=limit * MIB)


@cache
def found(
    limit: int,
    loss_pieces: LossPieces,
    schedule: str = "gpipe",
    pp: int = 2,
    sequence_length: int = 4096,
    **more: Any,
) -> SearchResult:
    return search.plan(
        MODEL, CLUSTER, job(limit, sequence_length), schedules=(schedule,), pp=pp, dp=4 // pp, microbatch=1,
        loss_pieces=loss_pieces, host_optimizer="never", zero=(None,), **more,
    )  # fmt: skip


def test_pieces_that_make_a_plan_faster_are_taken() -> None:
    """With all logits of the microbatches in flight the last rank must move some to the host; pieces are never saved."""
    whole, chosen = found(3500, 1).plans[0], found(3500, "auto").plans[0]
    assert whole.memory_policy[-1] != "keep" and chosen.memory_policy[-1] == "keep"
    assert chosen.loss_pieces == 2
    assert chosen.predictions.step_seconds < whole.predictions.step_seconds
    assert described_schedule(chosen) == "gpipe +L"
    (line,) = loss_lines(chosen)
    assert "in 2 slices" in line and "512.0 MiB" in line and "256.0 MiB are in memory at a time" in line


def test_microbatches_of_few_tokens_are_divided_too() -> None:
    """Where the larger pieces would be the whole microbatch."""
    whole, chosen = (found(1050, pieces, sequence_length=2048).plans[0] for pieces in (1, "auto"))
    assert whole.memory_policy[-1] != "keep" and chosen.memory_policy[-1] == "keep"
    assert chosen.loss_pieces == 4
    # Of plans about as fast the simpler one is first.
    assert chosen.predictions.step_seconds < (1 + AS_FAST) * whole.predictions.step_seconds


def test_pieces_that_would_only_cost_time_are_not_taken() -> None:
    """Where there is room, and where giving up a little is cheaper than what pieces add to the gradient of the head."""
    for limit in (7000, 3800):
        whole, chosen = found(limit, 1).plans[0], found(limit, "auto").plans[0]
        assert chosen.loss_pieces == 1
        assert chosen.predictions.step_seconds == whole.predictions.step_seconds
        assert loss_lines(chosen) == []
    assert found(3800, 1).plans[0].memory_policy[-1] != "keep"
    forced = found(7000, 2).plans[0]
    assert forced.predictions.step_seconds > found(7000, 1).plans[0].predictions.step_seconds


def test_pieces_that_make_a_plan_fit_are_taken() -> None:
    with pytest.raises(PlanError, match="no configuration fits"):
        found(1000, 1, "1f1b", 4)
    plan = found(1000, "auto", "1f1b", 4).plans[0]
    assert plan.loss_pieces > 1
    assert max(rank.reserved_peak_bytes for rank in plan.predictions.ranks) <= 1000 * MIB


def test_an_estimate_of_a_plan_in_pieces_is_that_of_the_plan() -> None:
    plan = found(3500, "auto").plans[0]
    again = estimate(plan, CLUSTER)
    assert again.loss_pieces == 2
    assert again.predictions.ranks == plan.predictions.ranks
    asked = estimate(MODEL, CLUSTER, job(3500), pp=2, dp=2, schedule="gpipe", loss_pieces=2)
    assert asked.loss_pieces == 2
    with pytest.raises(InputError, match="evaluates the loss at once"):
        eager = Job(global_batch=1, sequence_length=1024, runtime="torch-eager")
        estimate(MODEL, CLUSTER, eager, dp=1, pp=1, loss_pieces=2)


def test_models_without_pieces_are_planned_without() -> None:
    """Where they are asked for they are refused by name."""
    small = Job(global_batch=4, sequence_length=16, dtype="fp32")
    asked: dict[str, Any] = {"schedules": ("1f1b",), "pp": 4, "microbatch": 1}
    plan = search.plan("tiny-t5", CLUSTER, small, **asked).plans[0]
    assert plan.loss_pieces == 1
    with pytest.raises(InputError, match="no base model separate from its head"):
        search.plan("tiny-t5", CLUSTER, small, **asked, loss_pieces=2)
