"""A partition made to fit its memory limit: what each rank recomputes and offloads, proved by replay."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from stagewright.estimation.memory import RankMemory, replay_rank, stage_edges
from stagewright.estimation.stages import BodyCosts
from stagewright.planning.pipeline import Pipeline, Variants, allocatable_bytes, bodies_of
from stagewright.planning.plan import StagePolicy
from stagewright.planning.predict import lowered, rank_memories
from stagewright.planning.saving.anchors import anchors
from stagewright.planning.saving.best import choose
from stagewright.planning.saving.problem import (
    Choice,
    Problem,
    Unit,
    chain_seconds,
    policies,
    stage_units,
)
from stagewright.planning.shortening import shortened
from stagewright.schedule import Program
from stagewright.schedule.saving import insert_offloading, insert_recomputation

_ROUNDS = 12
"""Choices tried for a rank; each is replayed."""

_CLOSE = 0.01
"""Choices for needs that differ by less than this are as good as each other."""

_WITHIN = 0.1
"""The next need is at least this part of what lies between the known ones away from either."""


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
        recompute, offload = (
            tuple(self.units[index].operator for index in sorted(indices) if self.units[index].stage == stage)
            for indices in (self.choice.recomputed, self.choice.offloaded)
        )
        return StagePolicy(recompute=recompute, offload=offload) if recompute or offload else "keep"


Chooser = Callable[[Problem], Choice | None]
"""Makes a choice that saves enough, or says that there is none."""


def fit(
    line: Pipeline,
    body: BodyCosts,
    *,
    offload: bool = True,
    chooser: Chooser = choose,
) -> Fitted | None:
    """`line`, which keeps everything, with as much recomputed and offloaded as its limit asks for; None if no choice
    found stays within the limit when replayed."""
    memories = rank_memories(line)
    units = line_units(line, body)
    searches = [_RankSearch(line, body, memory, units, offload, chooser) for memory in memories]
    active = [search for search in searches if search.excess > 0]
    variants = Variants(line, body)
    for _ in range(_ROUNDS):
        active = [search for search in active if search.propose()]
        if not active:
            break
        _replay(variants, units, active)
    if any(search.best is None for search in searches):
        return None
    found = _joined(search.best.choice for search in searches if search.best is not None)
    chosen = with_choice(variants, units, found)
    best = tuple(search.best.memory for search in searches if search.best is not None)
    return Fitted(chosen, best, units, found)


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
    found = policies(units, choice, len(variants.line.stages))
    return variants.under(saving_program(kept, units, choice), found)


def saving_program(program: Program, units: Sequence[Unit], choice: Choice) -> Program:
    """`program` with the actions that a choice needs."""
    moved = insert_offloading(program, {units[index].stage for index in choice.offloaded})
    return insert_recomputation(moved, {units[index].stage for index in choice.recomputed})


def _joined(choices: Iterable[Choice]) -> Choice:
    found = list(choices)
    return Choice(
        frozenset[int]().union(*(choice.recomputed for choice in found)),
        frozenset[int]().union(*(choice.offloaded for choice in found)),
    )


def _replay(variants: Variants, units: Sequence[Unit], searches: Sequence[_RankSearch]) -> None:
    """Tells every search what its latest choice takes."""
    whole = variants.line.program
    tried = with_choice(variants, units, _joined(search.latest for search in searches), shortened(whole))
    program = lowered(tried.program, stage_edges(tried.stages))
    left_out = whole.num_microbatches - program.num_microbatches
    for search in searches:
        resident = tried.resident(search.rank)
        search.learn(replay_rank(tried.memories, program, search.rank, resident, left_out))


@dataclass(frozen=True)
class _Proved:
    choice: Choice
    memory: RankMemory


class _RankSearch:
    """Raises what a rank must save until a choice fits, then lowers it as long as one does."""

    def __init__(
        self,
        line: Pipeline,
        body: BodyCosts,
        kept: RankMemory,
        units: Sequence[Unit],
        offload: bool,
        chooser: Chooser,
    ) -> None:
        self.line = line
        self.rank = kept.rank
        self.limit = allocatable_bytes(line.job, line.device_of(self.rank), line.cluster)
        self.excess = kept.peak_bytes - self.limit
        self.best = _Proved(Choice(), kept) if self.excess <= 0 else None
        self.latest = Choice()
        if self.excess <= 0:
            return
        self.stages = line.program.placement.stages_of(self.rank)
        self.numbers = [number for number, unit in enumerate(units) if unit.stage in self.stages]
        self.problem = self._problem([units[number] for number in self.numbers], kept, body, offload)
        self.choose = chooser
        self.need = float(self.excess)
        self.low, self.high = _Tried(0.95 * self.need, 0.05 * self.need), _Tried(math.inf, -math.inf)
        self.step = 0.0
        self.seconds = float("inf")
        self.tried: dict[Choice, int] = {}
        self.took_everything = False

    def _problem(self, units: list[Unit], kept: RankMemory, body: BodyCosts, offload: bool) -> Problem:
        stages = {stage: self.line.stages[stage] for stage in self.stages}
        costs = bodies_of(body, self.line.cluster, self.line.pp, self.line.dp * self.line.tp)[self.rank]
        seconds: dict[int, float] = {}
        for number, stage in stages.items():
            own = [unit for unit in units if unit.stage == number]
            seconds |= chain_seconds(stage, own, costs.costing)
        alive = {stage: sum(one.stage == stage for one in kept.alive) for stage in self.stages}
        copies = {stage: float(max(count, 1)) for stage, count in alive.items()}
        device = self.line.device_of(self.rank)
        link = 1 / device.host_link_bandwidth if offload and device.kind != "cpu" else float("inf")
        free = min(self.line.summaries[stage].forward_s for stage in self.stages)
        parked = {stage: max(0.0, count - 2.0) for stage, count in copies.items()}
        return Problem(tuple(units), seconds, 0.0, copies, parked, link, free / len(self.stages))

    def propose(self) -> bool:
        """Sets the next choice to replay; false when the search is over."""
        while self.best is None or not self._is_close():
            found = self.choose(replace(self.problem, needed=self.need))
            if found is None:
                if self.took_everything or self.best is not None:
                    return False
                self.took_everything = True
                found = self._everything()
            if found not in self.tried:
                self._set(found)
                return True
            self._move_on(self.tried[found])
        return False

    def _set(self, found: Choice) -> None:
        self.local = found
        self.latest = Choice(
            frozenset(self.numbers[index] for index in found.recomputed),
            frozenset(self.numbers[index] for index in found.offloaded),
        )

    def _everything(self) -> Choice:
        units = self.problem.units
        return Choice(frozenset(index for index, unit in enumerate(units) if unit.chain))

    def learn(self, memory: RankMemory) -> None:
        """Takes in what the latest choice takes when replayed."""
        excess = memory.peak_bytes - self.limit
        self.tried[self.local] = excess
        if excess <= 0:
            seconds = self.local.seconds(self.problem)
            if seconds < self.seconds:
                self.best, self.seconds = _Proved(self.latest, memory), seconds
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
