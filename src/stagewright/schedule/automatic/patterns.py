"""Starting orders from patterns, in which every microbatch takes the same path a fixed time later."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np

from stagewright.arrays import Floats, Ints
from stagewright.schedule.automatic.orders import Patterns, peaks
from stagewright.schedule.list_scheduler.arrivals import rank_seconds
from stagewright.schedule.list_scheduler.terms import Stages


def patterns(stages: Stages, num_microbatches: int, num_patterns: int, rng: np.random.Generator) -> Patterns:
    """Return random patterns, half of them for equal costs without transfer times, half for the given costs.

    Source: the building blocks of Qi et al. 2024, "Pipeline Parallelism with Controllable Memory" (arXiv
    2405.15362).
    """
    times = [
        (*_first_times(model, gaps), rank_seconds(model).max())
        for model in (_uniform_times(stages), stages)
        for gaps in islice(_gap_choices(model, rng), num_patterns // 2)
    ]
    num_stages, num_ranks = len(stages.rank), len(stages.limit)
    forward_at = np.array([start[0] for start in times]).reshape(-1, num_stages)
    input_grad_at = np.array([start[1] for start in times]).reshape(-1, num_stages)
    interval = np.array([start[2] for start in times])
    result = Patterns(forward_at, input_grad_at, interval, np.empty((len(times), num_ranks)))
    peaks(result, stages, num_microbatches)
    return result


def _gap_choices(stages: Stages, rng: np.random.Generator) -> Iterator[Floats]:
    """Yield random gaps without end, equal along each leg of the path (a run of stages on successive ranks).

    Gaps that fit whole actions of other microbatches are more likely.
    """
    legs = _legs(stages.rank)
    num_legs = int(legs.max()) + 1
    action_s = np.array([stages.forward.mean(), stages.input_grad.mean(), stages.weight_grad.mean()])
    gaps = np.concatenate([[0.0], action_s, action_s + np.roll(action_s, 1), 2 * action_s[:1]])
    while True:
        chosen = np.where(rng.random((2, num_legs)) < 0.5, rng.choice(gaps, (2, num_legs)), 0.0)
        loose = rng.random((2, num_legs)) < 0.15
        yield np.where(loose, rng.uniform(0, gaps.max(), (2, num_legs)), chosen)[:, legs]


def _uniform_times(stages: Stages) -> Stages:
    """Return the same pipeline with actions of one second and no transfer times; its patterns often carry over."""
    ones, zeros = np.ones(len(stages.rank)), np.zeros(len(stages.rank))
    return stages._replace(forward=ones, input_grad=ones, weight_grad=ones, transfer=zeros)


def _first_times(stages: Stages, gaps: Floats) -> tuple[Floats, Floats]:
    """Return the start of every forward and input gradient of microbatch 0.

    The forward of stage `s` starts `gaps[0, s]` seconds after its input arrives, its input gradient `gaps[1, s]` seconds.
    """
    forward_at = np.concatenate([[0.0], np.cumsum(stages.forward[:-1] + stages.transfer[1:] + gaps[0, 1:])])
    begun = forward_at[-1] + stages.forward[-1] + gaps[1, -1]
    steps = (stages.input_grad[1:] + stages.transfer[1:] + gaps[1, :-1])[::-1]
    return forward_at, np.concatenate([[begun], begun + np.cumsum(steps)])[::-1]


def _legs(rank: Ints) -> Ints:
    """Number the legs of the path per stage: stages that continue in the same direction share a number.

    >>> _legs(np.array([0, 1, 2, 2, 1, 0])).tolist()
    [0, 1, 1, 2, 3, 3]
    """
    legs = np.zeros(len(rank), np.int64)
    steps = np.diff(rank, prepend=rank[0])
    for s in range(1, len(rank)):
        legs[s] = legs[s - 1] + (steps[s] != steps[s - 1])
    return legs
