"""`stagewright plan`: the best configurations of a model for a cluster and a job."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from stagewright.cli import joint
from stagewright.cli.options import Json, Output, Settings, parse_settings
from stagewright.cli.output import check_writable, print_document, show
from stagewright.cli.planning import (
    Compiled,
    DataWidth,
    Dtype,
    GlobalBatch,
    JobFile,
    JobSequenceLength,
    JobSequenceLengths,
    LossPieces,
    MemoryLimit,
    PipelineWidth,
    ReduceDtype,
    RuntimeName,
    SequenceParallel,
    ShardSize,
    ShardUnits,
    Zero,
    check_one_length,
    checked_reduce_dtype,
    checked_shard_units,
    parse_lengths,
    parse_pieces,
    read_job,
    warn,
)
from stagewright.cli.progress import Progress
from stagewright.cli.refuse import refuse, refuse_all_but, refuse_unshared
from stagewright.errors import InputError, nearest
from stagewright.units import parse_count

if TYPE_CHECKING:
    from stagewright.cluster import Cluster
    from stagewright.planning.found import Found
    from stagewright.planning.job import Job
    from stagewright.planning.plan import Plan

_SHOWN = 5
_OBJECTIVES = ("speed", "batch")
_OF_COSTS = frozenset(
    {"costs", "ranks", "microbatches", "speeds", "ran", "record", "bandwidth", "seconds", "seed", "robust"}
)
"""Options that go with --costs only."""
_OF_RUNTIMES = frozenset(
    {
        "model", "cluster", "job", "global_batch", "sequence_length", "dtype", "compiled", "memory_limit", "runtime", "pp",
        "tp", "sequence_parallel", "microbatch", "zero", "settings", "output", "top", "as_json",
    }
)  # fmt: skip
"""All that goes with --runtime."""
_MEANT = {
    "microbatches": "--microbatch is the samples of one microbatch",
    "ranks": "--pp, --dp and --tp are the widths",
}


def plan(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A bundled name (`stagewright models`), config.json, Hugging Face directory or id, or "
            "package.module:factory.",
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster", "-c", metavar="C", help="A catalog name such as 8x-h100, or a cluster.toml."
        ),
    ] = None,
    job: JobFile = None,
    global_batch: GlobalBatch = None,
    sequence_length: JobSequenceLength = None,
    sequence_lengths: JobSequenceLengths = None,
    dtype: Dtype = None,
    compiled: Compiled = False,
    memory_limit: MemoryLimit = None,
    runtime: RuntimeName = None,
    pp: PipelineWidth = None,
    dp: DataWidth = None,
    tp: Annotated[
        str | None,
        typer.Option(
            metavar="N|auto",
            help="Ranks that share every layer; auto, the default with --runtime, tries all widths within a node; else 1.",
        ),
    ] = None,
    sequence_parallel: SequenceParallel = False,
    microbatch: Annotated[int | None, typer.Option(min=1, help="Samples per microbatch.")] = None,
    schedule: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Schedules to try; repeatable; default 1f1b, gpipe, joint."),
    ] = None,
    recompute: Annotated[
        str | None,
        typer.Option(
            metavar="HOW",
            help="none, full, model: what the model's own code checkpoints, or auto: as much as the memory limit asks for. "
            "Default model where that code checkpoints something, else auto.",
        ),
    ] = None,
    offload: Annotated[
        bool, typer.Option(help="Whether auto may also move saved values to the host and back.")
    ] = True,
    host_optimizer: Annotated[
        str,
        typer.Option(
            metavar="HOW",
            help="Optimizer state and step on the host's processors: never, always, or auto, on ranks that lack memory "
            "if nothing else is faster.",
        ),
    ] = "auto",
    host_stages: Annotated[
        bool,
        typer.Option("--host-stages", help="Try hosts' processors as ranks with stages of their own, too."),
    ] = False,
    objective: Annotated[
        str,
        typer.Option(metavar="WHAT", help="speed, or batch: every sample a microbatch, as large as fits."),
    ] = "speed",
    zero: Zero = None,
    reduce_dtype: ReduceDtype = None,
    shard_size: ShardSize = None,
    shard_units: ShardUnits = "auto",
    loss_pieces: LossPieces = "auto",
    settings: Settings = None,
    output: Output = None,
    top: Annotated[
        int | None,
        typer.Option(
            min=1, help="Plans to show (default 5); with -o all of them are written: FILE, FILE-2, ..."
        ),
    ] = None,
    costs: joint.Costs = None,
    ranks: joint.Ranks = None,
    microbatches: joint.Microbatches = None,
    speeds: joint.Speeds = None,
    ran: joint.Ran = None,
    record: joint.RunRecord = None,
    bandwidth: joint.Bandwidth = None,
    seconds: joint.Seconds = 10.0,
    seed: joint.Seed = 0,
    robust: joint.Robust = 0.0,
    as_json: Json = False,
) -> None:
    """Find the best configurations for a cluster.

    Tries every pipeline and data-parallel width, microbatch size and schedule unless they are given. With
    --costs TABLE in place of a model: the best partition, placement and schedule for layers of those costs.
    """
    if costs is not None:
        refuse_all_but(
            context,
            _OF_COSTS | {"memory_limit", "output", "as_json"},
            "--costs takes the place of model, job and cluster, and searches all that is planned for them",
            "plan for a MODEL and a --cluster without --costs",
        )
        request = joint.Request(
            costs, ranks, microbatches, speeds, bandwidth, memory_limit, seconds, seed, robust, ran, record
        )
        joint.plan_costs(request, output, as_json)
        return
    refuse(context, _OF_COSTS, "options of --costs are given without it", "give --costs TABLE", _MEANT)
    if model is None or cluster is None:
        raise InputError("give a MODEL and --cluster, or --costs TABLE with --ranks and --microbatches")
    from stagewright.cluster import load_cluster
    from stagewright.estimation.runtime import STAGEWRIGHT
    from stagewright.planning import fitting, search
    from stagewright.planning.batch import largest_batch
    from stagewright.planning.host_stages import plan_with_hosts
    from stagewright.tracing.models.reference import resolve

    check_writable(output)
    if recompute is not None and recompute not in fitting.RECOMPUTE:
        raise InputError(
            f"--recompute {recompute}{nearest(recompute, fitting.RECOMPUTE)}: give none, full, model or auto"
        )
    if objective not in _OBJECTIVES:
        raise InputError(f"--objective {objective}{nearest(objective, _OBJECTIVES)}: give speed or batch")
    target = load_cluster(cluster)
    wanted = read_job(
        job,
        global_batch=global_batch,
        sequence_length=sequence_length,
        sequence_lengths=parse_lengths(sequence_lengths),
        dtype=dtype,
        compiled=compiled or None,
        memory_limit=memory_limit,
        runtime=runtime,
    )
    width = _tensor_width(tp or ("1" if wanted.runtime == STAGEWRIGHT else "auto"))
    if wanted.runtime != STAGEWRIGHT:
        check_one_length(wanted, "plan --runtime")
        refuse_all_but(
            context,
            _OF_RUNTIMES,
            f"of runtime '{wanted.runtime}' all widths, chunks and recomputations are tried",
            "plan without --runtime",
        )
        _plan_elsewhere(
            model,
            target,
            wanted,
            (width, pp, microbatch, zero),
            parse_settings(settings),
            output,
            top,
            as_json,
        )
        return
    refuse_unshared(
        context,
        is_one_replica=dp == 1 or (pp or 1) * (width or 1) == target.num_devices,
        is_one_rank_a_layer=width == 1,
    )
    reference = resolve(model, parse_settings(settings))
    with Progress(f"planning {model}") as progress:
        if host_stages and objective == "batch":
            raise InputError("--host-stages has no --objective batch: leave one of the two out")
        find = largest_batch if objective == "batch" else plan_with_hosts if host_stages else search.plan
        found = find(
            reference, target, wanted, report=progress, schedules=schedule or search.SCHEDULES, pp=pp, dp=dp,
            tp=width, sequence_parallel=sequence_parallel, microbatch=microbatch,
            recompute=cast("fitting.Recompute | None", recompute), offload=offload,
            zero=zero, reduce_dtype=checked_reduce_dtype(reduce_dtype),
            shard_size=shard_size, shard_units=checked_shard_units(shard_units),
            host_optimizer=cast("search.HostOptimizer", host_optimizer), loss_pieces=parse_pieces(loss_pieces),
            interruptible=True,
        )  # fmt: skip
    warn([*target.cautions, *found.warnings])
    _tell(found, output, top, as_json)


def _plan_elsewhere(
    model: str,
    cluster: Cluster,
    job: Job,
    given: tuple[int | None, int | None, int | None, int | None],
    settings: Mapping[str, Any],
    output: Path | None,
    top: int | None,
    as_json: bool,
) -> None:
    """The best configurations under another runtime; `given` are widths, samples of a microbatch and what is shared out."""
    from stagewright.planning.configure.search import configure
    from stagewright.planning.configure.space import Bounds
    from stagewright.tracing.models.reference import resolve

    tp, pp, microbatch, zero = given
    bounds = Bounds(tp=tp, pp=pp, microbatch=microbatch, zero=None if zero is None else (zero,))
    reference = resolve(model, settings)
    with Progress(f"planning {model}") as progress:
        found = configure(
            reference, cluster, job, bounds=bounds, keep=top or _SHOWN, report=progress, interruptible=True
        )
    warn([*cluster.cautions, *found.warnings])
    _tell(found, output, top, as_json)


def _tell(found: Found, output: Path | None, top: int | None, as_json: bool) -> None:
    """Write the best plans, if that is asked for, and show them."""
    from stagewright.estimation.runtime import STAGEWRIGHT

    shown = found.plans[: top or _SHOWN]
    paths = _write(shown, output, num_written=top or 1)
    if as_json:
        from stagewright.report.plans import plan_document

        plans = [plan_document(one, path) for one, path in zip(shown, paths, strict=True)]
        print_document({"plans": plans, "excluded": [dataclasses.asdict(one) for one in found.excluded]})
        return
    from stagewright.report.plans import found_heading, left_out, lengths_tables, plans_table
    from stagewright.report.saving import loss_lines, saving_tables

    show(
        found_heading(found),
        plans_table(shown),
        *lengths_tables(shown[0]),
        *saving_tables(shown[0]),
        *loss_lines(shown[0]),
        left_out(found),
    )
    if output is not None:
        written = ", ".join(str(path) for path in paths if path is not None)
        steps_early = any("STEP" in text for text in shown[0].program[0])
        show(
            f"Wrote {written}. `stagewright estimate {output}` shows the stages and the memory of the best, "
            + (
                "which is asynchronous and cannot be run."
                if steps_early
                else f"`stagewright run {output}` trains with it."
                if shown[0].job.runtime == STAGEWRIGHT
                else f"which {shown[0].job.runtime} runs, not Stagewright."
            )
        )


def _tensor_width(text: str) -> int | None:
    """
    >>> _tensor_width("2"), _tensor_width("auto")
    (2, None)
    """
    if text == "auto":
        return None
    if not (width := parse_count(text)):
        raise InputError(f"--tp {text}: give a number of ranks, or auto to try all widths within a node")
    return width


def _write(plans: Sequence[Plan], output: Path | None, num_written: int) -> list[Path | None]:
    """The file of each plan: the first `num_written` are written, if a file was asked for at all."""
    paths: list[Path | None] = [None] * len(plans)
    if output is not None:
        for index, one in enumerate(plans[:num_written]):
            paths[index] = path = _numbered(output, index + 1)
            one.save(path)
    return paths


def _numbered(path: Path, number: int) -> Path:
    """
    >>> str(_numbered(Path("runs/plan.json"), 1)), str(_numbered(Path("runs/plan.json"), 2))
    ('runs/plan.json', 'runs/plan-2.json')
    """
    return path if number == 1 else path.with_name(f"{path.stem}-{number}{path.suffix}")
