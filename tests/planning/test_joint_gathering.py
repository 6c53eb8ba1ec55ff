"""Of plans that are equally short, the joint search takes one that moves little between ranks."""

from __future__ import annotations

import numpy as np
import pytest

from peers.plans.adaptis import ADAPTIS
from stagewright.planning.joint.anneal import MARGIN, JointState, count, gather, makespan_of
from stagewright.planning.joint.problem import JointProblem, LayerTable
from stagewright.planning.joint.search import Effort, search

EQUAL = JointProblem.of(LayerTable.of([1.0] * 16, [1.0] * 16, [1.0] * 16, saved_bytes=1.0), 4, 16)


def test_free_transfers_are_no_reason_to_scatter_layers() -> None:
    found = search(EQUAL, Effort(rounds=2))
    assert found.gap == pytest.approx(0, abs=1e-6)
    assert found.best.layout.num_transfers <= 8  # of 15


def test_lone_layers_stay_together_under_a_heavy_head() -> None:
    seconds = np.r_[0.2, np.ones(22), 3.0]
    problem = JointProblem.of(LayerTable.of(seconds, seconds, np.minimum(seconds, 1)), 4, 16)
    found = search(problem, Effort(rounds=8))
    assert found.gap < 0.002
    assert found.best.layout.num_transfers <= 7  # a search that does not look has 12


@pytest.mark.parametrize("memory", [np.inf, 30.0])
def test_gathering_keeps_to_the_makespan_and_the_memory(memory: float) -> None:
    problem = JointProblem.of(EQUAL.layers, 4, 16, memory_bytes=memory)
    ranks, cuts = np.arange(16) % 4, np.ones(16, np.bool_)
    shifts, thrift = np.zeros((4, 16)), np.zeros(4, np.int64)
    state = JointState(ranks, cuts, thrift, ADAPTIS, shifts)
    before = makespan_of(state, problem.costs, (16, 0), np.inf)
    after, gathered, cut = gather(state, problem.costs, (16, 0), before * (1 + MARGIN), 500, 3)
    moved = state._replace(rank_of_layer=gathered, is_cut=cut)
    assert after == makespan_of(moved, problem.costs, (16, 0), np.inf) <= before * (1 + MARGIN)
    assert count(gathered, cut) < count(ranks, cuts) == (15, 16)
    assert set(gathered) == {0, 1, 2, 3}


def test_what_only_scattered_layers_reach_is_kept() -> None:
    """Gathering never gives a shorter makespan away."""
    rng = np.random.default_rng(0)
    columns = (rng.uniform(0.5, 2, 20) for _ in range(3))
    found = search(JointProblem.of(LayerTable.of(*columns), 4, 12), Effort(rounds=4))
    shortest = min(each.makespan_s for each in (found.best, *found.runners_up))
    assert found.best.makespan_s <= shortest * (1 + MARGIN)
