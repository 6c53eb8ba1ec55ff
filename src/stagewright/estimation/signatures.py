"""Signatures of operators as text, equal in every trace for calls with equal layouts."""

from __future__ import annotations

from typing import Any

from stagewright.graph import Node, Ref, Symbol, TensorMeta
from stagewright.graph.tensor import contiguous
from stagewright.graph.views import Lookup


def signature_of(node: Node, value: Lookup) -> str | None:
    """Return operator, layouts and all other arguments except the device; None for operators other than ATen's and attention
    (collectives, fused kernels, nodes that splitting adds)."""
    if not node.op.startswith(("aten.", "stagewright.attention")):
        return None
    given = [_text(argument, value) for argument in node.args]
    given += [f"{name}={_text(argument, value)}" for name, argument in node.kwargs]
    return f"{node.op}({', '.join(given)})"


def layout(meta: TensorMeta) -> str:
    """Return element type and shape, and strides unless row-major.

    >>> layout(TensorMeta((2, 3), (3, 1), "float32")), layout(TensorMeta((2, 3), (1, 2), "float32"))
    ('float32[2, 3]', 'float32[2, 3] by [1, 2]')
    """
    strides = "" if meta.stride == contiguous(meta.shape, meta.dtype).stride else f" by {list(meta.stride)}"
    return f"{meta}{strides}"


def _text(argument: Any, value: Lookup) -> str:
    if isinstance(argument, Ref):
        return layout(value(argument.value).meta)
    if isinstance(argument, Symbol):
        return argument.kind if argument.kind == "device" else argument.name
    if isinstance(argument, tuple):
        return f"[{', '.join(_text(item, value) for item in argument)}]"
    return repr(argument)
