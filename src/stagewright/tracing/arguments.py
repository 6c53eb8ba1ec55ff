"""Arguments of operators: between torch objects and the plain data of the operator graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from stagewright.errors import TraceError
from stagewright.graph import Ref, Symbol, TensorMeta
from stagewright.tracing.private import FakeTensor, without_modes

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.complex64, torch.complex128,
        torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool,
    )
}  # fmt: skip
_LAYOUTS = {"strided": torch.strided}
_FORMATS = {
    str(item).removeprefix("torch."): item
    for item in (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)
}
_PLAIN = {int: int.__int__, float: float.__float__, complex: complex.__complex__, str: str.__str__}
"""Without what enumerations and numpy's numbers add to them."""


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def meta_of(tensor: torch.Tensor) -> TensorMeta:
    return TensorMeta(
        tuple(int(size) for size in tensor.shape),
        tuple(int(step) for step in tensor.stride()),
        dtype_name(tensor.dtype),
        int(tensor.storage_offset()),
    )


def empty(meta: TensorMeta, device: torch.device) -> torch.Tensor:
    """Return a tensor with a layout, except its offset, in a new storage."""
    return torch.empty_strided(meta.shape, meta.stride, dtype=DTYPES[meta.dtype], device=device)


def contents(tensor: torch.Tensor) -> bytes:
    """Return the elements of a constant, row-major; also of a fake tensor that knows what it stands for."""
    real = getattr(tensor, "constant", None)
    tensor = tensor if real is None else real
    return bytes(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).tolist())


def the_element(tensor: torch.Tensor) -> bool | int | float | complex | None:
    """Return the value of all elements of a constant; None if they differ, or if the tensor is fake without a value."""
    real = getattr(tensor, "constant", None)
    if real is None and isinstance(tensor, FakeTensor):
        return None
    with without_modes():
        elements = (tensor if real is None else real).detach().flatten()
        return elements[0].item() if len(elements) and bool((elements == elements[0]).all()) else None


def from_contents(data: bytes, meta: TensorMeta) -> torch.Tensor:
    """Return the tensor whose `contents` these are."""
    dtype = DTYPES[meta.dtype]
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(meta.shape).clone()


def encode(argument: Any, tensor: Callable[[Any], Any]) -> Any:
    """Return plain data for an argument; `tensor` maps what stands for a tensor (an fx node) to a `Ref`."""
    if isinstance(argument, torch.fx.Node):
        return tensor(argument)
    if isinstance(argument, list | tuple):
        return tuple(encode(item, tensor) for item in argument)
    if argument is None or isinstance(argument, bool):
        return argument
    for kind, plain in _PLAIN.items():
        if isinstance(argument, kind):
            return plain(argument)
    if isinstance(argument, torch.dtype):
        return Symbol("dtype", dtype_name(argument))
    if isinstance(argument, torch.device):
        return Symbol("device", str(argument))
    if isinstance(argument, torch.layout):
        layout = str(argument).removeprefix("torch.")
        if layout not in _LAYOUTS:
            raise TraceError(
                f"an operator makes a tensor of layout {layout}, such as the gradient of an Embedding(sparse=True): "
                "leave sparse=True out; the dense gradient is the same"
            )
        return Symbol("layout", layout)
    if isinstance(argument, torch.memory_format):
        return Symbol("memory_format", str(argument).removeprefix("torch."))
    raise TraceError(
        f"an operator has the argument {argument!r} of type {type(argument).__name__}, which depends on data or has no "
        "plain form: shapes must be static, so replace .item(), nonzero or boolean indexing by masks of fixed shape"
    )


def encode_keywords(kwargs: Mapping[str, Any], tensor: Callable[[Any], Any]) -> tuple[tuple[str, Any], ...]:
    """Return plain data for keyword arguments, without defaults that mean nothing."""
    given = (item for item in kwargs.items() if item[0] != "pin_memory" and item[1] is not None)
    return tuple((name, encode(value, tensor)) for name, value in given)


def decode(argument: Any, tensor: Callable[[int], Any], device: torch.device | None = None) -> Any:
    """Return the torch argument for plain data; `tensor` maps value ids. `device` replaces the device of the trace."""
    if isinstance(argument, Ref):
        return tensor(argument.value)
    if isinstance(argument, Symbol):
        return symbol(argument, device)
    if isinstance(argument, tuple):
        return [decode(item, tensor, device) for item in argument]
    return argument


def symbol(item: Symbol, device: torch.device | None = None) -> Any:
    match item.kind:
        case "dtype":
            return DTYPES[item.name]
        case "device":
            return device if device is not None else torch.device(item.name)
        case "layout":
            return _LAYOUTS[item.name]
        case "memory_format":
            return _FORMATS[item.name]
    raise TraceError(f"an argument of kind '{item.kind}' is not known: re-trace the model with this version")


def references(argument: Any) -> Iterator[int]:
    """Yield the value ids in an encoded argument, in order, with repeats."""
    if isinstance(argument, Ref):
        yield argument.value
    elif isinstance(argument, tuple) and not isinstance(argument, Symbol):
        for item in argument:
            yield from references(item)


def draws(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call draws random numbers; attention without dropout is tagged as random, but does not."""
    if not isinstance(op, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    for position, argument in enumerate(op._schema.arguments):
        if argument.name == "dropout_p":
            default = kwargs.get("dropout_p", argument.default_value)
            return (args[position] if position < len(args) else default) != 0.0
    return True


def operator(name: str) -> torch._ops.OpOverload:
    """Return the operator of a name such as ``aten.mm.default``."""
    space, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, space), packet), overload)
