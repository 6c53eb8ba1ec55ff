"""The choice of what each rank recomputes and offloads to fit its memory limit, verified by replay."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from stagewright.arrays import Floats
from stagewright.estimation.memory import RankMemory, replay_rank, stage_edges
from stagewright.estimation.stages import RangeCosts
from stagewright.graph.layers import layer_inputs
from stagewright.graph.policy import Reruns
from stagewright.planning.checkpointing.choice import (
    SavingChoice,
    StageOperator,
    fetch_ahead,
    saved_roots,
    with_choice,
)
from stagewright.planning.checkpointing.proposals import Proposals, Propose
from stagewright.planning.checkpointing.rank_search import RankSearch
from stagewright.planning.plan import StagePolicy
from stagewright.planning.prediction.predict import lowered, rank_memories, run_timeline
from stagewright.planning.prediction.shortening import shortened
from stagewright.planning.prediction.staged_model import StagedModel, Variants
from stagewright.schedule.action import BACKWARDS, COMPUTE

_ROUNDS = 12
"""Maximum number of choices tried for a rank; each is replayed."""

_ANNEALINGS = 4
"""Maximum number of choices from annealing tried for a rank; each of them takes longer to find."""

_WORTH_MOVING = 0.01
"""Fraction of its time that a rank must spend on recomputation for offloading to be tried."""
_WORTH_ANNEALING = 0.001
"""Fraction of its time that a rank must spend on recomputation for annealing to be tried."""
_MISJUDGED = 0.005
"""Fraction of a batch by which proposals may be judged too slow."""


@dataclass(frozen=True)
class Fitted:
    """A pipeline whose ranks are within the limit, and the choice that makes it fit."""

    staged: StagedModel
    memories: tuple[RankMemory, ...]
    choice: SavingChoice

    @property
    def memory_policy(self) -> tuple[Literal["keep"] | StagePolicy, ...]:
        """The policy of every stage by names of operators, as in plans."""
        return tuple(self._of_stage(stage) for stage in range(len(self.staged.stages)))

    def _of_stage(self, stage: int) -> Literal["keep"] | StagePolicy:
        nodes, choice = self.staged.stages[stage].graph.nodes, self.choice
        recompute, checkpoints, moved = (
            tuple(nodes[operator].name for at, operator in sorted(keys) if at == stage)
            for keys in (choice.recomputed, choice.checkpoints, choice.moved)
        )
        reruns = tuple(
            (nodes[target].name, tuple(nodes[other].name for other in rerun))
            for target, rerun in dict(choice.reruns).get(stage, ())
        )
        if reruns:
            recompute = tuple(dict.fromkeys(name for _, rerun in reruns for name in rerun))
        if not recompute and not moved:
            return "keep"
        ahead = fetch_ahead(choice, self.staged.stages[stage])
        return StagePolicy(
            recompute=recompute, offload=moved, checkpoints=checkpoints, fetch_ahead=ahead, reruns=reruns
        )


@dataclass(frozen=True)
class TooSlow:
    """The result where ranks may fit, but not without computing for too long."""


def fit(
    staged: StagedModel,
    model_costs: RangeCosts,
    *,
    offload: bool = True,
    thorough: bool = False,
    below_s: float = math.inf,
    propose: Callable[[Proposals, RankMemory], Propose] | None = None,
) -> Fitted | TooSlow | None:
    """Return `staged`, which keeps everything, with as much recomputed and offloaded as its limit requires, or None if no
    choice stays within the limit when replayed.

    Recomputation may start at any value of the forward; if `thorough`, operators of stages that are not too large may be
    recomputed several times. Choices with which a rank computes for `below_s` or longer in a batch are of no use. `propose`
    makes the proposals for a rank instead, given its memory if everything is kept.
    """
    memories = rank_memories(staged)
    spare_s = (1 + _MISJUDGED) * below_s - _least_seconds(staged)
    spare_s /= staged.program.num_microbatches
    variants, roots = Variants(staged, model_costs), saved_roots(staged.stages)
    proposals = Proposals(variants, model_costs, roots)

    def searches(
        make: Callable[[RankMemory], Propose | None],
        rounds: int = _ROUNDS,
        below: Callable[[int], float] = lambda rank: math.inf,
        needing: Collection[int] = (),
    ) -> list[RankSearch]:
        """Return the searches of all ranks, unfinished once one of the ranks `needing` it has no result."""
        rank_searches: list[RankSearch] = []
        for memory in memories:
            limit = staged.allocatable_bytes(memory.rank)
            propose = make(memory) if memory.peak_bytes > limit else None
            most_s = min(below(memory.rank), float(spare_s[memory.rank]))
            rank_searches.append(RankSearch(memory, limit, propose, most_s))
        _search(variants, roots, rank_searches, rounds, needing)
        return rank_searches

    def anew(
        rank_searches: list[RankSearch],
        make: Callable[[RankMemory, RankSearch], Propose | None],
        worth: float,
        rounds: int = _ROUNDS,
    ) -> list[RankSearch]:
        """Return the faster search of each rank, the given one or another made by `make`, which is tried on ranks that
        recompute for more than the fraction `worth` of their time."""
        slow = {
            search.rank: search
            for search in rank_searches
            if search.seconds > worth * _busy_seconds(staged, search.rank)
        }
        if not slow:
            return rank_searches
        alternatives = searches(
            lambda memory: make(memory, slow[memory.rank]) if memory.rank in slow else None,
            rounds,
            lambda rank: slow[rank].seconds if rank in slow else math.inf,
            () if thorough else [rank for rank, search in slow.items() if search.best is None],
        )
        return [
            min(pair, key=lambda search: search.seconds)
            for pair in zip(rank_searches, alternatives, strict=True)
        ]

    if propose is not None:
        rank_searches = searches(lambda memory: propose(proposals, memory))
    else:
        moves = offload and not all(staged.device_of(memory.rank).shares_host_memory for memory in memories)
        needing = () if moves or thorough else range(staged.pp)
        rank_searches = searches(proposals.by_chain, needing=needing)
        if moves:
            rank_searches = anew(
                rank_searches, lambda memory, _: proposals.by_chain(memory, moves=True), _WORTH_MOVING
            )
        if thorough:
            rank_searches = anew(
                rank_searches,
                lambda memory, search: proposals.by_annealing(
                    memory, None if search.best is None else search.best.choice, search.seconds
                ),
                _WORTH_ANNEALING,
                _ANNEALINGS,
            )
    proved = [search.best for search in rank_searches if search.best is not None]
    if len(proved) < len(rank_searches):
        unfit = [search for search in rank_searches if search.best is None]
        is_slow = any(search.is_too_slow for search in unfit)
        return TooSlow() if is_slow and not any(search.lacks_memory for search in unfit) else None
    choice = _joined(proof.choice for proof in proved)
    return Fitted(with_choice(variants, roots, choice), tuple(proof.memory for proof in proved), choice)


def with_layers_recomputed(staged: StagedModel, model_costs: RangeCosts, *, offload: bool) -> Fitted:
    """Return `staged`, which keeps everything, with all but the inputs of layers recomputed, whether it fits or not. With
    `offload` these are on the host: then little of a microbatch that waits is on the device, and little moves."""
    variants, roots = Variants(staged, model_costs), saved_roots(staged.stages)
    graph = staged.stages[0].graph
    makers = {graph.values[root].node for root in layer_inputs(graph)}
    kept: set[StageOperator] = set()
    for stage in staged.stages:
        entering = {graph.values[stage.value(v).storage].node for t in stage.receives for v in t.values}
        own = set(graph.forward_ids[stage.start : stage.stop])
        kept |= {(stage.index, maker) for maker in makers & (own | entering)}
    inputs = frozenset(kept)
    moving = inputs if offload else frozenset[StageOperator]()
    choice = SavingChoice(frozenset(roots) - inputs, checkpoints=inputs, moved=moving)
    recomputed = with_choice(variants, roots, choice)
    return Fitted(recomputed, tuple(rank_memories(recomputed)), choice)


def _least_seconds(staged: StagedModel) -> Floats:
    """Return what a batch takes at least by the work of each rank: from when it starts until the last of its backwards has
    passed the stages before."""
    timeline, program = run_timeline(staged), staged.program
    passed_s = np.cumsum([0.0, *(summary.input_grad_s for summary in staged.summaries)])
    seconds = timeline.busy_s.astype(float)
    for rank, actions in enumerate(program.ranks):
        computing = [index for index, action in enumerate(actions) if action.kind in COMPUTE]
        first, last = computing[0], actions[computing[-1]]
        seconds[rank] += timeline.start_s[timeline.encoded.rank_slice(rank).start + first]
        seconds[rank] += passed_s[last.stage] if last.kind in BACKWARDS else 0.0
    return seconds


def _busy_seconds(staged: StagedModel, rank: int) -> float:
    """Return the seconds of one microbatch on a rank that keeps everything."""
    summaries = (staged.summaries[stage] for stage in staged.program.placement.stages_of(rank))
    return sum(summary.forward_s + summary.backward_s for summary in summaries)


def _search(
    variants: Variants,
    roots: Mapping[StageOperator, Sequence[int]],
    searches: Sequence[RankSearch],
    rounds: int,
    needing: Collection[int],
) -> None:
    active = [search for search in searches if search.excess > 0]
    for _ in range(rounds):
        active = [search for search in active if search.propose()]
        without = {search.rank for search in searches if search.best is None}
        if not active or without.difference(search.rank for search in active).intersection(needing):
            break
        _replay(variants, roots, active)


def _joined(choices: Iterable[SavingChoice]) -> SavingChoice:
    all_choices = list(choices)
    return SavingChoice(
        frozenset[StageOperator]().union(*(choice.recomputed for choice in all_choices)),
        frozenset[StageOperator]().union(*(choice.checkpoints for choice in all_choices)),
        frozenset[StageOperator]().union(*(choice.moved for choice in all_choices)),
        frozenset[tuple[int, Reruns]]().union(*(choice.reruns for choice in all_choices)),
    )


def _replay(
    variants: Variants, roots: Mapping[StageOperator, Sequence[int]], searches: Sequence[RankSearch]
) -> None:
    """Replay the latest choice of every search, and tell the searches the results."""
    whole = variants.staged.program
    latest = _joined(search.latest.choice for search in searches)
    tried = with_choice(variants, roots, latest, shortened(whole))
    program = lowered(tried.program, stage_edges(tried.stages), tried.receives_ahead)
    num_dropped = whole.num_microbatches - program.num_microbatches
    for search in searches:
        resident = tried.resident(search.rank)
        memory = replay_rank(tried.memories, program, search.rank, resident, num_dropped)
        search.learn(memory, _added_seconds(variants.staged, tried, search.rank))


def _added_seconds(kept: StagedModel, tried: StagedModel, rank: int) -> float:
    """Return by how many seconds a microbatch of `tried` takes longer on a rank than one of `kept`."""
    stages = kept.program.placement.stages_of(rank)

    def taken(staged: StagedModel) -> float:
        summaries = [staged.summaries[stage] for stage in stages]
        return sum(summary.forward_s + summary.rebuild_s + summary.backward_s for summary in summaries)

    return taken(tried) - taken(kept)
