"""The tensors a rank starts from: drawn from the seed as the plain model would, or read from safetensors."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from stagewright.errors import InputError, RunError
from stagewright.graph.stage import Stage
from stagewright.graph.tensor_parallel import TensorShard
from stagewright.tracing.arguments import from_contents
from stagewright.tracing.models.build import DeferredModel


def starting_tensors(
    model: DeferredModel,
    stages: Sequence[Stage],
    weights: Path | None = None,
    part: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, whole: whole,
) -> dict[str, torch.Tensor]:
    """Parameters and buffers of `stages` by name; parameters from files where `weights` names a directory.

    Nothing else of the model is made. ``part(name, whole)`` is what this rank keeps of a parameter.

    Raises:
        RunError: a parameter is in none of the files.
    """
    parameters = {stage.value(value).name: None for stage in stages for value in stage.parameters}
    buffers = {stage.value(value).name: None for stage in stages for value in stage.buffers}
    found: dict[str, torch.Tensor] = {}
    if weights is None:
        for name in parameters:  # one by one, because a whole one may be many times a part
            found[name] = part(name, model.tensors((name,))[name])
    else:
        layouts = dict(model.module.named_parameters())
        read = _read_weights(weights, {name: layouts[name] for name in parameters})
        found = {name: part(name, tensor) for name, tensor in read.items()}
    return {**found, **model.tensors(buffers), **_constants(stages)}


def unused_tensors(
    model: DeferredModel, names: Iterable[str], weights: Path | None = None
) -> dict[str, torch.Tensor]:
    """Tensors of the model that no stage uses, by name: from files that have them, from the seed otherwise."""
    stored = {} if weights is None else _index(weights)
    layouts = {**dict(model.module.named_parameters()), **dict(model.module.named_buffers())}
    read = {name: layouts[name] for name in names if name.removeprefix("net.") in stored}
    found = {} if weights is None else _read_weights(weights, read)
    return {**model.tensors(name for name in names if name not in found), **found}


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


def _read_weights(folder: Path, layouts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of the shapes and types of `layouts`, by name."""
    where, found = _index(folder), {}
    with contextlib.ExitStack() as stack:
        opened: dict[str, safe_open] = {}
        for name, layout in layouts.items():
            key = name.removeprefix("net.")
            file = where.get(key)
            if file is None:
                raise RunError(
                    f"'{folder}' has no tensor '{key}': the files belong to another model, or store it under another name; "
                    "run with --random-weights to start from the seed"
                )
            if file not in opened:
                opened[file] = stack.enter_context(safe_open(str(folder / file), framework="pt"))
            tensor = opened[file].get_tensor(key)
            if tensor.shape != layout.shape:
                raise RunError(
                    f"tensor '{key}' in '{file}' has shape {list(tensor.shape)}, expected {list(layout.shape)}"
                )
            found[name] = tensor.to(layout.dtype)
    return found


def _index(folder: Path) -> dict[str, str]:
    """Tensor name -> file, from the index where there is one."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        except (OSError, ValueError, KeyError) as error:
            raise InputError(f"'{index}' is not a safetensors index: {error}") from None
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as reader:
            found.update(dict.fromkeys(reader.keys(), file.name))
    return found
