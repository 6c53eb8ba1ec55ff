"""The bubble of a program by cause: the fraction of each cause is what leaving it out saves."""

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
"""Columns of compute seconds of the stages."""


@dataclass(frozen=True)
class Bubble:
    """Idle fractions of the ranks' time in a batch, by cause. Ignores: that causes hide each other, so another order of
    leaving them out would give slightly different fractions."""

    warm_up: float
    """Fraction idle with equal stages, mostly while the pipeline fills and drains."""
    imbalance: float
    """Fraction that stages of different length add."""
    transfers: float
    """Fraction that exposed transfers, gathers and reductions add."""

    @property
    def total(self) -> float:
        return self.warm_up + self.imbalance + self.transfers


def bubble(program: Program, costs: StepCosts) -> Bubble:
    """Return the bubble of one batch of `program`.

    >>> from stagewright.schedule import build
    >>> sent = {"source": 0, "target": 1, "value_bytes": 1, "gradient_bytes": 1, "value_seconds": 0, "gradient_seconds": 0}
    >>> stage = {"forward_seconds": (1, 1), "input_grad_seconds": (1, 1), "weight_grad_seconds": (1, 1)}
    >>> idle = bubble(build("1f1b", 2, 4), StepCosts(**stage, backward_seconds=(2, 2), transfers=(sent,)))
    >>> round(idle.warm_up, 3), idle.imbalance, idle.transfers
    (0.2, 0.0, 0.0)
    """
    computing = with_transfers(costs, 0.0).model_copy(update={"gather_seconds": (), "reduce_seconds": ()})
    balanced = with_equal_stages(computing)
    total, of_computing, of_balanced = (
        simulated(program, step_costs).bubble_fraction for step_costs in (costs, computing, balanced)
    )
    of_computing = min(total, of_computing)
    of_balanced = min(of_computing, of_balanced)
    return Bubble(warm_up=of_balanced, imbalance=of_computing - of_balanced, transfers=total - of_computing)


def with_transfers(costs: StepCosts, factor: float) -> StepCosts:
    """Return costs with transfers between stages that take `factor` times as long. Ignores: the time of posting them, which
    is part of forwards and backwards."""
    transfers = tuple(
        transfer.model_copy(
            update={
                "value_seconds": factor * transfer.value_seconds,
                "gradient_seconds": factor * transfer.gradient_seconds,
            }
        )
        for transfer in costs.transfers
    )
    return costs.model_copy(update={"transfers": transfers})


def with_equal_stages(costs: StepCosts) -> StepCosts:
    """Return costs with stages that all take the average time."""
    return costs.model_copy(update={name: _averaged(getattr(costs, name)) for name in COMPUTING})


def _averaged(column: tuple[float, ...]) -> tuple[float, ...]:
    return (statistics.fmean(column),) * len(column) if column else ()
