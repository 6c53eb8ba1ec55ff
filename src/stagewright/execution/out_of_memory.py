"""Out-of-memory errors: the action, the bytes alive by category, and a remedy."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping

import torch

from stagewright.errors import RunError, causes
from stagewright.execution.optimizer import Optimizer
from stagewright.execution.rank_runner import RankRunner
from stagewright.execution.shards import Shards
from stagewright.execution.weights import Weights
from stagewright.planning.plan import Plan
from stagewright.units import format_bytes

_LEAST = 0.01
"""Fraction of the predicted peak below which the memory of other programs is not worth a word."""
_LESS = 0.9
"""Fraction of the predicted peak that is recommended as the limit of a new plan."""


def explained(
    error: BaseException,
    position: str,
    alive: Mapping[str, int],
    plan: Plan,
    rank: int,
    length: int,
    bytes_of_others: int = 0,
) -> RunError:
    """Return the error to raise when memory ran out on the device of global `rank` at `position` of a step of samples of
    `length` tokens, with `alive` bytes by category, and `bytes_of_others` held by other programs.

    Call it when nothing of the failed step is held any more, so that there is memory for its work.
    """
    listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in alive.items() if size)
    predicted, limit = "", "below the available memory"
    if ranks := plan.at_length(length).predictions.ranks:
        peak = ranks[rank // (plan.num_holders * plan.tp)].reserved_peak_bytes
        predicted = f"; the plan predicted a peak of {format_bytes(peak)}"
        if bytes_of_others > _LEAST * peak:
            predicted += f"; other programs hold {format_bytes(bytes_of_others)} of this device"
        limit = f"{int(max(_LESS * peak - bytes_of_others, 0)) // 2**20}MiB"
    return RunError(
        f"out of memory at {position} on {plan.described_rank(rank)} ({_request(error)}); alive: {listed or 'nothing yet'}, "
        f"{format_bytes(sum(alive.values()))} in all{predicted}. Plan again with --memory-limit {limit}, or for smaller "
        "microbatches, shorter samples or more devices"
    )


def _request(error: BaseException) -> str:
    """Return the sentence of PyTorch's message that has the requested size."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    sentences = [part.strip() for part in text.replace("DefaultCPUAllocator: ", "").split(". ")]
    sentence = next((part for part in sentences if "ried to allocate" in part), sentences[0])
    return sentence.rpartition("] ")[2]


def alive_bytes(
    runner: RankRunner,
    weights: Weights,
    shards: Shards,
    optimizer: Optimizer,
    inputs: Iterable[Mapping[str, torch.Tensor]],
) -> dict[str, int]:
    """Return the bytes of the storages a rank holds, by category; each counts once. Ignores: functions' local variables."""
    seen: set[int] = set()
    buffers = shards.buffers.values()
    parameters = [*weights.parameters.values(), *(b.whole for b in buffers), *(b.shard for b in buffers)]
    by_category = {
        "parameters": _fresh(parameters, seen),
        "gradients": _fresh([*weights.gradients.values(), *(b.gradient_shard for b in buffers)], seen),
        "optimizer": _fresh(optimizer.updater.state(), seen),
        "inputs": _fresh((tensor for microbatch in inputs for tensor in microbatch.values()), seen),
        "constants": _fresh(
            (t for stage_runner in runner.runners.values() for t in stage_runner.resident.values()), seen
        ),
    }
    for stage, stage_runner in runner.runners.items():
        held = stage_runner.held
        size = _fresh((tensor for kept in held.values() for tensor in kept.values()), seen)
        by_category[f"activations of stage {stage} ({len(held)} microbatches)"] = size
    by_category["boundary"] = _fresh(runner.boundary(), seen)
    return by_category


def _fresh(tensors: Iterable[torch.Tensor | None], seen: set[int]) -> int:
    """Return the bytes of the storages of `tensors` that are not in `seen`, and add them to it."""
    total = 0
    for tensor in tensors:
        if tensor is None:
            continue
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def forget(error: BaseException | None, *holders: Callable[[], None]) -> None:
    """Release the local variables of the failed functions, and call `holders` to release theirs."""
    for cause in causes(error):
        traceback.clear_frames(cause.__traceback__)
    for holder in holders:
        holder()
