"""Assignments equal the optimum where it can be known, and find planted slow links where it cannot."""

from __future__ import annotations

from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagewright.cluster import Cluster, MeasuredBandwidth, load_cluster
from stagewright.errors import InputError
from stagewright.planning.assignment.kernels import NUM_MOVES, anneal, move
from stagewright.planning.assignment.problem import AssignmentProblem, Traffic, assignment_problem
from stagewright.planning.assignment.solve import _repaired, assign, best_of_all


def random_grid(replicas: int, stages: int, seed: int) -> AssignmentProblem:
    generator = np.random.default_rng(seed)
    units = replicas * stages
    return AssignmentProblem(
        replicas, stages, generator.random((units, units)), generator.random((units, units)),
        generator.random(stages),
    )  # fmt: skip


def plainly(grid: AssignmentProblem, order: tuple[int, ...]) -> float:
    """The objective written out in Python."""
    place = np.array(order).reshape(grid.num_replicas, grid.num_stages)
    through = max(sum(grid.transfer[a, b] for a, b in pairwise(row)) for row in place)
    edges = [
        grid.ring_share[stage] * grid.ring[a, b]
        for stage, ring in enumerate(place.T)
        for a, b in zip(ring, np.roll(ring, -1), strict=True)
        if grid.num_replicas > 1
    ]
    return through + max(edges, default=0.0)


@given(st.sampled_from([(1, 4), (4, 1), (2, 2), (2, 3), (3, 2)]), st.integers(0, 1000))
@settings(max_examples=15, deadline=None)
def test_the_optimum_is_the_best_of_all_orders(sizes: tuple[int, int], seed: int) -> None:
    grid = random_grid(*sizes, seed)
    best = best_of_all(grid)
    least = min(plainly(grid, order) for order in permutations(range(grid.num_units)))
    assert best.seconds == pytest.approx(least)
    assert plainly(grid, best.units) == pytest.approx(least)
    assert assign(grid).units == best.units


@pytest.mark.parametrize("seed", range(8))
def test_annealing_and_repairs_alone_reach_the_optimum(seed: int) -> None:
    replicas, stages = [(2, 4), (4, 2), (1, 8), (8, 1)][seed % 4]
    grid = random_grid(replicas, stages, seed)
    generator = np.random.default_rng(seed)
    starts = [generator.permutation(8) for _ in range(6)]
    made = [
        _repaired(grid, anneal(start, 4000, 0.2, 1e-4, seed, grid.terms), generator, 16) for start in starts
    ]
    assert min(map(grid.seconds, made)) == pytest.approx(best_of_all(grid).seconds)


@given(st.integers(0, NUM_MOVES - 1), st.integers(2, 12), st.integers(0, 999))
@settings(max_examples=60, deadline=None)
def test_every_move_permutes(kind: int, size: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    order = generator.permutation(size).astype(np.int64)
    out = np.full(size, -1)
    a, b, to = generator.integers(size, size=3)
    move(order, kind, a, b, to, out)
    assert sorted(out) == list(range(size))


def slow_link_cluster(slow: tuple[int, int]) -> Cluster:
    rates = [[2e10 for _ in range(16)] for _ in range(16)]
    for a, b in (slow, slow[::-1]):
        rates[a][b] = 1e9
    whole = load_cluster("16x8x-a100-80")
    measured = MeasuredBandwidth(bandwidth=tuple(map(tuple, rates)), sources={"bandwidth": "planted"})
    return whole.model_copy(update={"measured": measured})


def test_a_planted_slow_link_is_left_unused() -> None:
    cluster = slow_link_cluster((2, 3))
    traffic = Traffic(boundary_bytes=1e7, gradient_bytes=np.full(4, 1e8), num_exposed=4.0)
    grid = assignment_problem(cluster, traffic, tp=8, num_replicas=4, num_stages=4)
    found = assign(grid, num_steps=40_000, num_starts=2)
    place = np.array(found.units).reshape(4, 4)
    hops = {frozenset(pair) for row in place for pair in pairwise(row)}
    rings = {frozenset(pair) for ring in place.T for pair in zip(ring, np.roll(ring, -1), strict=True)}
    assert frozenset((2, 3)) not in hops | rings
    assert found.seconds < found.seconds_by_default / 2
    assert found == assign(grid, num_steps=40_000, num_starts=2)


def test_units_are_single_devices_too() -> None:
    cluster = load_cluster("2x4x-a100-80")
    traffic = Traffic(boundary_bytes=1e6, gradient_bytes=np.full(2, 1e9), num_exposed=2.0)
    grid = assignment_problem(cluster, traffic, tp=1, num_replicas=4, num_stages=2)
    place = np.array(assign(grid).units).reshape(4, 2)
    assert all(len({unit // 4 for unit in ring}) == 1 for ring in place.T)  # rings stay inside a node


def test_degrees_that_do_not_fill_the_cluster_are_named() -> None:
    with pytest.raises(InputError, match="are 4 devices"):
        traffic = Traffic(boundary_bytes=1.0, gradient_bytes=np.ones(2), num_exposed=1.0)
        assignment_problem(load_cluster("8x-a100-80"), traffic, tp=2, num_replicas=1, num_stages=2)
