"""The tensors a rank starts from: drawn from the seed as the plain model would, or as its safetensors files have them.

Source: of quantised weights, ``Fp8Dequantize`` and ``convert_moe_packed_tensors`` of transformers, which read whole models.
"""

from __future__ import annotations

import os
import re
import warnings
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from stagewright.errors import InputError, RunError, StagewrightWarning
from stagewright.execution.conversions import Conversions
from stagewright.execution.quantised import FIX, is_of_activations, leftovers_of, method_of, parts_of, scheme
from stagewright.execution.weight_files import WeightFiles, adapter_file, open_weights, reading, some_of
from stagewright.graph.stage import Stage
from stagewright.graph.tensor_parallel import TensorShard
from stagewright.text import say
from stagewright.tracing.arguments import from_contents
from stagewright.tracing.models.adapter_names import base_name, is_adapter, peft_name
from stagewright.tracing.models.build import DeferredModel


class StartingTensors(Mapping[str, torch.Tensor]):
    """Parameters, buffers and constants of `stages` by name, on the host: as they are `stored`, those of `adapters` as these
    are, or from the seed where nothing is.

    A parameter is read or drawn when it is asked for, anew each time, and not kept: a stage may be larger than the host or
    the device. Nothing else of the model is made.

    Args:
        part: ``part(name, whole)`` is what this rank keeps of a parameter.

    Raises:
        InputError: when a parameter is asked for that is in none of the files, or cannot be read.
    """

    def __init__(
        self,
        model: DeferredModel,
        stages: Sequence[Stage],
        stored: StoredWeights | None = None,
        part: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, whole: whole,
        adapters: StoredAdapters | None = None,
        copied: Collection[str] = (),
    ) -> None:
        self._model, self._stored, self._part, self._adapters = model, stored, part, adapters
        self._copied = copied
        self._parameters = dict.fromkeys(
            stage.value(value).name for stage in stages for value in stage.parameters
        )
        buffers = dict.fromkeys(stage.value(value).name for stage in stages for value in stage.buffers)
        kept = {} if stored is None else stored.lasting(buffers)
        drawn = model.tensors(name for name in buffers if name not in kept)
        self._others = {**drawn, **kept, **constants_of(stages)}
        self.checksums: dict[str, int] = {}
        """Of the contents of every one of the `copied` that was asked for."""

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._others[name] if name not in self._parameters else self._parameter(name)
        if name in self._copied:
            self.checksums[name] = _checksum(tensor)
        return tensor

    def _parameter(self, name: str) -> torch.Tensor:
        source = self._adapters if is_adapter(name) else self._stored
        whole = self._model.tensors((name,))[name] if source is None else source.read(name)
        return self._part(name, whole)

    def __contains__(self, name: object) -> bool:
        return name in self._parameters or name in self._others

    def __iter__(self) -> Iterator[str]:
        yield from self._parameters
        yield from self._others

    def __len__(self) -> int:
        return len(self._parameters) + len(self._others)


def _checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().data)


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


def constants_of(stages: Iterable[Stage]) -> dict[str, torch.Tensor]:
    """Tensors that the model's code makes, of `stages`, by name."""
    found = {}
    for owner, value in ((stage, stage.value(value)) for stage in stages for value in stage.constants):
        data = owner.graph.constants.get(value.name)
        if data is None:
            raise RunError(f"constant '{value.name}' of the traced model was not kept: trace the model again")
        found[value.name] = from_contents(data, value.meta)
    return found


class StoredWeights:
    """Weights in `folder` for the model `module`, whose names begin with ``net.``.

    Args:
        config: content of the model's ``config.json``, which says how the weights are quantised.

    Raises:
        InputError: files are missing or lie outside the folder, or the weights are quantised in a way that is not read.
    """

    def __init__(self, folder: Path, module: torch.nn.Module, config: Mapping[str, Any]) -> None:
        self._files = WeightFiles.of(folder)
        self._method = method_of(config, str(folder))
        self._scheme = scheme(config)
        buffers = dict(module.named_buffers(remove_duplicate=False))
        self._layouts = {**dict(module.named_parameters(remove_duplicate=False)), **buffers}
        self._tied: dict[int, list[str]] = {}  # parameter -> what its tensor may be called
        for name, parameter in module.named_parameters(remove_duplicate=False):
            self._tied.setdefault(id(parameter), []).append(_key(name))
        self._lasting = buffers.keys() & module.state_dict(keep_vars=True).keys()
        self._known = {_key(name) for name in self._layouts}
        self._conversions = Conversions(getattr(module, "net", None), self._files.where, self._known)
        self._stored = sorted(self._files.where)
        self._readers: dict[str, Any] = {}
        if (unread := self._unread(getattr(module, "net", None))) and os.environ.get("RANK", "0") == "0":
            say(
                f"'{folder}' has {len(unread)} tensors that the model lacks, which are not read: {some_of(unread)}"
            )

    def _unread(self, net: Any) -> list[str]:
        """The stored tensors that no tensor of the model is read from, but for those that transformers passes over too."""
        read = {part for key in self._known for part in parts_of(key, self._files.where, self._method)}
        read |= {source for key in self._known for source in self._conversions.sources(key)}
        read |= {part for name in read for part in parts_of(name, self._files.where, self._method)}
        ignored = [*(getattr(net, "_keys_to_ignore_on_load_unexpected", None) or ()), *_BUFFERS_OF_OLD]
        return [
            name
            for name in self._stored
            if name not in read
            and not is_of_activations(name)
            and not any(re.search(pattern, name) for pattern in ignored)
        ]

    def has(self, name: str) -> bool:
        """Whether the files have tensor `name` of the model."""
        return bool(self._stored_names(name))

    def _stored_names(self, name: str) -> list[str]:
        """What the files call tensor `name`: a tied parameter may be there under each of its names."""
        names = self._tied.get(id(self._layouts.get(name)), [_key(name)])
        return [key for key in names if self._is_plain(key) or self._conversions.sources(key)]

    def read(self, name: str) -> torch.Tensor:
        """Tensor `name` of the model, of its shape and type. Raises `InputError` where it is in no file, cannot be read, is
        stored as something else, or is tied and has other contents under another of its names."""
        key, *others = self._stored_names(name) or [_key(name)]
        whole = self._read(key, self._layouts[name])
        for other in others:
            if not torch.equal(whole, self._read(other, self._layouts[name])):
                raise InputError(
                    f"'{self._files.folder}' has '{key}' and '{other}' with different values, and the model ties them: set "
                    "tie_word_embeddings to false in its config.json and plan again, as transformers takes such files, or "
                    "remove one of the two from them"
                )
        return whole

    def _read(self, key: str, layout: torch.Tensor) -> torch.Tensor:
        if self._is_plain(key):
            sources, whole = [key], self._stored_as(key, layout.dtype)
        elif sources := self._conversions.sources(key):
            whole = self._conversions.made(key, lambda source: self._stored_as(source, layout.dtype))
        else:
            raise InputError(
                f"'{self._files.folder}' has no tensor '{key}': the files belong to another model, or store it under "
                "another name; run with --random-weights to start from the seed"
            )
        if whole.shape != layout.shape:
            raise InputError(
                f"tensor '{key}' in {self._file(sources[0])} has shape {list(whole.shape)}, expected "
                f"{list(layout.shape)}: the files belong to another model"
            )
        return whole

    def _is_plain(self, key: str) -> bool:
        """Whether a tensor is stored under its own name."""
        return bool(parts_of(key, self._files.where, self._method))

    def _file(self, key: str) -> str:
        return f"'{self._files.where[parts_of(key, self._files.where, self._method)[0]]}'"

    def _stored_as(self, key: str, dtype: torch.dtype) -> torch.Tensor:
        """A stored tensor, in memory of its own, as numbers of type `dtype`. Raises as `read`."""
        parts = parts_of(key, self._files.where, self._method)
        if left := [one for one in leftovers_of(key, self._stored, self._known) if one not in parts]:
            raise InputError(
                f"'{self._files.folder}' has '{left[0]}' beside '{key}', which is therefore quantised, in a way that its "
                f"config.json does not name: {FIX}"
            )
        whole = dequantised(key, [self._get(part) for part in parts], self._scheme, dtype)
        if _kind(whole) != _kind(torch.empty((), dtype=dtype)):
            raise InputError(
                f"tensor '{key}' in {self._file(key)} is stored as {whole.dtype}, and the model has {dtype} there, so that "
                f"its numbers are not those of the model: {FIX}"
            )
        return whole.to(dtype, copy=len(parts) == 1)  # what is read plainly is memory of the file

    def lasting(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """The buffers among `names` that belong to the model's state, by name; a warning names those in no file."""
        lasting = [name for name in names if name in self._lasting]
        for name in lasting:
            if not self.has(name) and self._layouts[name].is_floating_point():
                warnings.warn(
                    f"'{self._files.folder}' has no tensor '{_key(name)}': it is as in a fresh model",
                    StagewrightWarning,
                    stacklevel=2,
                )
        return {name: self.read(name) for name in lasting if self.has(name)}

    def _get(self, key: str) -> torch.Tensor:
        """A stored tensor, in memory of the file: what is changed there changes it."""
        name = self._files.where[key]
        if name not in self._readers:
            self._readers[name] = open_weights(self._files.verified(name), "pt")
        with reading(self._files.path(name)):
            return self._readers[name].get_tensor(key)


class StoredAdapters:
    """Adapters in `folder`, as peft wrote them, for those in the model `module`. Raises `InputError` where the folder has
    others."""

    def __init__(self, folder: Path, module: torch.nn.Module) -> None:
        self._path = adapter_file(folder)
        self._layouts = {name: one for name, one in module.named_parameters() if is_adapter(name)}
        self._reader = open_weights(self._path, "pt")
        self._keys = set(self._reader.keys())
        if others := sorted(self._keys - set(map(peft_name, self._layouts))):
            raise InputError(f"'{self._path}' has '{others[0]}', which the model has not: {_OTHERS}")

    def read(self, name: str) -> torch.Tensor:
        """A tensor of an adapter, of its shape and type. Raises `InputError` where it is not there, or cannot be read."""
        key, layout = peft_name(name), self._layouts[name]
        with reading(self._path):
            found = self._reader.get_tensor(key) if key in self._keys else None
        if found is None or found.shape != layout.shape:
            has = "no such tensor" if found is None else f"one of shape {list(found.shape)}"
            raise InputError(
                f"the model has '{key}' of shape {list(layout.shape)}, and '{self._path}' has {has}: {_OTHERS}"
            )
        return found.to(layout.dtype, copy=True)


_BUFFERS_OF_OLD = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$")
"""Buffers that files of earlier versions of transformers have, and which it computes now."""
_OTHERS = "the adapters are for another model; give --lora-from those of this one"


def _key(name: str) -> str:
    return base_name(name).removeprefix("net.")


def _kind(tensor: torch.Tensor) -> str:
    """What sort of numbers a tensor has; floating ones of fewer than 16 bits are of a sort of their own."""
    if tensor.is_floating_point():
        return "float" if tensor.element_size() >= 2 else str(tensor.dtype)
    return "complex" if tensor.is_complex() else "integer"


_EXPONENT_BIAS = 127  # of scales that are powers of two, stored as bytes
_EXACT = (torch.bfloat16, torch.float32)  # have every number that four bits and a power of two make


def dequantised(
    key: str, parts: Sequence[torch.Tensor], said: Mapping[str, Any], dtype: torch.dtype
) -> torch.Tensor:
    """Tensor `key` of the stored `parts` (`stagewright.execution.quantised.parts_of`); `said` is the config's scheme.

    The result need not be of type `dtype`, which is what it is wanted as. Raises `InputError` where weights and scales do
    not fit each other."""
    if len(parts) == 1:
        return parts[0]
    one, scales = parts
    if one.dtype == torch.uint8:
        return _of_packed(key, one, scales, dtype if dtype in _EXACT else torch.float32)
    if one.dtype != torch.float8_e4m3fn:
        raise InputError(
            f"tensor '{key}' is stored as {one.dtype} with scales, and of such only torch.float8_e4m3fn is read: dequantise "
            "it once with transformers, or run with --random-weights to start from the seed"
        )
    return _of_blocks(key, one, scales, said.get("weight_block_size"))


def _of_blocks(
    key: str, weight: torch.Tensor, scales: torch.Tensor, block: Sequence[int] | None
) -> torch.Tensor:
    """Every block of ``[rows, columns]`` of a weight times its scale; the last ones may be cut off."""
    if scales.dtype == torch.uint8:
        scales = torch.exp2(scales.float() - _EXPONENT_BIAS)
    scales, wide = scales.float(), weight.float()
    if scales.numel() == 1:
        return wide * scales.reshape(())
    sizes = tuple(block or ())
    if len(sizes) == 2 and weight.dim() == scales.dim() >= 2:
        rows, columns = weight.shape[-2:]
        if scales.shape == (*weight.shape[:-2], -(-rows // sizes[0]), -(-columns // sizes[1])):
            scales = scales.repeat_interleave(sizes[0], -2)[..., :rows, :]
            return wide * scales.repeat_interleave(sizes[1], -1)[..., :columns]
    raise InputError(
        f"tensor '{key}' is {list(weight.shape)} and its scales are {list(scales.shape)}, which does not fit blocks of "
        f"{list(sizes) or 'no size'} (weight_block_size in config.json): the files belong to another model"
    )


def _of_packed(key: str, blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Two numbers of four bits per byte, 32 of them with one scale, which transformers also transposes."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    if blocks.dim() != 4 or blocks.shape[:-1] != scales.shape or scales.dtype != torch.uint8:
        raise InputError(
            f"tensor '{key}' has blocks of {list(blocks.shape)} and scales of {list(scales.shape)}, which do not fit each "
            "other: the files belong to another model"
        )
    return convert_moe_packed_tensors(blocks, scales, dtype=dtype)
