"""Step time of the executor next to PyTorch's own pipeline runtime: same model, stages, schedule, processes and moment.

    python benchmarks/executor.py [--pairs 30] [--models llama gpt2] [--hidden 256] [--layers 8] [--sequence-length 128]
        [--microbatches 8] [--schedules 1f1b ...] [--json]

Two local processes (on GPUs those of `gpu/two.py`) hold both runtimes and alternate between them step by step, so that
whatever else the machine does
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
from typing import TYPE_CHECKING, Any, NamedTuple

from figures import interval, machine
from local_cluster import start_ranks

if TYPE_CHECKING:
    import torch

    from stagewright.cluster import Cluster
    from stagewright.planning.plan import Plan

SCHEDULES = {
    "1f1b": ("Schedule1F1B", 1),
    "gpipe": ("ScheduleGPipe", 1),
    "interleaved-1f1b": ("ScheduleInterleaved1F1B", 2),
    "breadth-first": ("ScheduleLoopedBFS", 2),
    "interleaved-zb": ("ScheduleInterleavedZeroBubble", 2),
}


MODELS = {"llama": "tiny-llama", "gpt2": "tiny-gpt2"}

BARS = {"interleaved-zb": 0.97}
"""What the upper end of the interval may be at most; 1.02 for the other schedules."""


class Sizes(NamedTuple):
    """Of the model, of a batch, and how many pairs of batches are compared."""

    hidden: int
    layers: int
    sequence_length: int
    microbatches: int
    pairs: int
    dtype: str = "fp32"


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
    start_ranks(__file__, 2, *sys.argv[1:])


def _work(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    from stagewright.cluster import load_cluster

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    sizes = Sizes(
        options.hidden, options.layers, options.sequence_length, options.microbatches, options.pairs
    )
    cluster = load_cluster("2x-h100", {"device.kind": "cpu"})
    results = {}
    for model in options.models:
        for schedule in options.schedules:
            if rank > 0:  # the first rank traces for all
                dist.barrier()
            plan = plan_of(model, schedule, sizes, 2, cluster)
            if rank == 0:
                dist.barrier()
            found = compared(model, schedule, sizes, plan, torch.device("cpu"))
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


def plan_of(model: str, schedule: str, sizes: Sizes, num_ranks: int, cluster: Cluster) -> Plan:
    """A plan of equally many layers per stage."""
    from stagewright.planning.estimate import estimate
    from stagewright.planning.job import Job
    from stagewright.tracing.models.reference import resolve

    chunks = SCHEDULES[schedule][1]
    num_stages = num_ranks * chunks
    return estimate(
        resolve(MODELS[model], _overrides(sizes, model)),
        cluster,
        Job(global_batch=sizes.microbatches, sequence_length=sizes.sequence_length, dtype=sizes.dtype),  # type: ignore[arg-type]
        pp=num_ranks,
        dp=1,
        schedule=schedule,
        chunks=chunks if chunks > 1 else None,
        layers_per_stage=[sizes.layers // num_stages] * num_stages,
        recompute="none",
    )


def batch_seconds(plan: Plan) -> float:
    """Predicted seconds of a batch, without the optimizer."""
    costs = plan.predictions.costs
    assert costs is not None, "estimates have the costs of a step"
    return plan.predictions.step_seconds - costs.norm_seconds - max(costs.optimizer_seconds, default=0.0)


def compared(model: str, schedule: str, sizes: Sizes, plan: Plan, device: torch.device) -> dict[str, Any]:
    """Times of batches of both runtimes in turn; every rank of the default group must call this."""
    from stagewright.execution.session import Session

    session = Session(plan, device, None, random_weights=True)
    inputs = session.microbatches(0, session.graph)

    def ours() -> None:
        session.runner.run_batch(0, inputs)

    theirs = _theirs(model, schedule, sizes, plan, device)
    ratios, mine, other = [], [], []
    for pair in range(sizes.pairs + 2):
        first, second = (ours, theirs) if pair % 2 else (theirs, ours)
        timed = {run: _timed(run, device) for run in (first, second)}
        if pair >= 2:
            mine.append(timed[ours])
            other.append(timed[theirs])
            ratios.append(timed[ours] / timed[theirs])
    session.close()
    return {
        "ratio": statistics.median(ratios),
        "interval": interval(ratios),
        "bar": BARS.get(schedule, 1.02),
        "ours_seconds": statistics.median(mine),
        "torch_seconds": statistics.median(other),
    }


def _overrides(sizes: Sizes, model: str) -> dict[str, Any]:
    if model == "gpt2":
        return {
            "num_hidden_layers": sizes.layers,
            "n_embd": sizes.hidden,
            "num_attention_heads": 8,
            "n_positions": sizes.sequence_length,
            "dropout": 0,
            "tie_word_embeddings": False,
        }
    return {
        "num_hidden_layers": sizes.layers,
        "hidden_size": sizes.hidden,
        "intermediate_size": 4 * sizes.hidden,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": sizes.hidden // 8,
    }


def _timed(run: Any, device: torch.device) -> float:
    import torch.distributed as dist

    from stagewright.execution.clock import synchronize

    dist.barrier()
    start = time.perf_counter()
    run()
    synchronize(device)
    dist.barrier()
    return time.perf_counter() - start


def _theirs(model: str, schedule: str, sizes: Sizes, plan: Plan, device: torch.device) -> Any:
    import torch
    import torch.distributed as dist
    import torch.distributed.pipelining as pipelining
    from torch import nn
    from torch.distributed.pipelining import PipelineStage

    from stagewright.tracing.models.build import build

    name, num_chunks = SCHEDULES[schedule]
    rank, num_ranks, num_stages = dist.get_rank(), plan.pp, plan.num_stages
    net = build(plan.model.reference(), 1, sizes.sequence_length, plan.job.torch_name, seed=0).module.net
    per = sizes.layers // num_stages
    make = _gpt2_part if model == "gpt2" else _llama_part

    def loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        shifted = nn.functional.pad(tokens, (0, 1), value=-100)[:, 1:]
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), shifted.flatten())

    parts = {
        index: make(net, index, per, num_stages).to(device) for index in range(rank, num_stages, num_ranks)
    }
    stages = [PipelineStage(part, index, num_stages, device) for index, part in parts.items()]
    runtime = getattr(pipelining, name)(
        stages if num_chunks > 1 else stages[0], sizes.microbatches, loss_fn=loss
    )
    torch.manual_seed(1)
    tokens = torch.randint(0, 256, (sizes.microbatches, sizes.sequence_length)).to(device)
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
            positions = self.rotary(x, torch.arange(x.shape[1], device=x.device)[None])
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
                x = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device)[None])
            for layer in self.layers:
                made = layer(x)
                x = made[0] if isinstance(made, tuple) else made
            return self.head(self.norm(x)) if self.head is not None and self.norm is not None else x

    return Part()


if __name__ == "__main__":
    main()
