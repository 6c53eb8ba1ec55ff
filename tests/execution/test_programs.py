"""What a model may hold, over real processes: one step equals the plain run, random numbers and buffers included."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from multiprocess import run_ranks

pytestmark = pytest.mark.multiprocess

SEED, STEP = 11, 3
"""As `in_turn` has them."""

MODELS = [
    "Dropout",  # the same random numbers where F is recomputed
    "BatchNorm",  # statistics follow every microbatch once, in order
    "Rotary",  # complex values cross cuts
    "Integers",  # integer and boolean values cross cuts
    "KeywordBlocks",  # keyword arguments, not all of them tensors
    "Unused",  # inputs, parameters and layers without gradient
]
SCHEDULES = [("zb-h1+R", None), ("interleaved-1f1b+r", 2)]
SCHEDULES = [
    ("gpipe", None), ("1f1b", None), ("interleaved-1f1b", 2), ("breadth-first", 2), ("zb-h1", None), ("zb-h2", None),
    ("zb-v", None), ("zb-auto", None), ("v-half", None), ("v-min", None), ("hanayo", 2), ("greedy", 2),
]  # fmt: skip
Case = tuple[str, str, int | None, int]


def test_values_of_all_kinds_equal_plain() -> None:
    check([(model, *schedule, 4) for model in MODELS for schedule in SCHEDULES], 2)


def test_one_microbatch_on_two_ranks_equals_plain() -> None:
    check([("EqualBlocks", *schedule, 1) for schedule in SCHEDULES], 2)


def test_fewer_microbatches_than_ranks_equal_plain() -> None:
    check(
        [
            ("EqualBlocks", schedule, None, count)
            for schedule in ("gpipe", "1f1b", "zb-h1")
            for count in (1, 3)
        ],
        4,
    )


def check(cases: list[Case], num_ranks: int) -> None:
    ranks = run_ranks(train, num_ranks, cases, timeout=120)
    for number, case in enumerate(cases):
        found = [rank[number] for rank in ranks]
        for one in found:
            assert not one["wrong"], f"{case}: {one['wrong']} differ from the plain run"
        assert sum(one["num_losses"] for one in found) == case[-1], f"{case}: a loss is missing"
        missing = found[0]["expected"] - set().union(*(one["compared"] for one in found))
        assert not missing, f"{case}: {missing} were not compared"


def train(rank: int, num_ranks: int, cases: list[Case]) -> list[dict[str, Any]]:
    """For every case what of this rank's losses, gradients and buffers differs from the plain run, by name."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    traced: dict[str, Any] = {}
    found = []
    for model, schedule, num_chunks, num_microbatches in cases:
        if model not in traced:
            traced[model] = _traced(rank, model)
        found.append(_compared(rank, num_ranks, *traced[model], schedule, num_chunks, num_microbatches))
    dist.barrier()
    dist.destroy_process_group()
    return found


def _traced(rank: int, name: str) -> tuple[Any, Any, Any]:
    import torch
    import torch.distributed as dist

    from nasty import NASTY
    from stagewright.tracing.trace import trace_module

    case = NASTY[name]
    torch.manual_seed(0)
    model, example = case.model(), case.batch()
    graphs = [trace_module(copy.deepcopy(model), example, name) if rank == 0 else None]
    dist.broadcast_object_list(graphs)
    return graphs[0], model, case


def _compared(
    rank: int, num_ranks: int, graph: Any, model: Any, case: Any, schedule: str, num_chunks: int | None, count: int
) -> dict[str, Any]:  # fmt: skip
    import torch
    from programs import place

    from in_turn import run_plain

    torch.manual_seed(1)
    batches = [case.batch() for _ in range(count)]
    plain = run_plain(copy.deepcopy(model), batches)
    placed = place(rank, num_ranks, graph, copy.deepcopy(model), schedule, num_chunks, count, SEED)
    batch = placed.runner.run_batch(STEP, batches)
    weights = placed.weights
    placed.tied.reduce(weights.gradients)
    losses = {f"loss {index}": loss.item() == plain.losses[index] for index, loss in batch.losses.items()}
    gradients, buffers = _own(placed)
    equal = {name: _equal(tensor, plain.gradients[name]) for name, tensor in gradients.items()}
    equal |= {name: torch.equal(tensor, plain.buffers[name]) for name, tensor in buffers.items()}
    written = {graph.values[value].name for stage in placed.stages for value, _ in stage.mutations}
    return {
        "wrong": [name for name, same in (losses | equal).items() if not same],
        "num_losses": len(batch.losses),
        "compared": set(equal),
        "expected": set(plain.gradients) | written,
    }


def _own(placed: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Gradients and buffers of a rank by name."""
    weights = placed.weights
    trained = {value for stage in placed.own for value, _ in stage.gradients}
    buffers = {value for stage in placed.own for value, _ in stage.mutations}
    return (
        {weights.names[value]: weights.gradients[value] for value in trained},
        {weights.names[value]: weights.tensors[value] for value in buffers},
    )


def _equal(gradient: Any, wanted: Any) -> bool:
    """Contributions of several ranks, and of several places of one module, may be added up in another order."""
    import torch

    return torch.equal(gradient, wanted) or bool(
        (gradient - wanted).abs().max() <= 1e-12 * wanted.abs().max()
    )
