"""`stagewright plan-costs`: the best partition, placement and schedule for a table of layer costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from stagewright.cli.cost_table import layer_table, read_cost_table
from stagewright.cli.groups import grouped
from stagewright.cli.options import Json, Output, warn
from stagewright.cli.output import check_writable, print_document, show
from stagewright.cli.program_file import check_suffix, lost_in, program_text
from stagewright.cli.progress import Progress
from stagewright.errors import InputError
from stagewright.files import write_whole
from stagewright.limits import LEAST_RATE, MOST_ACTIONS, MOST_SPEED_RATIO, MOST_STAGES, check_count
from stagewright.units import format_seconds, parse_bytes

if TYPE_CHECKING:
    from stagewright.planning.joint.prediction import Provenance
    from stagewright.planning.joint.problem import JointProblem, LayerTable

ASSUMED_BANDWIDTH = 50e9
"""Bytes per second of one 400 Gb/s port. Source: NVIDIA ConnectX-7 data sheet, InfiniBand NDR."""


# fmt: off
@dataclass(frozen=True)
class TableOptions:
    """Problem."""

    ranks: Annotated[int | None, typer.Option("--ranks", "-p", min=1, help="Number of ranks.")] = None
    microbatches: Annotated[
        int | None, typer.Option("--microbatches", "-m", min=1, help="Microbatches per batch.")] = None
    speeds: Annotated[
        str | None, typer.Option("--speeds", metavar="A,B,...", help="Speed of each rank, relative to the table.")] = None
    bandwidth: Annotated[
        str | None, typer.Option("--bandwidth", metavar="SIZE", help="Bytes/s between ranks; default: 50GB.")] = None
    memory_limit: Annotated[
        str | None, typer.Option("--memory-limit", metavar="SIZE", help="Memory per rank, e.g. 16GiB or 16GiB,8GiB.")] = None
    ran: Annotated[
        Path | None, typer.Option("--ran", metavar="PLAN", help="With --record: the plan.json that was run.")] = None
    record: Annotated[
        Path | None, typer.Option("--record", metavar="RECORD", help="The ranks' speeds from a run's record.json.")] = None
    seconds: Annotated[float, typer.Option("--seconds", min=0.0, help="Seconds to search.")] = 10.0
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**63 - 1, help="Seed of the search.")] = 0
# fmt: on


@grouped
def plan_costs(
    costs: Annotated[Path, typer.Argument(metavar="TABLE", help="Costs per layer, CSV or JSON.")],
    request: TableOptions,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Find the best plan for layers of known costs.

    Finds partition, placement and schedule from a table of layer costs instead of a model and a cluster.

    Example:
        stagewright plan-costs layers.csv --ranks 4 --microbatches 16
    """
    from stagewright.planning.checks import check_transfers
    from stagewright.planning.joint.prediction import prediction_of
    from stagewright.planning.joint.search import Effort, search
    from stagewright.report import joint as report
    from stagewright.schedule import chain, verify

    check_suffix(output)
    check_writable(output)
    problem, bandwidth = _problem(costs, request)
    with Progress(f"planning {costs}") as progress:

        def report_bound(best_s: float, bound_s: float) -> None:
            progress(f"best {format_seconds(best_s)}, nothing below {format_seconds(bound_s)}")

        result = search(problem, Effort(seconds=request.seconds), seed=request.seed, report=report_bound)
    plan = result.best
    check_transfers(verify(plan.program), chain(plan.program.num_stages), on_lanes=True)
    prediction = prediction_of(plan, result.bound.seconds, bandwidth)
    if output is not None:
        write_whole(output, program_text(output, plan.program, prediction))
        warn([lost] if (lost := lost_in(output)) else [])
    if as_json:
        assumed = prediction.assumptions.model_dump(mode="json")
        print_document(report.joint_document(result, output) | {"assumptions": assumed})
        return
    show(
        report.joint_heading(result),
        report.assumptions_text(prediction.assumptions),
        report.ranks_table(plan),
        report.runners_up_table(result),
    )
    if output is not None:
        show(f"Wrote {output}. `stagewright schedule {output}` draws its program.")


def _problem(costs: Path, request: TableOptions) -> tuple[JointProblem, Provenance]:
    """Return the planning problem and the provenance of its bandwidth."""
    from stagewright.planning.joint.problem import JointProblem

    if request.ran is not None and request.record is None:
        raise InputError("--ran is the plan of a run: also give the record of that run with --record RECORD")
    if request.ranks is None or request.microbatches is None:
        raise InputError("planning needs --ranks and --microbatches, e.g. --ranks 8 --microbatches 32")
    check_count(request.ranks, MOST_STAGES, "--ranks", "give fewer")
    most = MOST_ACTIONS // 2 // request.ranks
    check_count(request.microbatches, most, "--microbatches", "make them larger, so that there are fewer")
    table = layer_table(read_cost_table(costs))
    bytes_per_s, bandwidth = _bandwidth(costs, request, table)
    if request.memory_limit is not None and not (table.parameter_bytes.any() or table.saved_bytes.any()):
        raise InputError(
            f"{costs} has neither parameter_bytes nor activation_bytes, so --memory-limit {request.memory_limit} has no "
            "effect: add them, or leave the limit out"
        )
    problem = JointProblem.of(
        table, request.ranks, request.microbatches,
        speed=_observed(request) if request.record else _speeds(request.speeds, request.ranks),
        memory_bytes=_memory(request.memory_limit, request.ranks), bytes_per_s=bytes_per_s,
    )  # fmt: skip
    return problem, bandwidth


def _bandwidth(costs: Path, request: TableOptions, table: LayerTable) -> tuple[float, Provenance]:
    """Return the bytes per second between ranks, infinite where the layers have no boundary_bytes, and its provenance."""
    if table.boundary_bytes.any():
        if request.bandwidth is None:
            return ASSUMED_BANDWIDTH, "assumed"
        bandwidth = float(parse_bytes(request.bandwidth))
        if bandwidth < LEAST_RATE:
            raise InputError(f"--bandwidth {request.bandwidth}: give at least {LEAST_RATE:g} byte a second")
        return bandwidth, "given"
    if request.bandwidth is not None:
        raise InputError(
            f"{costs} has no boundary_bytes, so --bandwidth {request.bandwidth} has no effect: add them, or leave it out"
        )
    return float("inf"), "none"


def _speeds(text: str | None, num_ranks: int) -> list[float]:
    """Return the speed of each rank.

    >>> _speeds("1, 0.5", 2), _speeds(None, 2)
    ([1.0, 0.5], [1.0, 1.0])
    """
    if text is None:
        return [1.0] * num_ranks
    try:
        speeds = [float(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"--speeds {text}: write numbers separated by commas, e.g. 1,1,0.5,1") from None
    if len(speeds) != num_ranks or not all(
        1 / MOST_SPEED_RATIO <= speed <= MOST_SPEED_RATIO for speed in speeds
    ):
        raise InputError(
            f"--speeds {text}: give {num_ranks} numbers, one per rank, from {1 / MOST_SPEED_RATIO:g} to {MOST_SPEED_RATIO:g}"
        )
    return speeds


def _memory(text: str | None, num_ranks: int) -> list[float]:
    """Return the memory limit of each rank in bytes.

    >>> _memory("2KiB", 2), _memory("2KiB,1KiB", 2), _memory(None, 1)
    ([2048.0, 2048.0], [2048.0, 1024.0], [inf])
    """
    if text is None:
        return [float("inf")] * num_ranks
    limits = [float(parse_bytes(part)) for part in text.split(",")]
    if len(limits) not in (1, num_ranks):
        raise InputError(f"--memory-limit {text}: give one amount, or {num_ranks}, one per rank")
    return limits * (num_ranks if len(limits) == 1 else 1)


def _observed(request: TableOptions) -> list[float]:
    """Return the speeds of the ranks, from the measured time of the slowest replica of each and its planned time."""
    from stagewright.execution.record import load_record
    from stagewright.planning.plan import load_plan

    if request.ran is None or request.record is None or request.speeds is not None:
        raise InputError("--record replaces --speeds and needs --ran PLAN, the plan that was run")
    plan, record = load_plan(request.ran), load_record(request.record)
    measured: dict[int, float] = {}
    for rank in record.ranks:
        measured[rank.pipeline_rank] = max(rank.busy_seconds, measured.get(rank.pipeline_rank, 0.0))
    if len(measured) != request.ranks or plan.pp != request.ranks:
        raise InputError(
            f"record {request.record} has {len(measured)} pipeline ranks and {request.ran} {plan.pp}, but --ranks is "
            f"{request.ranks}: give the same number"
        )
    if not plan.predictions.ranks:
        raise InputError(f"{request.ran} predicts no times of its ranks: give the speeds with --speeds")
    planned = [rank.busy_seconds for rank in plan.predictions.ranks]
    return _relative_speeds(planned, [measured[rank] for rank in range(plan.pp)])


def _relative_speeds(planned_s: Sequence[float], measured_s: Sequence[float]) -> list[float]:
    """Return the speed of every rank relative to the median rank: a factor that all ranks share is an error of the plan.

    >>> [round(speed, 6) for speed in _relative_speeds([1, 2, 2], [1.1, 2.2, 4.4])]
    [1.0, 1.0, 0.5]
    """
    speeds = [planned / measured for planned, measured in zip(planned_s, measured_s, strict=True)]
    middle = median(speeds)
    return [speed / middle for speed in speeds]
