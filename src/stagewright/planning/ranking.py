"""The ranking of plans: the fastest first, and of nearly equally fast ones the simplest."""

from __future__ import annotations

from collections.abc import Iterable

from stagewright.planning.plan import Plan, StagePolicy
from stagewright.planning.plan_stages import stage_ranks

AS_FAST = 0.005
"""Relative difference of step times up to which estimates do not tell which of two plans is faster."""


def ranked(plans: Iterable[Plan]) -> list[Plan]:
    """Return `plans`, best first.

    The next plan is always the simplest, or of equally simple ones the one of least peak memory, among those within
    `AS_FAST` of the fastest remaining plan. So no plan precedes one that is faster by more than that. Being nearly equal is
    not transitive, so it cannot be a sorting key: rounded times would separate equal plans at the edge of a bucket.

    Plans of equal time and memory keep their order.
    """
    remaining = sorted(plans, key=lambda plan: (plan.mean_step_seconds, plan.predictions.reserved_peak_bytes))
    ranked_plans: list[Plan] = []
    while remaining:
        longest = remaining[0].mean_step_seconds * (1 + AS_FAST)
        best = min(
            (plan for plan in remaining if plan.mean_step_seconds <= longest),
            key=lambda plan: (
                complexity(plan),
                plan.predictions.reserved_peak_bytes,
                plan.mean_step_seconds,
            ),
        )
        remaining.remove(best)
        ranked_plans.append(best)
    return ranked_plans


def complexity(plan: Plan) -> tuple[bool, int]:
    """Return whether the optimizer or the weights are on the host, which needs RAM there, and the number of other mechanisms
    in use: a pipeline, several stages per rank, recomputation, offload, and a loss in slices."""
    recomputes, offloads = saves(plan)
    mechanisms = plan.pp > 1, chunks(plan) > 1, recomputes, offloads, plan.loss_pieces > 1
    return bool(plan.host_optimizer) or plan.streamed, sum(mechanisms)


def saves(plan: Plan) -> tuple[bool, bool]:
    """Return whether any stage recomputes, and whether any offloads."""
    policies = [policy for policy in plan.memory_policy if policy not in ("keep", StagePolicy())]
    recomputes = any(isinstance(policy, str) or policy.recompute for policy in policies)
    return recomputes, any(isinstance(policy, StagePolicy) and policy.offload for policy in policies)


def chunks(plan: Plan) -> int:
    """Return the stages of the schedule per pipeline rank; 1 without a pipeline."""
    return len(stage_ranks(plan)) // plan.pp if plan.pp > 1 else 1
