"""Verbs that need torch, which is imported on their first call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stagewright.cluster import Cluster
from stagewright.cluster.profile import OperatorProfile
from stagewright.planning.job import Job
from stagewright.planning.plan import Plan
from stagewright.tracing.models.reference import ModelReference, resolve
from stagewright.verbs.given import given_plan

if TYPE_CHECKING:
    from stagewright.execution.verification import Verification


def probe(
    device: str = "cpu", processes: int = 1, *, time_limit_s: float = 180.0,
    report: Callable[[str, float], None] = lambda what, fraction: None,
) -> Cluster:  # fmt: skip
    """Return this machine as a cluster of `processes` devices, measured in about fifteen seconds while all of them work.

    Raises:
        InputError: this machine has no such device, or too few.
        RunError: a process fails, or the time limit is exceeded.
    """
    from stagewright.execution.probe import probe as probed

    return probed(device, processes, report, time_limit_s)


def profile(
    model: str | ModelReference, job: Job, microbatches: Sequence[int] = (1,), *, device: str = "cpu",
    processes: int = 1, seconds: float = 5.0, report: Callable[[str, float], None] = lambda what, fraction: None,
) -> OperatorProfile:  # fmt: skip
    """Return measured times of a model's operators on this device, for `seconds` per microbatch size.

    `cluster.with_profile(...)` returns a cluster to plan for with it.

    Raises:
        InputError: this machine has no such device, or too few.
        RunError: a process fails or makes no progress.
        TraceError: the model cannot be traced.
    """
    from stagewright.execution.profiling import profile as profiled

    reference = model if isinstance(model, ModelReference) else resolve(model)
    return profiled(reference, job, microbatches, device, processes, seconds, report=report)


def verify(
    model: str, plan: Plan | str | Path, num_layers: int | None = None, *, device: str = "auto",
    report: Callable[[str], None] = lambda text: None,
) -> Verification:  # fmt: skip
    """Verify that a reduced copy of a model, pipelined as `plan` says, trains as it does without pipelining (`holds`).

    `device` is ``cpu``, ``cuda`` (one GPU per rank) or ``auto``: CUDA if the plan is for GPUs and there are enough.

    Raises:
        InputError: the plan is for another model or predicted only, the number of layers does not fit, or there are fewer
            GPUs than ranks.
        RunError: a rank failed, or the model cannot be trained without pipelining.
    """
    from stagewright.execution.verification import verify as verified

    return verified(model, given_plan(plan), num_layers, report, device)
