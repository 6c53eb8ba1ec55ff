"""Pipelined equals plain: losses and every gradient, bit for bit, over real processes."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from multiprocess import run_ranks

pytestmark = pytest.mark.multiprocess

NUM_MICROBATCHES = 5
TIED_TOLERANCE = 1e-12

MODELS = {
    "tiny-llama": ("float64", {}),
    "tiny-llama in pieces": ("float64", {}),
    "tiny-gpt2": ("float64", {"dropout": 0}),
    "tiny-mixtral": ("float32", {}),
    "tiny-t5": ("float64", {"dropout": 0}),
    "skip-net": ("float64", {}),
}
NUM_PIECES = {"tiny-llama in pieces": 3}

BOTH = [("1f1b", None), ("gpipe", None)]
EVERY = [
    ("interleaved-1f1b", 2), ("interleaved-zb", 2), ("breadth-first", 2), ("zb-h1", None), ("zb-h2", None),
    ("zb-v", None), ("zb-auto", None), ("v-half", None), ("v-min", None), ("dualpipe-v", None), ("hanayo", 2),
    ("greedy", 2),
]  # fmt: skip


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("model", [name for name in MODELS if name not in NUM_PIECES])
def test_pipelined_equals_plain(model: str, num_ranks: int) -> None:
    check_schedules(model, num_ranks, BOTH)


def test_every_schedule_equals_plain() -> None:
    """Any family and placement, split or fused backward: the executor knows no schedule's name."""
    check_schedules("tiny-llama", 2, EVERY)


@pytest.mark.parametrize("model", ["tiny-llama", "skip-net", "tiny-t5"])
def test_recomputation_equals_plain(model: str) -> None:
    """Stages that recompute everything ("+R"), or some of what they save ("+r"), or offload it ("+o") learn the same."""
    check_schedules(
        model,
        2,
        [("1f1b+R", None), ("zb-h1+r", None), ("interleaved-zb+R", 2), ("gpipe+o", None), ("zb-h1+o", None)],
    )


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_loss_in_pieces_equals_plain(num_ranks: int) -> None:
    """Head and loss in three slices of the tokens, one after the other, in other orders of additions."""
    check_schedules(
        "tiny-llama in pieces", num_ranks, [*BOTH, ("zb-h1", None), ("zb-v", None), ("gpipe+R", None)]
    )


def check_schedules(model: str, num_ranks: int, schedules: Sequence[tuple[str, int | None]]) -> None:
    results = run_ranks(train, num_ranks, model, schedules, timeout=180)
    for schedule, _ in schedules:
        names: set[str] = set()
        for result in results:
            assert result[schedule]["losses_equal"], f"{model} {schedule}: a loss differs"
            for name, (equal, error, tied) in result[schedule]["gradients"].items():
                names.add(name)
                close = equal or ((tied or model in NUM_PIECES) and error <= TIED_TOLERANCE)
                assert close, f"{model} {schedule}: gradient of {name} is off by {error}"
        assert sum(result[schedule]["num_losses"] for result in results) == NUM_MICROBATCHES
        assert names == set(results[0]["trained"])


def train(
    rank: int, num_ranks: int, model: str, schedules: Sequence[tuple[str, int | None]]
) -> dict[str, Any]:
    """One batch under each schedule on this rank, compared with plain autograd over the same microbatches."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if rank > 0:
        dist.barrier()  # the first rank traces, the others find the trace in the cache
    graph, module, inputs = _model(model)
    if rank == 0:
        dist.barrier()
    data = _microbatches(inputs)
    plain = _Plain(module, data)
    result: dict[str, Any] = {"trained": list(plain.gradients(tuple(range(NUM_MICROBATCHES))))}
    for schedule, num_chunks in schedules:
        result[schedule] = _train_one(rank, num_ranks, graph, module, plain, schedule, num_chunks, model)
    dist.barrier()
    dist.destroy_process_group()
    return result


def _train_one(
    rank: int,
    num_ranks: int,
    graph: Any,
    module: Any,
    plain: _Plain,
    schedule: str,
    num_chunks: int | None,
    model: str,
) -> dict[str, Any]:
    from programs import place

    placed = place(rank, num_ranks, graph, module, schedule, num_chunks, NUM_MICROBATCHES)
    runner, weights = placed.runner, placed.weights
    batch = runner.run_batch(0, plain.data)
    placed.tied.reduce(weights.gradients)
    holders = Counter(value for stage in placed.stages for value, _ in stage.gradients)
    compared = {}
    for stage in placed.own:
        order = tuple(
            action.microbatch
            for action in runner.actions
            if action.stage == stage.index and action.kind in ("B", "W") and action.microbatch is not None
        )
        wanted = plain.gradients(order)
        for value, _ in stage.gradients:
            name = weights.names[value]
            compared[name] = _compared(weights.gradients[value], wanted[name], holders[value] > 1)
    losses = batch.losses.items()
    return {
        "losses_equal": all(_equal_losses(loss, plain.losses[index], model) for index, loss in losses),
        "num_losses": len(batch.losses),
        "gradients": compared,
    }


def _equal_losses(loss: Any, wanted: Any, model: str) -> bool:
    import torch

    tolerance = TIED_TOLERANCE if model in NUM_PIECES else 0.0
    return torch.allclose(loss, wanted, rtol=tolerance, atol=0.0)


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
    bundled = name.partition(" ")[0]
    graph = trace(bundled, 2, 16, dtype, overrides, loss_pieces=NUM_PIECES.get(name, 1))
    built = build(resolve(bundled, overrides), 2, 16, dtype, seed=0)
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


class _Plain:
    """The unpartitioned model under autograd: losses, and gradients added up in any order of the microbatches."""

    def __init__(self, module: Any, data: list[dict[str, Any]]) -> None:
        self.module = copy.deepcopy(module)
        self.data = data
        self.losses: dict[int, Any] = {}
        self._known: dict[tuple[int, ...], dict[str, Any]] = {}

    def gradients(self, order: tuple[int, ...]) -> dict[str, Any]:
        if order not in self._known:
            self.module.zero_grad(set_to_none=True)
            for index in order:
                loss = self.module(**self.data[index])
                (loss * (1.0 / NUM_MICROBATCHES)).backward()
                self.losses[index] = loss.detach()
            named = self.module.named_parameters()
            self._known[order] = {name: p.grad.clone() for name, p in named if p.grad is not None}
        return self._known[order]
