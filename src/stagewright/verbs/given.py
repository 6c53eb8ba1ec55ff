"""Arguments of verbs: plans and clusters, as values or files, and callbacks for consent and progress."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from stagewright.cluster import Cluster, load_cluster
from stagewright.planning.plan import Plan, load_plan

Allow = Callable[[Plan, str], None]
"""A callback before the model of a plan is built, with the reason; may raise."""

Report = Callable[[str], None]
"""A callback with the current work."""


def given_plan(plan: Plan | str | Path) -> Plan:
    """Return the plan, loaded if it is a file. Raises `InputError` if the file is not a plan."""
    return plan if isinstance(plan, Plan) else load_plan(plan)


def given_cluster(cluster: Cluster | str | Path) -> Cluster:
    """Return the cluster, loaded if it is a name or file. Raises `InputError` if there is no such cluster."""
    return cluster if isinstance(cluster, Cluster) else load_cluster(str(cluster))
