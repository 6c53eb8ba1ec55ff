"""Step time of the executor beside PyTorch's own pipeline runtime: same model, stages, schedule, processes and moment.

    python benchmarks/executor.py [--pairs 30] [--models llama gpt2] [--hidden 256] [--layers 8] [--sequence-length 128]
        [--microbatches 8] [--schedules 1f1b ...] [--json]

Two local processes hold both runtimes and alternate between them step by step, so that whatever else the machine does
hits both alike. Prints, per model and schedule, the median of the paired ratios (ours over PyTorch's) and a 95 %
bootstrap interval of it, and whether its upper end keeps to the bar; below one is faster than PyTorch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from typing import Any

from figures import interval, machine

SCHEDULES = {
    "1f1b": ("Schedule1F1B", 1),
    "gpipe": ("ScheduleGPipe", 1),
    "interleaved-1f1b": ("ScheduleInterleaved1F1B", 2),
    "breadth-first": ("ScheduleLoopedBFS", 2),
    "interleaved-zb": ("ScheduleInterleavedZeroBubble", 2),
}


MODELS = {
    "llama": ("tiny-llama", "net.model.layers.{}.input_layernorm:0"),
    "gpt2": ("tiny-gpt2", "net.transformer.h.{}.ln_1:0"),
}
"""Bundled name, and the operator a layer starts with."""

BARS = {"interleaved-zb": 0.97}
"""What the upper end of the interval may be at most; 1.02 for the other schedules."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--sequence-length", type=int, default=128)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--schedules", nargs="*", default=list(SCHEDULES))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if "RANK" in os.environ:
        _work(options)
        return
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        1, 1, 2, run_id="executor", rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0
    )
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    elastic_launch(config, sys.executable)(__file__, *sys.argv[1:])


def _work(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    results = {}
    for model in options.models:
        for schedule in options.schedules:
            found = _compared(options, model, schedule, rank)
            results[f"{model} {schedule}"] = found
            if rank == 0 and not options.json:
                low, high = found["interval"]
                print(
                    f"{model:6} {schedule:17} ours {found['ours_seconds']:.3f} s  torch {found['torch_seconds']:.3f} s  "
                    f"ratio {found['ratio']:.3f}  95 % [{low:.3f}, {high:.3f}]  "
                    f"{'keeps to' if high <= found['bar'] else 'MISSES'} {found['bar']}",
                    flush=True,
                )
    if rank == 0 and options.json:
        print(json.dumps({"machine": machine(), "options": vars(options), "results": results}, indent=1))
    dist.barrier()
    dist.destroy_process_group()


def _compared(options: argparse.Namespace, model: str, schedule: str, rank: int) -> dict[str, Any]:
    """Step times of both runtimes, step by step in turn."""
    overrides = _overrides(options, model)
    ours = _ours(options, model, overrides, schedule, rank)
    theirs = _theirs(options, model, overrides, schedule, rank)
    ratios, mine, other = [], [], []
    for pair in range(options.pairs + 2):
        first, second = (ours, theirs) if pair % 2 else (theirs, ours)
        timed = {run: _timed(run) for run in (first, second)}
        if pair >= 2:
            mine.append(timed[ours])
            other.append(timed[theirs])
            ratios.append(timed[ours] / timed[theirs])
    return {
        "ratio": statistics.median(ratios),
        "interval": interval(ratios),
        "bar": BARS.get(schedule, 1.02),
        "ours_seconds": statistics.median(mine),
        "torch_seconds": statistics.median(other),
    }


def _overrides(options: argparse.Namespace, model: str) -> dict[str, Any]:
    if model == "gpt2":
        return {
            "num_hidden_layers": options.layers,
            "n_embd": options.hidden,
            "num_attention_heads": 8,
            "n_positions": options.sequence_length,
            "dropout": 0,
            "tie_word_embeddings": False,
        }
    return {
        "num_hidden_layers": options.layers,
        "hidden_size": options.hidden,
        "intermediate_size": 4 * options.hidden,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": options.hidden // 8,
    }


def _timed(run: Any) -> float:
    import torch.distributed as dist

    dist.barrier()
    start = time.perf_counter()
    run()
    dist.barrier()
    return time.perf_counter() - start


def _model(options: argparse.Namespace, model: str, overrides: dict[str, Any]) -> Any:
    from stagewright.tracing.models.build import build
    from stagewright.tracing.models.reference import resolve

    return build(resolve(MODELS[model][0], overrides), 1, options.sequence_length, "float32", seed=0)


def _tokens(options: argparse.Namespace) -> Any:
    import torch

    torch.manual_seed(1)
    return torch.randint(0, 256, (options.microbatches, options.sequence_length))


def _ours(
    options: argparse.Namespace, model: str, overrides: dict[str, Any], schedule: str, rank: int
) -> Any:
    import torch
    import torch.distributed as dist

    from stagewright.execution.rank_runner import RankRunner, stage_edges
    from stagewright.execution.weights import Weights
    from stagewright.graph.carving import carve
    from stagewright.schedule.families import build as build_schedule
    from stagewright.schedule.lower import insert_communication
    from stagewright.tracing.cache import trace

    if rank > 0:
        dist.barrier()
    graph = trace(MODELS[model][0], 1, options.sequence_length, "float32", overrides)
    if rank == 0:
        dist.barrier()
    num_chunks = SCHEDULES[schedule][1]
    program = build_schedule(schedule, 2, options.microbatches, num_chunks if num_chunks > 1 else None)
    place = {graph.nodes[node].name: index for index, node in enumerate(graph.body)}
    per = options.layers // program.num_stages
    cuts = [place[MODELS[model][1].format(stage * per)] for stage in range(1, program.num_stages)]
    stages = carve(graph, cuts)
    program = insert_communication(program, stage_edges(stages))
    own = [stage for stage in stages if program.placement.rank_of_stage[stage.index] == rank]
    module = _model(options, model, overrides).module
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    cpu = torch.device("cpu")
    runner = RankRunner(
        stages, program, rank, [0, 1], Weights(own, tensors, cpu), cpu, 1.0 / options.microbatches
    )
    data = [{"input_ids": row[None]} for row in _tokens(options)]
    return lambda: runner.run_batch(0, data)


def _theirs(
    options: argparse.Namespace, model: str, overrides: dict[str, Any], schedule: str, rank: int
) -> Any:
    import torch
    import torch.distributed.pipelining as pipelining
    from torch import nn
    from torch.distributed.pipelining import PipelineStage

    name, num_chunks = SCHEDULES[schedule]
    num_stages = 2 * num_chunks
    net = _model(options, model, overrides).module.net
    per = options.layers // num_stages
    make = _gpt2_part if model == "gpt2" else _llama_part

    def loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        shifted = nn.functional.pad(tokens, (0, 1), value=-100)[:, 1:]
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), shifted.flatten())

    parts = {index: make(net, index, per, num_stages) for index in range(rank, num_stages, 2)}
    stages = [PipelineStage(part, index, num_stages, torch.device("cpu")) for index, part in parts.items()]
    runtime = getattr(pipelining, name)(
        stages if num_chunks > 1 else stages[0], options.microbatches, loss_fn=loss
    )
    tokens = _tokens(options)
    last = any(stage.is_last for stage in stages)

    def run() -> None:
        for part in parts.values():
            part.zero_grad(set_to_none=False)
        runtime.step(*((tokens,) if rank == 0 else ()), **({"target": tokens, "losses": []} if last else {}))

    return run


def _llama_part(net: Any, index: int, per: int, num_stages: int) -> Any:
    """Stage `index` as PyTorch's runtime wants it: a module of its own."""
    import torch
    from torch import nn

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = net.model.embed_tokens if index == 0 else None
            self.layers = nn.ModuleList(net.model.layers[index * per : (index + 1) * per])
            self.rotary = net.model.rotary_emb
            self.norm = net.model.norm if index == num_stages - 1 else None
            self.head = net.lm_head if index == num_stages - 1 else None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embed(x) if self.embed is not None else x
            positions = self.rotary(x, torch.arange(x.shape[1])[None])
            for layer in self.layers:
                x = layer(x, position_embeddings=positions, attention_mask=None)
            return self.head(self.norm(x)) if self.head is not None and self.norm is not None else x

    return Part()


def _gpt2_part(net: Any, index: int, per: int, num_stages: int) -> Any:
    import torch
    from torch import nn

    body = net.transformer

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = body.wte if index == 0 else None
            self.places = body.wpe if index == 0 else None
            self.layers = nn.ModuleList(body.h[index * per : (index + 1) * per])
            self.norm = body.ln_f if index == num_stages - 1 else None
            self.head = net.lm_head if index == num_stages - 1 else None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.tokens is not None and self.places is not None:
                x = self.tokens(x) + self.places(torch.arange(x.shape[1])[None])
            for layer in self.layers:
                made = layer(x)
                x = made[0] if isinstance(made, tuple) else made
            return self.head(self.norm(x)) if self.head is not None and self.norm is not None else x

    return Part()


if __name__ == "__main__":
    main()
