"""Predicted and measured gain of the joint search over even interleaved 1F1B, on local processes.

    python benchmarks/joint_measured.py [--ranks 2] [--models NAME ...] [--batches 7] [--slowdown 4] [--json]

For each model: every layer's passes are measured in one process; partition, placement and schedule are searched
from that profile; then the plan and interleaved 1F1B on even stages train the same batches in turn, by one process
per rank. A rank is a device of its own however few cores there are: after every pass it sleeps until
`slowdown` times the pass's processor time is over, so that ranks do not wait for each other's cores.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from local_cluster import start_ranks
from stagewright.execution.rank_runner import PipelineRank, RankRunner, stage_edges
from stagewright.execution.stage_runner import StageOptions
from stagewright.execution.weights import Weights
from stagewright.graph import OperatorGraph
from stagewright.graph.cuts import find_cuts
from stagewright.graph.split import split_graph
from stagewright.graph.stage import Stage
from stagewright.planning.joint.plan import JointPlan, judged
from stagewright.planning.joint.problem import JointProblem, LayerTable
from stagewright.planning.joint.search import Effort, search
from stagewright.planning.joint.starts import even
from stagewright.planning.joint.traced import with_backwards
from stagewright.schedule import Program, build, insert_communication
from stagewright.schedule.action import COMPUTE, Action, Kind
from stagewright.schedule.placement import Placement, loop
from stagewright.tracing.cache import trace
from stagewright.tracing.models.build import build as build_model
from stagewright.tracing.models.reference import resolve

CPU = torch.device("cpu")
MODELS: dict[str, dict[str, Any]] = {
    "tiny-gemma": {"num_hidden_layers": 12, "vocab_size": 16384, "tie_word_embeddings": False},
    "tiny-deepseek-v3": {"num_hidden_layers": 10, "vocab_size": 8192, "first_k_dense_replace": 4},
    "tiny-nemotron-h": {"hybrid_override_pattern": "M-M*M-M-" * 2, "num_hidden_layers": 16, "vocab_size": 16384},
}  # fmt: skip
"""Large heads; dense layers before layers of experts; attention among state-space layers."""


class SlowedRank(RankRunner):
    """A rank on a device that takes `slowdown` times the processor time of every pass."""

    slowdown = 1.0

    def _act(self, action: Any, microbatches: Any, result: Any) -> None:
        begin = time.thread_time()
        super()._act(action, microbatches, result)
        if action.kind in COMPUTE:
            used = time.thread_time() - begin
            over = self.slowdown * used - self._started.elapsed_time(self.timer.mark()) / 1e3
            if over > 0:
                time.sleep(over)


def layer_cuts(graph: OperatorGraph) -> list[int]:
    """Legal cuts nearest to where a layer, or what comes behind the last, begins."""
    legal = find_cuts(graph).positions
    layers = [re.search(r"\.layers\.(\d+)\.", graph.nodes[node].name) for node in graph.forward_ids]
    numbered = [(position, found.group(1)) for position, found in enumerate(layers) if found]
    starts = [now for (_, a), (now, b) in itertools.pairwise(numbered) if a != b]
    return sorted({int(legal[abs(legal - at).argmin()]) for at in (*starts, numbered[-1][0] + 1)})


@dataclass(frozen=True)
class Profile:
    """Layer costs with backwards in two pieces and in one (the input gradient is what the backward takes beyond the
    weight gradient), and what every pass takes besides."""

    split: LayerTable
    whole: LayerTable
    overhead_s: float


def message_seconds(size: int, count: int = 30) -> tuple[float, float]:
    """Of a message of `size` floats between the first two ranks: latency, and processor time of sending or receiving;
    medians. Every rank must call this."""
    rank, found = dist.get_rank(), []
    for _ in range(count if rank < 2 else 0):
        began, busy = time.perf_counter(), time.thread_time()
        for sends in (rank == 0, rank == 1):
            call = dist.isend if sends else dist.irecv
            message = call(torch.zeros(size), 1 - rank)
            assert message is not None
            message.wait()
        found.append(((time.perf_counter() - began) / 2, (time.thread_time() - busy) / 2))
    dist.barrier()
    return tuple(statistics.median(column) for column in zip(*found, strict=True)) if found else (0.0, 0.0)


def profile(graph: OperatorGraph, cuts: Sequence[int], tensors: Any, data: Any) -> Profile:
    """Seconds of every layer's passes on a rank, medians over microbatches."""
    layers, whole = (_passes(graph, own, tensors, data) for own in (cuts, []))
    # What every pass takes however little there is to do.
    overhead = float(np.maximum(0.0, (layers.sum(axis=1) - whole[:, 0])[:3].mean() / len(cuts)))
    forward, input_grad, weight_grad, backward = np.maximum(0.0, layers - overhead)
    rest = np.maximum(0.0, backward - weight_grad)
    return Profile(
        LayerTable.of(forward, input_grad, weight_grad), LayerTable.of(forward, rest, weight_grad), overhead
    )


def _passes(graph: OperatorGraph, cuts: Sequence[int], tensors: Any, data: Any) -> np.ndarray:
    """[F, I, W or B; stage]: all stages on this rank, microbatches one after the other, the second half of them with
    backwards in one piece."""
    num_stages, count = len(cuts) + 1, 2 * len(data)
    up = range(num_stages)
    kinds = [(Kind.I, Kind.W)] * len(data) + [(Kind.B,)] * len(data)
    actions = tuple(
        action
        for m, backward in enumerate(kinds)
        for action in (
            *(Action(Kind.F, stage, m) for stage in up),
            *(Action(kind, stage, m) for stage in reversed(up) for kind in backward),
        )
    )
    program = Program("profile", Placement((0,) * num_stages), count, (actions,))
    trainer = Trainer(graph, cuts, program, tensors, 0, 1)
    moments = trainer.runner.run_batch(0, [*data, *data]).moments()
    found: dict[tuple[Kind, int], list[float]] = {}
    for each in moments:
        found.setdefault((each.action.kind, each.action.stage), []).append(each.end - each.start)
    order = (Kind.F, Kind.I, Kind.W, Kind.B)
    return np.array([[statistics.median(found[kind, stage]) for stage in up] for kind in order])


def plans(
    costs: Profile,
    ranks: int,
    num_microbatches: int,
    message: tuple[float, float],
    seconds: float,
) -> tuple[JointPlan, JointPlan]:
    """Interleaved 1F1B on even stages, two per rank, and the best that the joint search finds."""
    split, whole = (
        JointProblem.of(
            table, ranks, num_microbatches, latency_s=message[0], overhead_s=costs.overhead_s + 2 * message[1]
        )
        for table in (costs.split, costs.whole)
    )
    plain = build("interleaved-1f1b", ranks, num_microbatches, 2)
    baseline = judged("interleaved-1f1b", whole, even(whole, loop(ranks, 2)), plain)
    best = search(split, Effort(seconds=seconds)).best
    return baseline, judged("joint", split, best.layout, with_backwards(best))


class Trainer:
    """Runs the batches of one plan on this rank."""

    def __init__(
        self, graph: OperatorGraph, cuts: Sequence[int], program: Program, tensors: Any, rank: int, ranks: int
    ) -> None:
        stages = split_graph(graph, cuts)
        lowered = insert_communication(program, stage_edges(stages))
        own: list[Stage] = [s for s in stages if program.placement.rank_of_stage[s.index] == rank]
        weights = Weights(own, {name: tensor.clone() for name, tensor in tensors.items()}, CPU)
        scale = 1.0 / program.num_microbatches
        self.busy: list[float] = []
        self.runner = SlowedRank(
            stages, lowered, PipelineRank(rank, range(ranks)), weights, CPU, StageOptions(scale)
        )

    def seconds(self, data: Any) -> float:
        """Of one batch, over all ranks."""
        dist.barrier()
        began = time.perf_counter()
        moments = self.runner.run_batch(0, data).moments()
        dist.barrier()
        took = time.perf_counter() - began
        self.busy.append(sum(each.end - each.start for each in moments if each.action.kind in COMPUTE))
        return took

    def busiest(self) -> float:
        """Seconds of all passes of the rank that has most to do."""
        busy = torch.tensor([statistics.median(self.busy)])
        dist.all_reduce(busy, dist.ReduceOp.MAX)
        return float(busy)


def measured(model: str, options: argparse.Namespace) -> dict[str, Any]:
    """One row: predicted and measured seconds of both plans."""
    rank, ranks = dist.get_rank(), options.ranks
    overrides = MODELS[model]
    if rank > 0:
        dist.barrier()
    graph = trace(model, 1, options.sequence_length, "float32", overrides)
    if rank == 0:
        dist.barrier()
    built = build_model(resolve(model, overrides), 1, options.sequence_length, "float32", seed=0)
    module = built.module
    tensors = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    num_microbatches = 4 * ranks
    torch.manual_seed(1)
    shapes = {name: tensor.shape for name, tensor in built.inputs.items()}
    data = [
        {name: torch.randint(0, 200, shape) for name, shape in shapes.items()}
        for _ in range(num_microbatches)
    ]
    cuts = layer_cuts(graph)
    found: list[Any] = [None]
    width = int(find_cuts(graph).value_bytes[cuts].max()) // 4
    message = message_seconds(width)
    if rank == 0:
        costs = profile(graph, cuts, tensors, data[: options.profiled])
        both = plans(costs, ranks, num_microbatches, message, options.seconds)
        found = [
            [
                (each.layout.cuts, each.program, each.makespan_s, float(each.timeline.busy_s.max()))
                for each in both
            ]
        ]
    dist.broadcast_object_list(found, 0)
    ends = [0, *cuts, len(graph.forward_ids)]
    trainers = [
        Trainer(graph, [ends[cut] for cut in own], program, tensors, rank, ranks)
        for own, program, *_ in found[0]
    ]
    seconds = [[trainer.seconds(data) for trainer in trainers] for _ in range(options.batches + 1)][1:]
    theirs, ours = (statistics.median(column) for column in zip(*seconds, strict=True))
    busiest = [trainer.busiest() for trainer in trainers]
    predicted = [makespan for _, _, makespan, _ in found[0]]
    return {
        "model": model,
        "ranks": ranks,
        "stages": len(found[0][1][0]) + 1,
        "predicted interleaved": predicted[0],
        "predicted joint": predicted[1],
        "measured interleaved": theirs,
        "measured joint": ours,
        "busiest rank, measured over predicted": [
            round(m / p, 3) for m, (*_, p) in zip(busiest, found[0], strict=True)
        ],
        "predicted gain": predicted[0] / predicted[1],
        "measured gain": statistics.median(row[0] / row[1] for row in seconds),
    }


def work(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    SlowedRank.slowdown = options.slowdown
    dist.init_process_group("gloo")
    rows = []
    for model in options.models:
        rows.append(measured(model, options))
        if dist.get_rank() == 0 and not options.json:
            lines = _table(rows).splitlines()
            print("\n".join(lines if len(rows) == 1 else lines[-1:]), flush=True)
    if dist.get_rank() == 0 and options.json:
        print(json.dumps(rows, indent=1))
    dist.barrier()
    dist.destroy_process_group()


def _table(rows: list[dict[str, Any]]) -> str:
    heads = list(rows[0])
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    for row in rows:
        texts = (f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values())
        lines.append("| " + " | ".join(texts) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--batches", type=int, default=7)
    parser.add_argument("--profiled", type=int, default=6, help="microbatches of the profile")
    parser.add_argument("--slowdown", type=float, default=4.0, help="of every rank; ranks over cores or more")
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=5.0, help="of the search")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if "RANK" in os.environ:
        work(options)
        return
    # Freed memory stays with the process, as with the allocator of a GPU: getting it anew takes processor time.
    settings = {
        "OMP_NUM_THREADS": "1",
        "MALLOC_MMAP_THRESHOLD_": str(2**30),
        "MALLOC_TRIM_THRESHOLD_": str(2**34),
    }
    os.environ.update(settings)
    start_ranks(__file__, options.ranks, *sys.argv[1:])


if __name__ == "__main__":
    main()
