"""Stages in several sharding units: what replicas gather and reduce at once, and what that takes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from stagewright.cluster import load_cluster
from stagewright.errors import InputError
from stagewright.estimation.memory import replay_rank, stage_edges
from stagewright.planning.candidate import make_candidate, with_cuts, within_memory
from stagewright.planning.configuration import Configuration, Recompute
from stagewright.planning.estimate import estimate
from stagewright.planning.job import Job
from stagewright.planning.plan import Plan
from stagewright.planning.plan_stages import stage_program
from stagewright.planning.prediction.predict import rank_memories
from stagewright.planning.prediction.shortening import shortened
from stagewright.planning.prediction.staged_model import costs_of_model
from stagewright.planning.search import plan
from stagewright.schedule import insert_communication
from stagewright.tracing.cache import trace
from stagewright.tracing.models.reference import resolve

CLUSTER = load_cluster("4x-h100")
MODEL = resolve(
    "tiny-llama",
    {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 8,
        "vocab_size": 8192,
    },
)


def job(**more: Any) -> Job:
    return Job(global_batch=16, sequence_length=1024, dtype="bf16", **more)


def estimated(**more: Any) -> Plan:
    options: dict[str, Any] = {"dp": 4, "pp": 1, "zero": 3, "microbatch": 4}
    return estimate(MODEL, CLUSTER, job(), **options | more)


def peak(found: Plan) -> int:
    return max(rank.allocated_peak_bytes for rank in found.predictions.ranks)


def test_one_microbatch_is_gathered_layer_by_layer() -> None:
    whole, auto = estimated(shard_units=1), estimated()
    assert whole.num_stages == 1
    assert 8 <= auto.num_stages <= 10
    assert auto.predictions.step_seconds < whole.predictions.step_seconds
    layers = [cut.split(":")[0].split(".")[3] for cut in auto.cuts if ".layers." in cut]
    assert layers == sorted(set(layers)), "each layer is cut from the one before it once"
    categories = [found.predictions.ranks[0].categories for found in (whole, auto)]
    for name in ("gathered", "whole_gradients"):
        assert categories[1][name] < 0.5 * categories[0][name]
    assert peak(auto) < 0.8 * peak(whole)


def test_many_microbatches_are_gathered_once_where_memory_allows() -> None:
    """Each of four microbatches would be gathered twice in small pieces; the links of this cluster are slow."""
    slow = load_cluster("16x-v100-32")
    found = estimate(
        MODEL, slow, Job(global_batch=128, sequence_length=128, dtype="fp16"), dp=16, pp=1, zero=3
    )
    gathers = [text for text in found.program[0] if "GATHER" in text]
    assert len(gathers) == found.num_stages <= 2


def test_less_memory_makes_smaller_units() -> None:
    """What is fastest lacks memory; a division into smaller pieces has it."""
    model_costs = costs_of_model(trace(MODEL, 1, **job().traced("cuda")), CLUSTER, job())
    configuration = Configuration(4, 1, 1, 4, "1f1b", zero=3)
    ways = [
        with_cuts(
            model_costs, Configuration(4, 1, 1, 4, "1f1b", zero=3, shard_units=number), [], CLUSTER, job()
        )
        for number in (1, 9)
    ]
    peaks = [way.memories[0].peak_bytes for way in ways]
    assert peaks[1] < peaks[0]
    limited = job(memory_limit=sum(peaks) // 2 + CLUSTER.device.workspace_bytes)
    found = make_candidate(model_costs, configuration, CLUSTER, limited)
    assert found.excess_bytes <= 0
    assert len(found.staged.stages) > 2
    again = within_memory(
        replace(ways[0], staged=replace(ways[0].staged, job=limited)).with_headroom(0), model_costs
    )
    assert again.excess_bytes > 0, "a number that was asked for stays"


@pytest.mark.parametrize("zero", [None, 2, 3])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("chunks", [None, 2, 3])
def test_a_long_batch_in_units_is_replayed_in_few_microbatches(
    zero: int | None, recompute: Recompute, chunks: int | None
) -> None:
    model_costs = costs_of_model(trace(MODEL, 1, **job().traced("cuda")), CLUSTER, job())
    schedule, units = ("interleaved-1f1b" if chunks else "1f1b"), 3 if zero else None
    configuration = Configuration(2, 2, 1, 16, schedule, recompute, zero, shard_units=units, chunks=chunks)
    staged = make_candidate(model_costs, configuration, CLUSTER, job()).staged
    assert shortened(staged.program).num_microbatches < 16
    whole = insert_communication(staged.program, stage_edges(staged.stages), ahead=staged.receives_ahead)
    for memory in rank_memories(staged):
        replayed = replay_rank(staged.memories, whole, memory.rank, staged.resident(memory.rank))
        assert memory.peak_bytes == replayed.peak_bytes


@pytest.mark.parametrize("zero", [2, 3])
def test_a_number_asked_for_divides_every_stage(zero: int) -> None:
    found = estimated(zero=zero, dp=2, pp=2, microbatch=1, shard_units=3)
    assert found.placement == (0, 0, 0, 1, 1, 1)
    assert found.sharding == (zero,) * 6
    stage_program(found)
    assert found.predictions.costs is not None
    sent = [cost for cost in found.predictions.costs.transfers if cost.value_seconds > 0]
    assert [(one.source, one.target) for one in sent] == [(2, 3)]


def test_pipelines_keep_their_balance() -> None:
    """Ranks have what they have without units: cuts between ranks are chosen first."""
    whole, parts = (estimated(dp=2, pp=2, microbatch=1, shard_units=number) for number in (1, 4))
    first = parts.placement.index(1)
    assert parts.cuts[first - 1] == whole.cuts[0]
    assert all(a <= b for a, b in pairwise(parts.placement))


def test_the_search_plans_in_units() -> None:
    found = plan(MODEL, CLUSTER, job(), zero=3, pp=2, microbatch=2).plans
    assert all(one.pp == 2 for one in found)
    for one in found:
        stage_program(one)
    assert any(one.num_stages > 2 for one in found)
    asked = plan(
        MODEL, CLUSTER, job(), zero=2, tp=1, pp=2, microbatch=2, shard_units=2, schedules=["1f1b"]
    ).plans
    assert [one.placement for one in asked] == [(0, 0, 1, 1)]


@pytest.mark.parametrize("zero", [None, 0, 1])
def test_units_without_anything_to_gather_or_reduce_are_refused(zero: int | None) -> None:
    for search in (plan, estimate):
        with pytest.raises(InputError, match="--zero 2 and 3 do"):
            search(MODEL, CLUSTER, job(), dp=4, zero=zero, shard_units=4)


def test_no_units_at_all_are_refused() -> None:
    with pytest.raises(InputError, match="shard_units = 0: give a whole number of at least 1"):
        estimate(MODEL, CLUSTER, job(), dp=4, zero=3, shard_units=0)
