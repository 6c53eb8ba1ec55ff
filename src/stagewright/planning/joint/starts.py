"""Initial layouts for the joint search, from the costs alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from stagewright.arrays import Floats, Ints
from stagewright.errors import PlanError
from stagewright.planning.joint.layout import Layout
from stagewright.planning.joint.load_balancing import load_balanced
from stagewright.planning.joint.packing import Packing
from stagewright.planning.joint.problem import JointProblem
from stagewright.planning.partition.solver import ends_in_reach
from stagewright.schedule.placement import Placement, loop, wave


def even(problem: JointProblem, placement: Placement) -> Layout:
    """Return stages with as even numbers of layers as possible, longer ones first, as frameworks cut without balancing.

    The last layer, which holds the head, does not count where there are enough others: frameworks add it to
    the last stage.
    """
    num_layers, num_stages = problem.layers.num_layers, placement.num_stages
    if num_layers < num_stages:
        raise PlanError(
            f"{num_stages} stages need at least {num_stages} layers, but there are {num_layers}: use fewer stages"
        )
    counted = num_layers - 1 if num_layers > num_stages else num_layers
    size, longer = divmod(counted, num_stages)
    sizes = [size + (stage < longer) for stage in range(num_stages)]
    sizes[-1] += num_layers - counted
    return Layout(tuple(itertools.accumulate(sizes)), placement.rank_of_stage)


def balanced(problem: JointProblem, placement: Placement) -> Layout | None:
    """Return the partition whose slowest stage is as fast as possible on the ranks of `placement`, regardless of memory, or
    None where there are fewer layers than stages.

    Among such partitions every stage, from the first on, ends as late as possible.
    """
    time = np.concatenate([[0.0], np.cumsum(problem.layers.seconds)])
    ranks = list(placement.rank_of_stage)
    speed = problem.speed[ranks]
    low, high = 0.0, float(time[-1] / speed.min())
    if _ends_within(time, speed, high) is None:
        return None
    for _ in range(60):
        middle = (low + high) / 2
        if _ends_within(time, speed, middle) is None:
            low = middle
        else:
            high = middle
    ends = _ends_within(time, speed, high)
    return None if ends is None else Layout(tuple(ends), placement.rank_of_stage)


def _ends_within(time: Floats, speed: Floats, bottleneck: float) -> list[int] | None:
    """Return ends, as late as possible, of non-empty stages that each take at most `bottleneck` seconds."""

    def farthest(stage: int, start: int) -> int:
        limit = time[start] + bottleneck * speed[stage] * (1 + 1e-12)
        return int(np.searchsorted(time, limit, side="right")) - 1

    return ends_in_reach(farthest, len(speed), len(time) - 1)


def filled_from_the_end(problem: JointProblem, stage_ends: Ints | None = None) -> Layout:
    """Return the layout that puts every stage, from the last to the first, on the rank with the least work so far.

    The rank of a heavy head gets its other layers last, near the start of the model; all others alternate between the ranks.
    `stage_ends` default to one layer per stage.
    """
    ends = np.arange(1, problem.layers.num_layers + 1) if stage_ends is None else stage_ends
    time = np.concatenate([[0.0], np.cumsum(problem.layers.seconds)])
    seconds = np.diff(time[np.concatenate([[0], ends])])
    load = np.zeros(problem.num_ranks)
    order = np.argsort(-problem.speed, kind="stable")
    ranks = np.empty(len(ends), np.int64)
    for stage in range(len(ends) - 1, -1, -1):
        after = (load + seconds[stage]) / problem.speed
        rank = min(order[::-1], key=lambda candidate: (round(after[candidate], 12), load[candidate]))
        ranks[stage] = rank
        load[rank] += seconds[stage]
    return Layout(tuple(int(end) for end in ends), tuple(int(rank) for rank in ranks))


def spread(problem: JointProblem) -> Layout:
    """Return a layout with as many layers per rank as `filled_from_the_end`, each rank's spread evenly over the model."""
    filled = filled_from_the_end(problem)
    ranks = np.array(filled.rank_of_stage)
    count = np.bincount(ranks[:-1], minlength=problem.num_ranks).astype(float)
    taken = np.zeros(problem.num_ranks)
    chosen = np.empty_like(ranks)
    chosen[-1] = ranks[-1]
    for layer in range(len(ranks) - 1):
        wish = np.where(taken < count, (taken + 0.5) / np.maximum(count, 0.5), np.inf)
        rank = int(np.argmin(wish))
        chosen[layer] = rank
        taken[rank] += 1
    return Layout(filled.ends, tuple(int(rank) for rank in chosen))


def packed(problem: JointProblem, packing: Packing) -> Layout | None:
    """Return the layout with the numbers of layers of `packing`, each layer on the rank with the least work after it."""
    if packing.number is None:
        return None
    remaining = packing.number.copy()
    load = np.zeros(problem.num_ranks)
    ranks = np.empty(problem.layers.num_layers, np.int64)
    for layer in range(len(ranks) - 1, -1, -1):
        kind = packing.kind_of_layer[layer]
        rank = int(np.argmin(np.where(remaining[kind] > 0, load, np.inf)))
        ranks[layer] = rank
        remaining[kind, rank] -= 1
        load[rank] += problem.layers.seconds[layer] / problem.speed[rank]
    if len(set(ranks.tolist())) < problem.num_ranks:
        return None
    return Layout(tuple(range(1, len(ranks) + 1)), tuple(ranks.tolist()))


def starts(problem: JointProblem, packing: Packing) -> Iterator[Layout]:
    """Yield layouts of every kind and several granularities that use all ranks; each also load-balanced."""
    layout = packed(problem, packing)
    if layout is not None:
        yield layout
    for layout in _raw_starts(problem):
        yield layout
        if layout.num_stages > problem.num_ranks:
            for seed in range(2):
                ranks = load_balanced(problem, layout.rank_of_layer(), seed)
                yield Layout.of_layers(ranks)


def _raw_starts(problem: JointProblem) -> Iterator[Layout]:
    yield from _regular(problem)
    num_layers, num_ranks = problem.layers.num_layers, problem.num_ranks
    for num_stages in dict.fromkeys((num_layers, num_layers // 2, 4 * num_ranks, 2 * num_ranks)):
        if num_ranks <= num_stages <= num_layers:
            ends = _even_seconds(problem, num_stages)
            layout = filled_from_the_end(problem, ends)
            if len(set(layout.rank_of_stage)) == num_ranks:
                yield layout
    layout = spread(problem)
    if len(set(layout.rank_of_stage)) == num_ranks:
        yield layout


def _regular(problem: JointProblem) -> Iterator[Layout]:
    num_layers, num_ranks = problem.layers.num_layers, problem.num_ranks
    for num_chunks in (1, 2, 3, 4, 6, 8):
        if num_chunks * num_ranks > num_layers:
            return
        placements = [loop(num_ranks, num_chunks)]
        if num_chunks > 1 and num_ranks > 1:
            placements.append(wave(num_ranks, num_chunks))
        for placement in placements:
            layout = balanced(problem, placement)
            if layout is not None:
                yield layout


def _even_seconds(problem: JointProblem, num_stages: int) -> Ints:
    """Return ends of `num_stages` non-empty stages of about equal seconds."""
    time = np.cumsum(problem.layers.seconds)
    wanted = time[-1] * np.arange(1, num_stages + 1) / num_stages
    ends = np.searchsorted(time, wanted * (1 - 1e-12)) + 1
    first = np.arange(1, num_stages + 1)
    ends = np.maximum.accumulate(ends - first) + first
    return np.minimum(ends, problem.layers.num_layers - num_stages + first)
