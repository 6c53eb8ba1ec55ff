"""Stages of a model on one device, run one after the other without pipelining: equal to plain autograd, and predicted
against measured memory and time of each.

Without a GPU the peak is that of the executor's meter, and there is no reserved memory to speak of.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch

from stagewright.cluster import Cluster
from stagewright.estimation.stages import BodyCosts
from stagewright.execution.metering import StorageMeter
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
"""Largest difference of a gradient from plain autograd on the same device, relative to its largest element."""

REPEATS = 10

Row = tuple[str, float, float]
"""What, predicted, measured: seconds and bytes."""


def measured(
    model: str, num_stages: int, length: int, cluster: Cluster, device: torch.device, dtype: str
) -> tuple[list[Row], float]:
    """Rows of F and B of one sample of `length` tokens on every stage and of the peaks; and the largest difference of loss
    and gradients."""
    job = Job(global_batch=1, sequence_length=length, dtype=dtype)  # type: ignore[arg-type]
    reference = resolve(model)
    graph = trace(reference, 1, device=device.type, **job.traced(device.type))
    cuts = [len(graph.body) * index // num_stages for index in range(1, num_stages)]
    program = build_schedule("breadth-first", 1, 1, num_stages)
    stages = carve(graph, cuts)
    built = build(reference, 1, length, job.torch_name, seed=0)
    module = built.module.to(device)
    inputs = {name: tensor.to(device) for name, tensor in built.inputs.items()}
    runner = _runner(stages, program, module, device, job)
    batch = runner.run_batch(0, [inputs])
    (loss,) = batch.losses.values()
    difference = max(_compare(runner, module, inputs), abs(float(loss) / _plain_loss(module, inputs) - 1))
    body = BodyCosts(graph, costing(graph, cluster, job))
    line = pipeline(body, cuts, program, cluster, job, 1)
    rows = [*_memory(runner, line, cluster, inputs, device), *_seconds(runner, line, inputs)]
    return rows, difference


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
) -> list[Row]:
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


def _seconds(runner: RankRunner, line: Any, inputs: dict[str, torch.Tensor]) -> list[Row]:
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
