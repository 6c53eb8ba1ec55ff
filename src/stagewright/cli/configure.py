"""`stagewright configure`: widths of every kind of parallelism for a model on a cluster, under any runtime."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from stagewright.cli.options import Json, Model, Output, Settings, parse_settings
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
    read_job,
    warn,
)
from stagewright.cli.progress import Progress
from stagewright.errors import InputError, nearest
from stagewright.files import write_whole

if TYPE_CHECKING:
    from stagewright.planning.configure.objective import Objective, Offer

_SHOWN = 5
_DEFAULT = "megatron-core+te"
"""The runtime that is predicted unless another one is named."""


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
    runtime: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Whose execution is predicted; default megatron-core+te, or the job's."
        ),
    ] = None,
    objective: Annotated[str, typer.Option(metavar="WHAT", help="speed, cost, or time-to-train.")] = "speed",
    price: Annotated[float | None, typer.Option(min=0, help="Dollars per device and hour.")] = None,
    tokens: Annotated[
        float, typer.Option(min=1, help="Tokens to train on with a small batch, for days and dollars.")
    ] = 1e12,
    critical_batch: Annotated[
        float | None, typer.Option(min=1, help="Batch in samples at which twice the tokens are needed.")
    ] = None,
    settings: Settings = None,
    output: Output = None,
    ranks: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write node and device of every rank of the best (CSV)."),
    ] = None,
    top: Annotated[int, typer.Option(min=1, max=10, help="Configurations to show.")] = _SHOWN,
    as_json: Json = False,
) -> None:
    """Find the best widths of tensor, context, expert, pipeline and data parallelism for a cluster."""
    from stagewright.cluster import load_cluster
    from stagewright.estimation.runtime import STAGEWRIGHT
    from stagewright.export.megatron import megatron_options
    from stagewright.planning.configure.money import Target
    from stagewright.planning.configure.objective import OBJECTIVES, offers
    from stagewright.planning.configure.space import Bounds
    from stagewright.tracing.models.reference import resolve

    check_writable(ranks)
    check_writable(output)
    if objective not in OBJECTIVES:
        known = ", ".join(OBJECTIVES)
        raise InputError(f"--objective {objective}{nearest(objective, OBJECTIVES)}: give one of {known}")
    target = load_cluster(cluster)
    wanted = read_job(
        job,
        global_batch=global_batch,
        sequence_length=sequence_length,
        dtype=dtype,
        memory_limit=memory_limit,
        runtime=runtime,
    )
    if runtime is None and wanted.runtime == STAGEWRIGHT:
        wanted = wanted.model_copy(update={"runtime": _DEFAULT})
    check_one_length(wanted, "configure")
    reference = resolve(model, parse_settings(settings))
    with Progress(f"configuring {model}") as progress:
        found = offers(
            reference, target, wanted, cast("Objective", objective),
            Target(tokens, critical_batch), price_per_hour=price, keep=top,
            bounds=Bounds(tp=tp, pp=pp, cp=cp, ep=ep, microbatch=microbatch), report=progress,
        )  # fmt: skip
    warn([*target.cautions, *found[0].found.warnings, *_warnings(objective, critical_batch)])
    best = found[0].best
    options = megatron_options(best)
    if output is not None:
        best.save(output)
    if ranks is not None:
        _write_ranks(ranks, found[0])
    if as_json:
        from stagewright.report.configurations import offers_document

        print_document({"objective": objective} | offers_document(found) | {"megatron_options": options})
        return
    _show(found)
    if options:
        from stagewright.export.megatron import shell_lines

        show(
            "As options of Megatron-LM's pretrain_gpt.py, beside those of model and data:",
            shell_lines(options),
        )
    for path in (output, ranks):
        if path is not None:
            show(f"Wrote {path}.")


def _warnings(objective: str, critical_batch: float | None) -> Iterator[str]:
    if objective == "time-to-train" and critical_batch is None:
        yield "without --critical-batch every batch is taken to need as many tokens, which favours large ones"


def _write_ranks(path: Path, best: Offer) -> None:
    from stagewright.planning.placing import device_places, on_devices

    places = device_places(on_devices(best.cluster, best.best.devices))
    lines = [f"{rank},{node},{device}" for rank, (node, device) in enumerate(places)]
    write_whole(path, "\n".join(["rank,node,device", *lines]) + "\n")


def _show(found: tuple[Offer, ...]) -> None:
    from stagewright.report.configurations import (
        configurations_table,
        left_out_table,
        offers_table,
        stages_line,
    )

    best, job = found[0], found[0].job
    show(
        f"{best.cluster.name}: {job.global_batch} samples of {job.sequence_length} tokens per step, under {job.runtime}"
    )
    show(configurations_table(best.found.plans))
    for part in (stages_line(best.best, best.cluster), left_out_table(best.found)):
        if part is not None:
            show(part)
    show(f"{best.found.num_bounded} more cannot be faster than the ones found.", offers_table(found))
    if best.best.devices and best.cluster.measured is not None:
        show("Ranks are on the devices that suit them by the measured links: --ranks FILE writes which.")
