"""Partitions against brute force, on made-up ranges and on a real one."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagewright.cluster import load_cluster
from stagewright.errors import PlanError
from stagewright.estimation.stage_memory import StageMemory
from stagewright.estimation.stages import RangeCosts, summarise
from stagewright.estimation.time import Costing
from stagewright.graph.split import split_graph
from stagewright.planning.partition.solver import MemoryBudget, partition
from stagewright.tracing.cache import trace


class Body(SimpleNamespace):
    """Ranges as the partitioner sees it."""

    __hash__ = object.__hash__


def model_costs(
    times: list[int], widths: list[int], state: list[int] | None = None, saved: list[int] | None = None
) -> Any:
    """Ranges of operators of these times."""

    def prefix(amounts: list[int] | None) -> Any:
        return np.concatenate([[0.0], np.cumsum(amounts or [0] * len(times))])

    return Body(
        size=len(times),
        seconds=prefix(times),
        state_bytes=prefix(state),
        saved_bytes=prefix(saved),
        boundary_bytes=np.array([0.0, *widths, 0.0]),
        legal_cuts=np.arange(1, len(times)),
        graph=SimpleNamespace(name="made-up"),
    )


def slowest(costs: Any, cuts: list[int]) -> float:
    return float(np.diff(costs.seconds[[0, *cuts, costs.size]]).max())


def within(costs: Any, cuts: list[int], budget: MemoryBudget) -> bool:
    ends = [0, *cuts, costs.size]
    load = np.diff(costs.state_bytes[ends]) + np.array(budget.in_flight) * np.diff(costs.saved_bytes[ends])
    return bool((load <= np.array(budget.stage_bytes)).all())


BODIES = st.integers(3, 9).flatmap(
    lambda size: st.tuples(
        st.lists(st.integers(1, 9), min_size=size, max_size=size),
        st.lists(st.integers(1, 9), min_size=size - 1, max_size=size - 1),
        st.lists(st.integers(0, 9), min_size=size, max_size=size),
        st.lists(st.integers(0, 9), min_size=size, max_size=size),
        st.integers(1, 4).map(lambda stages: min(stages, size)),
        st.integers(5, 60),
    )
)


@given(BODIES)
def test_the_slowest_stage_is_as_fast_as_any_within_memory(case: Any) -> None:
    times, widths, state, saved, num_stages, limit = case
    costs = model_costs(times, widths, state, saved)
    budget = MemoryBudget([float(limit)] * num_stages, list(range(num_stages, 0, -1)))
    every = itertools.combinations(range(1, len(times)), num_stages - 1)
    feasible = [list(cuts) for cuts in every if within(costs, list(cuts), budget)]
    found = partition([costs] * num_stages, 0.0, budget)
    if not feasible:
        assert found is None
        return
    assert found is not None and within(costs, found, budget)
    assert slowest(costs, found) == pytest.approx(min(slowest(costs, cuts) for cuts in feasible), rel=1e-5)


@given(BODIES)
def test_slack_buys_the_narrowest_boundaries(case: Any) -> None:
    times, widths, _, _, num_stages, _ = case
    costs = model_costs(times, widths)
    every = [list(cuts) for cuts in itertools.combinations(range(1, len(times)), num_stages - 1)]
    fastest = min(slowest(costs, cuts) for cuts in every)
    near = [cuts for cuts in every if slowest(costs, cuts) <= 1.5 * fastest]
    found = partition([costs] * num_stages, 0.5)
    assert found is not None and slowest(costs, found) <= 1.5 * fastest * (1 + 1e-5)
    assert costs.boundary_bytes[found].sum() <= min(costs.boundary_bytes[cuts].sum() for cuts in near)


def test_more_stages_than_cuts_are_refused() -> None:
    with pytest.raises(PlanError, match="at most 3 stages"):
        partition([model_costs([1, 1, 1], [1, 1])] * 4)


def test_ranges_of_a_real_body_are_what_its_stages_take() -> None:
    graph = trace("tiny-llama", 2, 32, "float32")
    costing = Costing(graph, load_cluster("8x-h100").device)
    costs = RangeCosts(graph, costing)
    cuts = partition([costs] * 4, 0.1)
    assert cuts is not None
    ends = [0, *cuts, costs.size]
    summaries = [summarise(StageMemory(stage), costing) for stage in split_graph(graph, cuts)]
    seconds = [s.forward_s + s.input_grad_s + s.weight_grad_s for s in summaries]
    assert np.diff(costs.seconds[ends]) == pytest.approx(seconds, rel=0.1)
    assert np.diff(costs.forward_seconds[ends]) == pytest.approx([s.forward_s for s in summaries], rel=0.1)
    assert np.diff(costs.state_bytes[ends]) == pytest.approx(
        [16 * s.num_parameters for s in summaries], rel=0.01
    )
    assert np.diff(costs.saved_bytes[ends]) == pytest.approx([s.saved_bytes for s in summaries], rel=0.1)
    for index, cut in enumerate(cuts):
        crossing = summaries[index].sent_bytes[index + 1] + summaries[index + 1].returned_bytes[index]
        assert costs.boundary_bytes[cut] == crossing
