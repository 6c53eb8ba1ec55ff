"""A plan's pipeline: the traced model cut as the plan says, with its program."""

from __future__ import annotations

from dataclasses import replace

from stagewright.cluster import Cluster
from stagewright.estimation.stages import RangeCosts
from stagewright.planning.assignment.placing import on_devices
from stagewright.planning.plan import Plan
from stagewright.planning.plan_stages import stage_cuts, stage_policies, stage_program
from stagewright.planning.prediction.pipeline import Pipeline, pipeline


def planned_line(plan: Plan, body: RangeCosts, cluster: Cluster) -> Pipeline:
    """Return `body` split and run on `cluster` as `plan` says, ready to be simulated and replayed.

    Raises:
        PlanError: the model does not have the plan's cuts.
        ScheduleError: the program does not run.
    """
    policies = stage_policies(plan, body.graph)
    cuts, program = stage_cuts(plan, body.graph), stage_program(plan)
    line = pipeline(
        body, cuts, program, on_devices(cluster, plan.devices), plan.job, plan.num_holders, policies
    )
    return replace(
        line,
        sharding=plan.sharding,
        shard_size=plan.shard_size,
        reduce_dtype=plan.reduce_torch_name,
        host_optimizer=frozenset(plan.host_optimizer),
    )
