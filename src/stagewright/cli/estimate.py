"""`stagewright estimate`: time and memory of one configuration, rank by rank."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice, starmap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from stagewright.cli import options
from stagewright.cli.consent import WithModel, allow_model
from stagewright.cli.from_file import FromFile, overridden, read_and_report, replicas_of
from stagewright.cli.groups import explains, grouped
from stagewright.cli.job import JobOptions
from stagewright.cli.model import ModelOptions
from stagewright.cli.output import print_document, show
from stagewright.cli.progress import Progress
from stagewright.cli.refuse import refuse, refuse_all_but, refuse_unshared
from stagewright.documents import is_plan_file, parse_json, read_text
from stagewright.errors import InputError, StagewrightError, nearest
from stagewright.machine import num_more_processes, without_collection, worked_out
from stagewright.text import silent

if TYPE_CHECKING:
    from stagewright.cluster import Cluster
    from stagewright.export.reading import Reading
    from stagewright.planning.configuration import Configuration
    from stagewright.planning.plan import Plan


# fmt: off
@dataclass(frozen=True)
class ConfigurationOptions:
    """The configuration."""

    from_file: FromFile = None
    pp: options.PipelineDegree = None
    dp: options.DataDegree = None
    tp: options.TensorDegree = None
    cp: options.ContextDegree = None
    ep: options.ExpertDegree = None
    sequence_parallel: options.SequenceParallel = False
    microbatch: Annotated[int | None, typer.Option(min=1, help="Samples per microbatch; default: 1.")] = None
    schedule: Annotated[str | None, typer.Option(metavar="NAME", help="Schedule; default: 1f1b.")] = None
    chunks: Annotated[int | None, typer.Option(min=1, help="Stages per rank, for schedules that place several.")] = None
    layers_per_stage: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Layers of each stage; default: the runtime's split.")
    ] = None
    recompute: Annotated[
        str | None, typer.Option(metavar="WAY",
            help="none, full, selective (as the runtime does it), or model (the default if the model's code checkpoints).")
    ] = None
    zero: options.Zero = None
    reduce_dtype: options.ReduceDtype = None
    shard_size: options.ShardSize = None
    shard_units: options.ShardUnits = "auto"
    streamed: Annotated[
        bool, typer.Option("--streamed", help="Keep weights on the host, and copy each stage to its device before use.")
    ] = False
    loss_pieces: options.LossPieces = "1"
    configurations: Annotated[
        Path | None, typer.Option("--configurations", metavar="FILE",
            help="Estimate a configuration per line of a file (- for stdin): a JSON object of fields such as pp, dp and "
            "zero, which replace the options. Prints a JSON line for each.")] = None

    def configuration(self, reading: Reading | None) -> Configuration:
        """Return the configuration, that of a file overridden by options. Raises `InputError` for an invalid value."""
        from stagewright.planning.configuration import Configuration

        values = vars(self) | {
            "layers_per_stage": options.parse_layers(self.layers_per_stage),
            "recompute": _recomputes(self.recompute),
            "reduce_dtype": options.checked_reduce_dtype(self.reduce_dtype),
            "shard_units": options.checked_shard_units(self.shard_units),
            "loss_pieces": options.parse_pieces(self.loss_pieces),
        }
        del values["from_file"], values["configurations"]
        given = Configuration.of(**values)
        return given if reading is None else overridden(reading.configuration, given)
# fmt: on


@explains(
    "cluster", "job", "global_batch", "sequence_length", "dtype", "pp", "dp", "tp", "microbatch", "schedule", "by",
    "settings",
)  # fmt: skip
@grouped
def estimate(
    subject: Annotated[
        str | None, typer.Argument(metavar="MODEL|PLAN",
            help="A model, or a plan.json; optional if --from names the model.")] = None,
    cluster: options.PlannedCluster = None,
    *,
    job: JobOptions,
    configuration: ConfigurationOptions,
    model_options: ModelOptions,
    by: Annotated[
        str | None, typer.Option(metavar="WAY", help="Break time down by operator, layer or category.")] = None,
    with_model: WithModel = False,
    as_json: options.Json = False,
) -> None:  # fmt: skip
    """Estimate time and memory of one configuration.

    For a model, by default the deepest pipeline with one replica, even if it does not fit in memory. For a plan whose model
    is a factory, the plan's own predictions, unless --with-model allows that code to run.

    Example:
        stagewright estimate llama-3-8b --cluster 8x-h100 \\
            --global-batch 128 --sequence-length 8192 --pp 4 --dp 2
    """
    from stagewright.planning import estimate as estimating
    from stagewright.planning.plan import cluster_of, load_plan

    from_file = configuration.from_file
    from_plan = subject is not None and is_plan_file(subject)
    _refuse_ignored(from_plan)
    with without_collection(), Progress(f"estimating {subject or from_file or ''}") as progress:
        if subject is not None and from_plan:
            plan = load_plan(subject)
            on = job.measured(cluster_of(plan, cluster))
            needs_model = any(option is not None for option in (cluster, by, job.profile, job.record))
            shows_own = _shows_own_predictions(plan, with_model, needs_model)
            shown = plan if shows_own else estimating.estimate(plan, on, report=progress)
        else:
            reading = None if from_file is None else read_and_report(from_file)
            reference = model_options.reference(subject, reading)
            chosen = configuration.configuration(reading)
            on = job.measured(_cluster(cluster))
            dp = replicas_of(chosen, on.num_devices)
            replicas = dp * chosen.cp
            if configuration.configurations is not None:
                refuse(["by"], "--configurations prints estimates alone", "estimate one configuration")
                training_job = job.read(reference, reading, dp)
                _print_estimates(
                    configuration.configurations,
                    partial(estimating.estimate, reference, on, training_job, report=progress),
                    chosen,
                    progress,
                )
                return
            refuse_unshared(is_one_replica=replicas <= 1, is_tp_one=chosen.tp == 1)
            shown = estimating.estimate(
                reference, on, job.read(reference, reading, dp), chosen, report=progress
            )
        shares = () if by is None else estimating.estimate_breakdown(shown, on, by, progress)
    from stagewright.report import plans as report
    from stagewright.report.saved_values import loss_lines, saving_tables

    if as_json:
        breakdown = {"breakdown": [dataclasses.asdict(share) for share in shares]} if by else {}
        print_document(
            report.estimate_document(shown) | {"compared_with_model": shown.is_compared} | breakdown
        )
        return
    options.warn(report.tight_warnings(shown))
    lines = report.host_line(shown), report.profile_line(shown), report.host_memory_line(shown)
    show(
        report.estimate_heading(shown),
        *(line for line in lines if line is not None),
        *report.lengths_tables(shown),
        report.stage_table(shown),
    )
    show(*saving_tables(shown), *loss_lines(shown), report.memory_table(shown))
    overfull = report.overfull_line(shown)
    show(*((report.breakdown_table(shares, by),) if by else ()), *((overfull,) if overfull else ()))


def _print_estimates(
    path: Path, estimate: Callable[..., Plan], base: Configuration, report: Callable[[str], None]
) -> None:
    """Print a JSON line for each line of a file: its estimate, or its error. Exits with 1 if a line has an error."""
    has_errors = False
    for count, (line, has_error) in enumerate(
        _estimates(path, partial(_line_of, path, estimate, base)), start=1
    ):
        has_errors |= has_error
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
        report(f"{count} estimates")
    if has_errors:
        raise typer.Exit(1)


def _estimates(path: Path, estimate: Callable[..., tuple[str, bool]]) -> Iterator[tuple[str, bool]]:
    """Yield the JSON line for each line of a file, and whether it has an error; all but the first are worked out by as many
    processes as there are cores, those of stdin one after the other, as they come."""
    from stagewright.tracing.cache import trace

    lines = sys.stdin if str(path) == "-" else read_text(path, "configurations").splitlines()
    numbered = ((number, line) for number, line in enumerate(lines, start=1) if line.strip())
    yield from starmap(estimate, islice(numbered, None if lines is sys.stdin else 1))
    others = list(numbered)
    num_processes = min(1 + num_more_processes(), len(others))
    if sys.platform != "linux" or num_processes < 2:
        yield from starmap(estimate, others)
        return

    # A copy of this process lacks the threads that torch has started here.
    kept_trace = partial(trace, only_kept="torch" in sys.modules)

    def estimate_kept(item: tuple[int, str]) -> tuple[str, bool] | None:
        try:
            return estimate(*item, report=silent, trace=kept_trace)
        except LookupError:
            return None

    for item, answer in zip(others, worked_out(estimate_kept, others, num_processes), strict=True):
        yield answer or estimate(*item)


def _line_of(
    path: Path, estimate: Callable[..., Plan], base: Configuration, number: int, line: str, **arguments: Any
) -> tuple[str, bool]:
    """Return the JSON line for a line of a file, and whether it has an error."""
    from stagewright.planning.configuration import Configuration
    from stagewright.report.plans import estimate_document

    origin = f"line {number} of {'stdin' if str(path) == '-' else repr(str(path))}"
    try:
        fields = parse_json(line, origin)
        if not isinstance(fields, dict):
            raise InputError(f'{origin} is no JSON object: write one such as {{"pp": 4, "dp": 2}}')
        document = estimate_document(estimate(configuration=Configuration.of(base, **fields), **arguments))
    except StagewrightError as error:
        document = {"error": str(error)}
    return json.dumps({"line": number, **document}, allow_nan=False), "error" in document


def _shows_own_predictions(plan: Plan, with_model: bool, needs_model: bool) -> bool:
    """Return whether to show the plan's own predictions, since building its model runs code that was not allowed."""
    if needs_model or with_model or not plan.code:
        allow_model(plan, with_model, "--cluster, --profile, --record or --by")
        return False
    options.warn(
        [
            f"these are the plan's own predictions: new ones run {' and '.join(plan.code)}; allow that with --with-model"
        ]
    )
    return True


def _recomputes(way: str | None) -> Literal["none", "selective", "full", "model"] | None:
    ways = ("none", "selective", "full", "model")
    if way is not None and way not in ways:
        raise InputError(f"--recompute {way}{nearest(way, ways)}: give none, selective, full or model")
    return way  # type: ignore[return-value]


def _refuse_ignored(from_plan: bool) -> None:
    if from_plan:
        refuse_all_but(
            ["subject", "cluster", "profile", "record", "by", "with_model", "as_json"],
            "a plan has its own job and configuration", "estimate the model",
        )  # fmt: skip
        return
    refuse(["with_model"], "a named model is built anyway", "estimate a plan")


def _cluster(name: str | None) -> Cluster:
    from stagewright.cluster import load_cluster

    if name is None:
        raise InputError("estimating a model needs a cluster: give --cluster, e.g. --cluster 8x-h100")
    cluster = load_cluster(name)
    options.warn(cluster.cautions)
    return cluster
