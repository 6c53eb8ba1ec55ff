"""Checks that a plan would run: deadlock, memory, time and fit with its model.

What a plan predicts is checked against its own costs, for which no model is needed and no foreign code runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from stagewright.cluster import Cluster
from stagewright.errors import InputError, PlanError, StagewrightError
from stagewright.estimation.memory import stage_edges
from stagewright.planning.estimate import Report, estimate, staged_model_of
from stagewright.planning.plan import Plan, cluster_of, given_plan
from stagewright.planning.plan_stages import stage_program
from stagewright.planning.prediction.predict import rank_memories
from stagewright.planning.prediction.staged_model import StagedModel, allocated_bytes, reserved_bytes
from stagewright.planning.prediction.step_times import simulated, simulated_seconds
from stagewright.planning.predictions import StepCosts
from stagewright.schedule import Program, insert_communication, verify
from stagewright.schedule.lanes import check_lanes
from stagewright.schedule.lower import receives_ahead
from stagewright.schedule.tokens import Edge
from stagewright.simulation import StageCosts, Timeline
from stagewright.simulation import simulate as simulate_program
from stagewright.text import silent
from stagewright.units import format_bytes, format_seconds

Allow = Callable[[Plan, str], None]
"""A callback before the model of a plan is built, with the reason; may raise."""

TOLERANCE = 0.03
"""Relative difference by which a check may differ from the prediction of the plan."""


@dataclass(frozen=True)
class LeftOut:
    """A check that was skipped, and why."""

    check: str
    why: str


@dataclass(frozen=True)
class Checked:
    """The checks that passed with their findings, those left out, and the error of the first that failed."""

    passed: dict[str, str]
    left_out: tuple[LeftOut, ...]
    fault: StagewrightError | None = None

    def __bool__(self) -> bool:
        """Return whether no check failed."""
        return self.fault is None

    def __repr__(self) -> str:
        results = [f"{name} ok" for name in self.passed] + [
            f"{skipped.check} not checked" for skipped in self.left_out
        ]
        return f"<Checked: {', '.join([*results, *([str(self.fault)] if self.fault else [])])}>"


def check(
    plan: Plan | str | Path,
    cluster: str | Path | Cluster | None = None,
    *,
    with_model: bool = False,
    allow: Allow | None = None,
    report: Report | None = None,
) -> Checked:
    """Check whether a plan would run, before any machine is booked.

    Args:
        plan: a plan or its file.
        cluster: the cluster to check for; default the plan's.
        with_model: whether to build the model even if it is a factory, which runs its code.
        allow: called before the code of a factory runs; may raise.
    """
    passed: dict[str, str] = {}
    left_out: list[LeftOut] = []
    try:
        loaded = given_plan(plan)
        on = None if cluster is None else cluster_of(loaded, cluster)
        for name, detail in _checks(loaded, on, with_model, left_out, allow or silent, report or silent):
            passed[name] = detail  # noqa: PERF403  # kept when a later one raises
    except StagewrightError as error:
        return Checked(passed, tuple(left_out), error)
    return Checked(passed, tuple(left_out))


def _checks(
    plan: Plan,
    cluster: Cluster | None,
    with_model: bool,
    left_out: list[LeftOut],
    allow: Allow,
    report: Report,
) -> Iterator[tuple[str, str]]:
    """Yield name and finding of each check that passes; the first that fails raises. Adds to `left_out` what needs code."""
    yield "document", f"version {plan.version}, {plan.num_stages} stages, {plan.degrees}"
    yield "gradients", plan.batch_text
    program = stage_program(plan)
    yield "program", f"{plan.schedule}: {program.num_actions} actions, each once, in order, free of deadlock"
    if plan.predictions.costs is not None:
        yield "time", check_predicted_time(plan, plan.predictions.costs)
    why = None if with_model or cluster is not None else _without_model(plan)
    if why is not None:
        yield from _checks_of_predictions(plan, why, left_out)
        return
    allow(plan, "a check on another cluster")
    yield from _checks_of_model(plan, cluster, report)


def _without_model(plan: Plan) -> str | None:
    """Return why the model of a plan is not built without --with-model: it is code, or it is not here. None: it is built."""
    if plan.code:
        return f"as building it runs {' and '.join(plan.code)}; --with-model allows it"
    try:
        plan.model.reference()
    except InputError as error:
        return f"as it is not here: {error}"
    return None


def _checks_of_predictions(plan: Plan, why: str, left_out: list[LeftOut]) -> Iterator[tuple[str, str]]:
    """Yield the checks that a plan's predictions allow when its model is not built, for the reason `why`."""
    left_out.append(LeftOut("model", why))
    if plan.predictions.costs is None:
        why = "as the plan does not say what its stages send; --with-model finds out"
        left_out.append(LeftOut("transfers", why))
    else:
        cluster = plan.cluster.load()
        edges = tuple((transfer.source, transfer.target) for transfer in plan.predictions.costs.transfers)
        yield "transfers", check_transfers(stage_program(plan), edges, plan.job.uses_lanes(cluster))
    if plan.predictions.ranks:
        yield "memory", check_predicted_memory(plan, plan.cluster.load())
    else:
        left_out.append(LeftOut("memory", "as the plan predicts none; --with-model finds out"))


def _checks_of_model(plan: Plan, cluster: Cluster | None, report: Report) -> Iterator[tuple[str, str]]:
    """Yield the checks of a plan against its model as it is now."""
    staged = staged_model_of(plan, cluster or plan.cluster.load(), report)
    operators = sum(stage.stop - stage.start for stage in staged.stages)
    yield "model", f"{plan.model.text}: all {operators} forward operators, each on one stage"
    yield "transfers", check_transfers(staged.program, stage_edges(staged.stages), staged.uses_lanes)
    yield (
        "memory",
        _check_loop(plan, staged.cluster) if plan.job.profile.loop else _check_memory(plan, staged),
    )


def _check_loop(plan: Plan, cluster: Cluster) -> str:
    """Check the memory of a runtime without stages."""
    estimated = estimate(plan, cluster)
    needed, predicted = (
        candidate.predictions.ranks[0].allocated_peak_bytes for candidate in (estimated, plan)
    )
    _check_prediction("it", needed, predicted)
    return check_predicted_memory(estimated, cluster)


def _check_memory(plan: Plan, staged: StagedModel) -> str:
    memories = rank_memories(staged)
    for memory in memories:
        device = staged.device_of(memory.rank)
        needed, limit = reserved_bytes(memory, device), staged.usable_bytes(memory.rank)
        if needed > limit:
            raise PlanError(
                f"rank {memory.rank} needs {format_bytes(needed)} at {memory.at}, "
                f"{format_bytes(needed - limit)} more than it may use ({format_bytes(limit)}): plan again"
            )
    allocated = {memory.rank: allocated_bytes(memory, staged.device_of(memory.rank)) for memory in memories}
    for memory, predicted in zip(memories, plan.predictions.ranks, strict=False):  # of all ranks or of none
        _check_prediction(f"rank {memory.rank}", allocated[memory.rank], predicted.allocated_peak_bytes)
    fullest = max(allocated, key=allocated.__getitem__)
    limit = staged.usable_bytes(fullest)
    return f"at most {format_bytes(allocated[fullest])} (rank {fullest}) of {format_bytes(limit)}"


def _check_prediction(who: str, needed: int, predicted: int) -> None:
    if abs(needed - predicted) > TOLERANCE * needed:
        raise PlanError(
            f"{who} needs {format_bytes(needed)}, but the plan predicts {format_bytes(predicted)}: plan again"
        )


def check_predicted_time(plan: Plan, costs: StepCosts) -> str:
    """Return a text with the seconds of the program at the plan's costs; raises `PlanError` where the plan predicts another
    time."""
    simulated_s, predicted_s = simulated_seconds(stage_program(plan), costs), plan.predictions.step_seconds
    if abs(simulated_s - predicted_s) > TOLERANCE * simulated_s:
        raise PlanError(
            f"the plan says {format_seconds(predicted_s)} per step, but its program takes {format_seconds(simulated_s)} at "
            "its costs: plan again"
        )
    return f"{format_seconds(simulated_s)} per step at the costs that the plan states"


def check_transfers(program: Program, edges: tuple[Edge, ...], on_lanes: bool) -> str:
    """Return a text with the number of transfers that `program` needs; raises `ScheduleError` if they would not match, or
    hang. With `on_lanes` hosts may wait for their GPUs at any time."""
    lowered = verify(insert_communication(program, edges, ahead=receives_ahead(on_lanes)), edges)
    count = lowered.num_actions - program.num_actions
    matched = f"{count} sends and receives, matched and in one order; no deadlock even if every send blocks"
    if not on_lanes:
        return matched
    check_lanes(lowered, edges, waits_for_device=True)
    return f"{matched}, nor if a host waits for its GPU"


def check_predicted_memory(plan: Plan, cluster: Cluster) -> str:
    """Return a text with the memory that the fullest rank reserves; raises `PlanError` where a rank may use less."""
    limits = plan.usable_bytes(cluster)
    for rank in (rank for predictions in plan.by_length.values() for rank in predictions.ranks):
        needed, limit = rank.reserved_peak_bytes, limits[rank.rank]
        if needed > limit:
            raise PlanError(
                f"rank {rank.rank} needs {format_bytes(needed)} at {rank.peak_at or 'its peak'}, "
                f"{format_bytes(needed - limit)} more than it may use ({format_bytes(limit)}): plan again"
            )
    fullest = max(plan.predictions.ranks, key=lambda rank: rank.reserved_peak_bytes)
    needed, limit = format_bytes(fullest.reserved_peak_bytes), format_bytes(limits[fullest.rank])
    return f"at most {needed} (rank {fullest.rank}) of {limit}, as the plan says"


@overload
def simulate(subject: Plan | str | Path) -> Timeline: ...
@overload
def simulate(subject: Program, costs: StageCosts, *args: Any, **options: Any) -> Timeline: ...
def simulate(subject: Plan | str | Path | Program, *args: Any, **options: Any) -> Timeline:
    """Return when every action of a batch runs: for a plan, or that of a file, with the costs that it states; for a program
    with the given ones and the other arguments of `stagewright.simulation.simulate`.

    Raises:
        InputError: the plan states no costs, or costs of another number of stages are given.
        ScheduleError: the program deadlocks.
    """
    if isinstance(subject, Program):
        return simulate_program(subject, *args, **options)
    if args or options:
        raise InputError(
            "a plan states its own costs: give no other argument, or pass its program, `stage_program(plan)`"
        )
    plan = given_plan(subject)
    costs = plan.predictions.costs
    if costs is None:
        raise InputError(
            "the plan does not state its costs: `stagewright.estimate(plan, cluster)` returns one that does"
        )
    return simulated(stage_program(plan), costs)
