"""What verbs are given: plans and clusters as they are, or where they lie; and who is asked and told meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from stagewright.cluster import Cluster, load_cluster
from stagewright.planning.plan import Plan, load_plan

Allow = Callable[[Plan, str], None]
"""Asked before the model of a plan is built, with what needs it; may raise."""

Report = Callable[[str], None]
"""Told what is being done."""


def given_plan(plan: Plan | str | Path) -> Plan:
    """Raises `InputError` where a file is no plan."""
    return plan if isinstance(plan, Plan) else load_plan(plan)


def given_cluster(cluster: Cluster | str | Path) -> Cluster:
    """Raises `InputError` where there is no such cluster."""
    return cluster if isinstance(cluster, Cluster) else load_cluster(str(cluster))
