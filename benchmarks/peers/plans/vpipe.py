"""A vPipe-like plan: blocks of layers, the end of every stage in one checkpoint, blocks moved between neighbours.

Source: Zhao et al. 2022, "vPipe" (IEEE TPDS 33(3)) and its released runtime (hku-systems/vpipe), whose plans are blocks
per stage and the share of a stage, from its end, that one checkpoint recomputes. Its planner is not public: the partition
is a local search in which neighbours exchange blocks. Ignores: swapping, which the released code does not do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from peers.plans.blocks import block_ends, moved_cuts
from peers.plans.units import Unit, choice_of, stage_units
from stagewright.arrays import Ints
from stagewright.estimation.memory import RankMemory
from stagewright.estimation.stages import RangeCosts
from stagewright.planning.candidate import Candidate
from stagewright.planning.checkpointing.choice import saved_roots, with_choice
from stagewright.planning.partition.stage_ranges import StageRanges
from stagewright.planning.partition.stage_terms import corrected, known_ranges, terms_of
from stagewright.planning.plan import StagePolicy
from stagewright.planning.prediction.predict import rank_memories
from stagewright.planning.prediction.staged_model import Variants, allocatable_bytes
from stagewright.schedule.in_flight import in_flight


def suffix_cuts(plain: Candidate, model_costs: RangeCosts) -> tuple[int, ...]:
    """The cuts of `plain` with blocks exchanged between neighbours until no exchange makes the slowest stage, with what
    it must recompute, faster."""
    staged = plain.staged
    ends = block_ends(model_costs, len(staged.stages))
    terms = terms_of(staged, model_costs, offload=False)
    leaves = corrected(staged, plain.memories, StageRanges(known_ranges(model_costs), terms))

    def cost(cuts: Sequence[int]) -> tuple[float, ...]:
        bounds = [0, *cuts, model_costs.size]
        found = [_suffix(leaves, ends, stage, *bounds[stage : stage + 2]) for stage in range(len(terms))]
        missing = sum(one.missing for one in found)
        return missing, max(one.seconds for one in found), sum(one.seconds for one in found)

    return moved_cuts(ends, plain.cuts, cost)


@dataclass(frozen=True)
class _Suffix:
    """A stage whose blocks from `start` on are recomputed: seconds of a microbatch, and bytes it lacks even so."""

    start: int
    seconds: float
    missing: float


def _suffix(leaves: StageRanges, ends: Ints, stage: int, start: int, stop: int) -> _Suffix:
    """With as few blocks recomputed as fit; the set in use is whole while the backward runs."""
    ranges, terms = leaves.ranges, leaves.terms[stage]
    seconds, demand = leaves.seconds(stage, start, stop), leaves.demand(stage, start, stop)
    inside = [int(end) for end in ends[(ends > start) & (ends < stop)]]
    for begin in (stop, *reversed(inside), start):
        freed = float(ranges.saved_bytes[stop] - ranges.saved_bytes[begin]) * (terms.copies - 1)
        again = float(ranges.forward_seconds[stop] - ranges.forward_seconds[begin]) * terms.inverse_speed
        missing = max(0.0, demand - freed - terms.capacity)
        if missing <= 0 or begin == start:
            return _Suffix(begin, seconds + again, missing)
    return _Suffix(start, math.inf, math.inf)


def with_suffixes(plain: Candidate, model_costs: RangeCosts) -> Candidate | None:
    """`plain` with as few blocks of every stage recomputed as make it fit when replayed; None if all of them do not."""
    search = _Suffixes(plain, model_costs)
    while search.lacking:
        if not search.grow():
            return None
    return search.candidate


class _Suffixes:
    """Stages of a pipeline with one stage per rank whose suffixes grow until they fit."""

    def __init__(self, plain: Candidate, model_costs: RangeCosts) -> None:
        self.plain = plain
        staged = plain.staged
        self.variants, self.roots = Variants(staged, model_costs), saved_roots(staged.stages)
        self.units = [unit for stage in staged.stages for unit in stage_units(stage)]
        self.place = [_place(model_costs, unit) for unit in self.units]
        ends = block_ends(model_costs, len(staged.stages))
        self.begins = [
            [stage.stop, *(int(e) for e in ends[::-1] if stage.start < e < stage.stop), stage.start]
            for stage in staged.stages
        ]
        self.grown = [0] * len(staged.stages)
        self.candidate = plain
        self.lacking = self._lacking(plain.memories)

    def grow(self) -> bool:
        """Suffixes of stages that lack memory, longer by what that asks for; false if one is whole already."""
        copies = in_flight(self.plain.staged.program)
        for stage, missing in self.lacking.items():
            freed = 0.0
            while freed < missing:
                before = self._bytes(stage)
                self.grown[stage] += 1
                if self.grown[stage] == len(self.begins[stage]):
                    return False
                freed += (self._bytes(stage) - before) * (copies[stage] - 1)
        self._replay()
        return True

    def _chosen(self, stage: int) -> list[int]:
        begin = self.begins[stage][self.grown[stage]]
        return [
            index
            for index, unit in enumerate(self.units)
            if unit.stage == stage and unit.recomputable and self.place[index] >= begin
        ]

    def _bytes(self, stage: int) -> int:
        return sum(self.units[index].num_bytes for index in self._chosen(stage))

    def _replay(self) -> None:
        chosen = [self._chosen(stage) for stage in range(len(self.grown))]
        choice = choice_of(self.units, (index for one in chosen for index in one))
        staged = with_choice(self.variants, self.roots, choice)
        memories = tuple(
            _with_set_in_use(memory, self._bytes(staged.program.placement.stages_of(memory.rank)[0]))
            for memory in rank_memories(staged)
        )
        names = [tuple(self.units[index].operator for index in one) for one in chosen]
        policy = tuple(StagePolicy(recompute=one, offload=()) if one else "keep" for one in names)
        self.candidate = replace(
            self.plain,
            staged=staged,
            memories=memories,
            excess_bytes=staged.missing_bytes(memories),
            memory_policy=policy,
        )
        self.lacking = self._lacking(memories)

    def _lacking(self, memories: Sequence[RankMemory]) -> dict[int, int]:
        """Stage -> bytes its rank has too many."""
        staged = self.plain.staged
        limit = allocatable_bytes(staged.job.usable_bytes(staged.cluster.device), staged.cluster.device)
        return {
            staged.program.placement.stages_of(memory.rank)[0]: memory.peak_bytes - limit
            for memory in memories
            if memory.peak_bytes > limit
        }


def _place(model_costs: RangeCosts, unit: Unit) -> int:
    """Position of the operator that makes a unit."""
    graph = model_costs.graph
    return graph.position[graph.values[unit.values[0]].node]


def _with_set_in_use(memory: RankMemory, num_bytes: int) -> RankMemory:
    """One checkpoint makes its whole set at once, which an executor that makes values one by one does not show."""
    if not num_bytes:
        return memory
    categories = memory.categories | {
        "activations": memory.categories.get("activations", 0) + num_bytes,
    }
    return replace(memory, peak_bytes=memory.peak_bytes + num_bytes, categories=categories)
