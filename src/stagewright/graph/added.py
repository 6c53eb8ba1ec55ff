"""Nodes that carving adds to a stage. They are not part of the graph: no number, no module, no signature of their own."""

from __future__ import annotations

from typing import Any

from stagewright.graph.graph import Node, Part, Ref, Symbol
from stagewright.graph.tensor import TensorMeta

ACCUMULATE = "stagewright.accumulate"


def accumulate(parameter: int, gradient: int) -> Node:
    """Add a finished gradient to the gradient buffer of `parameter`."""
    return _added(ACCUMULATE, (gradient,), (), kwargs=(("parameter", parameter),))


def addition(left: int, right: int, total: int) -> Node:
    return _added("aten.add.Tensor", (left, right), (total,))


def copy(original: int, made: int) -> Node:
    return _added("aten.clone.default", (original,), (made,), part=Part.FORWARD)


def zeros(meta: TensorMeta, made: int, device: Symbol) -> Node:
    """What autograd takes for a gradient to which nothing contributes."""
    kwargs = (("dtype", Symbol("dtype", meta.dtype)), ("device", device))
    return _added("aten.zeros.default", (), (made,), args=(meta.shape,), kwargs=kwargs)


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
