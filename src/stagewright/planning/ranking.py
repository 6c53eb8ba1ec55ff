"""The order of plans: the fastest first, and of those as good as equally fast the one with least memory."""

from __future__ import annotations

from collections.abc import Iterable

from stagewright.planning.plan import Plan

AS_FAST = 0.005
"""Part of a step by which estimates of two plans may differ without saying which plan is faster."""


def ranked(plans: Iterable[Plan]) -> list[Plan]:
    """`plans`, best first.

    The next plan is always the one of least peak memory among those within `AS_FAST` of the fastest that is
    left. So no plan stands in front of one that is faster by more than that. Being nearly equal is not
    transitive, so it cannot be a sorting key: rounded times would part equal plans at the edge of a bucket.

    Equal in time and memory, plans keep their order.
    """
    left = sorted(plans, key=lambda plan: (plan.mean_step_seconds, peak_bytes(plan)))
    found: list[Plan] = []
    while left:
        longest = left[0].mean_step_seconds * (1 + AS_FAST)
        best = min(
            (plan for plan in left if plan.mean_step_seconds <= longest),
            key=lambda plan: (peak_bytes(plan), plan.mean_step_seconds),
        )
        left.remove(best)
        found.append(best)
    return found


def peak_bytes(plan: Plan) -> int:
    """What the fullest rank reserves."""
    return max(rank.reserved_peak_bytes for rank in plan.predictions.ranks)
