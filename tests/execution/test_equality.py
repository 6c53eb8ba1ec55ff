"""Pipelined equals plain: losses and every gradient, bit for bit, over real processes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from multiprocess import run_ranks

pytestmark = pytest.mark.multiprocess

NUM_MICROBATCHES = 5
TIED_TOLERANCE = 1e-12

MODELS = {
    "tiny-llama": ("float64", {}),
    "tiny-gpt2": ("float64", {"dropout": 0}),
    "tiny-mixtral": ("float32", {}),
    "tiny-t5": ("float64", {"dropout": 0}),
    "skip-net": ("float64", {}),
}


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_pipelined_equals_plain(
    model: str, num_ranks: int, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAGEWRIGHT_CACHE", str(tmp_path_factory.getbasetemp().parent / "traces"))
    results = run_ranks(train_both_ways, num_ranks, model, timeout=180)
    for schedule in ("1f1b", "gpipe"):
        num_losses = 0
        names: set[str] = set()
        for result in results:
            found = result[schedule]
            assert found["losses_equal"], f"{model} {schedule}: a loss differs"
            num_losses += found["num_losses"]
            for name, (equal, error, tied) in found["gradients"].items():
                names.add(name)
                assert equal or (tied and error <= TIED_TOLERANCE), (
                    f"{model} {schedule}: gradient of {name} is off by {error}"
                )
        assert num_losses == NUM_MICROBATCHES
        assert names == set(results[0]["trained"])


def train_both_ways(rank: int, num_ranks: int, model: str) -> dict[str, Any]:
    """One batch under each schedule on this rank, compared with plain autograd over the same microbatches."""
    import torch
    import torch.distributed as dist

    from stagewright.execution.rank_runner import RankRunner, stage_edges
    from stagewright.execution.weights import TiedGroups, Weights
    from stagewright.graph.stage import carve
    from stagewright.schedule.families import build as build_schedule
    from stagewright.schedule.lower import insert_communication

    dist.init_process_group("gloo")
    if rank > 0:
        dist.barrier()  # the first rank traces, the others find the trace in the cache
    graph, module, inputs = _model(model)
    if rank == 0:
        dist.barrier()
    count = len(graph.body)
    stages = carve(graph, [count * stage // num_ranks for stage in range(1, num_ranks)])
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    data = _microbatches(inputs)
    plain, losses = _plain(module, data)
    holders = [
        {stage.index for stage in stages for held, _ in stage.gradients if held == value}
        for value in range(len(graph.values))
    ]
    result: dict[str, Any] = {"trained": [name for name in plain]}
    for schedule in ("1f1b", "gpipe"):
        program = insert_communication(
            build_schedule(schedule, num_ranks, NUM_MICROBATCHES), stage_edges(stages)
        )
        placed = program.placement.rank_of_stage
        own = [stage for stage in stages if placed[stage.index] == rank]
        weights = Weights(own, tensors, torch.device("cpu"))
        tied = TiedGroups(stages, placed, rank, [list(range(num_ranks))])
        runner = RankRunner(
            stages,
            program,
            rank,
            list(range(num_ranks)),
            weights,
            torch.device("cpu"),
            1.0 / NUM_MICROBATCHES,
        )
        batch = runner.run_batch(0, data)
        tied.reduce(weights.gradients)
        result[schedule] = {
            "losses_equal": all(torch.equal(loss, losses[index]) for index, loss in batch.losses.items()),
            "num_losses": len(batch.losses),
            "gradients": {
                weights.names[value]: _compared(
                    gradient, plain[weights.names[value]], len(holders[value]) > 1
                )
                for value, gradient in weights.gradients.items()
            },
        }
    dist.barrier()
    dist.destroy_process_group()
    return result


def _compared(gradient: Any, wanted: Any, tied: bool) -> tuple[bool, float, bool]:
    import torch

    scale = max(wanted.abs().max().item(), 1e-30)
    return torch.equal(gradient, wanted), (gradient - wanted).abs().max().item() / scale, tied


def _model(name: str) -> tuple[Any, Any, dict[str, Any]]:
    import torch

    from stagewright.tracing.cache import trace
    from stagewright.tracing.models.build import build
    from stagewright.tracing.models.reference import resolve
    from stagewright.tracing.trace import trace_module

    dtype, overrides = MODELS[name]
    if name == "skip-net":
        from networks import skip_net

        module, inputs = skip_net()
        module = module.to(torch.float64)
        inputs = {
            key: value.double() if value.is_floating_point() else value for key, value in inputs.items()
        }
        return trace_module(module, inputs, name), module, inputs
    graph = trace(name, 2, 16, dtype, overrides)
    built = build(resolve(name, overrides), 2, 16, dtype, seed=0)
    return graph, built.module, built.inputs


def _microbatches(inputs: dict[str, Any]) -> list[dict[str, Any]]:
    import torch

    torch.manual_seed(5)
    return [
        {
            name: torch.randn_like(tensor)
            if tensor.is_floating_point()
            else torch.randint(0, int(tensor.max()) + 1, tensor.shape)
            for name, tensor in inputs.items()
        }
        for _ in range(NUM_MICROBATCHES)
    ]


def _plain(module: Any, data: list[dict[str, Any]]) -> tuple[dict[str, Any], list[Any]]:
    module = copy.deepcopy(module)
    losses = []
    for microbatch in data:
        loss = module(**microbatch)
        (loss * (1.0 / NUM_MICROBATCHES)).backward()
        losses.append(loss.detach())
    return {
        name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None
    }, losses
