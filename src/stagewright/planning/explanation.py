"""Why a plan takes what it takes: where the seconds of its step go, what would shorten it, and what errors would do to it.

All of it follows from the costs that the plan states: no model is built, and nothing is searched.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stagewright.errors import InputError, ScheduleError
from stagewright.frames import data_frame, html_table
from stagewright.planning.plan import Plan
from stagewright.planning.plan_stages import stage_program
from stagewright.planning.prediction.bubble import COMPUTING, levelled, with_transfers
from stagewright.planning.prediction.step_times import simulated, whole_step_seconds
from stagewright.planning.predictions import StepCosts
from stagewright.schedule.action import Kind
from stagewright.schedule.families import FAMILIES, build, options_of
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
"""Part of a step below which a change is worth no line."""


@dataclass(frozen=True)
class Part:
    """What some of the seconds of a step are."""

    what: str
    seconds: float
    count: int = 0
    """Actions or transfers."""


@dataclass(frozen=True)
class Change:
    """Something that could be otherwise, and the seconds of a step then."""

    what: str
    seconds: float
    note: str = ""


@dataclass(frozen=True)
class Explanation:
    """Of one step of a plan; seconds."""

    seconds: float
    parts: tuple[Part, ...]
    """What the end of the step waits for, one after the other: they add up to `seconds`."""
    slowest_rank: int
    """The pipeline rank that most of the computations among them are on."""
    slowest_share: float
    """Its part of those."""
    changes: tuple[Change, ...]
    """That would shorten it, most first."""
    errors: tuple[Change, ...]
    """Of the estimate, and what they would make of the step."""

    def __repr__(self) -> str:
        """The largest part and the largest gain."""
        most = f"{self.parts[0].what} {format_seconds(self.parts[0].seconds)}" if self.parts else "nothing"
        gains = [f"{one.what} {one.seconds / self.seconds - 1:+.1%}" for one in self.changes[:1]]
        return f"<Explanation of {format_seconds(self.seconds)}: {', '.join([most, *gains])}>"

    def _repr_html_(self) -> str:
        """In a notebook: all of it."""
        return html_table(repr(self).strip("<>"), *self._rows())

    def to_dataframe(self) -> DataFrame:
        """A row per part, change and error; of changes and errors the seconds of a step then. Raises `InputError` without
        pandas."""
        return data_frame(*self._rows())

    def _rows(self) -> tuple[list[str], list[list[Any]]]:
        rows: list[list[Any]] = [["part", one.what, one.seconds, one.count or ""] for one in self.parts]
        for kind, changes in (("change", self.changes), ("error", self.errors)):
            rows += [[kind, one.what, one.seconds, one.note] for one in changes]
        return ["kind", "what", "seconds", "note"], rows


def explain(plan: Plan) -> Explanation:
    """Why a step of `plan` takes what is predicted for it; of its longest samples.

    Raises:
        InputError: the plan does not state its costs.
        ScheduleError: its program does not run.
    """
    costs = plan.predictions.costs
    if costs is None:
        raise InputError(
            "the plan does not state what its actions take, as those of `stagewright plan` do: plan again"
        )
    program = stage_program(plan)
    timeline = simulated(program, costs)
    seconds = whole_step_seconds(timeline, costs)
    parts, on_rank = _parts(timeline, costs, seconds, _made_again(plan, costs))
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


# -- what each second is ------------------------------------------------------------------------------------

_NAMES = {
    Kind.F: "forwards", Kind.B: "backwards", Kind.I: "input gradients", Kind.W: "weight gradients",
    Kind.R: "recomputation", Kind.GATHER: "gathering parameters", Kind.REDUCE: "reducing gradients",
    Kind.STEP: "optimizer",
}  # fmt: skip


def _parts(
    timeline: Timeline, costs: StepCosts, step_s: float, made_again: Sequence[float]
) -> tuple[list[Part], dict[int, float]]:
    """The critical path by what it does, and its computations by rank; backwards without what they make again."""
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
        name = _NAMES.get(action.kind, "forwards and backwards at once")
        seconds[name] += end - max(start, reached)
        counts[name] += 1
        if action.kind in (Kind.B, Kind.I):
            again = made_again[action.stage]
            seconds[name] -= again
            seconds[_NAMES[Kind.R]] += again
        if timeline.is_compute[index]:
            on_rank[rank_of[action.parts[0].stage]] += end - start
        reached = max(reached, end)
    parts = [Part(name, seconds[name], counts[name]) for name in seconds]
    parts.sort(key=lambda part: -part.seconds)
    after = [
        Part("norm of the gradient", costs.norm_seconds),
        Part("optimizer, and updated parameters", max(costs.optimizer_seconds, default=0.0)),
    ]
    rest = step_s - reached - sum(part.seconds for part in after)
    name = "sums of gradients" if rest > 0 else "begun while others end the step before"
    return [part for part in (*parts, Part(name, rest), *after) if abs(part.seconds) > 1e-9 * step_s], on_rank


# -- what would shorten it ----------------------------------------------------------------------------------


def _seconds(program: Program, costs: StepCosts) -> float:
    return whole_step_seconds(simulated(program, costs), costs)


def _changes(program: Program, costs: StepCosts) -> Iterator[Change]:
    """Of the devices, the links and the cut, one at a time."""
    yield Change("devices compute 10 % faster", _seconds(program, _scaled(costs, COMPUTING, 1 / 1.1)))
    yield Change("links between stages twice as fast", _seconds(program, with_transfers(costs, 0.5)))
    yield Change("collectives twice as fast", _seconds(program, _with_collectives(costs, 0.5)))
    yield Change(
        "optimizer twice as fast", _seconds(program, _scaled(costs, ("optimizer_seconds", "update_seconds"), 0.5))
    )  # fmt: skip
    if program.num_stages > 1:
        yield Change("stages of equal length", _seconds(program, levelled(costs)))


def _without_recomputing(plan: Plan, program: Program) -> Iterator[Change]:
    """With memory for all that is saved. Ignores: values that are offloaded."""
    costs = plan.predictions.costs
    stages = plan.predictions.stages
    if costs is None or not any(stage.recompute_seconds for stage in stages):
        return
    again = _made_again(plan, costs)
    changed = costs.model_copy(
        update={
            name: tuple(max(own - less, 0.0) for own, less in zip(getattr(costs, name), again, strict=True))
            for name in ("input_grad_seconds", "backward_seconds")
        }
        | {"recompute_seconds": ()}
    )
    held = in_flight(program)
    needed = [0] * plan.pp
    for stage, (rank, count) in enumerate(zip(plan.placement, held, strict=True)):
        needed[rank] += stages[stage].recomputed_bytes * count
    note = f"needs {format_bytes(max(needed))} more on rank {needed.index(max(needed))}"
    yield Change("nothing recomputed", _seconds(program, changed), note)


def _made_again(plan: Plan, costs: StepCosts) -> tuple[float, ...]:
    """Per stage, seconds of its backward that are recomputation: what an R in front of it has not made."""
    ahead = costs.recompute_seconds or (0.0,) * plan.num_stages
    stages = plan.predictions.stages
    return tuple(max(stage.recompute_seconds - own, 0.0) for stage, own in zip(stages, ahead, strict=True))


def _schedules(plan: Plan, program: Program) -> Iterator[Change]:
    """Other orders of passes over the same stages, where parameters and gradients do not come and go with them."""
    costs = plan.predictions.costs
    kinds = {part.kind for actions in program.ranks for action in actions for part in action.parts}
    if costs is None or program.num_stages == 1 or kinds & {Kind.GATHER, Kind.REDUCE, Kind.STEP}:
        return
    again = {part.stage for action in program for part in action.parts if part.kind is Kind.R}
    own = peak_activations(program)
    for name in FAMILIES:
        found = _built(name, program)
        if found is None:
            continue
        found = insert_recomputation(found, again)
        more = [held - now for held, now in zip(peak_activations(found), own, strict=True)]
        rank = more.index(max(more))
        note = f"rank {rank} holds {max(more)} more microbatches" if max(more) > 0 else "holds no more"
        is_split = any(action.kind is Kind.W for action in found)
        after = costs.model_copy(update={"checks_after": plan.job.profile.checks_after and is_split})
        yield Change(f"schedule {name}", _seconds(found, after), note)


def _built(name: str, program: Program) -> Program | None:
    """The family's program of that size with the same stages on every rank; None where it has none, or it does not end with
    one update of the parameters."""
    chunks = program.num_stages // program.num_ranks
    if (chunks > 1) != ("num_chunks" in options_of(name)):
        return None
    num_chunks = chunks if chunks > 1 else None
    try:
        if build(name, program.num_ranks, 1, num_chunks).placement != program.placement:
            return None  # told by one microbatch, as families that search for an order take long over many
        found = build(name, program.num_ranks, program.num_microbatches, num_chunks)
    except ScheduleError:
        return None
    return None if any(action.kind is Kind.STEP for action in found) else found


# -- what errors would do to it -----------------------------------------------------------------------------


def _errors(program: Program, costs: StepCosts) -> Iterator[Change]:
    """The costs are other than estimated, one kind at a time."""
    yield Change("computations 10 % longer", _seconds(program, _scaled(costs, COMPUTING, 1.1)))
    slow = [_one_rank_slower(program, costs, rank) for rank in range(program.num_ranks)]
    if len(slow) > 1:
        worst, best = slow.index(max(slow)), slow.index(min(slow))
        yield Change(f"rank {worst} 10 % slower", slow[worst], "the rank that matters most")
        yield Change(f"rank {best} 10 % slower", slow[best], "the rank that matters least")
    yield Change("transfers twice as long", _seconds(program, with_transfers(costs, 2.0)))
    yield Change("collectives twice as long", _seconds(program, _with_collectives(costs, 2.0)))


def _one_rank_slower(program: Program, costs: StepCosts, rank: int) -> float:
    """A step when the computations of `rank` take a tenth longer."""
    factors = [1.1 if one == rank else 1.0 for one in program.placement.rank_of_stage]
    update = {
        name: tuple(factor * own for factor, own in zip(factors, column, strict=True))
        for name in COMPUTING
        if (column := getattr(costs, name))
    }
    return _seconds(program, costs.model_copy(update=update))


# -- costs that are otherwise -------------------------------------------------------------------------------


def _scaled(costs: StepCosts, names: tuple[str, ...], factor: float) -> StepCosts:
    return costs.model_copy(
        update={name: tuple(factor * own for own in getattr(costs, name)) for name in names}
    )


def _with_collectives(costs: StepCosts, factor: float) -> StepCosts:
    changed = _scaled(costs, _COLLECTIVES, factor)
    return changed.model_copy(update={"norm_seconds": factor * costs.norm_seconds})
