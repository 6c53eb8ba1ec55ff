"""A partition made to fit its memory limit: what each rank recomputes and offloads, proved by replay."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from stagewright.estimation.memory import RankMemory, replay_rank, stage_edges
from stagewright.estimation.stages import BodyCosts
from stagewright.graph.policy import Reruns
from stagewright.planning.pipeline import Pipeline, Variants, allocatable_bytes, bodies_of
from stagewright.planning.plan import StagePolicy
from stagewright.planning.predict import lowered, rank_memories
from stagewright.planning.saving.anchors import anchors
from stagewright.planning.saving.chain import chain_of
from stagewright.planning.saving.pieces import Point
from stagewright.planning.saving.problem import (
    Choice,
    Problem,
    Unit,
    chain_seconds,
    fetch_ahead,
    policies,
    stage_units,
)
from stagewright.planning.saving.rank_chain import Found, RankChain
from stagewright.planning.saving.reruns import Annealed, RerunSearch, RerunStage
from stagewright.planning.shortening import shortened
from stagewright.schedule import Kind, Program
from stagewright.schedule.saving import insert_recomputation

_ROUNDS = 12
"""Choices tried for a rank; each is replayed."""

_ANNEALINGS = 4
"""Choices found by annealing tried for a rank, each of which takes longer to find."""

_CLOSE = 0.01
"""Choices for needs that differ by less than this are as good as each other."""

_WITHIN = 0.1
"""The next need is at least this part of what lies between the known ones away from either."""

_WORTH = 0.01
"""Ranks that recompute for less than this part of their time are not looked at for what might wait on the host, or run again
at other times."""

_MOST_THOROUGH = 40_000
"""Operators times phases of stages for which annealing is tried."""


@dataclass(frozen=True)
class Fitted:
    """A pipeline whose ranks are within the limit, with the units of all stages and what became of them."""

    line: Pipeline
    memories: tuple[RankMemory, ...]
    units: tuple[Unit, ...]
    choice: Choice

    @property
    def memory_policy(self) -> tuple[Literal["keep"] | StagePolicy, ...]:
        """The policy of every stage by names of operators, as plans have it."""
        return tuple(self._of_stage(stage) for stage in range(len(self.line.stages)))

    def _of_stage(self, stage: int) -> Literal["keep"] | StagePolicy:
        indices = sorted(index for index in self.choice.recomputed if self.units[index].stage == stage)
        recompute = tuple(self.units[index].operator for index in indices)
        nodes = self.line.stages[stage].graph.nodes
        checkpoints, moved = (
            tuple(nodes[operator].name for at, operator in sorted(pairs) if at == stage)
            for pairs in (self.choice.checkpoints, self.choice.moved)
        )
        if not recompute and not moved and stage not in dict(self.choice.reruns):
            return "keep"
        ahead = fetch_ahead(self.choice, self.line.stages[stage])
        reruns = tuple(
            (nodes[one].name, tuple(nodes[other].name for other in again))
            for one, again in dict(self.choice.reruns).get(stage, ())
        )
        if reruns:
            recompute = tuple(dict.fromkeys(name for _, again in reruns for name in again))
        return StagePolicy(
            recompute=recompute, offload=moved, checkpoints=checkpoints, fetch_ahead=ahead, reruns=reruns
        )


Chooser = Callable[[Problem], Choice | None]
"""Makes a choice among units that saves enough, or says that there is none."""


def fit(
    line: Pipeline,
    body: BodyCosts,
    *,
    offload: bool = True,
    chooser: Chooser | None = None,
    thorough: bool = False,
) -> Fitted | None:
    """`line`, which keeps everything, with as much recomputed and offloaded as its limit asks for; None if no choice
    found stays within the limit when replayed.

    `chooser` chooses among the values that are saved alone, as other planners do; by default what is recomputed may begin
    at any value of the forward, and on small stages, or if it is `thorough`, operators may run again several times.
    """
    memories = rank_memories(line)
    units = line_units(line, body)
    variants = Variants(line, body)
    points: dict[tuple[object, ...], tuple[Point, ...]] = {}

    def searches(make: Callable[[RankMemory], Propose | None], rounds: int = _ROUNDS) -> list[_RankSearch]:
        found = [_RankSearch(line, memory, make) for memory in memories]
        _search(variants, units, found, rounds)
        return found

    def by_chain(memory: RankMemory, moves: bool = False) -> Propose | None:
        return _along_chains(line, body, memory, units, points, moves)

    if chooser is not None:
        found = searches(lambda memory: _among_units(line, body, memory, units, chooser))
    else:
        found = searches(by_chain)
        slow = _slow(line, found)
        if offload and any(line.device_of(one).kind != "cpu" for one in slow):
            found = _faster(found, searches(lambda memory: by_chain(memory, True) if memory.rank in slow else None))
        slow = _slow(line, found)
        if slow:
            known = {search.rank: search.best.choice for search in found if search.best is not None}
            below = {search.rank: search.seconds for search in found}
            by_reruns = _Annealing(variants, body, units, known, below, thorough)
            others = searches(lambda memory: by_reruns(memory) if memory.rank in slow else None, _ANNEALINGS)
            found = _faster(found, others)
    proved = [search.best for search in found if search.best is not None]
    if len(proved) < len(found):
        return None
    choice = _joined(one.choice for one in proved)
    return Fitted(with_choice(variants, units, choice), tuple(one.memory for one in proved), units, choice)


def _slow(line: Pipeline, searches: Iterable[_RankSearch]) -> set[int]:
    """Ranks that recompute for long, or do not fit."""
    return {one.rank for one in searches if one.seconds > _WORTH * _busy_seconds(line, one.rank)}


def _faster(searches: Iterable[_RankSearch], others: Iterable[_RankSearch]) -> list[_RankSearch]:
    """Rank by rank."""
    return [min(pair, key=lambda one: one.seconds) for pair in zip(searches, others, strict=True)]


def _busy_seconds(line: Pipeline, rank: int) -> float:
    """Of one microbatch on a rank that keeps everything."""
    own = (line.summaries[stage] for stage in line.program.placement.stages_of(rank))
    return sum(summary.forward_s + summary.backward_s for summary in own)


def _search(
    variants: Variants, units: Sequence[Unit], searches: Sequence[_RankSearch], rounds: int
) -> None:
    active = [search for search in searches if search.excess > 0]
    for _ in range(rounds):
        active = [search for search in active if search.propose()]
        if not active:
            break
        _replay(variants, units, active)


def line_units(line: Pipeline, body: BodyCosts) -> tuple[Unit, ...]:
    """The units of all stages; anchors are kept or offloaded."""
    found = [unit for stage in line.stages for unit in stage_units(stage)]
    roots = {root: body.graph.values[root].storage for unit in found for root in unit.values}
    held, _ = anchors(body.graph, body.cuts.value_bytes, sorted({*roots.values()}))
    return tuple(
        replace(unit, recomputable=False) if held & {roots[root] for root in unit.values} else unit
        for unit in found
    )


def with_choice(
    variants: Variants, units: Sequence[Unit], choice: Choice, program: Program | None = None
) -> Pipeline:
    """A partition with the policies of a choice and the program that carries them out; `program` keeps everything, and is
    that of the partition unless given."""
    kept = program or variants.line.program
    found = policies(units, choice, variants.line.stages)
    return variants.under(saving_program(kept, units, choice), found)


def saving_program(program: Program, units: Sequence[Unit], choice: Choice) -> Program:
    """`program` with the actions that a choice needs."""
    stages = {units[index].stage for index in choice.recomputed}
    others = {stage for stage, _ in (*choice.moved, *choice.reruns)}
    return insert_recomputation(program, stages | others)


def _joined(choices: Iterable[Choice]) -> Choice:
    found = list(choices)
    return Choice(
        frozenset[int]().union(*(choice.recomputed for choice in found)),
        frozenset[tuple[int, int]]().union(*(choice.checkpoints for choice in found)),
        frozenset[tuple[int, int]]().union(*(choice.moved for choice in found)),
        frozenset[tuple[int, Reruns]]().union(*(choice.reruns for choice in found)),
    )


def _replay(variants: Variants, units: Sequence[Unit], searches: Sequence[_RankSearch]) -> None:
    """Tells every search what its latest choice takes."""
    whole = variants.line.program
    latest = _joined(search.latest.choice for search in searches)
    tried = with_choice(variants, units, latest, shortened(whole))
    program = lowered(tried.program, stage_edges(tried.stages))
    left_out = whole.num_microbatches - program.num_microbatches
    for search in searches:
        resident = tried.resident(search.rank)
        memory = replay_rank(tried.memories, program, search.rank, resident, left_out)
        search.learn(memory, _added_seconds(variants.line, tried, search.rank))


def _added_seconds(kept: Pipeline, tried: Pipeline, rank: int) -> float:
    """What a microbatch of `tried` takes longer on a rank than one of `kept`."""
    stages = kept.program.placement.stages_of(rank)

    def taken(line: Pipeline) -> float:
        found = [line.summaries[stage] for stage in stages]
        return sum(one.forward_s + one.rebuild_s + one.backward_s for one in found)

    return taken(tried) - taken(kept)


@dataclass(frozen=True)
class Proposal:
    """A choice among all units, and the seconds it adds to a microbatch."""

    choice: Choice
    seconds: float


@dataclass(frozen=True)
class Propose:
    """`saving` so many bytes at the peak, or None; `least` for the lowest peak that can be had."""

    saving: Callable[[float], Proposal | None]
    least: Callable[[], Proposal | None]


def _among_units(
    line: Pipeline,
    body: BodyCosts,
    kept: RankMemory,
    units: Sequence[Unit],
    chooser: Chooser,
) -> Propose | None:
    """By a choice among the saved values of a rank."""
    stages = {stage: line.stages[stage] for stage in line.program.placement.stages_of(kept.rank)}
    numbers = [number for number, unit in enumerate(units) if unit.stage in stages]
    own = [units[number] for number in numbers]
    costs = bodies_of(body, line.cluster, line.pp, line.dp * line.tp)[kept.rank]
    seconds: dict[int, float] = {}
    for number, stage in stages.items():
        seconds |= chain_seconds(stage, [unit for unit in own if unit.stage == number], costs.costing)
    copies = _copies(line, kept)
    problem = Problem(tuple(own), seconds, 0.0, copies)

    def proposal(found: Choice | None) -> Proposal | None:
        if found is None:
            return None
        recomputed = frozenset(numbers[index] for index in found.recomputed)
        return Proposal(Choice(recomputed), found.seconds(problem))

    everything = Choice(frozenset(index for index, unit in enumerate(own) if unit.chain))
    return Propose(
        lambda needed: proposal(chooser(replace(problem, needed=needed))), lambda: proposal(everything)
    )


def _along_chains(
    line: Pipeline,
    body: BodyCosts,
    kept: RankMemory,
    units: Sequence[Unit],
    points: dict[tuple[object, ...], tuple[Point, ...]],
    moves: bool,
) -> Propose | None:
    """By what is recomputed piece by piece along the forward of a rank's stages, and offloaded where it `moves` values."""
    stages = line.program.placement.stages_of(kept.rank)
    costs = bodies_of(body, line.cluster, line.pp, line.dp * line.tp)[kept.rank]
    copies = _copies(line, kept)
    chains = [chain_of(line.memories[stage], costs.costing) for stage in stages]
    device = line.device_of(kept.rank)
    link = 1 / device.host_link_bandwidth if moves and device.kind != "cpu" else math.inf
    rank = RankChain(chains, [copies[stage] for stage in stages], points, link)
    index = {(unit.stage, unit.node): number for number, unit in enumerate(units)}

    def proposal(found: Found | None) -> Proposal | None:
        if found is None:
            return None
        recomputed = frozenset(index[key] for key in found.ran if key in index)
        return Proposal(Choice(recomputed, checkpoints=found.checkpoints, moved=found.moved), found.seconds)

    return Propose(
        lambda needed: proposal(rank.choose(rank.most_bytes - needed)), lambda: proposal(rank.least())
    )


@dataclass(frozen=True)
class _Annealing:
    """By what is there in front of every operator of the backward of a rank's only stage, looked for around the choices
    that are `known` by rank, which add `below_s` to a microbatch; of stages that are not small only if it is `thorough`."""

    variants: Variants
    body: BodyCosts
    units: Sequence[Unit]
    known: Mapping[int, Choice]
    below_s: Mapping[int, float]
    thorough: bool

    def __call__(self, kept: RankMemory) -> Propose | None:
        line = self.variants.line
        stages = line.program.placement.stages_of(kept.rank)
        if len(stages) > 1 or any(
            part.kind is Kind.I for action in line.program.ranks[kept.rank] for part in action.parts
        ):
            return None
        (number,) = stages
        costs = bodies_of(self.body, line.cluster, line.pp, line.dp * line.tp)[kept.rank]
        stage = RerunStage(line.memories[number], costs.costing, _copies(line, kept)[number])
        if stage.size > _MOST_THOROUGH:
            return None
        search = RerunSearch(stage, self._around(stage, kept.rank), self.below_s.get(kept.rank, math.inf))
        if not (search.is_small or (self.thorough and search.known)):
            return None

        def proposal(found: Annealed | None) -> Proposal | None:
            if found is None:
                return None
            reruns = stage.reruns(found.there)
            again = {one for _, group in reruns for one in group}
            units = (index for index, unit in enumerate(self.units) if unit.stage == number and unit.node in again)
            return Proposal(Choice(frozenset(units), reruns=frozenset({(number, reruns)})), found.seconds)

        most = search.most_bytes
        return Propose(lambda needed: proposal(search.within(most - needed)), lambda: None)

    def _around(self, stage: RerunStage, rank: int) -> list[NDArray[np.bool_]]:
        choice = self.known.get(rank)
        if choice is None or choice.moved:
            return []
        return [stage.under(with_choice(self.variants, self.units, choice).stages[stage.stage.index])]


def _copies(line: Pipeline, kept: RankMemory) -> dict[int, float]:
    """Stage of a rank -> sets of its saved values alive at the peak."""
    stages = line.program.placement.stages_of(kept.rank)
    return {stage: float(max(sum(one.stage == stage for one in kept.alive), 1)) for stage in stages}


@dataclass(frozen=True)
class _Proved:
    choice: Choice
    memory: RankMemory


class _RankSearch:
    """Raises what a rank must save until a choice fits, then lowers it as long as one does."""

    def __init__(
        self, line: Pipeline, kept: RankMemory, make: Callable[[RankMemory], Propose | None]
    ) -> None:
        self.rank = kept.rank
        self.limit = allocatable_bytes(line.job, line.device_of(self.rank), line.cluster)
        self.excess = kept.peak_bytes - self.limit
        self.best = _Proved(Choice(), kept) if self.excess <= 0 else None
        self.latest = Proposal(Choice(), 0.0)
        self.seconds = float("inf") if self.excess > 0 else 0.0
        self.ways = make(kept) if self.excess > 0 else None
        self.need = float(self.excess)
        self.low, self.high = _Tried(0.95 * self.need, 0.05 * self.need), _Tried(math.inf, -math.inf)
        self.step = 0.0
        self.tried: dict[Choice, int] = {}
        self.took_least = False

    def propose(self) -> bool:
        """Sets the next choice to replay; false when the search is over."""
        while self.ways is not None and (self.best is None or not self._is_close()):
            found = self.ways.saving(self.need)
            if found is None:
                if self.took_least or self.best is not None:
                    return False
                self.took_least = True
                found = self.ways.least()
                if found is None:
                    return False
            if found.choice not in self.tried:
                self.latest = found
                return True
            self._move_on(self.tried[found.choice])
        return False

    def learn(self, memory: RankMemory, seconds: float) -> None:
        """Takes in what the latest choice takes when replayed, and the seconds it adds to a microbatch."""
        excess = memory.peak_bytes - self.limit
        self.tried[self.latest.choice] = excess
        if excess <= 0 and seconds < self.seconds:
            self.best, self.seconds = _Proved(self.latest.choice, memory), seconds
        self._move_on(excess)

    def _is_close(self) -> bool:
        low, high = self.low, self.high
        return min(high.need - low.need, -high.excess) <= _CLOSE * high.need

    def _move_on(self, excess: int) -> None:
        """The next need to choose for, after one that left `excess` bytes too many, or fitted."""
        latest = _Tried(self.need, excess)
        if excess <= 0:
            self.high = min(self.high, latest, key=lambda one: one.need)
        else:
            self.low, before = max(self.low, latest, key=lambda one: one.need), self.low
            if self.best is None:
                stuck = 2 * self.step if excess > before.excess / 2 else 0.0
                self.step = max(stuck, float(excess), _CLOSE * self.need)
                self.need += self.step
        if self.best is not None:
            self.need = self._between()

    def _between(self) -> float:
        """Where the excess would be nothing if it fell evenly from `low` to `high`."""
        low, high = self.low, self.high
        part = low.excess / (low.excess - high.excess)
        return low.need + min(max(part, _WITHIN), 1 - _WITHIN) * (high.need - low.need)


@dataclass(frozen=True)
class _Tried:
    """A need that was chosen for, and the bytes the choice left too many."""

    need: float
    excess: float
