"""Nodes that splitting adds to a stage. They are not part of the graph and have no number, module or signature."""

from __future__ import annotations

from typing import Any

from stagewright.graph.graph import Node, Part, Ref, Symbol
from stagewright.graph.tensor import TensorMeta

ACCUMULATE = "stagewright.accumulate"
OFFLOAD, OFFLOADED = "stagewright.offload", "stagewright.offloaded"
FETCH, FETCHED = "stagewright.fetch", "stagewright.fetched"
HOST_COPIES = frozenset({OFFLOAD, OFFLOADED, FETCH, FETCHED})
"""Copies between the device and the host, and waits for them."""


def accumulate(parameter: int, gradient: int) -> Node:
    """Add a finished gradient to the gradient buffer of `parameter`."""
    return _added(ACCUMULATE, (gradient,), (), kwargs=(("parameter", parameter),))


def addition(first: int, second: int, total: int) -> Node:
    return _added("aten.add.Tensor", (first, second), (total,))


def copied(original: int, copy: int) -> Node:
    return _added("aten.clone.default", (original,), (copy,), part=Part.FORWARD)


def zeros(meta: TensorMeta, output: int, device: Symbol) -> Node:
    """Make the gradient that autograd uses where nothing contributes."""
    kwargs = (("dtype", Symbol("dtype", meta.dtype)), ("device", device))
    return _added("aten.zeros.default", (), (output,), args=(meta.shape,), kwargs=kwargs)


def offload(values: tuple[int, ...], handle: int, offset: int, num_bytes: int) -> Node:
    """Start to copy `num_bytes` of the storage of `values` to the host, from `offset` bytes before the first value."""
    kwargs = (("offset", offset), ("num_bytes", num_bytes))
    return _added(OFFLOAD, values, (handle,), kwargs=kwargs, part=Part.FORWARD)


def offloaded(handle: int, values: tuple[int, ...]) -> Node:
    """Wait for the end of a copy to the host; `values` stay on the device until then."""
    return _added(OFFLOADED, (handle, *values), (), part=Part.FORWARD)


def fetch(handle: int, storage: int) -> Node:
    """Start to copy an offloaded storage back into a new one."""
    return _added(FETCH, (handle,), (storage,), part=Part.INPUT_GRAD)


def fetched(handle: int, storage: int, values: tuple[int, ...], places: tuple[int, ...]) -> Node:
    """Wait for the end of a copy from the host; `values` lie in its storage, at `places` among the offloaded ones."""
    return _added(FETCHED, (handle, storage), values, kwargs=(("places", places),), part=Part.INPUT_GRAD)


def _added(
    op: str,
    inputs: tuple[int, ...],
    outputs: tuple[int, ...],
    args: tuple[Any, ...] = (),
    kwargs: tuple[tuple[str, Any], ...] = (),
    part: Part = Part.WEIGHT_GRAD,
) -> Node:
    args = args or tuple(Ref(value) for value in inputs)
    return Node(-1, op, args, kwargs, inputs, outputs, part, -1, "", -1, -1)
