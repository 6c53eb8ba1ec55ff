"""`stagewright profile`: what a model's operators take on the device at hand, as a file that plans are made with."""

from __future__ import annotations

from typing import Annotated

import typer

from stagewright.cli import options
from stagewright.cli.output import check_writable, print_document, show
from stagewright.cli.probe import Processes
from stagewright.cli.progress import Progress


def profile(
    model: options.Model,
    sequence_length: options.JobSequenceLength = None,
    dtype: options.Dtype = None,
    job: options.JobFile = None,
    device: Annotated[str, typer.Option(help="cpu (each process a share of the cores) or cuda.")] = "cpu",
    processes: Processes = 1,
    microbatches: Annotated[
        str, typer.Option(metavar="N,N,...", help="Samples per microbatch; operators of others are not measured.")
    ] = "1,2,4",
    seconds: Annotated[float, typer.Option(min=0.1, help="Of passes with microbatches of each size.")] = 5.0,
    timeout: Annotated[
        float | None, typer.Option(min=1.0, metavar="SECONDS",
            help="After which processes that come no further are given up; default as the sizes need.")
    ] = None,
    settings: options.Settings = None,
    output: options.Output = None,
    as_json: options.Json = False,
) -> None:  # fmt: skip
    """Time a model's operators on the device at hand.

    Runs forwards and backwards of a few of the layers and writes what each operator takes, by its arguments' layouts: a file
    that `plan` and `estimate` take with --profile. Processes as many as the plan will use here share the machine as it will.

    Example:
        stagewright profile tiny-llama --processes 2 --sequence-length 256 \\
            --dtype fp32 -o operators.json
    """
    from stagewright.tracing.models.reference import resolve

    check_writable(output)
    sizes = options.parse_microbatches(microbatches)
    wanted = options.read_job(
        job, global_batch=max(sizes), sequence_length=sequence_length, dtype=dtype,
    )  # fmt: skip
    reference = resolve(model, options.parse_settings(settings))
    with Progress("importing torch") as progress:
        from stagewright.execution.profiling import profile as measure

        def report(what: str, fraction: float) -> None:
            progress(f"profiling: {what}", fraction)

        found = measure(reference, wanted, sizes, device, processes, seconds, timeout, report)
    if output is not None:
        found.save(output)
    if as_json:
        print_document(found.model_dump(mode="json"))
        return
    from stagewright.report.profiles import profile_heading, profile_table

    show(profile_heading(found), profile_table(found))
    if output is not None:
        show(f"\nWrote {output}; plan with it: `--profile {output}`.")
