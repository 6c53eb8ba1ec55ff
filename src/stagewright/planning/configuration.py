"""One configuration of a model as a value: what `stagewright.planning.estimate.estimate` takes beside model and job."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import accumulate, groupby, pairwise
from typing import Any, Literal

from stagewright.graph import OperatorGraph
from stagewright.graph.flat_buffers import GRADIENTS
from stagewright.graph.layers import layer_begins, layer_end
from stagewright.planning.plan import Plan
from stagewright.planning.plan_stages import layers_per_stage, stage_cuts
from stagewright.planning.space import Recomputed
from stagewright.schedule import Program
from stagewright.schedule.placement import loop, v


@dataclass(frozen=True)
class Configuration:
    """Widths, schedule and what is recomputed; fields are the arguments of `estimate`, with its defaults."""

    pp: int | None = None
    dp: int | None = None
    tp: int = 1
    cp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    microbatch: int = 1
    schedule: str = "1f1b"
    chunks: int | None = None
    layers_per_stage: tuple[int, ...] | None = None
    recompute: Recomputed | None = None
    zero: int | None = None
    reduce_dtype: Literal["fp32", "bf16"] | None = None
    shard_size: int | None = None
    program: Program | None = None

    def arguments(self) -> dict[str, Any]:
        """Those of `estimate`."""
        return {one.name: getattr(self, one.name) for one in fields(self)}


def configuration_of(plan: Plan) -> Configuration:
    """The widths of `plan`, the name of its schedule, and what its stages recompute where all do the same."""
    has_sums = any("REDUCE" in text for actions in plan.program for text in actions)
    recomputed: dict[str, Recomputed] = {"keep": "none", "layers": "full", "selective": "selective"}
    policies = set(map(str, plan.memory_policy))
    chunks = len(stage_ranks(plan)) // plan.pp
    return Configuration(
        pp=plan.pp,
        dp=plan.dp,
        tp=plan.tp,
        cp=plan.cp,
        ep=plan.ep,
        sequence_parallel=plan.sequence_parallel,
        microbatch=plan.microbatch_size,
        schedule=plan.schedule,
        chunks=chunks if chunks > 1 and is_looped(plan) else None,
        recompute=recomputed.get(policies.pop()) if len(policies) == 1 else None,
        zero=max(plan.sharding) or (0 if has_sums else None),
        reduce_dtype=plan.reduce_dtype,
        shard_size=plan.shard_size,
    )


def stage_ranks(plan: Plan) -> tuple[int, ...]:
    """Ranks of the stages of the schedule of `plan`."""
    ends = [0, *accumulate(_units(plan))]
    return tuple(plan.placement[end] for end in ends[:-1])


def stage_layers(plan: Plan) -> tuple[int, ...] | None:
    """Numbered layers of every stage of the schedule, a layer that is cut being that of the stage behind the cut; None where
    stages are not of such layers."""
    counts = layers_per_stage(plan)
    ends = list(accumulate(_units(plan)))
    return counts and tuple(sum(counts[start:end]) for start, end in pairwise([0, *ends]))


def _units(plan: Plan) -> list[int]:
    """How many stages of `plan` each stage of its schedule is: sharding units, where replicas share out gradients."""
    if max(plan.sharding) < GRADIENTS or (plan.pp > 1 and plan.placement in _placements(plan)):
        return [1] * plan.num_stages
    return [len(list(units)) for _, units in groupby(plan.placement)]


def _placements(plan: Plan) -> list[tuple[int, ...]]:
    """Those of schedules with as many stages."""
    chunks = plan.num_stages // plan.pp
    found = [v(plan.pp)] if chunks == 2 else []
    return [one.rank_of_stage for one in (*found, loop(plan.pp, max(chunks, 1)))]


def is_looped(plan: Plan) -> bool:
    """Whether stage s of the schedule is on rank s mod pp, with as many stages on every rank."""
    ranks = stage_ranks(plan)
    return len(ranks) % plan.pp == 0 and ranks == loop(plan.pp, len(ranks) // plan.pp).rank_of_stage


def whole_layers(plan: Plan, graph: OperatorGraph) -> tuple[tuple[int, ...], bool]:
    """Layers of every stage of the schedule where cuts go to the nearest places between layers, and whether any moves."""
    places = [*layer_begins(graph), layer_end(graph)]
    ends = list(accumulate(_units(plan)))
    cuts = stage_cuts(plan, graph)
    own = [cuts[end - 1] for end in ends[:-1]]
    near = [min(range(len(places)), key=lambda index, cut=cut: abs(places[index] - cut)) for cut in own]
    moves = any(places[index] != cut for index, cut in zip(near, own, strict=True))
    return tuple(after - before for before, after in pairwise([0, *near, len(places) - 1])), moves
