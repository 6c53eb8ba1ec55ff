"""Stages of one model on one GPU: equal to the CPU, and predicted against measured memory and time of each.

    python benchmarks/gpu_stages.py [--model tiny-llama] [--stages 4] [--sequence-length 256] [--dtype bf16] [--json]

All stages run one after the other in this process, without pipelining: F and B of one microbatch, as the executor runs them.
Loss and gradients are compared with those of the whole model under autograd on the same device. Without a GPU it runs on the
CPU in fp32 and says so; then the peak is that of the executor's meter, and there is no reserved memory to speak of.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from typing import Any

import torch

from stagewright.cluster import Cluster
from stagewright.estimation.stages import BodyCosts
from stagewright.execution.metering import StorageMeter
from stagewright.execution.probe import probe
from stagewright.execution.rank_runner import RankRunner, stage_edges
from stagewright.execution.verification import largest_difference
from stagewright.execution.weights import Weights
from stagewright.graph.carving import carve
from stagewright.graph.stage import Stage
from stagewright.planning.job import Job
from stagewright.planning.prediction.pipeline import costing, pipeline, reserved_bytes
from stagewright.planning.prediction.predict import rank_memories
from stagewright.schedule.families import build as build_schedule
from stagewright.schedule.lower import insert_communication
from stagewright.tracing.cache import trace
from stagewright.tracing.models.build import build
from stagewright.tracing.models.reference import resolve

TOLERANCES = {"bf16": 0.05, "fp32": 1e-5}
REPEATS = 10


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny-llama")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--dtype", default="bf16", choices=list(TOLERANCES))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = options.dtype if kind == "cuda" else "fp32"
    found = measured(options, torch.device(kind), dtype)
    machine = {
        "device": torch.cuda.get_device_name() if kind == "cuda" else "CPU: there is no GPU here",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if options.json:
        print(json.dumps({"machine": machine, **found}, indent=1))
        return
    print(f"{machine['device']}, torch {machine['torch']}, {options.model} in {dtype}")
    for name, predicted, got in found["rows"]:
        print(f"{name:22} predicted {predicted:.6g}  measured {got:.6g}  {predicted / got - 1:+.1%}")
    verdict = "within" if found["difference"] <= TOLERANCES[dtype] else "OUTSIDE"
    print(f"largest difference of a gradient {found['difference']:.2e}: {verdict} {TOLERANCES[dtype]}")


def measured(options: argparse.Namespace, device: torch.device, dtype: str) -> dict[str, Any]:
    """Rows (name, predicted, measured) in seconds and bytes, and the largest difference of loss and gradients."""
    job = Job(global_batch=1, sequence_length=options.sequence_length, dtype=dtype)  # type: ignore[arg-type]
    cluster = probe(device.type, processes=1)
    reference = resolve(options.model)
    graph = trace(reference, 1, device=device.type, **job.traced(device.type))
    cuts = [len(graph.body) * index // options.stages for index in range(1, options.stages)]
    program = build_schedule("breadth-first", 1, 1, options.stages)
    stages = carve(graph, cuts)
    built = build(reference, 1, options.sequence_length, job.torch_name, seed=0)
    module = built.module.to(device)
    inputs = {name: tensor.to(device) for name, tensor in built.inputs.items()}
    runner = _runner(stages, program, module, device, job)
    batch = runner.run_batch(0, [inputs])
    (loss,) = batch.losses.values()
    difference = max(_compare(runner, module, inputs), abs(float(loss) / _plain_loss(module, inputs) - 1))
    body = BodyCosts(graph, costing(graph, cluster, job))
    line = pipeline(body, cuts, program, cluster, job, 1)
    rows = [*_memory(runner, line, cluster, inputs, device), *_seconds(runner, line, inputs)]
    return {"rows": rows, "difference": difference}


def _runner(stages: list[Stage], program: Any, module: Any, device: torch.device, job: Job) -> RankRunner:
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    wide = torch.float32 if job.dtype == "bf16" else None
    weights = Weights(stages, tensors, device, wide)
    lowered = insert_communication(program, stage_edges(stages))
    return RankRunner(stages, lowered, 0, [0], weights, device, 1.0)


def _plain_loss(module: Any, inputs: dict[str, torch.Tensor]) -> float:
    with torch.no_grad():
        return float(module(**inputs))


def _compare(runner: RankRunner, module: Any, inputs: dict[str, torch.Tensor]) -> float:
    """The largest difference of a gradient from plain autograd."""
    module.zero_grad(set_to_none=True)
    module(**inputs).backward()
    wanted = {name: parameter.grad for name, parameter in module.named_parameters()}
    names, found = runner.weights.names, runner.weights.gradients
    worst = max(largest_difference(found[v], wanted[names[v]].to(found[v].dtype)) for v in found)
    module.zero_grad(set_to_none=True)
    return worst


def _memory(
    runner: RankRunner, line: Any, cluster: Cluster, inputs: dict[str, torch.Tensor], device: torch.device
) -> list[tuple[str, float, float]]:
    """Peak bytes of a batch beyond what the optimizer keeps, which does not exist here."""
    (memory,) = rank_memories(line)
    absent = sum(memory.categories[name] for name in ("optimizer", "master"))
    predicted = memory.peak_bytes - absent
    resident = [t for one in runner.runners.values() for t in one.resident.values()]
    if device.type == "cpu":
        lasting = [
            *resident,
            *runner.weights.tensors.values(),
            *runner.weights.gradients.values(),
            *inputs.values(),
        ]
        with StorageMeter(lasting) as meter:
            runner.run_batch(1, [inputs])
        return [("peak bytes", predicted, meter.peak_bytes)]
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    runner.run_batch(1, [inputs])
    torch.cuda.synchronize()
    return [
        ("active peak bytes", predicted, torch.cuda.max_memory_allocated()),
        (
            "reserved peak bytes",
            reserved_bytes(memory, cluster.device) - absent,
            torch.cuda.max_memory_reserved(),
        ),
    ]


def _seconds(
    runner: RankRunner, line: Any, inputs: dict[str, torch.Tensor]
) -> list[tuple[str, float, float]]:
    """Medians of the forward and the backward of every stage."""
    taken: dict[str, list[float]] = {}
    for step in range(REPEATS):
        batch = runner.run_batch(step, [inputs])
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        for moment in batch.moments():
            taken.setdefault(str(moment.action), []).append(moment.end - moment.start)
    rows = []
    for index, summary in enumerate(line.summaries):
        rows.append((f"stage {index} forward s", summary.forward_s, statistics.median(taken[f"{index}F0"])))
        rows.append((f"stage {index} backward s", summary.backward_s, statistics.median(taken[f"{index}B0"])))
    return rows


if __name__ == "__main__":
    main()
