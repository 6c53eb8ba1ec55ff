"""`stagewright estimate`: what one configuration takes, rank by rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from stagewright.cli.options import Json, Settings, parse_settings
from stagewright.cli.output import print_document, show
from stagewright.cli.planning import (
    DataWidth,
    Dtype,
    GlobalBatch,
    JobFile,
    JobSequenceLength,
    MemoryLimit,
    PipelineWidth,
    PlannedCluster,
    cluster_of,
    is_plan,
    read_job,
)
from stagewright.cli.progress import Progress
from stagewright.cli.quick import without_collection
from stagewright.errors import InputError

if TYPE_CHECKING:
    from stagewright.cluster import Cluster


def estimate(
    subject: Annotated[str, typer.Argument(metavar="MODEL|PLAN", help="A model, or a plan.json.")],
    cluster: PlannedCluster = None,
    job: JobFile = None,
    global_batch: GlobalBatch = None,
    sequence_length: JobSequenceLength = None,
    dtype: Dtype = None,
    memory_limit: MemoryLimit = None,
    pp: PipelineWidth = None,
    dp: DataWidth = None,
    microbatch: Annotated[int | None, typer.Option(min=1, help="Samples per microbatch; default 1.")] = None,
    schedule: Annotated[str | None, typer.Option(metavar="NAME", help="Default 1f1b.")] = None,
    stack: Annotated[
        str, typer.Option(metavar="NAME", help="Whose execution: stagewright, or torch-eager on one device.")
    ] = "stagewright",
    by: Annotated[
        str | None, typer.Option(metavar="WAY", help="Break time down by operator, layer or category.")
    ] = None,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Estimate time and memory of one configuration.

    Of a model, by default, the deepest pipeline with one replica; whether or not it fits the memory.
    """
    from stagewright.planning import estimate as estimating
    from stagewright.planning.plan import load_plan
    from stagewright.tracing.models.reference import resolve

    with without_collection(), Progress(f"estimating {subject}") as progress:
        if is_plan(subject):
            _refuse_with_a_plan(
                job=job, global_batch=global_batch, sequence_length=sequence_length, dtype=dtype,
                memory_limit=memory_limit, pp=pp, dp=dp, microbatch=microbatch, schedule=schedule, set=settings,
            )  # fmt: skip
            plan = load_plan(subject)
            on = cluster_of(plan, cluster)
            found = estimating.estimate(plan, on, stack=stack, report=progress)
        else:
            wanted = read_job(
                job,
                global_batch=global_batch,
                sequence_length=sequence_length,
                dtype=dtype,
                memory_limit=memory_limit,
            )
            on = _cluster(cluster)
            reference = resolve(subject, parse_settings(settings))
            found = estimating.estimate(
                reference, on, wanted, dp=dp, pp=pp, microbatch=microbatch or 1,
                schedule=schedule or "1f1b", stack=stack, report=progress,
            )  # fmt: skip
        shares = () if by is None else estimating.estimate_breakdown(found, on, by, progress)
    from stagewright.report.breakdown import breakdown_document, breakdown_table
    from stagewright.report.plans import estimate_document, estimate_heading, memory_table, stage_table

    if as_json:
        print_document(estimate_document(found) | ({"breakdown": breakdown_document(shares)} if by else {}))
    else:
        show(estimate_heading(found), stage_table(found), memory_table(found))
        show(*((breakdown_table(shares, by),) if by else ()))


def _refuse_with_a_plan(**options: object) -> None:
    """A plan brings its own job and configuration: what would be ignored is refused."""
    given = [f"--{name.replace('_', '-')}" for name, value in options.items() if value is not None]
    if given:
        raise InputError(
            f"a plan has its own job and configuration: leave out {', '.join(given)}, or estimate the model"
        )


def _cluster(name: str | None) -> Cluster:
    from stagewright.cluster import load_cluster

    if name is None:
        raise InputError("an estimate of a model needs a cluster: give --cluster, e.g. --cluster 8x-h100")
    return load_cluster(name)
