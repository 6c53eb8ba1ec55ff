"""Ways to choose what one rank gives up: among its saved values, along its chains of operators, or by annealing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

from stagewright.estimation.memory import RankMemory
from stagewright.estimation.stages import RangeCosts
from stagewright.estimation.time import Costing
from stagewright.planning.prediction.pipeline import Pipeline, Variants, bodies_of
from stagewright.planning.saving.anchors import anchors
from stagewright.planning.saving.chain import chain_of
from stagewright.planning.saving.problem import Choice, Problem, Unit, chain_seconds, with_choice
from stagewright.planning.saving.rank_chain import Found, KnownPieces, RankChain
from stagewright.planning.saving.reruns import Annealed, RerunSearch, RerunStage
from stagewright.schedule import Kind

_MOST_ANNEALED = 16_000
"""Operators times phases up to which annealing is tried: in larger stages of equal layers it gains nothing."""

_PIECES: WeakKeyDictionary[RangeCosts, KnownPieces] = WeakKeyDictionary()
"""Of a model, which are the same wherever it is cut."""

Chooser = Callable[[Problem], Choice | None]
"""Makes a choice among units that saves enough, or says that there is none."""


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


@dataclass
class Proposals:
    """Of the ranks of a pipeline, each given with its memory if everything is kept; `units` are those of all stages."""

    variants: Variants
    body: RangeCosts
    units: Sequence[Unit]

    @property
    def line(self) -> Pipeline:
        return self.variants.line

    def by_units(self, kept: RankMemory, chooser: Chooser) -> Propose:
        """By `chooser`, among the values that are saved anyway; what anchors hold is kept."""
        stages = {stage: self.line.stages[stage] for stage in self._stages(kept)}
        numbers = [number for number, unit in enumerate(self.units) if unit.stage in stages]
        own = self._anchored([self.units[number] for number in numbers])
        seconds: dict[int, float] = {}
        for number, stage in stages.items():
            units = [unit for unit in own if unit.stage == number]
            seconds |= chain_seconds(stage, units, self._costing(kept))
        problem = Problem(tuple(own), seconds, 0.0, _copies(kept, stages))

        def proposal(found: Choice | None) -> Proposal | None:
            if found is None:
                return None
            recomputed = frozenset(numbers[index] for index in found.recomputed)
            return Proposal(Choice(recomputed), found.seconds(problem))

        everything = Choice(frozenset(index for index, unit in enumerate(own) if unit.chain))
        return Propose(
            lambda needed: proposal(chooser(replace(problem, needed=needed))), lambda: proposal(everything)
        )

    def by_chain(self, kept: RankMemory, moves: bool = False) -> Propose:
        """Piece by piece along the forward of the rank's stages, with values on the host where it `moves` them."""
        stages, costing = self._stages(kept), self._costing(kept)
        copies = _copies(kept, stages)
        chains = [chain_of(self.line.memories[stage], costing) for stage in stages]
        device = self.line.device_of(kept.rank)
        link = 1 / device.host_link_bandwidth if moves and device.kind != "cpu" else math.inf
        known = _PIECES.setdefault(self.body, KnownPieces())
        rank = RankChain(chains, [copies[stage] for stage in stages], known, link)
        index = {(unit.stage, unit.node): number for number, unit in enumerate(self.units)}

        def proposal(found: Found | None) -> Proposal | None:
            if found is None:
                return None
            recomputed = frozenset(index[key] for key in found.ran if key in index)
            choice = Choice(recomputed, checkpoints=found.checkpoints, moved=found.moved)
            return Proposal(choice, found.seconds)

        return Propose(
            lambda needed: proposal(rank.choose(rank.most_bytes - needed)), lambda: proposal(rank.least())
        )

    def by_annealing(self, kept: RankMemory, known: Choice | None, below_s: float) -> Propose | None:
        """By what is there in front of every operator of the backward, around a choice that is `known` and adds `below_s` to
        a microbatch; None for a rank of several stages or whose backwards are split, for a stage that is too large, and for
        one that is not small if no choice is known, or one with values on the host."""
        stages = [*self._stages(kept)]
        program = self.line.program.ranks[kept.rank]
        if len(stages) > 1 or any(part.kind is Kind.I for action in program for part in action.parts):
            return None
        (number,) = stages
        stage = RerunStage(self.line.memories[number], self._costing(kept), _copies(kept, stages)[number])
        around = None if known is None or known.moved else known
        if not stage.is_small and (around is None or stage.size > _MOST_ANNEALED):
            return None
        starts = [] if around is None else [stage.under(self._with(around).stages[number])]
        search = RerunSearch(stage, starts, below_s)
        most = search.most_bytes

        def proposal(found: Annealed | None) -> Proposal | None:
            if found is None:
                return None
            return Proposal(Choice(reruns=frozenset({(number, stage.reruns(found.there))})), found.seconds)

        return Propose(lambda needed: proposal(search.within(most - needed)), lambda: None)

    # -- inner ------------------------------------------------------------------------------------------------------

    def _stages(self, kept: RankMemory) -> tuple[int, ...]:
        return tuple(self.line.program.placement.stages_of(kept.rank))

    def _costing(self, kept: RankMemory) -> Costing:
        line = self.line
        return bodies_of(self.body, line.cluster, line.pp, line.num_holders * line.tp)[kept.rank].costing

    def _with(self, choice: Choice) -> Pipeline:
        return with_choice(self.variants, self.units, choice)

    def _anchored(self, units: Sequence[Unit]) -> list[Unit]:
        graph = self.body.graph
        roots = {root: graph.values[root].storage for unit in units for root in unit.values}
        held, _ = anchors(graph, self.body.cuts.value_bytes, sorted({*roots.values()}))
        return [
            replace(unit, recomputable=False) if held & {roots[root] for root in unit.values} else unit
            for unit in units
        ]


def _copies(kept: RankMemory, stages: Iterable[int]) -> dict[int, float]:
    """Stage of a rank -> sets of its saved values alive at the peak."""
    return {stage: float(max(sum(one.stage == stage for one in kept.alive), 1)) for stage in stages}
