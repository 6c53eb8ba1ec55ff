"""Proposals of what one rank recomputes and offloads: along its chains, or by annealing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from stagewright.estimation.memory import RankMemory
from stagewright.estimation.stages import RangeCosts
from stagewright.estimation.time import Costing
from stagewright.planning.checkpointing.chain import chain_of
from stagewright.planning.checkpointing.choice import SavingChoice, StageOperator, with_choice
from stagewright.planning.checkpointing.rank_chain import ChainChoice, PieceCache, RankChain
from stagewright.planning.checkpointing.reruns import Annealed, RerunSearch, RerunStage
from stagewright.planning.prediction.staged_model import StagedModel, Variants, costs_by_rank
from stagewright.schedule import Kind

_MOST_ANNEALED = 16_000
"""Operators times phases up to which annealing is tried: in larger stages of equal layers it gains nothing."""

_PIECES: WeakKeyDictionary[RangeCosts, PieceCache] = WeakKeyDictionary()
"""Pieces of each model, which are the same wherever it is cut."""


@dataclass(frozen=True)
class Proposal:
    """A choice, and the seconds it adds to a microbatch."""

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
    """Proposals for the ranks of a pipeline, each given by its memory if everything is kept; `roots` are the `saved_roots`
    of all stages."""

    variants: Variants
    model_costs: RangeCosts
    roots: Mapping[StageOperator, Sequence[int]]

    @property
    def staged(self) -> StagedModel:
        return self.variants.staged

    def by_chain(self, kept: RankMemory, moves: bool = False) -> Propose:
        """Return the proposals along the chains of the rank's stages, piece by piece; with offloading if `moves`."""
        stages, costing = self.stages_of(kept), self.costing_of(kept)
        copies = copies_of(kept, stages)
        chains = [chain_of(self.staged.memories[stage], costing) for stage in stages]
        device = self.staged.device_of(kept.rank)
        link = 1 / device.host_link_bandwidth if moves and not device.shares_host_memory else math.inf
        cache = _PIECES.setdefault(self.model_costs, PieceCache())
        rank = RankChain(chains, [copies[stage] for stage in stages], cache, link)

        def proposal(chosen: ChainChoice | None) -> Proposal | None:
            if chosen is None:
                return None
            recomputed = chosen.ran.intersection(self.roots)
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
        number, *others = stages = self.stages_of(kept)
        program = self.staged.program.ranks[kept.rank]
        if others or any(part.kind is Kind.I for action in program for part in action.parts):
            return None
        stage = RerunStage(
            self.staged.memories[number], self.costing_of(kept), copies_of(kept, stages)[number]
        )
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

    def stages_of(self, kept: RankMemory) -> tuple[int, ...]:
        return self.staged.program.placement.stages_of(kept.rank)

    def costing_of(self, kept: RankMemory) -> Costing:
        staged = self.staged
        return costs_by_rank(self.model_costs, staged.cluster, staged.pp, staged.ranks_per_stage)[
            kept.rank
        ].costing

    def _with(self, choice: SavingChoice) -> StagedModel:
        return with_choice(self.variants, self.roots, choice)


def copies_of(kept: RankMemory, stages: Iterable[int]) -> dict[int, float]:
    """Return stage of a rank -> sets of its saved values alive at the peak."""
    return {stage: float(max(sum(saved.stage == stage for saved in kept.alive), 1)) for stage in stages}
