"""Configurations on links that differ: what is predicted and chosen does not depend on how devices are numbered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest

from stagewright.cluster import Cluster, MeasuredBandwidth, all_reduce_seconds, arranged, load_cluster
from stagewright.estimation.megatron import Layout, Shape, find_megatron_stack
from stagewright.estimation.megatron.fusion import find_fusion
from stagewright.planning.configure.assignment import as_numbered, assign, grid_of
from stagewright.planning.configure.iteration import Run
from stagewright.planning.configure.placing import device_places, rearranged, unit_width
from stagewright.planning.configure.ranks import rank_lines
from stagewright.planning.configure.search import Configuration, configure
from stagewright.planning.configure.space import Bounds
from stagewright.planning.job import Job

SHAPE = Shape(16, 4096, 14336, 32, 128256, 8, 128, gated=True, has_bias=False, tied=False)
JOB = Job(global_batch=32, sequence_length=4096)
STACK = "megatron-core+te"
NODES = load_cluster("4x8x-a100-80")


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


def best(cluster: Cluster, bounds: Bounds | None = None) -> Configuration:
    return configure(SHAPE, cluster, JOB, bounds=bounds, keep=1).configurations[0]


def run(cluster: Cluster, **layout: Any) -> Run:
    made = Layout(4096, num_microbatches=4, shards_optimizer=True, **layout)
    return Run(SHAPE, made, find_megatron_stack(STACK), find_fusion(STACK), cluster)


@pytest.mark.parametrize("pair", [(0, 2), (1, 3)])
def test_the_slowest_replica_s_links_count(pair: tuple[int, int]) -> None:
    """Nodes 0 and 1 hold the first stage, 2 and 3 the second: either pair of nodes joins a replica's stages."""
    plain = run(with_slow(None), tp=8, pp=2, dp=2).step().seconds
    slow = run(with_slow(pair), tp=8, pp=2, dp=2).step().seconds
    assert slow > 1.1 * plain
    assert slow == pytest.approx(run(with_slow((0, 2)), tp=8, pp=2, dp=2).step().seconds, rel=1e-12)


@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("pair", [(0, 1), (1, 0), (0, 2), (1, 3), (2, 3)])
def test_one_slow_link_costs_nothing_where_ranks_can_go_around_it(pair: tuple[int, int], pp: int) -> None:
    bounds = Bounds(tp=8, pp=pp, cp=1, microbatch=1, chunks=(1,))
    plain, slow = best(with_slow(None), bounds), best(with_slow(pair), bounds)
    assert slow.step_s == pytest.approx(plain.step_s, rel=1e-9)
    assert slow.bound_s <= slow.step_s


def test_a_slow_link_does_not_change_what_is_chosen() -> None:
    bounds = Bounds(largest_cp=2, chunks=(1,))
    plain, slow = best(with_slow(None), bounds), best(with_slow((0, 1)), bounds)
    assert slow.layout == plain.layout
    assert slow.step_s == pytest.approx(plain.step_s, rel=1e-6)


def test_numbers_of_equal_nodes_do_not_matter() -> None:
    generator = np.random.default_rng(3)
    rates = generator.uniform(2e9, 2e10, (4, 4))
    order = generator.permutation(4)
    bounds = Bounds(tp=8, cp=1, chunks=(1,))
    first, second = (best(with_links(one.tolist()), bounds) for one in (rates, rates[np.ix_(order, order)]))
    assert first.layout == second.layout
    assert first.step_s == pytest.approx(second.step_s, rel=1e-9)


def test_predictions_are_for_the_places_that_are_written() -> None:
    cluster = with_slow((0, 1))
    one = best(cluster, Bounds(tp=8, pp=2, cp=1, microbatch=1, chunks=(1,)))
    assert one.assignment is not None and one.assignment.seconds < one.assignment.seconds_by_default
    lines = [tuple(map(int, line.split(","))) for line in rank_lines(one)]
    order = [8 * node + device for _, node, device in lines]
    again = Run(SHAPE, one.layout, find_megatron_stack(STACK), find_fusion(STACK), arranged(cluster, order))
    assert again.step().seconds == one.step_s
    units = np.array(one.assignment.units).reshape(2, 2)
    assert order == [
        8 * units[replica, stage] + i for stage in (0, 1) for replica in (0, 1) for i in range(8)
    ]


def test_groups_of_context_and_experts_stay_together() -> None:
    layout = Layout(4096, tp=2, cp=2, ep=4, dp=4, pp=2)
    assert unit_width(layout) == 8
    units = [3, 1, 0, 2]
    places = device_places(rearranged(NODES, layout, units))
    assert [places[rank] for rank in range(8)] == [(3, device) for device in range(8)]
    assert {node for node, _ in places[8:16]} == {0}
    bounds = Bounds(tp=2, cp=2, pp=4, microbatch=1, chunks=(1,))
    placed = device_places(best(with_slow((0, 1)), bounds).cluster)
    for first in range(0, 32, 4):
        assert len({node for node, _ in placed[first : first + 4]}) == 1


def test_a_group_that_ends_inside_a_node_is_not_taken_for_all() -> None:
    """Four of six devices: the second tensor-parallel group has two devices on each of two nodes."""
    group = NODES.nodes[0].model_copy(update={"count": 2, "devices_per_node": 6})
    sixes = Cluster(name="sixes", nodes=(group,))
    inside = run(NODES, tp=4, dp=8).clocks[0].layer(0)[0].exposed_s
    across = run(sixes, tp=4, dp=3).clocks[0].layer(0)[0].exposed_s
    assert across > 1.5 * inside > 0


def test_an_order_of_an_order_is_that_of_the_devices() -> None:
    once = arranged(NODES, [*range(8, 32), *range(8)])
    assert arranged(once, list(range(32))).node_of(0) == 0
    assert arranged(once, [*range(8, 32), *range(8)]) is once


def test_links_whose_two_ways_add_up_to_the_same_are_told_apart() -> None:
    """A pipeline waits as long everywhere, but rings go one way."""
    units = 9
    there = 1 + np.triu(np.full((units, units), 0.5), 1) - np.tril(np.full((units, units), 0.5), -1)
    cluster = with_links((1e9 / there).tolist(), load_cluster("9x1x-a100-80"))
    grid = grid_of(
        cluster,
        tp=1,
        num_replicas=3,
        num_stages=3,
        boundary_bytes=1e6,
        gradient_bytes=np.ones(3) * 1e8,
        num_exposed=1.0,
    )
    grid = replace(grid, hop=np.full((units, units), 1e-3))
    found = assign(grid, num_steps=1000, num_starts=1)
    assert found.units != as_numbered(3, 3) or not found.is_proved


def test_tied_stages_keep_off_a_slow_link() -> None:
    """Only the first and the last stage of the default order meet on it."""
    shape = replace(SHAPE, tied=True)
    bounds = Bounds(tp=8, pp=4, cp=1, microbatch=1, chunks=(1,))
    plain, slow = (
        configure(shape, with_slow(pair), JOB, bounds=bounds, keep=1).configurations[0]
        for pair in (None, (3, 0))
    )
    assert slow.step_s == pytest.approx(plain.step_s, rel=1e-9)
    assert slow.assignment is not None and {slow.assignment.units[0], slow.assignment.units[-1]} != {0, 3}


@pytest.mark.parametrize("replicas", [8, 16, 32])
def test_rings_cross_nodes_with_all_of_their_devices(replicas: int) -> None:
    """What is weighed is what collectives are predicted to take."""
    cluster = with_slow((1, 2))
    one = run(cluster, dp=replicas, pp=32 // replicas)
    sizes = np.array([one.gradient_bytes(*counts) for counts in one.parameters_of_ranks()])
    grid = grid_of(
        cluster, tp=1, num_replicas=replicas, num_stages=32 // replicas, boundary_bytes=0.0, gradient_bytes=sizes,
        num_exposed=0.0,
    )  # fmt: skip
    predicted = [
        all_reduce_seconds(cluster, sizes[rank], one.groups("dp", rank)[0]) for rank in range(32 // replicas)
    ]
    assert grid.seconds(grid.default) == pytest.approx(max(predicted), rel=0.01)
