"""Out of memory: at which action, what was alive, and what to try."""

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

_LESS = 0.9
"""Part of the predicted peak that a new plan is to keep to."""


def explained(
    error: BaseException, position: str, alive: Mapping[str, int], plan: Plan, pipeline_rank: int, length: int
) -> RunError:
    """What to say when memory ran out at `position` of a step of samples of `length` tokens, with `alive` bytes by category.

    Call it when nothing of the failed step is held any more, so that there is room for what it does.
    """
    listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in alive.items() if size)
    predicted, limit = "", "below what there is"
    if ranks := plan.at_length(length).predictions.ranks:
        peak = ranks[pipeline_rank].reserved_peak_bytes
        predicted = f"; the plan predicted a peak of {format_bytes(peak)}"
        limit = f"{int(_LESS * peak) // 2**20}MiB"
    return RunError(
        f"out of memory at {position} ({_asked(error)}); alive: {listed or 'nothing yet'}, "
        f"{format_bytes(sum(alive.values()))} in all{predicted}. Plan again with --memory-limit {limit}, or for smaller "
        "microbatches, shorter samples or more devices"
    )


def _asked(error: BaseException) -> str:
    """The sentence of PyTorch's message that says how much was asked for."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    sentences = [part.strip() for part in text.replace("DefaultCPUAllocator: ", "").split(". ")]
    asked = next((part for part in sentences if "ried to allocate" in part), sentences[0])
    return asked.rpartition("] ")[2]


def alive_bytes(
    runner: RankRunner,
    weights: Weights,
    shards: Shards,
    optimizer: Optimizer,
    inputs: Iterable[Mapping[str, torch.Tensor]],
) -> dict[str, int]:
    """Bytes of the storages a rank holds, by category; each counts once. What a function holds for itself is not seen."""
    seen: set[int] = set()
    buffers = shards.buffers.values()
    parameters = [*weights.parameters.values(), *(b.whole for b in buffers), *(b.shard for b in buffers)]
    found = {
        "parameters": _fresh(parameters, seen),
        "gradients": _fresh([*weights.gradients.values(), *(b.gradient_shard for b in buffers)], seen),
        "optimizer": _fresh(optimizer.updater.state(), seen),
        "inputs": _fresh((tensor for one in inputs for tensor in one.values()), seen),
        "constants": _fresh((t for one in runner.runners.values() for t in one.resident.values()), seen),
    }
    for stage, one in runner.runners.items():
        held = one.held
        size = _fresh((tensor for kept in held.values() for tensor in kept.values()), seen)
        found[f"activations of stage {stage} ({len(held)} microbatches)"] = size
    found["boundary"] = _fresh(runner.boundary(), seen)
    return found


def _fresh(tensors: Iterable[torch.Tensor | None], seen: set[int]) -> int:
    """Bytes of the storages of `tensors` that are not in `seen`, which they are from then on."""
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
    """Let go of what the functions that failed still hold, and of what `holders` do."""
    for each in causes(error):
        traceback.clear_frames(each.__traceback__)
    for holder in holders:
        holder()
