"""Graphs of other microbatch sizes or parallel degrees, extrapolated from graphs at few sizes.

Every dimension of a tensor is linear in the number of samples, and in 1 / the number of ranks that share a layer; so are
strides and sizes among the arguments of operators. All of them thus lie on a line through those of two graphs, which must be
equal in everything else: operators, their order and their inputs. Where several sizes change at once, each number follows
from those at which only one of them does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from fractions import Fraction
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from stagewright.errors import ContractError
from stagewright.graph.graph import Node, OperatorGraph, Value
from stagewright.graph.tensor import TensorMeta

Item = TypeVar("Item", Node, Value)


class Unlike(ContractError):
    """Two graphs differ in more than sizes, or a size would not be a whole number."""


class SizeChange(NamedTuple):
    """One size in which a graph differs from another."""

    is_degree: bool
    """Whether it is the number of ranks that share a layer; otherwise that of samples."""
    before: int
    after: int

    @property
    def factor(self) -> Fraction:
        """Factor of numbers that are proportional to the size."""
        return Fraction(self.before, self.after) if self.is_degree else Fraction(self.after, self.before)


def on_line(
    first_graph: OperatorGraph,
    second_graph: OperatorGraph,
    sizes: tuple[int, int],
    size: int,
    is_degree: bool,
) -> OperatorGraph:
    """Return the graph for microbatches of `size` samples, or with `is_degree` for that parallel degree, from the graphs for
    two `sizes`.

    Raises:
        Unlike: the two differ in more than sizes, or the degree does not divide a dimension.
    """
    first, second, wanted = (Fraction(1, number) if is_degree else number for number in (*sizes, size))
    at = Fraction(wanted - first, second - first)
    return _Line(at, sizes if is_degree else None, size).graph((first_graph, second_graph))


def with_changes(
    changes: Sequence[SizeChange], base: OperatorGraph, *changed: OperatorGraph
) -> OperatorGraph:
    """Return the graph with all `changes` of `base`, from `base` and the graphs with one of them each.

    Raises:
        Unlike: they differ in more than sizes, or a number that several changes concern is not in proportion to each size.
    """
    return _Corner(changes).graph((base, *changed))


class _Sizes:
    """Numbers of a graph that follow from those in others, in order."""

    def __init__(self) -> None:
        self.signatures: dict[tuple[int, ...], int] = {}
        self.metas: dict[tuple[TensorMeta, ...], TensorMeta] = {}

    def whole(self, numbers: Sequence[int]) -> int:
        """Return the number that follows from different `numbers`, one of each graph."""
        raise NotImplementedError

    def graph(self, graphs: Sequence[OperatorGraph]) -> OperatorGraph:
        """Return the graph that follows; signatures are equal there if they are equal in all graphs."""
        first = graphs[0]
        if len({(len(graph.nodes), len(graph.values)) for graph in graphs}) > 1:
            raise Unlike(f"model '{first.name}' has other operators at another size")
        others = {
            field.name: self.item([getattr(graph, field.name) for graph in graphs])
            for field in fields(OperatorGraph)
            if field.name not in ("nodes", "values")
        }
        nodes = zip(*(graph.nodes for graph in graphs), strict=True)
        values = zip(*(graph.values for graph in graphs), strict=True)
        return OperatorGraph(
            **others, nodes=tuple(map(self.node, nodes)), values=tuple(map(self.value, values))
        )

    def node(self, nodes: Sequence[Node]) -> Node:
        """Return the node that follows; nodes with equal signatures in only some of the graphs get different ones."""
        first = _alike(nodes, _CALL, "operator")
        of_all = tuple([node.signature for node in nodes])
        signature = self.signatures.setdefault(of_all, len(self.signatures))
        args = self.item([node.args for node in nodes])
        kwargs = self.item([node.kwargs for node in nodes])
        if args is first.args and kwargs is first.kwargs and signature == first.signature:
            return first
        return replace(first, args=args, kwargs=kwargs, signature=signature)

    def value(self, values: Sequence[Value]) -> Value:
        """Return the value that follows."""
        first = _alike(values, _IDENTITY, "value")
        metas = tuple([value.meta for value in values])
        meta = self.metas.get(metas)
        if meta is None:
            meta = self.metas[metas] = self.item(metas)
        return first if meta is first.meta else replace(first, meta=meta)

    def item(self, items: Sequence[Any]) -> Any:
        """Return the item that follows from the same one of each graph."""
        first = items[0]
        kind = type(first)
        for item in items:
            if type(item) is not kind:
                raise Unlike(f"{first!r} is {item!r} at another size")
        if items.count(first) == len(items):
            return first
        if kind is int:
            return self.whole(items)
        if kind is tuple:
            if len(set(map(len, items))) > 1:
                raise Unlike("an operator has other arguments at another size")
            return tuple(map(self.item, zip(*items, strict=True)))
        if kind is dict:
            if any(list(item) != list(first) for item in items):
                raise Unlike("a graph has other names at another size")
            return {key: self.item([item[key] for item in items]) for key in first}
        if kind is TensorMeta:
            return self._meta(items)
        if is_dataclass(first):
            return self._fields(items)
        other = next(item for item in items if item != first)
        raise Unlike(f"{str(first)[:40]} is {str(other)[:40]} at another size")

    def _fields(self, items: Sequence[Any]) -> Any:
        kind = type(items[0])
        return kind(*(self.item([getattr(item, field.name) for item in items]) for field in fields(kind)))

    def _meta(self, metas: Sequence[TensorMeta]) -> TensorMeta:
        """Return the layout that follows. Where a dimension is 1 in only some of the graphs, torch may choose other strides
        there."""
        meta: TensorMeta = self._fields(metas)
        first = metas[0]
        for other in metas[1:]:
            for sizes in zip(first.shape, other.shape, meta.shape, first.stride, other.stride, strict=True):
                size, other_size, next_size, stride, other_stride = sizes
                if size != other_size and (
                    next_size == 1 or (1 in (size, other_size) and stride != other_stride)
                ):
                    raise Unlike(f"{first} is {other} at another size, and {meta}")
        return meta


class _Line(_Sizes):
    """A line through two points: numbers at `at`, from those at 0 and at 1.

    `degrees` are the parallel degrees at 0 and at 1, if they change: no other number may then grow with the degree.
    """

    def __init__(self, at: Fraction, degrees: tuple[int, int] | None = None, degree: int = 0) -> None:
        super().__init__()
        self.at, self.degrees, self.degree = at, degrees, degree

    def whole(self, numbers: Sequence[int]) -> int:
        first, second = numbers
        if self.degrees is not None and (second > first) == (self.degrees[1] > self.degrees[0]):
            if (first, second) == self.degrees:
                return self.degree
            raise Unlike(f"{first} is {second} where more ranks share a layer")
        size = first + (second - first) * self.at
        if size.denominator != 1 or size < 0:
            raise Unlike(f"a size of {first} and {second} would be {size}")
        return int(size)


class _Corner(_Sizes):
    """The corner of a box opposite to the base, from the base and the corners next to it."""

    def __init__(self, changes: Sequence[SizeChange]) -> None:
        super().__init__()
        self.factors = [change.factor for change in changes]

    def whole(self, numbers: Sequence[int]) -> int:
        first, *others = numbers
        changed = [
            (number, factor) for number, factor in zip(others, self.factors, strict=True) if number != first
        ]
        if len(changed) == 1:
            return changed[0][0]
        size = Fraction(first)
        for number, factor in changed:
            if number != first * factor:
                raise Unlike(f"{first} is {number} at another size, not in proportion to it")
            size *= factor
        if size.denominator != 1:
            raise Unlike(f"a size of {first} would be {size}")
        return int(size)


def _alike(items: Sequence[Item], key: Callable[[Item], Any], kind: str) -> Item:
    """Return the first of `items`; raises `Unlike` where others have another `key`."""
    first, *others = items
    expected = key(first)
    for item in others:
        if key(item) != expected:
            raise Unlike(f"'{first.name}' is another {kind} at another size")
    return first


_CALL = attrgetter(
    *(field.name for field in fields(Node) if field.name not in ("args", "kwargs", "signature"))
)
_IDENTITY = attrgetter(*(field.name for field in fields(Value) if field.name != "meta"))
