"""Explanations of a plan's step time: its parts, changes that would shorten it, and the effect of estimation errors.

All of it follows from the costs in the plan: no model is built, and nothing is searched.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagewright.errors import InputError, ScheduleError
from stagewright.frames import data_frame, html_table
from stagewright.planning.plan import Plan, given_plan
from stagewright.planning.plan_stages import stage_program
from stagewright.planning.prediction.bubble import COMPUTING, with_equal_stages, with_transfers
from stagewright.planning.prediction.step_times import simulated, simulated_seconds, whole_step_seconds
from stagewright.planning.predictions import StepCosts
from stagewright.schedule.action import Kind
from stagewright.schedule.builders import BUILDERS, build, options_of
from stagewright.schedule.in_flight import in_flight, peak_activations
from stagewright.schedule.lower import insert_recomputation
from stagewright.schedule.program import Program
from stagewright.simulation.critical import critical_path
from stagewright.simulation.timeline import Timeline
from stagewright.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from pandas import DataFrame

_COLLECTIVES = ("gather_seconds", "reduce_seconds", "sum_seconds")
_LEAST_GAIN = 0.0005
"""Fraction of a step below which a gain is not reported."""


@dataclass(frozen=True)
class StepPart:
    """A part of the seconds of a step, named by `what` it is."""

    what: str
    seconds: float
    count: int = 0
    """Number of actions or transfers."""


@dataclass(frozen=True)
class Change:
    """A hypothetical change, and the seconds of a step with it."""

    what: str
    seconds: float
    note: str = ""


@dataclass(frozen=True)
class Explanation:
    """An explanation of the seconds of one step of a plan."""

    seconds: float
    parts: tuple[StepPart, ...]
    """Parts of the critical path of the step; they add up to `seconds`."""
    slowest_rank: int
    """The pipeline rank with most of the computations on the critical path."""
    slowest_share: float
    """Its fraction of these computations."""
    changes: tuple[Change, ...]
    """Changes that would shorten the step, the largest gain first."""
    errors: tuple[Change, ...]
    """Errors of the estimate, with the seconds of a step if they occurred."""

    def __repr__(self) -> str:
        """Return the largest part and the largest gain."""
        most = f"{self.parts[0].what} {format_seconds(self.parts[0].seconds)}" if self.parts else "nothing"
        gains = [f"{change.what} {change.seconds / self.seconds - 1:+.1%}" for change in self.changes[:1]]
        return f"<Explanation of {format_seconds(self.seconds)}: {', '.join([most, *gains])}>"

    def _repr_html_(self) -> str:
        """Return the table of parts, changes and errors, for a notebook."""
        return html_table(repr(self).strip("<>"), *self._rows())

    def to_dataframe(self) -> DataFrame:
        """Return one row per part, change and error; those of changes and errors have the seconds of a step with them.
        Raises `InputError` without pandas."""
        return data_frame(*self._rows())

    def _rows(self) -> tuple[list[str], list[list[Any]]]:
        rows: list[list[Any]] = [["part", part.what, part.seconds, part.count or ""] for part in self.parts]
        for kind, changes in (("change", self.changes), ("error", self.errors)):
            rows += [[kind, change.what, change.seconds, change.note] for change in changes]
        return ["kind", "what", "seconds", "note"], rows


def explain(plan: Plan | str | Path) -> Explanation:
    """Explain the predicted time of a step of `plan`, or of the plan in a file, at its longest sequence length.

    Raises:
        InputError: the plan does not state its costs.
        ScheduleError: its program does not run.
    """
    plan = given_plan(plan)
    costs = plan.predictions.costs
    if costs is None:
        raise InputError(
            "the plan has no costs of its actions (predictions.costs), as plans of `stagewright plan` have: plan again"
        )
    program = stage_program(plan)
    timeline = simulated(program, costs)
    seconds = whole_step_seconds(timeline, costs)
    parts, on_rank = _parts(timeline, costs, seconds, _recompute_seconds(plan, costs))
    slowest = max(on_rank, key=lambda rank: on_rank[rank], default=0)
    changes = [*_changes(program, costs), *_without_recomputing(plan, program), *_schedules(plan, program)]
    worth = [change for change in changes if change.seconds < seconds * (1 - _LEAST_GAIN)]
    return Explanation(
        seconds=seconds,
        parts=tuple(parts),
        slowest_rank=slowest,
        slowest_share=on_rank[slowest] / (sum(on_rank.values()) or 1.0),
        changes=tuple(sorted(worth, key=lambda change: change.seconds)),
        errors=tuple(_errors(program, costs)),
    )


# -- parts of the step --------------------------------------------------------------------------------------

_NAMES = {
    Kind.F: "forwards", Kind.B: "backwards", Kind.I: "input gradients", Kind.W: "weight gradients",
    Kind.R: "recomputation", Kind.GATHER: "gathering parameters", Kind.REDUCE: "reducing gradients",
    Kind.STEP: "optimizer",
}  # fmt: skip


def _parts(
    timeline: Timeline, costs: StepCosts, step_s: float, recompute_s: Sequence[float]
) -> tuple[list[StepPart], dict[int, float]]:
    """Return the parts of the critical path, and its compute seconds by rank; recomputation in backwards is its own part."""
    seconds: dict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    on_rank: dict[int, float] = defaultdict(float)
    rank_of = timeline.encoded.placement.rank_of_stage
    reached = 0.0
    for index in critical_path(timeline):
        action = timeline.encoded.action(int(index))
        start, end = float(timeline.start_s[index]), float(timeline.end_s[index])
        if start > reached:
            seconds["transfers between stages"] += start - reached
            counts["transfers between stages"] += 1
        name = _NAMES.get(action.kind, "overlapped forwards and backwards")
        seconds[name] += end - max(start, reached)
        counts[name] += 1
        if action.kind in (Kind.B, Kind.I):
            recomputed_s = recompute_s[action.stage]
            seconds[name] -= recomputed_s
            seconds[_NAMES[Kind.R]] += recomputed_s
        if timeline.is_compute[index]:
            on_rank[rank_of[action.parts[0].stage]] += end - start
        reached = max(reached, end)
    parts = [StepPart(name, seconds[name], counts[name]) for name in seconds]
    parts.sort(key=lambda part: -part.seconds)
    after = [
        StepPart("norm of the gradient", costs.norm_seconds),
        StepPart("optimizer, and updated parameters", max(costs.optimizer_seconds, default=0.0)),
    ]
    remaining_s = step_s - reached - sum(part.seconds for part in after)
    name = "gradient reduction" if remaining_s > 0 else "overlap with the end of the previous step"
    return [
        part for part in (*parts, StepPart(name, remaining_s), *after) if abs(part.seconds) > 1e-9 * step_s
    ], on_rank


# -- changes that would shorten it --------------------------------------------------------------------------


def _changes(program: Program, costs: StepCosts) -> Iterator[Change]:
    """Yield changes of the devices, links and cuts, one at a time."""
    yield Change(
        "devices compute 10 % faster", simulated_seconds(program, _scaled(costs, COMPUTING, 1 / 1.1))
    )
    yield Change("links between stages twice as fast", simulated_seconds(program, with_transfers(costs, 0.5)))
    yield Change("collectives twice as fast", simulated_seconds(program, _with_collectives(costs, 0.5)))
    yield Change(
        "optimizer twice as fast", simulated_seconds(program, _scaled(costs, ("optimizer_seconds", "update_seconds"), 0.5))
    )  # fmt: skip
    if len(program.ranks) > 1:
        yield Change("stages of equal length", simulated_seconds(program, with_equal_stages(costs)))


def _without_recomputing(plan: Plan, program: Program) -> Iterator[Change]:
    """Yield the change to keep everything, with the memory it needs. Ignores: values that are offloaded."""
    costs = plan.predictions.costs
    stages = plan.predictions.stages
    if costs is None or not any(stage.recompute_seconds for stage in stages):
        return
    recompute_s = _recompute_seconds(plan, costs)
    changed = costs.model_copy(
        update={
            name: tuple(
                max(seconds - recomputed, 0.0)
                for seconds, recomputed in zip(getattr(costs, name), recompute_s, strict=True)
            )
            for name in ("input_grad_seconds", "backward_seconds")
        }
        | {"recompute_seconds": ()}
    )
    held = in_flight(program)
    needed = [0] * plan.pp
    for stage, (rank, count) in enumerate(zip(plan.placement, held, strict=True)):
        needed[rank] += stages[stage].recomputed_bytes * count
    note = f"needs {format_bytes(max(needed))} more on rank {needed.index(max(needed))}"
    yield Change("nothing recomputed", simulated_seconds(program, changed), note)


def _recompute_seconds(plan: Plan, costs: StepCosts) -> tuple[float, ...]:
    """Return, per stage, the seconds of recomputation within its backward, which no R before it does."""
    ahead = costs.recompute_seconds or (0.0,) * plan.num_stages
    stages = plan.predictions.stages
    return tuple(
        max(stage.recompute_seconds - ahead_s, 0.0) for stage, ahead_s in zip(stages, ahead, strict=True)
    )


def _schedules(plan: Plan, program: Program) -> Iterator[Change]:
    """Yield other schedules of the same stages, where parameters and gradients are not gathered and reduced per action."""
    costs = plan.predictions.costs
    kinds = {part.kind for actions in program.ranks for action in actions for part in action.parts}
    if costs is None or program.num_stages == 1 or kinds & {Kind.GATHER, Kind.REDUCE, Kind.STEP}:
        return
    recomputed = {part.stage for action in program for part in action.parts if part.kind is Kind.R}
    peaks = peak_activations(program)
    for name in BUILDERS:
        candidate = _built(name, program)
        if candidate is None:
            continue
        candidate = insert_recomputation(candidate, recomputed)
        more = [peak - current for peak, current in zip(peak_activations(candidate), peaks, strict=True)]
        rank = more.index(max(more))
        note = f"rank {rank} holds {max(more)} more microbatches" if max(more) > 0 else "holds no more"
        is_split = any(action.kind is Kind.W for action in candidate)
        after = costs.model_copy(update={"checks_after": plan.job.profile.checks_after and is_split})
        yield Change(f"schedule {name}", simulated_seconds(candidate, after), note)


def _built(name: str, program: Program) -> Program | None:
    """Return the schedule's program of the same size with the same stages on every rank, or None if it has none or does not
    end with one update of the parameters."""
    chunks = program.num_stages // program.num_ranks
    if (chunks > 1) != ("num_chunks" in options_of(name)):
        return None
    num_chunks = chunks if chunks > 1 else None
    try:
        if build(name, program.num_ranks, 1, num_chunks).placement != program.placement:
            return (
                None  # checked with one microbatch, as schedules that search for an order are slow for many
            )
        other = build(name, program.num_ranks, program.num_microbatches, num_chunks)
    except ScheduleError:
        return None
    return None if any(action.kind is Kind.STEP for action in other) else other


# -- estimation errors --------------------------------------------------------------------------------------


def _errors(program: Program, costs: StepCosts) -> Iterator[Change]:
    """Yield errors of the estimated costs, one kind at a time."""
    yield Change("computations 10 % longer", simulated_seconds(program, _scaled(costs, COMPUTING, 1.1)))
    slow = [_one_rank_slower(program, costs, rank) for rank in range(program.num_ranks)]
    if len(slow) > 1:
        worst, best = slow.index(max(slow)), slow.index(min(slow))
        yield Change(f"rank {worst} 10 % slower", slow[worst], "the rank that matters most")
        yield Change(f"rank {best} 10 % slower", slow[best], "the rank that matters least")
    yield Change("transfers twice as long", simulated_seconds(program, with_transfers(costs, 2.0)))
    yield Change("collectives twice as long", simulated_seconds(program, _with_collectives(costs, 2.0)))


def _one_rank_slower(program: Program, costs: StepCosts, rank: int) -> float:
    """Return the seconds of a step when the computations of `rank` take a tenth longer."""
    factors = [1.1 if stage_rank == rank else 1.0 for stage_rank in program.placement.rank_of_stage]
    update = {
        name: tuple(factor * seconds for factor, seconds in zip(factors, column, strict=True))
        for name in COMPUTING
        if (column := getattr(costs, name))
    }
    return simulated_seconds(program, costs.model_copy(update=update))


# -- changed costs ------------------------------------------------------------------------------------------


def _scaled(costs: StepCosts, names: tuple[str, ...], factor: float) -> StepCosts:
    return costs.model_copy(
        update={name: tuple(factor * seconds for seconds in getattr(costs, name)) for name in names}
    )


def _with_collectives(costs: StepCosts, factor: float) -> StepCosts:
    changed = _scaled(costs, _COLLECTIVES, factor)
    return changed.model_copy(update={"norm_seconds": factor * costs.norm_seconds})
