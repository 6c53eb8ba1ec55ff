"""Bounds and exact optima of the joint search on small problems."""

import numpy as np
import pytest

from peers.exact.joint import optimum
from peers.plans.adaptis import ADAPTIS, tune
from stagewright.errors import PlanError
from stagewright.planning.joint import bounds
from stagewright.planning.joint.layout import Layout
from stagewright.planning.joint.packing import pack
from stagewright.planning.joint.plan import DeadlinePolicy, scheduled
from stagewright.planning.joint.problem import JointProblem, LayerTable
from stagewright.planning.joint.search import Effort, search

LITTLE = Effort(rounds=4, num_workers=1)


def random_problem(seed, **options):
    rng = np.random.default_rng(seed)
    num_layers = int(rng.integers(4, 6))
    table = LayerTable.of(*rng.integers(1, 10, (3, num_layers)), saved_bytes=1.0)
    return JointProblem.of(table, int(rng.integers(2, 4)), int(rng.integers(2, 4)), **options)


@pytest.mark.parametrize("seed", range(4))
def test_the_search_comes_near_the_optimum_and_the_bounds_stay_below(seed):
    problem = random_problem(seed, memory_bytes=8.0 if seed % 2 else np.inf, latency_s=seed // 2)
    found = search(problem, LITTLE)
    best = optimum(problem, at_most_s=found.best.makespan_s)
    assert best.is_proven
    assert best.upper_s <= found.best.makespan_s <= 1.03 * best.upper_s
    for bound in (bounds.chain_bound, bounds.load_bound, bounds.layer_bound, bounds.memory_bound):
        assert bound(problem) <= best.upper_s + 1e-9, bound
    assert pack(problem).seconds <= best.upper_s + 1e-9


def test_a_packing_is_exact_for_equal_layers():
    problem = JointProblem.of(LayerTable.of(np.ones(9), np.ones(9), np.ones(9)), 4, 10)
    # Some rank has three layers, and may be the one that starts at once.
    assert pack(problem).seconds == pytest.approx(90, rel=2e-6)
    number = pack(problem).number
    assert number is not None and sorted(number.sum(axis=0).tolist()) == [2, 2, 2, 3]


def test_the_memory_bound_counts_what_is_kept_and_for_how_long():
    layers = LayerTable.of([1, 1], [1, 1], [0, 0], parameter_bytes=3, saved_bytes=5)
    problem = JointProblem.of(layers, 2, 10, memory_bytes=8)
    # Five bytes for four and for two seconds, ten times, in the ten bytes that the parameters leave.
    assert bounds.memory_bound(problem) == pytest.approx(10 * 5 * (4 + 2) / 10)
    with pytest.raises(PlanError, match="memory"):
        search(JointProblem.of(layers, 2, 10, memory_bytes=7), LITTLE)


def test_slow_ranks_get_less_to_do():
    layers = LayerTable.of(np.ones(12), np.ones(12), np.ones(12))
    problem = JointProblem.of(layers, 3, 12, speed=[1, 0.5, 1])
    best = search(problem, LITTLE).best
    count = np.bincount(best.layout.rank_of_layer())
    assert count[1] < min(count[0], count[2])


def test_no_baseline_and_no_runner_up_is_faster():
    found = search(random_problem(1), LITTLE)
    assert all(
        plan.makespan_s >= found.best.makespan_s
        for plan in (*found.runners_up, *found.baselines)
        if plan.fits
    )


def test_the_tuner_keeps_only_what_helps_and_does_not_stall_on_equal_layers():
    problem = JointProblem.of(LayerTable.of(np.ones(64), 2 * np.ones(64), np.zeros(64)), 4, 8)
    even = scheduled("even", problem, Layout((16, 32, 48, 64), (0, 1, 2, 3)), DeadlinePolicy.of(ADAPTIS, 64))
    tuned = tune(problem, max_simulated=60)
    assert even is not None and tuned.kept and tuned.num_simulated <= 60
    assert tuned.best.makespan_s < 0.9 * even.makespan_s
