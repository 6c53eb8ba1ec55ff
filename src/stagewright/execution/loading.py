"""The tensors a rank starts from: drawn from the seed as the plain model would, or as they are stored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from stagewright.errors import RunError
from stagewright.execution.stored_weights import StoredWeights
from stagewright.graph.stage import Stage
from stagewright.graph.tensor_parallel import TensorShard
from stagewright.tracing.arguments import from_contents
from stagewright.tracing.models.build import DeferredModel


def starting_tensors(
    model: DeferredModel,
    stages: Sequence[Stage],
    stored: StoredWeights | None = None,
    part: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, whole: whole,
) -> dict[str, torch.Tensor]:
    """Parameters and buffers of `stages` by name: as they are `stored`, or from the seed where nothing is.

    Nothing else of the model is made. ``part(name, whole)`` is what this rank keeps of a parameter.

    Raises:
        InputError: a parameter is in none of the files, or cannot be read.
    """
    parameters = dict.fromkeys(stage.value(value).name for stage in stages for value in stage.parameters)
    buffers = dict.fromkeys(stage.value(value).name for stage in stages for value in stage.buffers)
    found: dict[str, torch.Tensor] = {}
    for name in parameters:  # one by one, because a whole one may be many times a part
        whole = model.tensors((name,))[name] if stored is None else stored.read(name)
        found[name] = part(name, whole)
    kept = {} if stored is None else stored.lasting(buffers)
    return {
        **found,
        **model.tensors(name for name in buffers if name not in kept),
        **kept,
        **_constants(stages),
    }


def unused_tensors(
    model: DeferredModel, names: Iterable[str], stored: StoredWeights | None = None
) -> dict[str, torch.Tensor]:
    """Tensors of the model that no stage uses, by name: from files that have them, from the seed otherwise."""
    wanted = list(names)
    found = {} if stored is None else {name: stored.read(name) for name in wanted if stored.has(name)}
    return {**model.tensors(name for name in wanted if name not in found), **found}


def part_of(whole: torch.Tensor, shard: TensorShard, num_ranks: int, rank: int) -> torch.Tensor:
    """The part of `rank` of a tensor that `num_ranks` ranks share, in memory of its own."""
    if shard.padding:
        shape = list(whole.shape)
        shape[shard.dim] = shard.padding
        whole = torch.cat((whole, whole.new_zeros(shape)), shard.dim)
    parts = [whole.narrow(shard.dim, start, stop - start) for start, stop in shard.ranges(num_ranks, rank)]
    return torch.cat(parts, shard.dim).detach()


def _constants(stages: Iterable[Stage]) -> dict[str, torch.Tensor]:
    found = {}
    for stage in stages:
        for value in stage.constants:
            name = stage.value(value).name
            data = stage.graph.constants.get(name)
            if data is None:
                raise RunError(f"constant '{name}' of the traced model was not kept: trace the model again")
            found[name] = from_contents(data, stage.value(value).meta)
    return found
