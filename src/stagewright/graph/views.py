"""Views that need not be issued: a view of a view is a view of what that one is of, or a value at hand.

What is left computes the same tensors: same shapes, strides and storages. A storage goes after the same statement as before,
because it is alive whenever something views it, through whichever view.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from stagewright.graph.graph import Node, OperatorGraph, Part, Ref, Value
from stagewright.graph.stage import Function
from stagewright.graph.tensor import contiguous

VIEW = "aten.view.default"

Lookup = Callable[[int], Value]

_IN_PLACE = frozenset(
    {
        VIEW, "aten._unsafe_view.default", "aten.alias.default", "aten.detach.default", "aten.expand.default",
        "aten.permute.default", "aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims", "aten.t.default",
        "aten.transpose.int", "aten.unsqueeze.default",
    }
)  # fmt: skip
"""Views that begin where their argument begins, and show the elements as they are: `_conj` and `view.dtype` do not."""


@dataclass(frozen=True)
class Issued:
    """The statements of a function: of each of its nodes the call to issue, None where there is none, and for values that
    are not made the value in their place."""

    nodes: tuple[Node | None, ...]
    names: dict[int, int]

    def of(self, values: Iterable[int]) -> list[int]:
        """The values in the place of `values`."""
        return [self.names.get(value, value) for value in values]


class _Layout(NamedTuple):
    """How a value lies in the storage of `root`, whose first element is its own too."""

    root: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def is_row_major(self) -> bool:
        return self.stride == contiguous(self.shape, self.dtype).stride


def issued(function: Function, value: Lookup) -> Issued:
    """What to issue for `function`: its views from the first value that one call makes them from, without views that
    nothing uses any more, and without those that equal a value at hand. `value` describes a value by its id."""
    uses = Counter(argument for node in function.nodes for argument in node.inputs)
    uses.update(function.outputs)
    views = _Views(value)
    nodes = [views.shortened(node) if _is_used_view(node, uses) else node.renamed(views.names)
             for node in function.nodes]  # fmt: skip
    still_used = Counter(views.names.get(output, output) for output in function.outputs)
    kept: list[Node | None] = []
    for node in reversed(nodes):
        is_idle = node is None or (_is_used_view(node, uses) and not still_used[node.outputs[0]])
        kept.append(None if is_idle else node)
        if node is not None and not is_idle:
            still_used.update(node.inputs)
    return Issued(tuple(reversed(kept)), views.names)


def _is_used_view(node: Node, uses: Mapping[int | None, int]) -> bool:
    """A view that nothing uses stays: the storage is alive until then."""
    return node.op in _IN_PLACE and bool(uses[node.outputs[0]])


class _Views:
    """Values that views are made of, in running order.

    * `names`: of a view that equals a value at hand, that value.
    """

    def __init__(self, value: Lookup) -> None:
        self.names: dict[int, int] = {}
        self._value = value
        self._roots: dict[int, int] = {}
        self._at_hand: dict[_Layout, int] = {}
        self._row_major: dict[tuple[int, str, int], int] = {}  # root, dtype and number of elements -> value

    def shortened(self, node: Node) -> Node | None:
        """`node`, a view, from the first value that one call makes it from; None where it is at hand."""
        node = node.renamed(self.names)
        (output,), base = node.outputs, node.inputs[0]
        assert output is not None, "it is used"
        if base not in self._roots:
            self._enter(base, base)
        root = self._roots[base]
        layout = self._layout(output, root)
        if (same := self._at_hand.get(layout)) is not None:
            self.names[output] = same
            return None
        shape = layout.shape
        row_major = self._row_major.get((root, layout.dtype, math.prod(shape)))
        if row_major is not None and layout.is_row_major:
            node = replace(node, op=VIEW, args=(Ref(row_major), shape), kwargs=(), inputs=(row_major,))
        self._enter(output, root)
        return node

    def _layout(self, number: int, root: int) -> _Layout:
        meta = self._value(number).meta
        return _Layout(root, meta.dtype, meta.shape, meta.stride)

    def _enter(self, number: int, root: int) -> None:
        layout = self._layout(number, root)
        self._roots[number] = root
        self._at_hand.setdefault(layout, number)
        if layout.is_row_major:
            self._row_major.setdefault((root, layout.dtype, math.prod(layout.shape)), number)


def not_issued(graph: OperatorGraph) -> frozenset[int]:
    """Ids of the views of a graph for which nothing is issued when it is run as one stage.

    Ignores: cuts and recomputation, which move some views to other functions than those of what they are views of.
    """
    outputs = dict.fromkeys(value for found in graph.contributions.values() for _, value in found)
    dropped: set[int] = set()
    for parts in ((Part.PROLOGUE, Part.FORWARD), (Part.INPUT_GRAD, Part.WEIGHT_GRAD)):
        nodes = tuple(node for node in graph.nodes if node.part in parts)
        made = {output for node in nodes for output in node.outputs if output is not None}
        later = {v for node in graph.nodes if node.part not in parts for v in node.inputs}
        later |= {*outputs, graph.loss, *(changed for _, changed in graph.mutations)}
        calls = issued(Function(nodes, (), tuple(sorted(made & later))), graph.values.__getitem__).nodes
        dropped.update(node.id for node, call in zip(nodes, calls, strict=True) if call is None)
    return frozenset(dropped)
