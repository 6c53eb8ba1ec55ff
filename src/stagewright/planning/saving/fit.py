"""A partition made to fit its memory limit: what each rank recomputes and offloads, proved by replay."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from stagewright.estimation.memory import RankMemory, replay_rank, stage_edges
from stagewright.estimation.stages import RangeCosts
from stagewright.graph.policy import Reruns
from stagewright.planning.plan import StagePolicy
from stagewright.planning.prediction.pipeline import Pipeline, Variants
from stagewright.planning.prediction.predict import lowered, rank_memories
from stagewright.planning.prediction.shortening import shortened
from stagewright.planning.saving.problem import Choice, Unit, fetch_ahead, stage_units, with_choice
from stagewright.planning.saving.proposals import Chooser, Proposals, Propose
from stagewright.planning.saving.rank_search import RankSearch

_ROUNDS = 12
"""Choices tried for a rank; each is replayed."""

_ANNEALINGS = 4
"""Choices found by annealing tried for a rank, each of which takes longer to find."""

_WORTH_MOVING = 0.01
"""Ranks that recompute for less than this part of their time are not looked at for what might wait on the host."""
_WORTH_ANNEALING = 0.001
"""Nor those that do for less than this for what might run again at other times."""


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
        reruns = tuple(
            (nodes[one].name, tuple(nodes[other].name for other in again))
            for one, again in dict(self.choice.reruns).get(stage, ())
        )
        if reruns:
            recompute = tuple(dict.fromkeys(name for _, again in reruns for name in again))
        if not recompute and not moved:
            return "keep"
        ahead = fetch_ahead(self.choice, self.line.stages[stage])
        return StagePolicy(
            recompute=recompute, offload=moved, checkpoints=checkpoints, fetch_ahead=ahead, reruns=reruns
        )


def fit(
    line: Pipeline,
    body: RangeCosts,
    *,
    offload: bool = True,
    chooser: Chooser | None = None,
    thorough: bool = False,
) -> Fitted | None:
    """`line`, which keeps everything, with as much recomputed and offloaded as its limit asks for; None if no choice
    found stays within the limit when replayed.

    `chooser` chooses among the values that are saved alone, as other planners do; by default what is recomputed may begin
    at any value of the forward, and if it is `thorough`, operators of stages that are not too large may run again several
    times.
    """
    memories = rank_memories(line)
    units = tuple(unit for stage in line.stages for unit in stage_units(stage))
    variants = Variants(line, body)
    proposals = Proposals(variants, body, units)

    def searches(
        make: Callable[[RankMemory], Propose | None],
        rounds: int = _ROUNDS,
        below: Callable[[int], float] = lambda rank: math.inf,
    ) -> list[RankSearch]:
        found: list[RankSearch] = []
        for memory in memories:
            limit = line.allocatable_bytes(memory.rank)
            ways = make(memory) if memory.peak_bytes > limit else None
            found.append(RankSearch(memory, limit, ways, below(memory.rank)))
        _search(variants, units, found, rounds)
        return found

    def anew(
        found: list[RankSearch],
        make: Callable[[RankMemory, RankSearch], Propose | None],
        worth: float,
        rounds: int = _ROUNDS,
    ) -> list[RankSearch]:
        """Rank by rank the faster of what was found and of another way, which is tried on ranks that recompute for longer
        than the part `worth` of their time."""
        slow = {one.rank: one for one in found if one.seconds > worth * _busy_seconds(line, one.rank)}
        if not slow:
            return found
        others = searches(
            lambda memory: make(memory, slow[memory.rank]) if memory.rank in slow else None,
            rounds,
            lambda rank: slow[rank].seconds if rank in slow else math.inf,
        )
        return [min(pair, key=lambda one: one.seconds) for pair in zip(found, others, strict=True)]

    if chooser is not None:
        found = searches(lambda memory: proposals.by_units(memory, chooser))
    else:
        found = searches(proposals.by_chain)
        if offload and any(line.device_of(memory.rank).kind != "cpu" for memory in memories):
            found = anew(found, lambda memory, _: proposals.by_chain(memory, moves=True), _WORTH_MOVING)
        if thorough:
            found = anew(
                found,
                lambda memory, one: proposals.by_annealing(
                    memory, None if one.best is None else one.best.choice, one.seconds
                ),
                _WORTH_ANNEALING,
                _ANNEALINGS,
            )
    proved = [search.best for search in found if search.best is not None]
    if len(proved) < len(found):
        return None
    choice = _joined(one.choice for one in proved)
    return Fitted(with_choice(variants, units, choice), tuple(one.memory for one in proved), units, choice)


def _busy_seconds(line: Pipeline, rank: int) -> float:
    """Of one microbatch on a rank that keeps everything."""
    own = (line.summaries[stage] for stage in line.program.placement.stages_of(rank))
    return sum(summary.forward_s + summary.backward_s for summary in own)


def _search(variants: Variants, units: Sequence[Unit], searches: Sequence[RankSearch], rounds: int) -> None:
    active = [search for search in searches if search.excess > 0]
    for _ in range(rounds):
        active = [search for search in active if search.propose()]
        if not active:
            break
        _replay(variants, units, active)


def _joined(choices: Iterable[Choice]) -> Choice:
    found = list(choices)
    return Choice(
        frozenset[int]().union(*(choice.recomputed for choice in found)),
        frozenset[tuple[int, int]]().union(*(choice.checkpoints for choice in found)),
        frozenset[tuple[int, int]]().union(*(choice.moved for choice in found)),
        frozenset[tuple[int, Reruns]]().union(*(choice.reruns for choice in found)),
    )


def _replay(variants: Variants, units: Sequence[Unit], searches: Sequence[RankSearch]) -> None:
    """Tells every search what its latest choice takes."""
    whole = variants.line.program
    latest = _joined(search.latest.choice for search in searches)
    tried = with_choice(variants, units, latest, shortened(whole))
    program = lowered(tried.program, stage_edges(tried.stages), tried.receives_ahead)
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
