"""Partitions that pay for memory with time: as good as the exact program, feasible whenever it is."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from peers.exact.cuts import exact
from stagewright.cluster import load_cluster
from stagewright.estimation.stages import RangeCosts
from stagewright.estimation.time import Costing
from stagewright.planning.partition.binary import binary, memory_balance, time_balance
from stagewright.planning.partition.bisection import bisect, bottleneck
from stagewright.planning.partition.ranges import RangeMaximum, Ranges, Recomputable, ranges_of
from stagewright.planning.partition.refine import best_partition
from stagewright.planning.partition.stage_ranges import StageRanges, StageTerms
from stagewright.tracing.cache import trace


def sums(amounts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0.0], amounts.cumsum()])


def random_ranges(draw: np.random.Generator, size: int) -> Ranges:
    """A model in which every second operator is a product and its ends are heavy."""
    product = np.arange(size) % 2 == 0
    seconds = np.where(product, 3.0, 0.3) * (0.7 + 0.6 * draw.random(size))
    saved = np.where(product, 0.8, 1.5) * (0.7 + 0.6 * draw.random(size))
    weights = np.where(product, 1.5, 0.01)
    weights[0] += 8
    seconds[-1] *= 4
    width = np.concatenate([[0.0], draw.random(size - 1), [0.0]])
    recomputable = Recomputable.sorted(
        np.arange(size).tolist(), saved.tolist(), (seconds / 3 * draw.random(size)).tolist()
    )
    return Ranges(
        sums(seconds), sums(seconds / 3), sums(4 * weights), sums(weights), sums(saved),
        draw.random(size) * 0.5, width, np.flatnonzero(draw.random(size) < 0.9)[1:], recomputable,
    )  # fmt: skip


def random_leaves(seed: int) -> StageRanges:
    draw = np.random.default_rng(seed)
    ranges = random_ranges(draw, int(draw.integers(20, 45)))
    count = int(draw.integers(2, 7))
    copies = [count - stage for stage in range(count)] if seed % 3 else [2 * count] * count
    versions = copies if seed % 3 == 1 else [1] * count
    demand = (np.mean(copies) * ranges.saved_bytes[-1] + ranges.state_bytes[-1]) / count
    link = math.inf if seed % 2 else float(draw.random() * ranges.seconds[-1] / ranges.saved_bytes[-1])
    uneven = seed % 4 == 0
    terms = [
        StageTerms(
            copies=copies[stage],
            capacity=float(demand * draw.choice([0.6, 0.9, 1.3]) * (0.8 + 0.4 * draw.random() * uneven)),
            versions=versions[stage],
            inverse_speed=1 + float(draw.random()) * uneven,
            link_s_per_byte=link,
            boundary_s_per_byte=0.5,
        )
        for stage in range(count)
    ]
    return StageRanges(ranges, terms)


@pytest.mark.parametrize("search", [best_partition, binary])
def test_a_search_finds_what_the_exact_program_finds(search) -> None:
    gaps, evaluated = [], [0, 0]
    for seed in range(40):
        wanted, leaves = random_leaves(seed), random_leaves(seed)
        best, found = exact(wanted), search(leaves)
        assert (best is None) == (found is None), f"seed {seed}"
        if best is None or found is None:
            continue
        assert found.seconds == pytest.approx(bottleneck(wanted, found.cuts))
        gaps.append(found.seconds / best.seconds - 1)
        evaluated = [evaluated[0] + wanted.num_evaluated, evaluated[1] + leaves.num_evaluated]
    assert len(gaps) > 15 and np.mean(gaps) <= 0.003 and max(gaps) <= 0.03
    assert evaluated[0] > 5 * evaluated[1]


def test_the_best_cut_of_a_pair_of_equal_operators_lies_between_the_balances() -> None:
    """Equal operators and ranks: more demand means more overhead, as the theorem assumes."""
    size = 60
    ones, none = np.ones(size), np.zeros(size)
    recomputable = Recomputable.sorted(list(range(size)), [1.0] * size, [0.2] * size)
    ranges = Ranges(
        sums(ones), sums(ones / 3), sums(0.5 * ones), sums(none), sums(ones), none, np.zeros(size + 1),
        np.arange(1, size), recomputable,
    )  # fmt: skip
    for capacity in np.linspace(60, 160, 21):
        leaves = StageRanges(ranges, [StageTerms(4, capacity), StageTerms(3, capacity)])
        costs = [max(leaves.cost(0, 0, cut), leaves.cost(1, cut, size)) for cut in ranges.legal]
        sides = (leaves, ranges.legal, 0, len(ranges.legal) - 1, 0, size, (0, 1), (1, 2))
        low, high = sorted((time_balance(*sides), memory_balance(*sides)))
        if math.isfinite(min(costs)):
            assert min(costs[low : high + 2]) == pytest.approx(min(costs))


def test_range_maxima() -> None:
    values = np.random.default_rng(0).random(37)
    most = RangeMaximum(values)
    for start in range(37):
        for stop in range(start + 1, 38):
            assert most(start, stop) == values[start:stop].max()


def test_the_ranges_of_a_traced_model_add_up() -> None:
    graph = trace("tiny-llama", 2, 32, "float32")
    model_costs = RangeCosts(graph, Costing(graph, load_cluster("2x-h100").device))
    ranges = ranges_of(model_costs)
    assert ranges.size == model_costs.size
    assert ranges.parameter_bytes[-1] == pytest.approx(4 * graph.num_parameters)
    assert (
        0.5 * model_costs.saved_bytes[-1] < ranges.recomputable.num_bytes.sum() <= model_costs.saved_bytes[-1]
    )
    rates = ranges.recomputable.seconds / ranges.recomputable.num_bytes
    assert (
        np.all(np.diff(rates) >= 0)
        and 0 < ranges.recomputable.seconds.sum() < model_costs.forward_seconds[-1] * 1.01
    )
    assert 0 < ranges.transient_bytes.max() < model_costs.saved_bytes[-1]


def test_more_memory_never_costs_time() -> None:
    draw = np.random.default_rng(5)
    ranges = random_ranges(draw, 30)
    for link in (math.inf, 0.5):
        costs = [
            StageRanges(ranges, [StageTerms(4, capacity, link_s_per_byte=link)]).cost(0, 3, 25)
            for capacity in np.linspace(20, 200, 60)
        ]
        assert costs[0] == math.inf and costs[-1] == pytest.approx(ranges.seconds[25] - ranges.seconds[3])
        assert all(a >= b for a, b in itertools.pairwise(costs))


def test_what_cannot_be_recomputed_is_offloaded_up_to_the_last_byte() -> None:
    ones = np.arange(11, dtype=np.float64)
    ranges = Ranges(
        ones, ones / 3, 0 * ones, 0 * ones, ones, np.zeros(10), 0 * ones, np.arange(1, 10), Recomputable.sorted([], [], [])
    )  # fmt: skip
    for copies in range(1, 200):
        terms = StageTerms(copies, 10.0 * copies - 1, link_s_per_byte=1.0)
        assert math.isfinite(StageRanges(ranges, [terms]).cost(0, 0, 10)), copies


def test_stages_of_a_rank_share_its_memory_as_takes_least_time() -> None:
    """No other division of a rank's memory between two stages takes less, and what is divided is all of it."""
    draw = np.random.default_rng(7)
    ranges = replace(random_ranges(draw, 30), transient_bytes=np.zeros(30))
    spans = {0: (0, 14), 1: (14, 30)}
    kept = [StageTerms(5, math.inf), StageTerms(2, math.inf, inverse_speed=1.5)]
    whole = StageRanges(ranges, kept)
    demands = [whole.demand(stage, *span) for stage, span in spans.items()]
    least = sum(whole.least_capacity(stage, *span) for stage, span in spans.items())

    def seconds(capacities: list[float]) -> float:
        terms = [replace(stage, capacity=capacity) for stage, capacity in zip(kept, capacities, strict=True)]
        return sum(StageRanges(ranges, terms).cost(stage, *span) for stage, span in spans.items())

    def shared(capacity: float) -> dict[int, float] | None:
        terms = [replace(stage, capacity=capacity / 2) for stage in kept]
        return StageRanges(ranges, terms).shared(spans)

    assert shared(sum(demands)) == dict(enumerate(demands))
    assert shared(0.99 * least) is None
    for part in (0.1, 0.4, 0.8):
        total = least + part * (sum(demands) - least)
        capacities = shared(total)
        assert capacities is not None and sum(capacities.values()) == pytest.approx(total)
        others = [seconds([first, total - first]) for first in np.linspace(0, total, 400)]
        assert seconds([*capacities.values()]) == pytest.approx(min(others), rel=1e-3)
        assert seconds([*capacities.values()]) <= min(others) * (1 + 1e-9)


def test_a_stage_that_cannot_take_what_comes_next_leaves_it_to_its_successor() -> None:
    """Stages may not be empty, so going as far as possible can strand the next one."""
    size = 6
    ones = np.arange(size + 1, dtype=np.float64)
    heavy = np.array([0.0, 1, 2, 3, 13, 14, 15])  # the fourth operator fits on the last stage alone
    ranges = Ranges(
        ones,
        ones / 3,
        heavy,
        heavy,
        0 * ones,
        np.zeros(size),
        0 * ones,
        np.arange(1, size),
        Recomputable.sorted([], [], []),
    )
    terms = [StageTerms(copies=1, capacity=capacity) for capacity in (4.0, 4.0, 14.0)]
    found, best = bisect(StageRanges(ranges, terms)), exact(StageRanges(ranges, terms))
    assert found is not None and best is not None
    assert found.seconds == pytest.approx(best.seconds, rel=1e-3)
