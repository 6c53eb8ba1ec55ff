"""Stagewright plans and runs pipeline-parallel training of PyTorch models."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from stagewright.version import __version__ as __version__

if TYPE_CHECKING:
    from stagewright.api import compare as compare
    from stagewright.api import probe as probe
    from stagewright.api import profile as profile
    from stagewright.api import verify as verify
    from stagewright.cluster.cluster import Cluster as Cluster
    from stagewright.cluster.load import load_cluster as load_cluster
    from stagewright.cluster.profile import load_profile as load_profile
    from stagewright.errors import InputError as InputError
    from stagewright.errors import PlanError as PlanError
    from stagewright.errors import RunError as RunError
    from stagewright.errors import ScheduleError as ScheduleError
    from stagewright.errors import StagewrightError as StagewrightError
    from stagewright.errors import TraceError as TraceError
    from stagewright.execution.launch import run as run
    from stagewright.execution.trainer import Trainer as Trainer
    from stagewright.planning.checks import check as check
    from stagewright.planning.checks import simulate as simulate
    from stagewright.planning.estimate import estimate as estimate
    from stagewright.planning.explanation import explain as explain
    from stagewright.planning.job import Job as Job
    from stagewright.planning.plan import Plan as Plan
    from stagewright.planning.plan import load_plan as load_plan
    from stagewright.planning.search import plan as plan
    from stagewright.planning.space import Space as Space
    from stagewright.tracing.cache import trace as trace

_HOMES = {
    "Cluster": "stagewright.cluster.cluster",
    "InputError": "stagewright.errors",
    "Job": "stagewright.planning.job",
    "Plan": "stagewright.planning.plan",
    "PlanError": "stagewright.errors",
    "RunError": "stagewright.errors",
    "ScheduleError": "stagewright.errors",
    "Space": "stagewright.planning.space",
    "StagewrightError": "stagewright.errors",
    "TraceError": "stagewright.errors",
    "Trainer": "stagewright.execution.trainer",
    "check": "stagewright.planning.checks",
    "compare": "stagewright.api",
    "estimate": "stagewright.planning.estimate",
    "explain": "stagewright.planning.explanation",
    "load_cluster": "stagewright.cluster.load",
    "load_plan": "stagewright.planning.plan",
    "load_profile": "stagewright.cluster.profile",
    "plan": "stagewright.planning.search",
    "probe": "stagewright.api",
    "profile": "stagewright.api",
    "run": "stagewright.execution.launch",
    "simulate": "stagewright.planning.checks",
    "trace": "stagewright.tracing.cache",
    "verify": "stagewright.api",
}
"""Module of each export, imported on first use, so that nothing unused is loaded."""

__all__ = [
    "Cluster",
    "InputError",
    "Job",
    "Plan",
    "PlanError",
    "RunError",
    "ScheduleError",
    "Space",
    "StagewrightError",
    "TraceError",
    "Trainer",
    "__version__",
    "check",
    "compare",
    "estimate",
    "explain",
    "load_cluster",
    "load_plan",
    "load_profile",
    "plan",
    "probe",
    "profile",
    "run",
    "simulate",
    "trace",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'stagewright' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__]
