"""Why ranks are idle: the bubble of a program in three parts, each the difference that leaving its cause out makes."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from stagewright.planning.prediction.step_times import simulated
from stagewright.planning.predictions import StepCosts
from stagewright.schedule.program import Program

COMPUTING = (
    "forward_seconds",
    "input_grad_seconds",
    "weight_grad_seconds",
    "backward_seconds",
    "recompute_seconds",
)
"""Columns of what stages compute."""


@dataclass(frozen=True)
class Bubble:
    """Parts of the ranks' time in a batch. Ignores: that causes hide each other, so that another order of leaving them out
    would give somewhat other parts."""

    warm_up: float
    """What the schedule leaves idle of equal stages, filling and draining the pipeline above all."""
    imbalance: float
    """What stages of different length add to that."""
    transfers: float
    """What transfers, gathers and reductions that are waited for add."""

    @property
    def total(self) -> float:
        return self.warm_up + self.imbalance + self.transfers


def bubble(program: Program, costs: StepCosts) -> Bubble:
    """Of one batch of `program`.

    >>> from stagewright.schedule import build
    >>> sent = {"source": 0, "target": 1, "value_bytes": 1, "gradient_bytes": 1, "value_seconds": 0, "gradient_seconds": 0}
    >>> stage = {"forward_seconds": (1, 1), "input_grad_seconds": (1, 1), "weight_grad_seconds": (1, 1)}
    >>> found = bubble(build("1f1b", 2, 4), StepCosts(**stage, backward_seconds=(2, 2), transfers=(sent,)))
    >>> round(found.warm_up, 3), found.imbalance, found.transfers
    (0.2, 0.0, 0.0)
    """
    still = with_transfers(costs, 0.0).model_copy(update={"gather_seconds": (), "reduce_seconds": ()})
    equal = levelled(still)
    whole, without, plain = (simulated(program, one).bubble_fraction for one in (costs, still, equal))
    without = min(whole, without)
    plain = min(without, plain)
    return Bubble(warm_up=plain, imbalance=without - plain, transfers=whole - without)


def with_transfers(costs: StepCosts, factor: float) -> StepCosts:
    """With transfers between stages that are `factor` times as long on their way. Ignores: what posting them takes of the
    ranks, which is part of the passes."""
    transfers = tuple(
        one.model_copy(
            update={
                "value_seconds": factor * one.value_seconds,
                "gradient_seconds": factor * one.gradient_seconds,
            }
        )
        for one in costs.transfers
    )
    return costs.model_copy(update={"transfers": transfers})


def levelled(costs: StepCosts) -> StepCosts:
    """With stages that all take what they take on the average."""
    return costs.model_copy(update={name: _levelled(getattr(costs, name)) for name in COMPUTING})


def _levelled(column: tuple[float, ...]) -> tuple[float, ...]:
    return (statistics.fmean(column),) * len(column) if column else ()
