"""`stagewright plan`: the best configurations of a model for a cluster and a job."""

from __future__ import annotations

import dataclasses
import math
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from stagewright.cli import options
from stagewright.cli.from_file import read_and_report, replicas_of
from stagewright.cli.groups import explains, grouped
from stagewright.cli.job import JobOptions
from stagewright.cli.model import ModelOptions
from stagewright.cli.output import check_writable, copied, print_document, show
from stagewright.cli.pictures import Html, Pictures
from stagewright.cli.progress import Progress
from stagewright.cli.refuse import refuse, refuse_unshared
from stagewright.errors import InputError, StagewrightError, nearest
from stagewright.files import write_whole
from stagewright.text import say
from stagewright.units import parse_count

if TYPE_CHECKING:
    from stagewright.cluster import Cluster
    from stagewright.cluster.prices import Price, Terms
    from stagewright.export.reading import Reading
    from stagewright.planning.cost import Objective, PricedResult
    from stagewright.planning.job import Job
    from stagewright.planning.plan import Plan
    from stagewright.planning.search_result import SearchResult
    from stagewright.planning.space import Space
    from stagewright.report.pictures.scene import Curve
    from stagewright.tracing.models.reference import ModelReference

_SHOWN = 5


# fmt: off
@dataclass(frozen=True)
class PlannedJobOptions(JobOptions):
    """The job."""

    sequence_lengths: options.JobSequenceLengths = None
    documents_apart: options.DocumentsApart = False
    optimizer: options.OptimizerName = None
    optimizer_option: options.OptimizerOptions = None

    def keys(self) -> dict[str, Any]:
        keys = super().keys()
        del keys["optimizer_option"]
        return keys | {
            "optimizer_options": options.parse_settings(self.optimizer_option, "--optimizer-option") or None,
            "sequence_lengths": options.parse_lengths(self.sequence_lengths),
            "documents_apart": self.documents_apart or None,
        }


@dataclass(frozen=True)
class ParallelismOptions:
    """Parallelism: all degrees and ZeRO levels are tried unless given."""

    pp: options.PipelineDegree = None
    dp: options.DataDegree = None
    tp: Annotated[
        str | None, typer.Option("--tp", metavar="N|auto",
            help="Tensor parallelism; auto, the default, tries all degrees within a node.")] = None
    cp: options.ContextDegree = None
    ep: options.ExpertDegree = None
    sequence_parallel: Annotated[
        bool | None, typer.Option("--sequence-parallel/--no-sequence-parallel",
            help="Whether to use sequence parallelism over the ranks of --tp; default: whichever is faster.")] = None
    microbatch: Annotated[int | None, typer.Option("--microbatch", min=1, help="Samples per microbatch.")] = None
    zero: options.Zero = None
    shard_size: options.ShardSize = None
    shard_units: options.ShardUnits = "auto"
    reduce_dtype: options.ReduceDtype = None


@dataclass(frozen=True)
class ScheduleOptions:
    """Schedule and memory."""

    schedule: Annotated[
        list[str] | None, typer.Option("--schedule", metavar="NAME",
            help="A schedule to try; repeatable; default: 1f1b, gpipe, interleaved-1f1b, breadth-first and joint.")] = None
    recompute: Annotated[
        str | None, typer.Option("--recompute", metavar="HOW",
            help="none, full, model (what the model's code checkpoints), or auto (as little as fits the memory limit); "
            "default: model if its code checkpoints anything, else auto.")] = None
    offload: Annotated[
        bool, typer.Option("--offload/--no-offload",
            help="Whether --recompute auto may also offload activations to the host.")] = True
    host_optimizer: Annotated[
        str, typer.Option("--host-optimizer", metavar="HOW",
            help="Keep optimizer state on the host and step there: never, always, or auto (on ranks short of memory, first "
            "only if faster by 0.5 %).")] = "auto"
    streamed: Annotated[
        str, typer.Option("--streamed", metavar="HOW",
            help="Keep weights on the host and copy each stage to its device before use: never, always, or auto (where "
            "devices lack memory).")] = "auto"
    loss_pieces: options.LossPieces = "auto"


@dataclass(frozen=True)
class ObjectiveOptions:
    """Objective."""

    objective: Annotated[
        str, typer.Option("--objective", metavar="WHAT",
            help="speed, or cost (also tries halves of the cluster).")] = "speed"
    price: Annotated[
        str | None, typer.Option("--price", metavar="DOLLARS|TERMS",
            help="Dollars per device-hour, or the list price to use: on-demand (the default), reserved or spot.")
    ] = None
    tokens: Annotated[
        float | None, typer.Option("--tokens", min=1,
            help="Training tokens, for days and dollars; default: 1e12.")] = None
    within: Annotated[
        float | None, typer.Option("--within", metavar="SECONDS", min=0,
            help="End the search then with the best plans so far, or as soon as it has one.")] = None


@dataclass(frozen=True)
class PlanResultOptions:
    """The result."""

    output: options.Output = None
    top: Annotated[
        int | None, typer.Option("--top", min=1,
            help="Number of plans to find (default: enough to be sure of the best, up to 5); if given, -o writes all of "
            "them: FILE, FILE-2, ...")] = None
    details: Annotated[
        bool, typer.Option("--details", help="Also show what every stage recomputes and what was ruled out.")] = False
    ranks: Annotated[
        Path | None, typer.Option("--ranks", metavar="FILE",
            help="Write the node and device of every rank of the best plan (CSV), for `run --ranks`.")] = None
    html: Html = None
    compare: Annotated[
        Path | None, typer.Option("--compare", metavar="FILE",
            help="Compare the best plan with a configuration you use today, in a file that `estimate --from` reads; job and "
            "runtime are taken from it unless given.")] = None
    as_json: options.Json = False
# fmt: on


@dataclass(frozen=True)
class Compared:
    """The predicted plan of a configuration file, and what was read from the file."""

    plan: Plan
    reading: Reading
    path: Path


@explains("cluster", "output", "global_batch", "sequence_length", "dtype", "job", "memory_limit", "objective")
@grouped
def plan(
    model: options.ComparedModel = None,
    *,
    cluster: options.ClusterName,
    job: PlannedJobOptions,
    model_options: ModelOptions,
    degrees: ParallelismOptions,
    scheduling: ScheduleOptions,
    objective: ObjectiveOptions,
    result: PlanResultOptions,
) -> None:
    """Find the best configurations of a model for a cluster.

    Tries every degree of parallelism, microbatch size, sharding and schedule that is not given, and recomputes or
    offloads activations where memory is short.

    Example:
        stagewright plan llama-3-8b --cluster 8x-h100 \\
            --global-batch 128 --sequence-length 8192 -o plan.json
    """
    from stagewright.cluster import load_cluster
    from stagewright.estimation.runtime import STAGEWRIGHT
    from stagewright.planning.cost import priced_results, prices_of
    from stagewright.report.plans import tight_warnings

    check_writable(result.output)
    _check_ranks(result.ranks)
    check_writable(result.html)
    if result.html is not None and result.html in (result.output, result.ranks):
        raise InputError(f"--html {result.html} is also written by another option: name another file")
    _check_objective(objective.objective)
    reading = None if result.compare is None else read_and_report(result.compare)
    reference = model_options.reference(model, reading)
    target = job.measured(load_cluster(cluster))
    dp = 1 if reading is None else replicas_of(reading.configuration, target.num_devices)
    training_job = job.read(reference, reading, dp)
    if training_job.runtime != STAGEWRIGHT:
        options.check_one_length(training_job, f"plan --runtime {training_job.runtime}")
    price, terms = _price(objective.price)
    tp = tensor_degree(degrees.tp or "auto")
    refuse_unshared(
        is_one_replica=(degrees.cp or 1) == 1
        and (degrees.dp == 1 or (degrees.pp or 1) * (tp or 1) == target.num_devices),
        is_tp_one=tp == 1,
    )
    space = space_of(degrees, tp, scheduling)
    has_bills = objective.objective == "cost" or (objective.price, objective.tokens) != (None, None)
    with _message_without_plan(), Progress(f"planning {reference.name}") as progress:
        results = priced_results(
            reference, target, training_job, cast("Objective", objective.objective), objective.tokens or 1e12,
            price_per_hour=price, terms=terms, only_best=not has_bills, space=space, keep=result.top, report=progress,
            patience_s=math.inf if objective.within is None else objective.within,
        )  # fmt: skip
        search_result, on = results[0].result, results[0].cluster
        compared = (
            None if reading is None else _compared(reading, result, reference, target, training_job, progress)
        )
    best = search_result.plans[0]
    options.warn([*target.cautions, *search_result.warnings, *tight_warnings(best)])
    if result.ranks is not None:
        _write_ranks(result.ranks, best, on)
    if result.html is not None:
        _write_page(result.html, search_result, on)
    bills = Bills(results, prices_of(target, terms) if price is None else {}, terms) if has_bills else None
    _show_plans(search_result, on, bills, result, compared)


@contextmanager
def _message_without_plan() -> Iterator[None]:
    """Report that Ctrl-C or SIGTERM ended the search before it had a plan."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        what = str(interrupt) or "interrupted"
        say(f"{what} before there was a plan: nothing was written")
        raise typer.Exit(128 + (signal.SIGTERM if "SIGTERM" in what else signal.SIGINT)) from None


@dataclass(frozen=True)
class Bills:
    """Time and cost to reach the target for each cluster size, and the prices used."""

    results: Sequence[PricedResult]
    prices: Mapping[str, Price]
    terms: str


def _price(text: str | None) -> tuple[float | None, Terms]:
    """Return the given dollars, or None and the terms of the list price.

    >>> _price("2.5"), _price(None), _price("spot")
    ((2.5, 'on-demand'), (None, 'on-demand'), (None, 'spot'))
    """
    from stagewright.cluster.prices import TERMS
    from stagewright.planning.cost import check_price

    if text is None:
        return None, "on-demand"
    for terms in TERMS:
        if text == terms:
            return None, terms
    try:
        dollars = float(text)
    except ValueError:
        accepted = ", ".join(TERMS)
        raise InputError(
            f"--price {text}{nearest(text, TERMS)}: give dollars per device-hour, e.g. 2.50, or one of {accepted}"
        ) from None
    check_price(dollars)
    return dollars, "on-demand"


def _compared(
    reading: Reading,
    result: PlanResultOptions,
    reference: ModelReference,
    cluster: Cluster,
    job: Job,
    progress: Progress,
) -> Compared:
    from stagewright.planning.estimate import estimate

    assert result.compare is not None
    progress(f"estimating {result.compare}")
    plan = estimate(reference, cluster, job, reading.configuration, report=progress)
    return Compared(plan, reading, result.compare)


def space_of(degrees: ParallelismOptions, tp: int | None, scheduling: ScheduleOptions) -> Space:
    """Return the search space of the options."""
    from stagewright.planning.space import Space

    return Space.of(
        tp=tp, cp=degrees.cp, ep=degrees.ep, pp=degrees.pp, dp=degrees.dp, sequence_parallel=degrees.sequence_parallel,
        microbatch=degrees.microbatch, zero=degrees.zero, reduce_dtype=options.checked_reduce_dtype(degrees.reduce_dtype),
        shard_size=degrees.shard_size, shard_units=options.checked_shard_units(degrees.shard_units),
        schedules=scheduling.schedule, recompute=scheduling.recompute, offload=scheduling.offload,
        host_optimizer=scheduling.host_optimizer, streamed=scheduling.streamed,
        loss_pieces=options.parse_pieces(scheduling.loss_pieces),
    )  # fmt: skip


def _check_objective(what: str) -> None:
    from stagewright.planning.cost import OBJECTIVES

    if what not in OBJECTIVES:
        raise InputError(
            f"--objective {what}{nearest(what, OBJECTIVES)}: give one of {', '.join(OBJECTIVES)}"
        )
    if what != "speed":
        refuse(
            ["compare"], "a configuration is compared on one cluster and with one batch",
            f"leave out --objective {what}",
        )  # fmt: skip


def _check_ranks(path: Path | None) -> None:
    if path is not None and parse_count(str(path)):
        raise InputError(
            f"--ranks {path}: give a file to write ranks to; parallel degrees are --pp, --dp and --tp"
        )
    check_writable(path)


def _write_ranks(path: Path, best: Plan, cluster: Cluster) -> None:
    from stagewright.planning.assignment.placing import device_places, on_devices

    places = device_places(on_devices(cluster, best.devices))
    lines = [f"{rank},{node},{device}" for rank, (node, device) in enumerate(places)]
    write_whole(path, "\n".join(["rank,node,device", *lines]) + "\n")


def _write_page(path: Path, search_result: SearchResult, cluster: Cluster) -> None:
    """Write the report of the best plan, with the memory of its ranks over time if it can be shown in bytes."""
    from stagewright.planning.estimate import staged_model_of
    from stagewright.planning.plan_stages import stage_program
    from stagewright.planning.prediction.step_times import simulated
    from stagewright.report.pictures.plan_memory import plan_curves

    best = search_result.plans[0]
    if (costs := best.predictions.costs) is None:
        raise InputError(f"--html: plans for {best.job.runtime} have no costs to simulate: leave it out")
    with Progress(f"writing {path}") as progress:
        timeline = simulated(stage_program(best), costs)

        def curves() -> list[Curve] | None:
            try:
                return plan_curves(staged_model_of(best, cluster, progress), timeline)
            except StagewrightError as error:
                options.warn([f"the page counts activations instead of bytes: {error}"])
                return None

        Pictures(html=path).write(timeline, curves, best, search_result)


def _show_plans(
    search_result: SearchResult,
    cluster: Cluster,
    bills: Bills | None,
    result: PlanResultOptions,
    compared: Compared | None,
) -> None:
    """Show the best plans, and write them if an output is given."""
    from stagewright.estimation.runtime import STAGEWRIGHT
    from stagewright.export.megatron import megatron_options, shell_lines
    from stagewright.report import configurations, plans, saved_values, side_by_side

    shown = search_result.plans[: result.top or _SHOWN]
    paths = _write(shown, result.output, num_written=result.top or 1)
    for_megatron = megatron_options(shown[0])
    if result.as_json:
        document = {
            "plans": [plans.plan_document(plan, path) for plan, path in zip(shown, paths, strict=True)],
            "excluded": [dataclasses.asdict(excluded) for excluded in search_result.excluded],
            "num_bounded": search_result.num_bounded,
            "next_best": dataclasses.asdict(search_result.next_best) if search_result.next_best else None,
            "ended_early": search_result.ended_early,
            "gap": search_result.gap,
            "compared_with_model": shown[0].is_compared,
        }
        print_document(
            document
            | (configurations.sizes_document(bills.results) if bills else {})
            | (
                {"prices": {name: vars(price) for name, price in bills.prices.items()}}
                if bills and bills.prices
                else {}
            )
            | ({"megatron_options": for_megatron} if for_megatron else {})
            | ({"compared": _comparison(compared, shown[0])} if compared else {})
        )
        return
    is_own = shown[0].job.runtime == STAGEWRIGHT
    parts = [
        plans.job_heading(shown[0]),
        configurations.configurations_table(shown),
        *configurations.legend(shown),
        plans.answer_line(shown[0]),
        plans.host_memory_line(shown[0]),
        *plans.lengths_tables(shown[0]),
        *(saved_values.saving_tables if result.details else saved_values.saving_summary)(shown[0]),
        *saved_values.loss_lines(shown[0]),
        configurations.stages_line(shown[0], cluster),
        plans.host_line(shown[0]),
        plans.profile_line(shown[0]),
        configurations.left_out_table(search_result) if result.details else None,
        configurations.considered_line(search_result),
        *(side_by_side.side_by_side_lines(compared.plan, shown[0], str(compared.path)) if compared else ()),
    ]
    if bills is not None:
        parts += [
            configurations.sizes_table(bills.results),
            *configurations.price_lines(bills.prices, bills.terms),
        ]
    if shown[0].devices and cluster.measured is not None:
        parts.append(
            "Ranks are assigned to devices by the measured links: --ranks FILE writes the assignment."
        )
    if for_megatron:
        parts += [
            "Add these to your model and data arguments for pretrain_gpt.py:",
            copied(shell_lines(for_megatron)),
        ]
    show(*(part for part in parts if part is not None))
    if result.output is not None:
        written = ", ".join(str(path) for path in paths if path is not None)
        steps_early = any("STEP" in text for text in shown[0].program[0])
        show(
            f"Wrote {written}. `stagewright estimate {result.output}` shows stages and memory of the best plan; "
            + (
                "it is asynchronous and cannot be run."
                if steps_early
                else f"`stagewright run {result.output}` trains with it."
                if is_own
                else f"it is for {shown[0].job.runtime}: `stagewright run` cannot execute it."
            )
        )
    if result.ranks is not None:
        show(f"Wrote {result.ranks}.")
    if result.html is not None:
        show(f"Wrote {result.html}.")


def _comparison(compared: Compared, best: Plan) -> dict[str, Any]:
    from stagewright.report.side_by_side import side_by_side_document

    return side_by_side_document(compared.plan, best, str(compared.path), compared.reading.notes)


def tensor_degree(text: str) -> int | None:
    """Return the tensor parallel degree, None for ``auto``.

    >>> tensor_degree("2"), tensor_degree("auto")
    (2, None)
    """
    if text == "auto":
        return None
    if not (degree := parse_count(text)):
        raise InputError(f"--tp {text}: give a number of ranks, or auto to try all degrees within a node")
    return degree


def _write(plans: Sequence[Plan], output: Path | None, num_written: int) -> list[Path | None]:
    """Write the first `num_written` plans if there is an output; return the path of each plan, None if not written."""
    paths: list[Path | None] = [None] * len(plans)
    if output is not None:
        for index, plan in enumerate(plans[:num_written]):
            paths[index] = path = _numbered(output, index + 1)
            plan.save(path)
    return paths


def _numbered(path: Path, number: int) -> Path:
    """Return `path` with `number` in its name, unless it is the first.

    >>> str(_numbered(Path("runs/plan.json"), 1)), str(_numbered(Path("runs/plan.json"), 2))
    ('runs/plan.json', 'runs/plan-2.json')
    """
    return path if number == 1 else path.with_name(f"{path.stem}-{number}{path.suffix}")
