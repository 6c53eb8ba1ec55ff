"""Orders to start from: patterns in which every microbatch takes the same path a fixed time later."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from stagewright.schedule.automatic.kernels import FORWARD, INPUT_GRAD, Costs, Floats, Ints, Orders

Order = tuple[Orders, Orders]


def pattern_order(costs: Costs, num_microbatches: int, gaps: Floats, interval_s: float) -> Order:
    """Passes and stages per rank when microbatch m runs every pass ``m * interval_s`` after microbatch 0.

    `gaps[0, s]` seconds go by before the forward of stage `s` beyond what it waits for, `gaps[1, s]` before
    its input gradient. Where passes would overlap they follow in the order of their times.
    Source: the building blocks of Qi et al. 2024, "Pipeline Parallelism with Controllable Memory" (arXiv
    2405.15362).
    """
    forward_at, backward_at = _first_times(costs, gaps)
    later = interval_s * np.arange(num_microbatches)
    return _in_time(costs.rank, forward_at[:, None] + later, backward_at[:, None] + later)


def _in_time(rank_of_stage: Ints, forward_at: Floats, backward_at: Floats) -> Order:
    """The order of passes that are given a time each, [stage, microbatch]."""
    num_microbatches = forward_at.shape[1]
    rows = []
    for rank in range(int(rank_of_stage.max()) + 1):
        stages = np.flatnonzero(rank_of_stage == rank)
        times = np.concatenate([at[stages].ravel() for at in (forward_at, backward_at)])
        passes = np.repeat([FORWARD, INPUT_GRAD], len(stages) * num_microbatches)
        held_by = np.tile(np.repeat(stages, num_microbatches), 2)
        rows.append(np.stack([passes, held_by])[:, np.lexsort((held_by, times))])
    return padded(rows)


def padded(rows: list[Ints]) -> Order:
    """Rows of passes and stages as two arrays, shorter rows filled up with stage -1."""
    both = np.full((2, len(rows), max(row.shape[1] for row in rows)), -1, np.int16)
    for rank, row in enumerate(rows):
        both[:, rank, : row.shape[1]] = row
    return both[0], both[1]


def gap_choices(costs: Costs, rng: np.random.Generator) -> Iterator[Floats]:
    """Random gaps, equal along each leg of the path (a stretch of stages on successive ranks), without end.

    Gaps that fit whole passes of other microbatches are likelier than others.
    """
    legs = _legs(costs.rank)
    num_legs = int(legs.max()) + 1
    pass_s = np.array([costs.forward.mean(), costs.input_grad.mean(), costs.weight_grad.mean()])
    lengths = np.concatenate([[0.0], pass_s, pass_s + np.roll(pass_s, 1), 2 * pass_s[:1]])
    while True:
        chosen = np.where(rng.random((2, num_legs)) < 0.5, rng.choice(lengths, (2, num_legs)), 0.0)
        loose = rng.random((2, num_legs)) < 0.15
        yield np.where(loose, rng.uniform(0, lengths.max(), (2, num_legs)), chosen)[:, legs]


def uniform_times(costs: Costs) -> Costs:
    """The same pipeline with passes of one second and no transfer times; its patterns often carry over."""
    ones, zeros = np.ones(len(costs.rank)), np.zeros(len(costs.rank))
    return costs._replace(forward=ones, input_grad=ones, weight_grad=ones, value_s=zeros, gradient_s=zeros)


def interval(costs: Costs) -> float:
    """Seconds of work of the busiest rank per microbatch."""
    work = np.zeros(int(costs.rank.max()) + 1)
    np.add.at(work, costs.rank, costs.forward + costs.input_grad + costs.weight_grad)
    return float(work.max())


def _first_times(costs: Costs, gaps: Floats) -> tuple[Floats, Floats]:
    """Start of every forward and input gradient of microbatch 0."""
    num_stages = len(costs.rank)
    forward_at, backward_at = np.zeros(num_stages), np.zeros(num_stages)
    for s in range(1, num_stages):
        forward_at[s] = forward_at[s - 1] + costs.forward[s - 1] + costs.value_s[s] + gaps[0, s]
    backward_at[-1] = forward_at[-1] + costs.forward[-1] + gaps[1, -1]
    for s in range(num_stages - 2, -1, -1):
        backward_at[s] = backward_at[s + 1] + costs.input_grad[s + 1] + costs.gradient_s[s] + gaps[1, s]
    return forward_at, backward_at


def _legs(rank: Ints) -> Ints:
    """A number per stage: stages that go on in the direction of the stage before share one.

    >>> _legs(np.array([0, 1, 2, 2, 1, 0])).tolist()
    [0, 1, 1, 2, 3, 3]
    """
    legs = np.zeros(len(rank), np.int64)
    steps = np.diff(rank, prepend=rank[0])
    for s in range(1, len(rank)):
        legs[s] = legs[s - 1] + (steps[s] != steps[s - 1])
    return legs
