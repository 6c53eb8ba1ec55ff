"""Quantised frozen weights under adapters (QLoRA): packed while they are read, and dequantised by operators of the graph
right before each use, in the forward and again in the backward.

A packed weight is one vector of bytes, under the weight's own name. For ``nf4`` it holds 4-bit numbers in blocks of 64 with
a scale each, and the scales as 8-bit numbers in blocks of 256; for ``int8``, rows of 8-bit numbers with a scale each; for
``fp8``, 8-bit floats with a scale for each block of 128 x 128, the last blocks cut off.

Source: Dettmers et al. 2023, "QLoRA" (arXiv 2305.14314), as `bitsandbytes` computes it; ``int8`` as the weight-only
quantisation of `torchao`; ``fp8`` as ``Fp8Quantize`` of transformers. Ignores: quantisation of activations.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stagewright.errors import InputError
from stagewright.tracing.models.adapter_names import base_name, is_adapter
from stagewright.tracing.models.adapters import is_transposed, quiet_bitsandbytes
from stagewright.tracing.models.lora import NF4
from stagewright.tracing.models.quantised import FP8, FP8_BLOCK, NEEDS_BITSANDBYTES
from stagewright.tracing.tensor_parallel.operators import define

_BLOCK, _SCALES_PER_BLOCK = 64, 256
"""Numbers that share a scale, and scales that share one."""
_ALIGNMENT = 16
_HALF_RANGE = 127.5
"""Half the difference between the smallest and the largest 8-bit number."""
_LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max


class Packed(NamedTuple):
    """How a frozen weight is packed: the `method`, and `shape` and `dtype` of the dequantised weight; the module uses its
    transpose if it `is_transposed`."""

    method: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_transposed: bool

    @classmethod
    def of(cls, weight: Tensor, method: str, transposed: bool) -> Packed:
        return cls(method, tuple((weight.t() if transposed else weight).shape), weight.dtype, transposed)

    @property
    def layout(self) -> Tensor:
        """A tensor without contents of the weight as the module uses it."""
        whole = torch.empty(self.shape, dtype=self.dtype, device="meta")
        return whole.t() if self.is_transposed else whole

    def pack(self, weight: Tensor) -> Tensor:
        """Return `weight`, as the module uses it, in packed form."""
        return torch.ops.stagewright.quantise(weight.t() if self.is_transposed else weight, self.method)

    def of_stored(self, parts: Mapping[str, Tensor]) -> Tensor | None:
        """Return a weight in packed form from the tensors that bitsandbytes stores it as; None if that is another form.

        Raises `InputError` where it has another shape."""
        state = _state_of(parts)
        if (
            self.method != NF4
            or state.blocksize != _BLOCK
            or not state.nested
            or state.state2.blocksize != _SCALES_PER_BLOCK
        ):
            return None
        self._check_shape(next(iter(parts)), state.shape)
        return _joined(next(iter(parts.values())), state)

    def of_blocks(self, key: str, numbers: Tensor, scales: Tensor) -> Tensor | None:
        """Return weight `key` in packed form from 8-bit floats with a scale for each block, or one for all; None if that is
        another form.

        Raises `InputError` where it has another shape."""
        self._check_shape(key, numbers.shape)
        grid = _grid(self.shape)
        if self.method != FP8 or self.is_transposed or (scales.shape != grid and scales.numel() > 1):
            return None
        packed = torch.zeros(_num_bytes(self.shape, FP8), dtype=torch.uint8, device=numbers.device)
        packed_scales, packed_numbers = _parts_blocks(packed, self.shape)
        packed_scales.copy_(scales.reshape((1,) * len(grid)) if scales.numel() == 1 else scales)
        packed_numbers.copy_(numbers)
        return packed

    def _check_shape(self, key: str, shape: Sequence[int]) -> None:
        if tuple(shape) != self.shape:
            raise InputError(
                f"tensor '{key}' stands for a weight of shape {list(shape)}, expected {list(self.shape)}: the files belong "
                "to another model"
            )

    def unpack(self, packed: Tensor) -> Tensor:
        """Return the weight as the module uses it."""
        if self.method == NF4:
            scales = torch.ops.stagewright.block_scales(packed, math.prod(self.shape))
            weight = torch.ops.stagewright.dequantise_4bit(packed, scales, self.shape, self.dtype)
        else:
            dequantise = "dequantise_blocks" if self.method == FP8 else "dequantise_rows"
            weight = getattr(torch.ops.stagewright, dequantise)(packed, self.shape, self.dtype)
        return weight.t() if self.is_transposed else weight


def quantise_base(net: nn.Module, method: str, unconverted: Sequence[str] = ()) -> None:
    """Change `net`, a transformers model with adapters: the weights of its linear layers and experts are packed.

    Embeddings, head and whatever shares its weight with them keep their type, as in transformers, and so do modules that a
    pattern in `unconverted` names. Raises `InputError` for weights of 64 bits.
    """
    kept = set(_kept(net))
    for path, module in net.named_modules():
        if is_adapter(f"{path}.") or not _is_converted(path, unconverted):
            continue
        layouts: dict[str, Packed] = {}
        for name, weight in _weights(module):
            if id(weight) in kept:
                continue
            if weight.dtype == torch.float64:
                raise InputError(
                    f"weights of {method} are dequantised to at most 32 bits: plan with --dtype fp32 or bf16"
                )
            layouts[name] = Packed.of(weight, method, is_transposed(module))
            packed = layouts[name].pack(weight.detach())
            module._parameters[name] = nn.Parameter(packed, requires_grad=False)
        if layouts:
            module.packed_weights = layouts  # type: ignore[assignment]
            module.__class__ = _unpacking(type(module), tuple(layouts))


def _is_converted(path: str, unconverted: Sequence[str]) -> bool:
    from transformers.quantizers.quantizers_utils import should_convert_module

    return should_convert_module(base_name(f"{path}.").removesuffix("."), list(unconverted))


def packed_weights(module: nn.Module) -> dict[str, Packed]:
    """Return how the weights of `module` are packed, by name; empty unless it has a quantised base."""
    return {
        f"{path}.{name}": packed
        for path, part in module.named_modules()
        for name, packed in getattr(part, "packed_weights", {}).items()
    }


def _weights(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the weights that `module` itself multiplies by: that of a linear layer, and those of several experts."""
    is_linear = isinstance(module, nn.Linear) or is_transposed(module)
    for name, parameter in module._parameters.items():
        if parameter is not None and (parameter.dim() == 3 or (is_linear and name == "weight")):
            yield name, parameter


def _kept(net: Any) -> Iterator[int]:
    """Yield the identities of the weights that are not packed: of the head or last layer, and those with several uses."""
    if (head := net.get_output_embeddings()) is not None:
        yield id(head.weight)
    else:
        layers = [part for path, part in net.named_modules() if not is_adapter(f"{path}.")]
        yield from [id(weight) for layer in layers for _, weight in _weights(layer)][-1:]
    seen: set[int] = set()
    for module in net.modules():
        for parameter in module._parameters.values():
            if id(parameter) in seen:
                yield id(parameter)
            seen.add(id(parameter))


@functools.cache
def _unpacking(kind: type, names: tuple[str, ...]) -> type:
    """Return `kind` with the weights `names` dequantised whenever they are used."""

    def property_of(name: str) -> property:
        return property(lambda module: module.packed_weights[name].unpack(module._parameters[name]))

    return type(kind.__name__, (kind,), {name: property_of(name) for name in names})


# -- operators --------------------------------------------------------------------------------------------------------


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _parts_4bit(num_elements: int) -> tuple[int, int, int, int, int]:
    """Return the numbers of scales and of blocks of scales, and where scales, numbers and the vector end."""
    num_scales = -(-num_elements // _BLOCK)
    num_blocks = -(-num_scales // _SCALES_PER_BLOCK)
    scales = _aligned(4 * (1 + num_blocks))
    numbers = scales + _aligned(num_scales)
    return num_scales, num_blocks, scales, numbers, numbers + -(-num_elements // 2)


def _quantise(weight: Tensor, method: str) -> Tensor:
    if method == FP8:
        return _quantise_blocks(weight)
    return _quantise_4bit(weight) if method == NF4 else _quantise_rows(weight)


def _quantise_4bit(weight: Tensor) -> Tensor:
    """Pack the mean of the scales, the scales' scales, the scales, and the numbers."""
    functional = bitsandbytes().functional
    numbers, state = functional.quantize_4bit(
        weight.contiguous(), blocksize=_BLOCK, quant_type=NF4, compress_statistics=True
    )
    return _joined(numbers, state)


def _joined(numbers: Tensor, state: Any) -> Tensor:
    num_scales, num_blocks, scales_at, numbers_at, size = _parts_4bit(math.prod(state.shape))
    packed = torch.zeros(size, dtype=torch.uint8, device=numbers.device)
    packed[: 4 * (1 + num_blocks)] = torch.cat((state.offset.reshape(1), state.state2.absmax)).view(
        torch.uint8
    )
    packed[scales_at : scales_at + num_scales] = state.absmax
    packed[numbers_at:] = numbers.reshape(-1)
    return packed


def _state_of(parts: Mapping[str, Tensor]) -> Any:
    """Return the `QuantState` in the tensors that bitsandbytes stores a weight as, itself first."""
    (key, weight), *others = parts.items()
    stored = {name.removeprefix(f"{key}."): tensor for name, tensor in others}
    return bitsandbytes().functional.QuantState.from_dict(stored, device=weight.device)


def stored_weight(parts: Mapping[str, Tensor]) -> Tensor:
    """Return a weight from the tensors that bitsandbytes stores it as, itself first."""
    return bitsandbytes().functional.dequantize_4bit(next(iter(parts.values())), _state_of(parts))


def _block_scales(packed: Tensor, num_elements: int) -> Tensor:
    num_scales, num_blocks, scales_at, _, _ = _parts_4bit(num_elements)
    of_blocks = packed[: 4 * (1 + num_blocks)].view(torch.float32)
    operators = bitsandbytes_operators()
    scales = operators.dequantize_blockwise.default(
        packed[scales_at : scales_at + num_scales],
        of_blocks[1:],
        _dynamic_code(packed.device),
        _SCALES_PER_BLOCK,
        torch.float32,
    )
    return scales.add_(of_blocks[0])


def _dequantise_4bit(packed: Tensor, scales: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    numbers = packed[_parts_4bit(math.prod(shape))[3] :]
    return bitsandbytes_operators().dequantize_4bit.default(
        numbers.view(-1, 1), scales, _BLOCK, NF4, tuple(shape), dtype
    )


def _quantise_rows(weight: Tensor) -> Tensor:
    """Pack a scale for each row, and the numbers."""
    wide = weight.float()
    scales = wide.abs().amax(-1, keepdim=True).clamp_(min=torch.finfo(torch.float32).eps) / _HALF_RANGE
    numbers = (wide * (1.0 / scales)).round_().clamp_(-128, 127).to(torch.int8)
    start = _aligned(4 * scales.numel())
    packed = torch.zeros(start + weight.numel(), dtype=torch.uint8, device=weight.device)
    packed[: 4 * scales.numel()] = scales.reshape(-1).view(torch.uint8)
    packed[start:] = numbers.reshape(-1).view(torch.uint8)
    return packed


def _dequantise_rows(packed: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    rows = math.prod(shape[:-1])
    scales = packed[: 4 * rows].view(torch.float32).view(*shape[:-1], 1)
    numbers = packed[_aligned(4 * rows) :].view(torch.int8).view(tuple(shape))
    return torch.mul(numbers, scales, out=packed.new_empty(tuple(shape), dtype=dtype))


def _quantise_blocks(weight: Tensor) -> Tensor:
    """Pack a scale for each block, and the numbers; the experts of a tensor one after the other."""
    packed = weight.new_zeros(_num_bytes(weight.shape, FP8), dtype=torch.uint8)
    matrices = (part.reshape(-1, *part.shape[-2:]) for part in (*_parts_blocks(packed, weight.shape), weight))
    for scales, numbers, matrix in zip(*matrices, strict=True):
        for (part, scale), (packed_part, _) in zip(
            _in_blocks(matrix, scales), _in_blocks(numbers, scales), strict=True
        ):
            wide = part.float()
            largest = wide.abs().amax((-3, -1), keepdim=True)
            factor = torch.where(largest > 0, _LARGEST_FP8 / largest, 1.0)
            scale.copy_(1.0 / factor)
            packed_part.copy_((wide * factor).clamp_(-_LARGEST_FP8, _LARGEST_FP8))
    return packed


def _dequantise_blocks(packed: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Convert the numbers, then multiply them in place, since no operator multiplies 8-bit floats."""
    scales, numbers = _parts_blocks(packed, shape)
    weight = packed.new_empty(tuple(shape), dtype=dtype).copy_(numbers)
    for part, scale in _in_blocks(weight, scales):
        part.mul_(scale)
    return weight


def _grid(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the number of blocks along each dimension of a weight."""
    *experts, rows, columns = shape
    return (*experts, -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))


def _parts_blocks(packed: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the scales and the numbers in a packed weight."""
    grid = _grid(shape)
    size = 4 * math.prod(grid)
    numbers = packed[_aligned(size) :].view(torch.float8_e4m3fn)
    return packed[:size].view(torch.float32).view(grid), numbers.view(tuple(shape))


def _in_blocks(weight: Tensor, scales: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield views of a weight in blocks ``[..., place, row, place, column]``, and of their scales: of whole blocks, and of
    those that the last rows or columns cut off."""
    for places, rows, height in _runs(weight.shape[-2]):
        for next_places, columns, width in _runs(weight.shape[-1]):
            blocks = weight[..., rows, columns].unflatten(-1, (-1, width)).unflatten(-3, (-1, height))
            yield blocks, scales[..., places, next_places][..., :, None, :, None]


def _runs(size: int) -> Iterator[tuple[slice, slice, int]]:
    """Yield the places of the whole blocks along a dimension, what they span and the size of one; then of one cut off."""
    count, remainder = divmod(size, FP8_BLOCK)
    if count:
        yield slice(0, count), slice(0, size - remainder), FP8_BLOCK
    if remainder:
        yield slice(count, count + 1), slice(size - remainder, size), remainder


def _num_bytes(shape: Sequence[int], method: str) -> int:
    if method == NF4:
        return _parts_4bit(math.prod(shape))[-1]
    scales = math.prod(_grid(shape) if method == FP8 else shape[:-1])
    return _aligned(4 * scales) + math.prod(shape)


define(
    "quantise(Tensor weight, str method) -> Tensor",
    run=_quantise,
    lay_out=lambda weight, method: weight.new_empty(_num_bytes(weight.shape, method), dtype=torch.uint8),
)
define(
    "block_scales(Tensor packed, int num_elements) -> Tensor",
    run=_block_scales,
    lay_out=lambda packed, num_elements: packed.new_empty(-(-num_elements // _BLOCK), dtype=torch.float32),
)
define(
    "dequantise_4bit(Tensor packed, Tensor scales, int[] shape, ScalarType dtype) -> Tensor",
    run=_dequantise_4bit,
    lay_out=lambda packed, scales, shape, dtype: packed.new_empty(shape, dtype=dtype),
)
define(
    "dequantise_rows(Tensor packed, int[] shape, ScalarType dtype) -> Tensor",
    run=_dequantise_rows,
    lay_out=lambda packed, shape, dtype: packed.new_empty(shape, dtype=dtype),
)
define(
    "dequantise_blocks(Tensor packed, int[] shape, ScalarType dtype) -> Tensor",
    run=_dequantise_blocks,
    lay_out=lambda packed, shape, dtype: packed.new_empty(shape, dtype=dtype),
)


@functools.cache
def bitsandbytes() -> Any:
    """Import bitsandbytes. Raises `InputError` where it is missing."""
    try:
        with quiet_bitsandbytes():
            import bitsandbytes
    except ImportError:
        raise InputError(NEEDS_BITSANDBYTES) from None
    return bitsandbytes


@functools.cache
def bitsandbytes_operators() -> Any:
    bitsandbytes()
    return torch.ops.bitsandbytes


@functools.cache
def _dynamic_code(device: torch.device) -> Tensor:
    """Return the 256 numbers that 8-bit scales stand for."""
    return bitsandbytes().functional.create_dynamic_map().to(device)
