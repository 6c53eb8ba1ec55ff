"""Models whose code checkpoints: what is predicted is what autograd with its checkpoints has alive."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stagewright.cluster import load_cluster
from stagewright.estimation.eager_step import step_memory
from stagewright.estimation.runtime import load_runtime
from stagewright.planning.estimate import estimate
from stagewright.planning.job import Job
from stagewright.tracing.cache import trace
from stagewright.tracing.models.build import build
from stagewright.tracing.models.reference import resolve


class Peak(TorchDispatchMode):
    """The most bytes alive at once of the storages made under it, after any operator."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage()._cdata for tensor in known}
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.alive = {key: kept for key, kept in self.alive.items() if not kept[0].expired()}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.known:
                storage = tensor.untyped_storage()
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.bytes = max(self.bytes, sum(num_bytes for _, num_bytes in self.alive.values()))
        return result


def autograd_peak(module: nn.Module, inputs: dict[str, torch.Tensor], *, has_gradients: bool) -> int:
    """Bytes beside parameters, buffers, inputs, and gradients where these are there before."""
    if has_gradients:
        module(**inputs).backward()
    known = [*module.parameters(), *module.buffers(), *inputs.values()]
    with Peak([*known, *(p.grad for p in module.parameters() if p.grad is not None)]) as peak:
        module(**inputs).backward()
    return peak.bytes


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_lone_rank_has_alive_what_plain_autograd_has(checkpointed: bool) -> None:
    """Up to a few constants. Longer samples take less than autograd: a region is not recomputed all at once."""
    reference = resolve("tiny-llama", {"gradient_checkpointing": True} if checkpointed else {})
    built = build(reference, 2, 64)
    wanted = autograd_peak(built.module, built.inputs, has_gradients=True)
    job = Job(global_batch=2, sequence_length=64, dtype="fp32")
    plan = estimate(reference, load_cluster("8x-h100"), job, pp=1, dp=1, microbatch=2)
    (rank,) = plan.predictions.ranks
    named = "activations", "recomputed", "transient", "boundary", "constants"
    found = sum(rank.categories[name] for name in named)
    assert found == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_loop_of_pytorch_runs_the_regions_of_the_models_code(checkpointed: bool) -> None:
    reference = resolve("tiny-llama", {"gradient_checkpointing": True} if checkpointed else {})
    built = build(reference, 8, 256)
    wanted = autograd_peak(built.module, built.inputs, has_gradients=False)
    loop = load_runtime("torch-eager").loop
    assert loop is not None
    memory = step_memory(trace(reference, 8, 256), loop)
    own = sum(tensor.nbytes for tensor in (*built.module.parameters(), *built.inputs.values()))
    moments = 2 * sum(parameter.nbytes for parameter in built.module.parameters())
    assert memory.active_peak_bytes - own - moments == pytest.approx(wanted, rel=0.02)
