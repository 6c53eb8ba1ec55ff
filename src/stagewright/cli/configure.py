"""`stagewright configure`: widths of every kind of parallelism for a model on a cluster, before anything is traced."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from stagewright.cli.options import Json, Model, Settings, parse_settings
from stagewright.cli.output import check_writable, print_document, show
from stagewright.cli.planning import (
    ClusterName,
    Dtype,
    GlobalBatch,
    JobFile,
    JobSequenceLength,
    MemoryLimit,
    PipelineWidth,
    TensorWidth,
    check_one_length,
    check_own_runtime,
    read_job,
    warn,
)
from stagewright.cli.progress import Progress
from stagewright.errors import InputError, nearest
from stagewright.files import write_whole
from stagewright.units import format_seconds

if TYPE_CHECKING:
    from stagewright.estimation.megatron import Shape
    from stagewright.planning.configure.objective import Objective, Offer

_SHOWN = 5


def configure(
    model: Model,
    cluster: ClusterName,
    job: JobFile = None,
    global_batch: GlobalBatch = None,
    sequence_length: JobSequenceLength = None,
    dtype: Dtype = None,
    memory_limit: MemoryLimit = None,
    tp: TensorWidth = None,
    pp: PipelineWidth = None,
    cp: Annotated[int | None, typer.Option("--cp", min=1, help="Context-parallel width.")] = None,
    ep: Annotated[int | None, typer.Option("--ep", min=1, help="Expert-parallel width.")] = None,
    microbatch: Annotated[int | None, typer.Option(min=1, help="Samples per microbatch.")] = None,
    stack: Annotated[
        str, typer.Option(metavar="NAME", help="The runtime whose kernels and memory are predicted.")
    ] = "megatron-core+te",
    objective: Annotated[str, typer.Option(metavar="WHAT", help="speed, cost, or time-to-train.")] = "speed",
    price: Annotated[float | None, typer.Option(min=0, help="Dollars per device and hour.")] = None,
    tokens: Annotated[
        float, typer.Option(min=1, help="Tokens to train on with a small batch, for days and dollars.")
    ] = 1e12,
    critical_batch: Annotated[
        float | None, typer.Option(min=1, help="Batch in samples at which twice the tokens are needed.")
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Choose as another system does: amp, megatron, pipette or varuna."),
    ] = None,
    settings: Settings = None,
    ranks: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write node and device of every rank of the best (CSV)."),
    ] = None,
    top: Annotated[int, typer.Option(min=1, max=10, help="Configurations to show.")] = _SHOWN,
    as_json: Json = False,
) -> None:
    """Find the best widths of tensor, context, expert, pipeline and data parallelism for a cluster."""
    from stagewright.cluster import load_cluster
    from stagewright.estimation.megatron import shape_of
    from stagewright.planning.configure.money import Target
    from stagewright.planning.configure.objective import OBJECTIVES, offers
    from stagewright.planning.configure.space import Bounds
    from stagewright.planning.configure.strategies.choice import find_strategy, own_seconds
    from stagewright.tracing.models.reference import resolve

    check_writable(ranks)
    if objective not in OBJECTIVES:
        known = ", ".join(OBJECTIVES)
        raise InputError(f"--objective {objective}{nearest(objective, OBJECTIVES)}: give one of {known}")
    other = None if strategy is None else find_strategy(strategy)
    target = load_cluster(cluster)
    wanted = read_job(
        job,
        global_batch=global_batch,
        sequence_length=sequence_length,
        dtype=dtype,
        memory_limit=memory_limit,
    )
    check_one_length(wanted, "configure")
    check_own_runtime(wanted, "the --stack of configure")
    reference = resolve(model, parse_settings(settings))
    if reference.config is None:
        raise InputError(f"'{reference.text}' is a factory: configure reads widths from a model's config")
    shape = shape_of(reference.config)
    with Progress(f"configuring {model}") as progress:
        found = offers(
            shape, target, wanted, cast("Objective", objective),
            Target(tokens, critical_batch), price_per_hour=price, stack=stack,
            bounds=Bounds(tp=tp, pp=pp, cp=cp, ep=ep, microbatch=microbatch), strategy=other, report=progress,
        )  # fmt: skip
    warn([*target.cautions, *_warnings(found[0], objective, critical_batch)])
    options = _megatron_options(found[0], shape, stack)
    first = found[0].configured.configurations[0]
    own = None if other is None else own_seconds(other, shape, first, stack)
    if ranks is not None:
        _write_ranks(ranks, found[0])
    if as_json:
        from stagewright.report.configurations import offers_document

        document = {"objective": objective} | offers_document(found) | {"megatron_options": options}
        if own is not None:
            document |= {"strategy": strategy, "strategy_seconds": own}
        print_document(document)
        return
    _show(found, top, ranks)
    if own is not None:
        show(f"Chosen as {strategy} does, which itself predicts {format_seconds(own)} for the first.")
    if options:
        from stagewright.export.megatron import shell_lines

        show(
            "As options of Megatron-LM's pretrain_gpt.py, beside those of model and data:",
            shell_lines(options),
        )


def _warnings(best: Offer, objective: str, critical_batch: float | None) -> Iterator[str]:
    beyond = best.job.beyond(best.cluster.device) if best.cluster.is_homogeneous else None
    if beyond is not None:
        yield beyond
    if objective == "time-to-train" and critical_batch is None:
        yield "without --critical-batch every batch is taken to need as many tokens, which favours large ones"


def _megatron_options(best: Offer, shape: Shape, stack: str) -> tuple[str, ...]:
    from stagewright.export.megatron import STACKS, megatron_options

    if stack not in STACKS:
        return ()
    return megatron_options(best.configured.configurations[0], shape, best.job, stack)


def _write_ranks(path: Path, best: Offer) -> None:
    from stagewright.planning.configure.ranks import rank_lines

    lines = rank_lines(best.configured.configurations[0])
    write_whole(path, "\n".join(["rank,node,device", *lines]) + "\n")


def _show(found: tuple[Offer, ...], top: int, ranks: Path | None) -> None:
    from dataclasses import replace

    from stagewright.report.configurations import (
        assignment_line,
        configurations_table,
        left_out_table,
        offers_table,
        stages_line,
    )

    best = found[0]
    configured = best.configured
    shown = replace(configured, configurations=configured.configurations[:top])
    job = best.job
    show(f"{best.cluster.name}: {job.global_batch} samples of {job.sequence_length} tokens per step")
    show(configurations_table(shown))
    stages = stages_line(configured.configurations[0])
    if stages is not None:
        show(stages)
    excluded = left_out_table(configured)
    if excluded is not None:
        show(excluded)
    show(f"{configured.num_bounded} more cannot be faster than the ones found.", offers_table(found))
    assignment = configured.configurations[0].assignment
    if assignment is not None and assignment.seconds < assignment.seconds_by_default:
        show(assignment_line(assignment))
    if ranks is not None:
        show(f"Wrote {ranks}.")
