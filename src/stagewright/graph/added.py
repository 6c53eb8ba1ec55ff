"""Nodes that carving adds to a stage. They are not part of the graph: no number, no module, no signature of their own."""

from __future__ import annotations

from typing import Any

from stagewright.graph.graph import Node, Part, Ref, Symbol
from stagewright.graph.tensor import TensorMeta

ACCUMULATE = "stagewright.accumulate"
OFFLOAD, LEFT = "stagewright.offload", "stagewright.left"
FETCH, ARRIVED = "stagewright.fetch", "stagewright.arrived"
MOVES = frozenset({OFFLOAD, LEFT, FETCH, ARRIVED})
"""Between the device and the host."""


def accumulate(parameter: int, gradient: int) -> Node:
    """Add a finished gradient to the gradient buffer of `parameter`."""
    return _added(ACCUMULATE, (gradient,), (), kwargs=(("parameter", parameter),))


def addition(left: int, right: int, total: int) -> Node:
    return _added("aten.add.Tensor", (left, right), (total,))


def copied(original: int, made: int) -> Node:
    return _added("aten.clone.default", (original,), (made,), part=Part.FORWARD)


def zeros(meta: TensorMeta, made: int, device: Symbol) -> Node:
    """What autograd takes for a gradient to which nothing contributes."""
    kwargs = (("dtype", Symbol("dtype", meta.dtype)), ("device", device))
    return _added("aten.zeros.default", (), (made,), args=(meta.shape,), kwargs=kwargs)


def offload(values: tuple[int, ...], handle: int, offset: int, num_bytes: int) -> Node:
    """Start to copy the storage of `values` to the host, `num_bytes` from `offset` bytes in front of the first on."""
    kwargs = (("offset", offset), ("num_bytes", num_bytes))
    return _added(OFFLOAD, values, (handle,), kwargs=kwargs, part=Part.FORWARD)


def left(handle: int, values: tuple[int, ...]) -> Node:
    """Wait until a copy to the host is made; `values` are there until then."""
    return _added(LEFT, (handle, *values), (), part=Part.FORWARD)


def fetch(handle: int, storage: int) -> Node:
    """Start to copy what is on the host into a new storage."""
    return _added(FETCH, (handle,), (storage,), part=Part.INPUT_GRAD)


def arrived(handle: int, storage: int, values: tuple[int, ...], places: tuple[int, ...]) -> Node:
    """Wait until a copy from the host is made; `values` lie in its storage, at `places` among those that left."""
    return _added(ARRIVED, (handle, storage), values, kwargs=(("places", places),), part=Part.INPUT_GRAD)


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
