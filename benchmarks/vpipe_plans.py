"""vPipe's published plans of BERT beside ours: same graph, devices, microbatches and asynchronous schedule, in simulation.

    python benchmarks/vpipe_plans.py

Source: the partitions and shares of recomputation in vPipe's released configurations (hku-systems/vpipe) for RTX 2080 Ti,
sequences of 128 and microbatches of 16. A block ends at each residual addition, and the head is the last; of a stage the
last blocks, as many as the share says, are recomputed. Steps of the optimizer are left out of the times. Ignores: that
vPipe's shares count lines of code, not blocks.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from peers.plans.strategies import STRATEGIES
from peers.plans.units import choice_of, stage_units
from stagewright.cluster import load_cluster
from stagewright.estimation.stages import RangeCosts
from stagewright.planning.candidate import Candidate, with_cuts
from stagewright.planning.checkpointing.choice import saved_roots, with_choice
from stagewright.planning.configuration import Configuration
from stagewright.planning.job import Job
from stagewright.planning.prediction.predict import rank_memories, run_timeline
from stagewright.planning.prediction.staged_model import Variants, costing
from stagewright.tracing.cache import trace
from stagewright.tracing.models.reference import resolve

SIZE, LENGTH, MICROBATCHES_PER_RANK = 16, 128, 4


@dataclass(frozen=True)
class Published:
    num_layers: int
    blocks: tuple[int, ...]
    shares: tuple[float, ...]


PLANS = (
    Published(24, (12, 13, 13, 11), (0.3, 0.0, 0.0, 0.0)),
    Published(48, (11, 11, 12, 12, 13, 13, 14, 11), (1.0, 0.85, 0.8, 0.6, 0.5, 0.2, 0.0, 0.0)),
)


def main() -> None:
    """One row for each published plan."""
    print(
        "| model | devices | vPipe's plan | its fullest device | ours | ours over theirs | bottleneck of theirs |"
    )
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for published in PLANS:
        print(row(published))


def row(published: Published) -> str:
    pp = len(published.blocks)
    cluster = load_cluster(f"{pp}x-rtx2080ti")
    count = MICROBATCHES_PER_RANK * pp
    job = Job(global_batch=SIZE * count, sequence_length=LENGTH, dtype="fp32")
    reference = resolve("bert-large", {"num_hidden_layers": published.num_layers})
    graph = trace(reference, SIZE, LENGTH, "float32")
    model_costs = RangeCosts(graph, costing(graph, cluster, job))
    ends = block_ends(model_costs, published.num_layers)
    bounds = [0, *itertools.accumulate(published.blocks)]
    configuration = Configuration(1, pp, SIZE, count, "pipedream")
    plain = with_cuts(model_costs, configuration, [ends[end - 1] for end in bounds[1:-1]], cluster, job)
    begins = [
        bounds[stage + 1] - int(share * number)
        for stage, (number, share) in enumerate(zip(published.blocks, published.shares, strict=True))
    ]
    places = [ends[begin - 1] if begin else 0 for begin in begins]
    theirs = recomputed(plain, model_costs, places)
    own = STRATEGIES["own-async"].candidate(
        model_costs, Configuration(1, pp, SIZE, count, "1f1b"), cluster, job
    )
    assert own is not None, "ours fits where theirs does"
    timeline = run_timeline(theirs.staged, steps=False)
    their_s, own_s = timeline.makespan_s, run_timeline(own.staged, steps=False).makespan_s
    peak, busy = max(memory.peak_bytes for memory in theirs.memories), timeline.busy_s
    return (
        f"| BERT, {published.num_layers} layers | {pp} x rtx2080ti | {their_s:.3f} s | {peak / 2**30:.1f} GiB | "
        f"{own_s:.3f} s | {their_s / own_s:.2f}x | {max(busy) / (sum(busy) / pp):.2f} of the mean |"
    )


def block_ends(model_costs: RangeCosts, num_layers: int) -> list[int]:
    """Where blocks end: behind each residual addition, in front of the norm; the end of the model for the head."""
    graph, found = model_costs.graph, []
    for layer in range(num_layers):
        for part in ("attention.output", "output"):
            name = f"net.bert.encoder.layer.{layer}.{part}.LayerNorm:0"
            found.append(
                next(place for place, node in enumerate(graph.forward_ids) if graph.nodes[node].name == name)
            )
    return [*found, model_costs.size]


def recomputed(plain: Candidate, model_costs: RangeCosts, places: list[int]) -> Candidate:
    """`plain` with what each stage makes from its place on recomputed."""
    units = [unit for stage in plain.staged.stages for unit in stage_units(stage)]
    graph = model_costs.graph
    chosen = [
        index
        for index, unit in enumerate(units)
        if unit.recomputable and graph.position[graph.values[unit.values[0]].node] >= places[unit.stage]
    ]
    roots = saved_roots(plain.staged.stages)
    staged = with_choice(Variants(plain.staged, model_costs), roots, choice_of(units, chosen))
    memories = tuple(rank_memories(staged))
    return Candidate(
        plain.configuration, staged, plain.cuts, memories, staged.missing_bytes(memories), plain.memory_policy
    )


if __name__ == "__main__":
    main()
