"""A traced model cut into as many stages as a schedule has, ready to run on the ranks of one process group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Placed:
    """What one rank holds of a model under a schedule."""

    stages: list[Any]
    own: list[Any]
    weights: Any
    tied: Any
    runner: Any


def place(
    rank: int, num_ranks: int, graph: Any, module: Any, schedule: str, num_chunks: int | None, num_microbatches: int,
    seed: int = 0,
) -> Placed:  # fmt: skip
    """`module` cut into stages of equally many operators; every rank must call this.

    `schedule` is a family, with "+R" where stages recompute everything, "+r" where they recompute some of what they save,
    and "+o" where they offload it.
    """
    import torch

    from stagewright.execution.collectives import ProcessGroups
    from stagewright.execution.rank_runner import PipelineRank, RankRunner, stage_edges
    from stagewright.execution.stage_runner import StageOptions
    from stagewright.execution.weights import TiedGroups, Weights
    from stagewright.graph.policy import RECOMPUTE_ALL, Policy
    from stagewright.graph.split import split_graph
    from stagewright.schedule.builders import build as build_schedule
    from stagewright.schedule.lower import insert_communication, insert_recomputation

    family, _, policy = schedule.partition("+")
    program = build_schedule(family, num_ranks, num_microbatches, num_chunks)
    cuts = even_cuts(graph, program.num_stages)
    stages = split_graph(graph, cuts)
    if policy == "o":
        program = insert_recomputation(program, range(len(stages)))
        stages = split_graph(graph, cuts, [Policy(offload=frozenset(stage.saved)) for stage in stages])
    elif policy:
        program = insert_recomputation(program, range(len(stages)))
        some = [Policy(recompute=frozenset(stage.saved[::2])) for stage in stages]
        stages = split_graph(graph, cuts, some if policy == "r" else [RECOMPUTE_ALL] * len(stages))
    program = insert_communication(program, stage_edges(stages))
    placed, cpu, everyone = program.placement.rank_of_stage, torch.device("cpu"), list(range(num_ranks))
    own = [stage for stage in stages if placed[stage.index] == rank]
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers()), **_constants(stages)}
    weights = Weights(own, tensors, cpu)
    tied = TiedGroups(stages, placed, rank, [everyone], ProcessGroups())
    place, options = PipelineRank(rank, everyone), StageOptions(1.0 / num_microbatches, seed)
    runner = RankRunner(stages, program, place, weights, cpu, options)
    return Placed(list(stages), own, weights, tied, runner)


def _constants(stages: Any) -> dict[str, Any]:
    from stagewright.tracing.arguments import from_contents

    graph = stages[0].graph
    values = [graph.values[value] for value in {value for stage in stages for value in stage.constants}]
    return {value.name: from_contents(graph.constants[value.name], value.meta) for value in values}


def even_cuts(graph: Any, num_stages: int) -> list[int]:
    """Legal cuts near those that give every stage equally many operators."""
    from stagewright.graph.cuts import find_cuts

    legal = [int(cut) for cut in find_cuts(graph).legal.nonzero()[0]]
    count, found = len(graph.forward_ids), []
    for stage in range(1, num_stages):
        left = [cut for cut in legal if cut > (found[-1] if found else 0)]
        left = left[: len(left) - (num_stages - 1 - stage)]  # one for each cut to come
        found.append(min(left, key=lambda cut: abs(cut - count * stage // num_stages)))
    return found
