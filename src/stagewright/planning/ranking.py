"""The ranking of plans: the fastest first, and of nearly equally fast ones the one with the least memory."""

from __future__ import annotations

from collections.abc import Iterable

from stagewright.planning.plan import Plan

AS_FAST = 0.005
"""Relative difference of step times up to which estimates do not tell which of two plans is faster."""


def ranked(plans: Iterable[Plan]) -> list[Plan]:
    """Return `plans`, best first.

    The next plan is always the one of least peak memory among those within `AS_FAST` of the fastest remaining plan. So no
    plan precedes one that is faster by more than that. Being nearly equal is not transitive, so it cannot be a sorting key:
    rounded times would separate equal plans at the edge of a bucket.

    Plans of equal time and memory keep their order.
    """
    remaining = sorted(plans, key=lambda plan: (plan.mean_step_seconds, plan.predictions.reserved_peak_bytes))
    ranked_plans: list[Plan] = []
    while remaining:
        longest = remaining[0].mean_step_seconds * (1 + AS_FAST)
        best = min(
            (plan for plan in remaining if plan.mean_step_seconds <= longest),
            key=lambda plan: (plan.predictions.reserved_peak_bytes, plan.mean_step_seconds),
        )
        remaining.remove(best)
        ranked_plans.append(best)
    return ranked_plans
