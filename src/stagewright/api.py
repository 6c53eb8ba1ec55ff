"""Python functions that combine several layers, or that import torch only when they are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagewright.cluster import Cluster
from stagewright.cluster.profile import OperatorProfile
from stagewright.execution.record import Record, clock_error_seconds, first_replica, load_record, timeline_of
from stagewright.planning.checks import Allow
from stagewright.planning.estimate import Report, staged_model_of
from stagewright.planning.job import Job, given_job
from stagewright.planning.plan import Plan, cluster_of, given_plan
from stagewright.planning.plan_stages import stage_program
from stagewright.planning.prediction.predict import run_timeline
from stagewright.planning.prediction.step_times import simulated
from stagewright.report.comparison import comparison_document
from stagewright.report.runs import as_timed, longest_not_run, on_other_devices
from stagewright.text import silent
from stagewright.tracing.models.reference import ModelReference, resolve

if TYPE_CHECKING:
    from stagewright.execution.verification import Verification
    from stagewright.simulation import Timeline


@dataclass(frozen=True)
class Comparison:
    """A batch as predicted and as measured."""

    plan: Plan
    """The plan for batches of the sequence length whose steps were timed."""
    record: Record
    predicted: Timeline
    measured: Timeline
    document: dict[str, Any]
    """The document that `stagewright compare --json` prints."""
    warnings: list[str]
    """Reasons why the two should not be expected to agree."""

    def __repr__(self) -> str:
        """Return the error of the step time; the document is long."""
        step = self.document["step_seconds"]
        off = step["measured"] / step["predicted"] - 1 if step["predicted"] else float("inf")
        return f"<Comparison of {self.plan.model.name}: step {off:+.1%} of what was predicted>"

    def page(self) -> str:
        """Return one HTML page: both timelines, and predicted over measured times."""
        from stagewright.report.pictures import html_page, scene_of
        from stagewright.report.pictures.comparison_panels import comparison_panels
        from stagewright.report.pictures.plan_memory import measured_curves

        panels = comparison_panels(self.document, f"{self.plan.model.name} on {self.plan.cluster.name}")
        other_scenes = {"predicted": scene_of(self.predicted)}
        curves = measured_curves(first_replica(self.record, self.plan), self.measured)
        return html_page(scene_of(self.measured, curves), panels, "measured", other_scenes)


def compare(
    plan: Plan | str | Path,
    record: Record | str | Path,
    cluster: str | Path | Cluster | None = None,
    *,
    allow: Allow | None = None,
    report: Report | None = None,
) -> Comparison:
    """Compare a plan's predictions with the record of its run.

    Args:
        plan: a plan or its file.
        record: a record or its file, which `stagewright run` wrote.
        cluster: the cluster to predict for, which builds the model; default the plan's.
        allow: called before the model is built, which runs the code of a factory; may raise.

    Raises:
        InputError: a file cannot be read, or the record is of another plan.
    """
    run = record if isinstance(record, Record) else load_record(record)
    whole = given_plan(plan)
    timed = as_timed(whole, run)
    measured = timeline_of(run, timed)
    planned = cluster_of(timed, cluster)
    predicted = _predicted(timed, planned, cluster is None, allow or silent, report or silent)
    document = comparison_document(timed, run, predicted, measured, clock_error_seconds(run))
    return Comparison(
        timed, run, predicted, measured, document, [*longest_not_run(whole, run), *_warnings(run, planned)]
    )


def _predicted(
    plan: Plan, cluster: Cluster, is_plans_cluster: bool, allow: Allow, report: Report
) -> Timeline:
    """Return the timeline that the plan predicts, or the one on another cluster."""
    if is_plans_cluster and plan.predictions.costs is not None:
        return simulated(stage_program(plan), plan.predictions.costs)
    what = "a plan that does not state its costs" if is_plans_cluster else "what another cluster would take"
    allow(plan, f"comparing {what}")
    return run_timeline(staged_model_of(plan, cluster, report))


def _warnings(record: Record, planned: Cluster) -> list[str]:
    """Return reasons why the two should not be expected to agree."""
    reasons = on_other_devices(record, planned.device.kind, planned.device.name)
    if record.is_going_on:
        done = record.first_step + len(record.losses)
        reasons.insert(0, f"the run was still in progress when this was written, after step {done}")
    if record.timed_steps[-1] in record.metered_steps:
        more = "3 steps or more" if record.timed_length is None else "each length three times or more"
        reasons.insert(
            0, f"the record's times are of a step that also counted memory, which is slow: run {more}"
        )
    return reasons


def probe(
    device: str = "cpu", processes: int = 1, *, time_limit_s: float = 180.0,
    report: Callable[[str, float], None] | None = None,
) -> Cluster:  # fmt: skip
    """Return this machine as a cluster of `processes` devices, measured in about fifteen seconds while all of them work.

    Raises:
        InputError: this machine has no such device, or too few.
        RunError: a process fails, or the time limit is exceeded.
    """
    from stagewright.execution.probe import probe as probed

    return probed(device, processes, report or silent, time_limit_s)


def profile(
    model: str | ModelReference, job: Job | Mapping[str, Any] | str | Path, microbatches: Sequence[int] = (1,), *,
    device: str = "cpu",
    processes: int = 1, seconds: float = 5.0, report: Callable[[str, float], None] | None = None,
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
    return profiled(
        reference, given_job(job), microbatches, device, processes, seconds, report=report or silent
    )


def verify(
    model: str, plan: Plan | str | Path, num_layers: int | None = None, *, device: str = "auto",
    report: Callable[[str], None] | None = None,
) -> Verification:  # fmt: skip
    """Verify that a reduced copy of a model, pipelined as `plan` says, trains as it does without pipelining (`holds`).

    `device` is ``cpu``, ``cuda`` (one GPU per rank) or ``auto``: CUDA if the plan is for GPUs and there are enough.

    Raises:
        InputError: the plan is for another model or predicted only, the number of layers does not fit, or there are fewer
            GPUs than ranks.
        RunError: a rank failed, or the model cannot be trained without pipelining.
    """
    from stagewright.execution.verification import verify as verified

    return verified(model, given_plan(plan), num_layers, report or silent, device)
