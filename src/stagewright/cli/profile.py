"""`stagewright profile`: measured times of a model's operators on this device, for planning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from stagewright.cli import options
from stagewright.cli.groups import grouped
from stagewright.cli.output import check_writable, print_document, show
from stagewright.cli.probe import Processes
from stagewright.cli.progress import Progress


# fmt: off
@dataclass(frozen=True)
class ProfiledJobOptions:
    """The job."""

    sequence_length: options.JobSequenceLength = None
    dtype: options.Dtype = None
    job: options.JobFile = None


@dataclass(frozen=True)
class MeasurementOptions:
    """The measurement."""

    device: Annotated[str, typer.Option(help="cpu (each process a share of the cores) or cuda.")] = "cpu"
    processes: Processes = 1
    microbatches: Annotated[str, typer.Option(metavar="N,N,...", help="Microbatch sizes to measure.")] = "1,2,4"
    seconds: Annotated[float, typer.Option(min=0.1, help="Seconds to measure each microbatch size.")] = 5.0
    timeout: Annotated[
        float | None, typer.Option(min=1.0, metavar="SECONDS",
            help="Maximum seconds without progress; default depends on the sizes.")] = None
# fmt: on


@grouped
def profile(
    model: options.Model,
    job: ProfiledJobOptions,
    measurement: MeasurementOptions,
    settings: options.Settings = None,
    output: options.Output = None,
    as_json: options.Json = False,
) -> None:
    """Time a model's operators on the device at hand.

    Runs forwards and backwards of a few layers and writes the time of each operator, by its arguments' layouts, to a file
    for `plan --profile` and `estimate --profile`. Use as many --processes as the plan will, to share the machine alike.

    Example:
        stagewright profile tiny-llama --processes 2 --sequence-length 256 \\
            --dtype fp32 -o operators.json
    """
    from stagewright.tracing.models.reference import resolve

    check_writable(output)
    sizes = options.parse_microbatches(measurement.microbatches)
    reference = resolve(model, options.parse_settings(settings))
    training_job = options.read_job(
        job.job, reference, global_batch=max(sizes), sequence_length=job.sequence_length, dtype=job.dtype
    )
    with Progress("importing torch") as progress:
        from stagewright.execution.profiling import profile as measure

        def report(what: str, fraction: float) -> None:
            progress(f"profiling: {what}", fraction)

        measured = measure(
            reference, training_job, sizes, measurement.device, measurement.processes, measurement.seconds,
            measurement.timeout, report,
        )  # fmt: skip
    if output is not None:
        measured.save(output)
    if as_json:
        print_document(measured.model_dump(mode="json"))
        return
    from stagewright.report.profiles import profile_heading, profile_table

    show(profile_heading(measured), profile_table(measured))
    if output is not None:
        show(f"\nWrote {output}; plan with it: `--profile {output}`.")
