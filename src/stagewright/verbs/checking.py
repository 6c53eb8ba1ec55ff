"""Checks that a plan would run: deadlock, memory, time and fit with its model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stagewright.cluster import Cluster
from stagewright.errors import InputError, PlanError, StagewrightError
from stagewright.estimation.memory import stage_edges
from stagewright.planning.checks import (
    TOLERANCE,
    check_predicted_memory,
    check_predicted_time,
    check_transfers,
)
from stagewright.planning.estimate import estimate, line_of
from stagewright.planning.plan import Plan
from stagewright.planning.plan_stages import stage_program
from stagewright.planning.prediction.pipeline import Pipeline, reserved_bytes
from stagewright.planning.prediction.predict import rank_memories
from stagewright.report.plans import batch_text, degrees
from stagewright.units import format_bytes
from stagewright.verbs.given import Allow, Report, given_cluster, given_plan


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
    allow: Allow = lambda plan, what: None,
    report: Report = lambda stage: None,
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
        on = None if cluster is None else given_cluster(cluster)
        for name, detail in _checks(given_plan(plan), on, with_model, left_out, allow, report):
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
    yield "document", f"version {plan.version}, {plan.num_stages} stages on {degrees(plan)} ranks"
    yield "gradients", batch_text(plan)
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
    staged = line_of(plan, cluster or plan.cluster.load(), report)
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


def _check_memory(plan: Plan, staged: Pipeline) -> str:
    memories = rank_memories(staged)
    for memory in memories:
        device = staged.device_of(memory.rank)
        needed, limit = reserved_bytes(memory, device), staged.usable_bytes(memory.rank)
        if needed > limit:
            raise PlanError(
                f"rank {memory.rank} needs {format_bytes(needed)} at {memory.at}, "
                f"{format_bytes(needed - limit)} more than it may use ({format_bytes(limit)}): plan again"
            )
    for memory, predicted in zip(memories, plan.predictions.ranks, strict=False):  # of all ranks or of none
        _check_prediction(f"rank {memory.rank}", memory.peak_bytes, predicted.allocated_peak_bytes)
    fullest = max(memories, key=lambda memory: memory.peak_bytes)
    limit = staged.usable_bytes(fullest.rank)
    return f"at most {format_bytes(fullest.peak_bytes)} (rank {fullest.rank}) of {format_bytes(limit)}"


def _check_prediction(who: str, needed: int, predicted: int) -> None:
    if abs(needed - predicted) > TOLERANCE * needed:
        raise PlanError(
            f"{who} needs {format_bytes(needed)}, but the plan predicts {format_bytes(predicted)}: plan again"
        )
