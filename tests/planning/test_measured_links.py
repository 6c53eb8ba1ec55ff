"""The search over all widths on measured links: what is slow is gone around, and said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pytest

from stagewright.cluster import Cluster, MeasuredBandwidth, all_reduce_seconds, arranged, load_cluster
from stagewright.planning.assignment.placing import (
    device_places,
    devices_of,
    line_assignment_problem,
    on_devices,
    placed,
    unit_width,
)
from stagewright.planning.assignment.problem import Traffic, as_numbered, assignment_problem
from stagewright.planning.assignment.solve import assign
from stagewright.planning.candidate import make_candidate
from stagewright.planning.configuration import Configuration
from stagewright.planning.estimate import estimate
from stagewright.planning.job import Job
from stagewright.planning.plan import Plan
from stagewright.planning.prediction.predict import gradient_bytes
from stagewright.planning.prediction.staged_model import StagedModel, costs_of_model
from stagewright.planning.search import plan as search
from stagewright.planning.space import Space
from stagewright.tracing.cache import trace
from stagewright.tracing.models.reference import ModelReference, resolve

JOB = Job(global_batch=32, sequence_length=512, runtime="megatron-core+te")
NODES = load_cluster("4x8x-a100-80")
SMALL = {"num_hidden_layers": 8, "hidden_size": 1024, "intermediate_size": 2048, "vocab_size": 8192}


def model(**more: Any) -> ModelReference:
    return resolve("llama-3-8b", SMALL | more)


def with_links(rates: Sequence[Sequence[float]], cluster: Cluster = NODES) -> Cluster:
    between: Literal["nodes", "ranks"] = "nodes" if len(rates) == cluster.num_nodes else "ranks"
    measured = MeasuredBandwidth(
        between=between, bandwidth=tuple(map(tuple, rates)), sources={"bandwidth": "planted"}
    )
    return cluster.model_copy(update={"measured": measured})


def with_slow(pair: tuple[int, int] | None) -> Cluster:
    rates = np.full((4, 4), 2e10)
    if pair is not None:
        rates[pair] = 2e8
    return with_links(rates.tolist())


def best(cluster: Cluster, bounds: Space) -> Plan:
    return search(model(), cluster, JOB, space=bounds, keep=1).plans[0]


def staged(cluster: Cluster, dp: int, pp: int, tp: int = 1, cp: int = 1, ep: int = 1) -> StagedModel:
    configuration = Configuration(
        dp, pp, 1, 32 // dp, "1f1b", zero=1, tp=tp, sequence_parallel=tp > 1, cp=cp, ep=ep
    )
    traced = JOB.traced("cuda") | configuration.trace_arguments | {"expand": False}
    model_costs = costs_of_model(trace(model(), 1, **traced), cluster, JOB)
    return make_candidate(model_costs, configuration, cluster, JOB).staged


def seconds(cluster: Cluster, **widths: int) -> float:
    options: Any = {"sequence_parallel": True, "zero": 1}
    return estimate(model(), cluster, JOB, **widths, **options).predictions.step_seconds


@pytest.mark.parametrize("pair", [(0, 2), (1, 3)])
def test_the_slowest_replica_s_links_count(pair: tuple[int, int]) -> None:
    """Nodes 0 and 1 hold the first stage, 2 and 3 the second: either pair of nodes joins a replica's stages, and both are as
    slow to a step whose ranks stay where they are."""
    found = [
        staged(arranged(with_slow(one), range(32)), dp=2, pp=2, tp=8).cluster.blocks_seconds(1e6, 0, 16, 16)
        for one in (None, pair)
    ]
    assert found[1] > 10 * found[0]


@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("pair", [(0, 1), (1, 3)])
def test_one_slow_link_costs_nothing_where_ranks_can_go_around_it(pair: tuple[int, int], pp: int) -> None:
    bounds = Space(tp=8, pp=pp, cp=1, microbatch=1, chunks=(1,), recompute=("none",))
    plain, slow = best(with_slow(None), bounds), best(with_slow(pair), bounds)
    assert slow.predictions.step_seconds == pytest.approx(plain.predictions.step_seconds, rel=1e-6)


def test_predictions_are_for_the_places_that_are_written() -> None:
    cluster = with_slow((0, 2))
    bounds = Space(tp=8, pp=2, cp=1, microbatch=1, chunks=(1,), recompute=("none",))
    one = best(cluster, bounds)
    assert one.devices and one.devices != tuple(range(32))
    assert set(one.memory_policy) == {"keep"}  # though the runtime gathers parts of the sequence again
    again = estimate(one, cluster).predictions.step_seconds
    assert again == pytest.approx(one.predictions.step_seconds)
    places = device_places(on_devices(cluster, one.devices))
    assert [8 * node + device for node, device in places] == list(one.devices)


def test_groups_of_context_parallelism_stay_together() -> None:
    joined = staged(NODES, dp=4, pp=2, tp=2, cp=2)
    assert unit_width(joined) == 4
    for units in ([3, 1, 0, 2], [0, 1, 2, 3]):
        order = devices_of(units, 8, 2, 2)
        assert [device // 8 for device in order[:8]] == [units[0]] * 8
    bounds = Space(tp=2, cp=2, pp=4, microbatch=1, chunks=(1,), recompute=("none",))
    places = device_places(on_devices(NODES, best(with_slow((0, 1)), bounds).devices or tuple(range(32))))
    for first in range(0, 32, 4):
        assert len({node for node, _ in places[first : first + 4]}) == 1


def test_an_order_of_an_order_is_that_of_the_devices() -> None:
    once = arranged(NODES, [*range(8, 32), *range(8)])
    assert arranged(once, list(range(32))).node_of(0) == 0
    assert arranged(once, [*range(8, 32), *range(8)]) is once


def test_links_whose_two_ways_add_up_to_the_same_are_told_apart() -> None:
    """A pipeline waits as long everywhere, but rings go one way."""
    units = 9
    there = 1 + np.triu(np.full((units, units), 0.5), 1) - np.tril(np.full((units, units), 0.5), -1)
    cluster = with_links((1e9 / there).tolist(), load_cluster("9x1x-a100-80"))
    traffic = Traffic(boundary_bytes=1e6, gradient_bytes=np.ones(3) * 1e8, num_exposed=1.0)
    grid = assignment_problem(cluster, traffic, tp=1, num_replicas=3, num_stages=3)
    found = assign(grid, num_steps=1000, num_starts=1)
    assert found.units != as_numbered(3, 3) or not found.is_proved


def test_a_configuration_is_judged_on_the_devices_that_suit_it() -> None:
    rates = np.full((4, 4), 2e10)
    rates[[0, 1, 1, 2], [1, 0, 2, 1]] = 2e7
    slow, bounds = with_links(rates.tolist()), Space(tp=8, cp=1, microbatch=1, chunks=(1, 2))
    one, every = (search(model(), slow, JOB, space=bounds, keep=keep).plans[0] for keep in (1, 1000))
    assert one.predictions.step_seconds == every.predictions.step_seconds


def test_tied_stages_keep_off_a_slow_link() -> None:
    """Only the first and the last stage of the default order meet on it."""
    bounds = Space(tp=8, pp=4, cp=1, microbatch=1, chunks=(1,), recompute=("none",))
    tied = model(tie_word_embeddings=True)
    plain, slow = (
        search(tied, with_slow(pair), JOB, space=bounds, keep=1).plans[0] for pair in (None, (3, 0))
    )
    assert slow.predictions.step_seconds == pytest.approx(plain.predictions.step_seconds, rel=1e-6)
    assert {slow.devices[0] // 8, slow.devices[-1] // 8} != {0, 3}


@pytest.mark.parametrize("replicas", [8, 16, 32])
def test_rings_cross_nodes_with_all_of_their_devices(replicas: int) -> None:
    """What is weighed is what collectives are predicted to take."""
    cluster, stages = with_slow((1, 2)), 32 // replicas
    one = staged(cluster, dp=replicas, pp=stages)
    sizes = 100 * np.array([sum(gradient_bytes(one.stages_of(rank)).values()) for rank in range(stages)])
    traffic = Traffic(boundary_bytes=0.0, gradient_bytes=sizes, num_exposed=0.0)
    grid = assignment_problem(cluster, traffic, tp=1, num_replicas=replicas, num_stages=stages)
    predicted = [
        all_reduce_seconds(cluster, float(sizes[rank]), one.replicas(rank)) for rank in range(stages)
    ]
    assert grid.seconds(grid.default) == pytest.approx(max(predicted), rel=0.01)


def test_what_is_placed_is_no_slower() -> None:
    slow = with_slow((0, 2))
    one = staged(slow, dp=2, pp=2, tp=8)
    grid = line_assignment_problem(one)
    assert grid.num_units == 4
    moved, order = placed(one)
    assert order and moved.cluster is not one.cluster
