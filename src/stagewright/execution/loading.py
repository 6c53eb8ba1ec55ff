"""Initial tensors of a rank: drawn from the seed as the plain model draws them, or read from safetensors files.

Source: for quantised weights, ``Fp8Dequantize`` and ``convert_moe_packed_tensors`` of transformers, which read whole models.
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
from stagewright.execution.weight_files import WeightFiles, adapter_file, open_weights, reading, some_of
from stagewright.graph.stage import Stage
from stagewright.graph.tensor_parallel import TensorShard
from stagewright.text import say
from stagewright.tracing.arguments import from_contents
from stagewright.tracing.models.adapter_names import base_name, is_adapter, peft_name
from stagewright.tracing.models.build import DeferredModel
from stagewright.tracing.models.quantised import (
    BITSANDBYTES,
    FIX,
    FP8,
    FP8_BLOCK,
    is_of_activations,
    leftovers_of,
    method_of,
    parts_of,
    scheme,
)
from stagewright.tracing.models.quantised_base import Packed, packed_weights, stored_weight

CPU = torch.device("cpu")


class StartingTensors(Mapping[str, torch.Tensor]):
    """Parameters, buffers and constants of `stages` by name, on the host: from `stored` weights and `adapters`, or drawn
    from the seed where there are no files.

    A parameter is read or drawn anew at each access and not kept: a stage may be larger than the host or the device.
    Nothing else of the model is made.

    Args:
        part: ``part(name, whole)`` is the part of a parameter that this rank keeps.
        copied: names whose checksums are kept.
        device: that packs the weights of a quantised base.

    Raises:
        InputError: at access, if a parameter is in none of the files or cannot be read.
    """

    def __init__(
        self,
        model: DeferredModel,
        stages: Sequence[Stage],
        stored: StoredWeights | None = None,
        part: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, whole: whole,
        adapters: StoredAdapters | None = None,
        copied: Collection[str] = (),
        device: torch.device = CPU,
    ) -> None:
        self._packed, self._device = packed_weights(model.module), device
        self._model, self._stored, self._part, self._adapters = model, stored, part, adapters
        self._copied = copied
        self._parameters = dict.fromkeys(
            stage.value(value).name for stage in stages for value in stage.parameters
        )
        buffers = dict.fromkeys(stage.value(value).name for stage in stages for value in stage.buffers)
        kept = {} if stored is None else stored.lasting(buffers)
        drawn = model.tensors(name for name in buffers if name not in kept)
        self._fixed = {**drawn, **kept, **constants_of(stages)}
        self.checksums: dict[str, int] = {}
        """Checksums of the contents of those `copied` that were accessed."""

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._fixed[name] if name not in self._parameters else self._parameter(name)
        if name in self._copied:
            self.checksums[name] = _checksum(tensor)
        return tensor

    def _parameter(self, name: str) -> torch.Tensor:
        source = self._adapters if is_adapter(name) else self._stored
        if isinstance(source, StoredWeights) and name in self._packed:
            return source.read_packed(name, self._packed[name], self._device)
        whole = self._model.tensors((name,))[name] if source is None else source.read(name)
        return self._part(name, whole)

    def __contains__(self, name: object) -> bool:
        return name in self._parameters or name in self._fixed

    def __iter__(self) -> Iterator[str]:
        yield from self._parameters
        yield from self._fixed

    def __len__(self) -> int:
        return len(self._parameters) + len(self._fixed)


def _checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().data)


def unused_tensors(
    model: DeferredModel, names: Iterable[str], stored: StoredWeights | None = None
) -> dict[str, torch.Tensor]:
    """Return tensors of the model that no stage uses, by name: from files that have them, else from the seed."""
    wanted = list(names)
    read = {} if stored is None else {name: stored.read(name) for name in wanted if stored.has(name)}
    return {**model.tensors(name for name in wanted if name not in read), **read}


def part_of(whole: torch.Tensor, shard: TensorShard, num_ranks: int, rank: int) -> torch.Tensor:
    """Return the part of `rank` of a tensor that is sharded over `num_ranks` ranks, in separate memory."""
    if shard.padding:
        shape = list(whole.shape)
        shape[shard.dim] = shard.padding
        whole = torch.cat((whole, whole.new_zeros(shape)), shard.dim)
    parts = [whole.narrow(shard.dim, start, stop - start) for start, stop in shard.ranges(num_ranks, rank)]
    return torch.cat(parts, shard.dim).detach()


def constants_of(stages: Iterable[Stage]) -> dict[str, torch.Tensor]:
    """Return the constants of `stages`, tensors that the model's code makes, by name."""
    by_name = {}
    for owner, value in ((stage, stage.value(value)) for stage in stages for value in stage.constants):
        data = owner.graph.constants.get(value.name)
        if data is None:
            raise RunError(f"constant '{value.name}' of the traced model was not kept: trace the model again")
        by_name[value.name] = from_contents(data, value.meta)
    return by_name


class StoredWeights:
    """Weights in `folder` for the model `module`, whose names begin with ``net.``.

    Args:
        config: content of the model's ``config.json``, which describes the quantisation of the weights.

    Raises:
        InputError: files are missing or lie outside the folder.
    """

    def __init__(self, folder: Path, module: torch.nn.Module, config: Mapping[str, Any]) -> None:
        self._files = WeightFiles.of(folder)
        self._method = method_of(config)
        self._scheme = scheme(config)
        buffers = dict(module.named_buffers(remove_duplicate=False))
        packed = {name: how.layout for name, how in packed_weights(module).items()}
        self._layouts = {**dict(module.named_parameters(remove_duplicate=False)), **buffers, **packed}
        self._tied: dict[int, list[str]] = {}  # parameter -> names of its tensor
        for name, parameter in module.named_parameters(remove_duplicate=False):
            self._tied.setdefault(id(parameter), []).append(_key(name))
        self._lasting = buffers.keys() & module.state_dict(keep_vars=True).keys()
        self._keys = {_key(name) for name in self._layouts}
        self._conversions = Conversions(getattr(module, "net", None), self._files.where, self._keys)
        self._stored = sorted(self._files.where)
        self._readers: dict[str, Any] = {}
        if (unread := self._unread(getattr(module, "net", None))) and os.environ.get("RANK", "0") == "0":
            say(
                f"'{folder}' has {len(unread)} tensors that the model lacks, which are not read: {some_of(unread)}"
            )

    def _unread(self, net: Any) -> list[str]:
        """Return the stored tensors that no tensor of the model is read from, except those that transformers ignores too."""
        read = {part for key in self._keys for part in parts_of(key, self._files.where, self._method)}
        read |= {source for key in self._keys for source in self._conversions.sources(key)}
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
        """Return whether the files have tensor `name` of the model."""
        return bool(self._stored_names(name))

    def _stored_names(self, name: str) -> list[str]:
        """Return the names of tensor `name` in the files: a tied parameter may be stored under each of its names."""
        names = self._tied.get(id(self._layouts.get(name)), [_key(name)])
        return [key for key in names if self._is_plain(key) or self._conversions.sources(key)]

    def read(self, name: str) -> torch.Tensor:
        """Read tensor `name` of the model in its shape and type. Raises `InputError` where it is in no file, cannot be read,
        has another kind of numbers, or is tied and has other contents under another of its names."""
        key, *aliases = self._stored_names(name) or [_key(name)]
        whole = self._read(key, self._layouts[name])
        for other in aliases:
            if not torch.equal(whole, self._read(other, self._layouts[name])):
                raise InputError(
                    f"'{self._files.folder}' has '{key}' and '{other}' with different values, but the model ties them: set "
                    "tie_word_embeddings to false in its config.json and plan again, as transformers reads such files, or "
                    "remove one of the two from them"
                )
        return whole

    def _read(self, key: str, layout: torch.Tensor) -> torch.Tensor:
        if self._is_plain(key):
            sources, whole = [key], self._stored_as(key, layout.dtype)
        elif sources := self._conversions.sources(key):
            whole = self._conversions.converted(key, lambda source: self._stored_as(source, layout.dtype))
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
        """Return whether a tensor is stored under its own name."""
        return bool(parts_of(key, self._files.where, self._method))

    def _file(self, key: str) -> str:
        return f"'{self._files.where[parts_of(key, self._files.where, self._method)[0]]}'"

    def _stored_as(self, key: str, dtype: torch.dtype) -> torch.Tensor:
        """Read a stored tensor into separate memory as numbers of type `dtype`. Raises as `read`."""
        parts = self._parts(key)
        if self._method == BITSANDBYTES and len(parts) > 1:
            whole = stored_weight(parts)
        else:
            whole = dequantised(key, list(parts.values()), self._scheme, dtype)
        if _kind(whole) != _kind(torch.empty((), dtype=dtype)):
            raise InputError(
                f"tensor '{key}' in {self._file(key)} is stored as {whole.dtype}, but the model has {dtype} there, so that "
                f"its numbers are not those of the model: {FIX}"
            )
        return whole.to(dtype, copy=len(parts) == 1)  # a single part is memory of the file

    def _parts(self, key: str) -> dict[str, torch.Tensor]:
        """Read the stored tensors that make tensor `key`, by name, in the memory of their files. Raises as `read`."""
        parts = parts_of(key, self._files.where, self._method)
        if leftovers := [name for name in leftovers_of(key, self._stored, self._keys) if name not in parts]:
            raise InputError(
                f"'{self._files.folder}' has '{leftovers[0]}' next to '{key}', which is therefore quantised, in a way that "
                f"its config.json does not name: {FIX}"
            )
        return {part: self._get(part) for part in parts}

    def read_packed(self, name: str, packed: Packed, device: torch.device = CPU) -> torch.Tensor:
        """Read tensor `name` in packed form: as it is stored, if in that form, else packed by `device`. Raises as `read`."""
        key = _key(name)
        stored: torch.Tensor | None = None
        if self._method == FP8 == packed.method:
            stored = self._kept_fp8(key, packed)
        elif self._method == BITSANDBYTES and len(parts := self._parts(key)) > 1:
            stored = packed.of_stored(parts)
        return packed.pack(self.read(name).to(device)) if stored is None else stored

    def _kept_fp8(self, key: str, packed: Packed) -> torch.Tensor | None:
        """Return tensor `key` in the numbers and scales of the files; None if it is not stored in fp8, or made of tensors
        whose blocks do not stay whole in it."""
        is_plain = self._is_plain(key)
        sources = [key] if is_plain else self._conversions.sources(key)
        parts = {source: tuple(self._parts(source).values()) for source in sources}
        if not parts or not all(map(_is_fp8, parts.values())):
            return None
        if not is_plain and not self._conversions.only_joins(key):
            return None

        def joined(part: Callable[[str], torch.Tensor]) -> torch.Tensor:
            return part(key) if is_plain else self._conversions.converted(key, part)

        numbers = joined(lambda source: parts[source][0].view(torch.uint8)).view(torch.float8_e4m3fn)
        for weight, _ in parts.values():
            sizes = zip(weight.shape[-2:], numbers.shape[-2:], strict=True)
            if any(size % FP8_BLOCK and size != whole for size, whole in sizes):
                return None
        return packed.of_blocks(key, numbers, joined(lambda source: _scales(parts[source][1])))

    def lasting(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Read the buffers among `names` that belong to the model's state, by name; a warning names those in no file."""
        lasting = [name for name in names if name in self._lasting]
        for name in lasting:
            if not self.has(name) and self._layouts[name].is_floating_point():
                warnings.warn(
                    f"'{self._files.folder}' has no tensor '{_key(name)}': it starts as in a new model",
                    StagewrightWarning,
                    stacklevel=2,
                )
        return {name: self.read(name) for name in lasting if self.has(name)}

    def _get(self, key: str) -> torch.Tensor:
        """Return a stored tensor in the memory of the file, shared with it."""
        name = self._files.where[key]
        if name not in self._readers:
            self._readers[name] = open_weights(self._files.verified(name), "pt")
        with reading(self._files.path(name)):
            return self._readers[name].get_tensor(key)


class StoredAdapters:
    """The adapters in `folder`, as peft wrote them, for the model `module`. Raises `InputError` where the folder has
    adapters that the model lacks."""

    def __init__(self, folder: Path, module: torch.nn.Module) -> None:
        self._path = adapter_file(folder)
        self._layouts = {name: parameter for name, parameter in module.named_parameters() if is_adapter(name)}
        self._reader = open_weights(self._path, "pt")
        self._keys = set(self._reader.keys())
        if extra := sorted(self._keys - set(map(peft_name, self._layouts))):
            raise InputError(f"'{self._path}' has '{extra[0]}', which the model lacks: {_OTHERS}")

    def read(self, name: str) -> torch.Tensor:
        """Read a tensor of an adapter in its shape and type. Raises `InputError` where it is missing or cannot be read."""
        key, layout = peft_name(name), self._layouts[name]
        with reading(self._path):
            tensor = self._reader.get_tensor(key) if key in self._keys else None
        if tensor is None or tensor.shape != layout.shape:
            has = "no such tensor" if tensor is None else f"one of shape {list(tensor.shape)}"
            raise InputError(
                f"the model has '{key}' of shape {list(layout.shape)}, and '{self._path}' has {has}: {_OTHERS}"
            )
        return tensor.to(layout.dtype, copy=True)


_BUFFERS_OF_OLD = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$")
"""Buffers in files of earlier versions of transformers, which now computes them."""
_OTHERS = "the adapters are for another model; give --lora-from adapters of this model"


def _key(name: str) -> str:
    return base_name(name).removeprefix("net.")


def _kind(tensor: torch.Tensor) -> str:
    """Return the kind of a tensor's numbers; each floating-point type of fewer than 16 bits is a separate kind."""
    if tensor.is_floating_point():
        return "float" if tensor.element_size() >= 2 else str(tensor.dtype)
    return "complex" if tensor.is_complex() else "integer"


_EXPONENT_BIAS = 127  # of scales that are powers of two, stored as bytes
_EXACT = (torch.bfloat16, torch.float32)  # represent every product of a four-bit number and a power of two


def dequantised(
    key: str, parts: Sequence[torch.Tensor], scheme: Mapping[str, Any], dtype: torch.dtype
) -> torch.Tensor:
    """Dequantise tensor `key` from its stored `parts` (`quantised.parts_of`) by the config's scheme.

    The result is meant for `dtype` but need not have that type. Raises `InputError` where weights and scales do not fit
    each other."""
    if len(parts) == 1:
        return parts[0]
    weight, scales = parts
    if weight.dtype == torch.uint8:
        return _of_packed(key, weight, scales, dtype if dtype in _EXACT else torch.float32)
    if weight.dtype != torch.float8_e4m3fn:
        raise InputError(
            f"tensor '{key}' is stored as {weight.dtype} with scales, for which only torch.float8_e4m3fn is supported: "
            "dequantise it once with transformers, or run with --random-weights to start from the seed"
        )
    return _of_blocks(key, weight, scales, scheme.get("weight_block_size", [FP8_BLOCK] * 2))


def _of_blocks(
    key: str, weight: torch.Tensor, scales: torch.Tensor, block: Sequence[int] | None
) -> torch.Tensor:
    """Multiply every block of ``[rows, columns]`` of a weight by its scale; the last blocks may be cut off."""
    scales, wide = _scales(scales), weight.float()
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


def _scales(stored: torch.Tensor) -> torch.Tensor:
    """Return the scales of blocks, which may be stored as exponents of two."""
    return torch.exp2(stored.float() - _EXPONENT_BIAS) if stored.dtype == torch.uint8 else stored.float()


def _is_fp8(parts: Sequence[torch.Tensor]) -> bool:
    """Return whether the stored `parts` of a tensor are 8-bit floats and their scales."""
    return len(parts) == 2 and parts[0].dtype == torch.float8_e4m3fn


def _of_packed(key: str, blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Unpack two four-bit numbers per byte, with one scale per 32 numbers; transformers also transposes them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    if blocks.dim() != 4 or blocks.shape[:-1] != scales.shape or scales.dtype != torch.uint8:
        raise InputError(
            f"tensor '{key}' has blocks of {list(blocks.shape)} and scales of {list(scales.shape)}, which do not fit each "
            "other: the files belong to another model"
        )
    return convert_moe_packed_tensors(blocks, scales, dtype=dtype)
