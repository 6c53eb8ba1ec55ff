"""Proposals of what one rank recomputes and offloads: from its saved values, along its chains, or by annealing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

from stagewright.estimation.memory import RankMemory
from stagewright.estimation.stages import RangeCosts
from stagewright.estimation.time import Costing
from stagewright.planning.prediction.pipeline import Pipeline, Variants, bodies_of
from stagewright.planning.saving.chain import chain_of
from stagewright.planning.saving.checkpoint_boundaries import checkpoint_boundaries
from stagewright.planning.saving.problem import SavingChoice, SavingProblem, Unit, chain_seconds, with_choice
from stagewright.planning.saving.rank_chain import ChainChoice, PieceCache, RankChain
from stagewright.planning.saving.reruns import Annealed, RerunSearch, RerunStage
from stagewright.schedule import Kind

_MOST_ANNEALED = 16_000
"""Operators times phases up to which annealing is tried: in larger stages of equal layers it gains nothing."""

_PIECES: WeakKeyDictionary[RangeCosts, PieceCache] = WeakKeyDictionary()
"""Pieces of each model, which are the same wherever it is cut."""

Chooser = Callable[[SavingProblem], SavingChoice | None]
"""Returns a choice among units that frees enough, or None if there is none."""


@dataclass(frozen=True)
class Proposal:
    """A choice among all units, and the seconds it adds to a microbatch."""

    choice: SavingChoice
    seconds: float


@dataclass(frozen=True)
class Propose:
    """Functions that propose a choice: `saving` one that frees so many bytes at the peak, or None; `least` one with the
    lowest possible peak."""

    saving: Callable[[float], Proposal | None]
    least: Callable[[], Proposal | None]


@dataclass
class Proposals:
    """Proposals for the ranks of a pipeline, each given by its memory if everything is kept; `units` are those of all
    stages."""

    variants: Variants
    body: RangeCosts
    units: Sequence[Unit]

    @property
    def line(self) -> Pipeline:
        return self.variants.line

    def by_units(self, kept: RankMemory, chooser: Chooser) -> Propose:
        """Return the proposals of `chooser`, which chooses among saved values; those at checkpoint boundaries are kept."""
        stages = {stage: self.line.stages[stage] for stage in self._stages(kept)}
        numbers = [number for number, unit in enumerate(self.units) if unit.stage in stages]
        free_units = self._with_boundaries_kept([self.units[number] for number in numbers])
        seconds: dict[int, float] = {}
        for number, stage in stages.items():
            units = [unit for unit in free_units if unit.stage == number]
            seconds |= chain_seconds(stage, units, self._costing(kept))
        problem = SavingProblem(tuple(free_units), seconds, 0.0, _copies(kept, stages))

        def proposal(choice: SavingChoice | None) -> Proposal | None:
            if choice is None:
                return None
            recomputed = frozenset(numbers[index] for index in choice.recomputed)
            return Proposal(SavingChoice(recomputed), choice.seconds(problem))

        everything = SavingChoice(frozenset(index for index, unit in enumerate(free_units) if unit.chain))
        return Propose(
            lambda needed: proposal(chooser(replace(problem, needed=needed))), lambda: proposal(everything)
        )

    def by_chain(self, kept: RankMemory, moves: bool = False) -> Propose:
        """Return the proposals along the chains of the rank's stages, piece by piece; with offloading if `moves`."""
        stages, costing = self._stages(kept), self._costing(kept)
        copies = _copies(kept, stages)
        chains = [chain_of(self.line.memories[stage], costing) for stage in stages]
        device = self.line.device_of(kept.rank)
        link = 1 / device.host_link_bandwidth if moves and device.kind != "cpu" else math.inf
        cache = _PIECES.setdefault(self.body, PieceCache())
        rank = RankChain(chains, [copies[stage] for stage in stages], cache, link)
        index = {(unit.stage, unit.node): number for number, unit in enumerate(self.units)}

        def proposal(chosen: ChainChoice | None) -> Proposal | None:
            if chosen is None:
                return None
            recomputed = frozenset(index[key] for key in chosen.ran if key in index)
            choice = SavingChoice(recomputed, checkpoints=chosen.checkpoints, moved=chosen.moved)
            return Proposal(choice, chosen.seconds)

        return Propose(
            lambda needed: proposal(rank.choose(rank.most_bytes - needed)), lambda: proposal(rank.least())
        )

    def by_annealing(self, kept: RankMemory, start: SavingChoice | None, below_s: float) -> Propose | None:
        """Return the proposals of annealing over the storages present before every operator of the backward.

        It starts from the choice `start`, which adds `below_s` to a microbatch. None for a rank with several stages or split
        backwards, for a stage that is too large, and for one that is not small if there is no start, or one that offloads.
        """
        stages = [*self._stages(kept)]
        program = self.line.program.ranks[kept.rank]
        if len(stages) > 1 or any(part.kind is Kind.I for action in program for part in action.parts):
            return None
        (number,) = stages
        stage = RerunStage(self.line.memories[number], self._costing(kept), _copies(kept, stages)[number])
        start_choice = None if start is None or start.moved else start
        if not stage.is_small and (start_choice is None or stage.size > _MOST_ANNEALED):
            return None
        starts = [] if start_choice is None else [stage.under(self._with(start_choice).stages[number])]
        search = RerunSearch(stage, starts, below_s)
        most = search.most_bytes

        def proposal(annealed: Annealed | None) -> Proposal | None:
            if annealed is None:
                return None
            return Proposal(
                SavingChoice(reruns=frozenset({(number, stage.reruns(annealed.present))})), annealed.seconds
            )

        return Propose(lambda needed: proposal(search.within(most - needed)), lambda: None)

    # -- inner ------------------------------------------------------------------------------------------------------

    def _stages(self, kept: RankMemory) -> tuple[int, ...]:
        return tuple(self.line.program.placement.stages_of(kept.rank))

    def _costing(self, kept: RankMemory) -> Costing:
        line = self.line
        return bodies_of(self.body, line.cluster, line.pp, line.num_holders * line.tp)[kept.rank].costing

    def _with(self, choice: SavingChoice) -> Pipeline:
        return with_choice(self.variants, self.units, choice)

    def _with_boundaries_kept(self, units: Sequence[Unit]) -> list[Unit]:
        graph = self.body.graph
        roots = {root: graph.values[root].storage for unit in units for root in unit.values}
        boundaries, _ = checkpoint_boundaries(graph, self.body.cuts.value_bytes, sorted({*roots.values()}))
        return [
            replace(unit, recomputable=False) if boundaries & {roots[root] for root in unit.values} else unit
            for unit in units
        ]


def _copies(kept: RankMemory, stages: Iterable[int]) -> dict[int, float]:
    """Return stage of a rank -> sets of its saved values alive at the peak."""
    return {stage: float(max(sum(saved.stage == stage for saved in kept.alive), 1)) for stage in stages}
