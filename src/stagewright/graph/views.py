"""Elimination of views: a view of a view becomes a view of the base, or a value that exists already.

The remaining calls compute the same tensors: same shapes, strides and storages. A storage is freed after the same statement
as before, because any view keeps it alive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from stagewright.graph.graph import Node, OperatorGraph, Part, Ref, Value, made_by
from stagewright.graph.stage import Function

VIEW = "aten.view.default"

Shape = tuple[int, ...]
Lookup = Callable[[int], Value]

_IN_PLACE = frozenset(
    {
        VIEW, "aten._unsafe_view.default", "aten.alias.default", "aten.detach.default", "aten.expand.default",
        "aten.permute.default", "aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims", "aten.t.default",
        "aten.transpose.int", "aten.unsqueeze.default",
    }
)  # fmt: skip
"""Views that begin where their argument begins and do not reinterpret elements, unlike `_conj` and `view.dtype`."""


@dataclass(frozen=True)
class Issued:
    """The calls of a function: for each of its nodes the call to issue, or None, and `names` with the substitutes of values
    that are not computed."""

    nodes: tuple[Node | None, ...]
    names: dict[int, int]

    def of(self, values: Iterable[int]) -> list[int]:
        """Return the substitutes of `values`."""
        return [self.names.get(value, value) for value in values]


def issued(function: Function, value: Lookup) -> Issued:
    """Return the calls of `function`, each view taken from the earliest possible value, without views that are unused then
    or equal an existing value. `value` returns the description of a value by its id."""
    uses: Counter[int | None] = Counter(argument for node in function.nodes for argument in node.inputs)
    uses.update(function.outputs)
    views = _Views(value)
    nodes = [views.shortened(node) if _is_used_view(node, uses) else node.renamed(views.names)
             for node in function.nodes]  # fmt: skip
    still_used: Counter[int | None] = Counter(views.names.get(output, output) for output in function.outputs)
    kept: list[Node | None] = []
    for node in reversed(nodes):
        is_idle = node is None or (_is_used_view(node, uses) and not still_used[node.outputs[0]])
        kept.append(None if is_idle else node)
        if node is not None and not is_idle:
            still_used.update(node.inputs)
    return Issued(tuple(reversed(kept)), views.names)


def _is_used_view(node: Node, uses: Mapping[int | None, int]) -> bool:
    """Whether a node is a view that can change. A view that nothing uses stays: it keeps its storage alive until then."""
    return node.op in _IN_PLACE and bool(uses[node.outputs[0]])


class _Views:
    """Values that views can be taken from, in running order.

    * `names`: the existing value that a view equals.

    All values of a root begin where it begins.
    """

    def __init__(self, value: Lookup) -> None:
        self.names: dict[int, int] = {}
        self._value = value
        self._roots: dict[int, int] = {}
        self._at_hand: dict[tuple[int, Shape, Shape, str], int] = {}  # root, shape, stride, dtype -> value
        self._row_major: dict[tuple[int, int, str], int] = {}  # root, number of elements, dtype -> value

    def shortened(self, node: Node) -> Node | None:
        """Return `node`, a view, taken from the earliest value possible; None where an equal value exists."""
        node = node.renamed(self.names)
        (output,), base = node.outputs, node.inputs[0]
        assert output is not None, "it is used"
        if base not in self._roots:
            self._enter(base, base)
        root = self._roots[base]
        meta = self._value(output).meta
        if (same := self._at_hand.get((root, meta.shape, meta.stride, meta.dtype))) is not None:
            self.names[output] = same
            return None
        if meta.is_row_major:
            row_major = self._row_major.get((root, meta.num_elements, meta.dtype))
            if row_major is not None and (row_major != base or node.op != VIEW):
                node = replace(
                    node, op=VIEW, args=(Ref(row_major), meta.shape), kwargs=(), inputs=(row_major,)
                )
        self._enter(output, root)
        return node

    def _enter(self, number: int, root: int) -> None:
        self._roots[number] = root
        meta = self._value(number).meta
        self._at_hand.setdefault((root, meta.shape, meta.stride, meta.dtype), number)
        if meta.is_row_major:
            self._row_major.setdefault((root, meta.num_elements, meta.dtype), number)


def not_issued(graph: OperatorGraph) -> frozenset[int]:
    """Return the ids of views that are not issued when the graph is run as one stage. A gradient with one contribution is
    that contribution.

    Ignores: cuts and recomputation, which move some views and their bases to different functions.
    """
    whole = {
        gradient: contributions[0][1]
        for gradient, contributions in graph.contributions.items()
        if len(contributions) == 1
    }
    used_whole = {value for node in graph.nodes for value in node.inputs} & whole.keys()
    outputs = {graph.loss, *(changed for _, changed in graph.mutations)}
    for gradient, contributions in graph.contributions.items():
        outputs.update(value for _, value in contributions if gradient not in used_whole)
    dropped: set[int] = set()
    for parts in ((Part.PROLOGUE, Part.FORWARD), (Part.INPUT_GRAD, Part.WEIGHT_GRAD)):
        nodes = tuple(node.renamed(whole) for node in graph.nodes if node.part in parts)
        later = {value for node in graph.nodes if node.part not in parts for value in node.inputs} | outputs
        function = Function(nodes, (), tuple(sorted(made_by(nodes) & later)))
        calls = issued(function, graph.values.__getitem__).nodes
        dropped.update(node.id for node, call in zip(nodes, calls, strict=True) if call is None)
    return frozenset(dropped)
