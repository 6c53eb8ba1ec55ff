"""Stagewright plans and runs pipeline-parallel training of PyTorch models."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from stagewright.version import __version__ as __version__

if TYPE_CHECKING:
    from stagewright.cluster.load import load_cluster as load_cluster
    from stagewright.execution.launch import run as run
    from stagewright.execution.trainer import Trainer as Trainer
    from stagewright.planning.estimate import estimate as estimate
    from stagewright.planning.job import Job as Job
    from stagewright.planning.plan import load_plan as load_plan
    from stagewright.planning.search import plan as plan
    from stagewright.simulation.simulate import simulate as simulate
    from stagewright.tracing.cache import trace as trace

_HOMES = {
    "Job": "stagewright.planning.job",
    "Trainer": "stagewright.execution.trainer",
    "estimate": "stagewright.planning.estimate",
    "load_cluster": "stagewright.cluster.load",
    "load_plan": "stagewright.planning.plan",
    "plan": "stagewright.planning.search",
    "run": "stagewright.execution.launch",
    "simulate": "stagewright.simulation.simulate",
    "trace": "stagewright.tracing.cache",
}
"""Where each export lives; imported when it is first asked for, so that nothing is loaded that is not used."""

__all__ = [
    "Job",
    "Trainer",
    "__version__",
    "estimate",
    "load_cluster",
    "load_plan",
    "plan",
    "run",
    "simulate",
    "trace",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'stagewright' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
