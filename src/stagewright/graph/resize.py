"""Graphs of other microbatch sizes or parallel degrees, extrapolated from the graphs at two sizes.

Every dimension of a tensor is linear in the number of samples, and in 1 / the number of ranks that share a layer; so are
strides and sizes among the arguments of operators. So all of them lie on a line through those of two graphs, which must be
equal in everything else: operators, their order and their inputs.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from fractions import Fraction
from typing import Any

from stagewright.errors import ContractError
from stagewright.graph.graph import Node, OperatorGraph
from stagewright.graph.tensor import TensorMeta


class Unlike(ContractError):
    """Two graphs differ in more than sizes, or a size would not be a whole number."""


def at_samples(
    first_graph: OperatorGraph, second_graph: OperatorGraph, sizes: tuple[int, int], num_samples: int
) -> OperatorGraph:
    """Return the graph for microbatches of `num_samples`, from the graphs for two `sizes` of microbatches.

    Raises:
        Unlike: the two differ in more than sizes.
    """
    first, second = sizes
    return _on_line(first_graph, second_graph, _Line(Fraction(num_samples - first, second - first)))


def at_degree(
    first_graph: OperatorGraph, second_graph: OperatorGraph, sizes: tuple[int, int], size: int
) -> OperatorGraph:
    """Return the graph for a parallel degree of `size`, from the graphs for two `sizes`.

    Raises:
        Unlike: the two differ in more than sizes, or the degree does not divide a dimension.
    """
    first, second = (Fraction(1, ranks) for ranks in sizes)
    return _on_line(
        first_graph, second_graph, _Line((Fraction(1, size) - first) / (second - first), sizes, size)
    )


def _on_line(first_graph: OperatorGraph, second_graph: OperatorGraph, line: _Line) -> OperatorGraph:
    """Return the graph at a point of `line`; signatures are equal there if they are equal in both graphs."""
    if len(first_graph.nodes) != len(second_graph.nodes):
        raise Unlike(f"model '{first_graph.name}' has other operators at another size")
    others = {
        field.name: line.between(getattr(first_graph, field.name), getattr(second_graph, field.name))
        for field in fields(OperatorGraph)
        if field.name != "nodes"
    }
    return OperatorGraph(**others, nodes=tuple(map(line.node, first_graph.nodes, second_graph.nodes)))


class _Line:
    """A line through two points: whole numbers at `at`, from those at 0 and at 1.

    `degrees` are the parallel degrees at 0 and at 1: no other number grows with the degree.
    """

    def __init__(self, at: Fraction, degrees: tuple[int, int] | None = None, degree: int = 0) -> None:
        self.at, self.degrees, self.degree = at, degrees, degree
        self.signatures: dict[tuple[int, int], int] = {}

    def node(self, first: Node, second: Node) -> Node:
        """Return the node at `at`; nodes with equal signatures in only one of the graphs get different ones."""
        pair = first.signature, second.signature
        arguments = [
            getattr(first, name)
            if name not in _SIZED
            else self.between(getattr(first, name), getattr(second, name))
            for name in _NODE
        ]
        arguments[_NODE.index("signature")] = self.signatures.setdefault(pair, len(self.signatures))
        for name in _NODE:
            if name not in _SIZED and name != "signature" and getattr(first, name) != getattr(second, name):
                raise Unlike(f"'{first.name}' is another operator at another size")
        return Node(*arguments)

    def between(self, first: Any, second: Any) -> Any:
        """Return the item at `at` that is `first` at 0 and `second` at 1."""
        kind = type(first)
        if kind is not type(second):
            raise Unlike(f"{first!r} is {second!r} at another size")
        if first == second:
            return first
        if kind is int:
            return self._whole(first, second)
        if kind is tuple:
            if len(first) != len(second):
                raise Unlike("an operator has other arguments at another size")
            return tuple(map(self.between, first, second))
        if kind is dict:
            if list(first) != list(second):
                raise Unlike("a graph has other names at another size")
            return {key: self.between(value, second[key]) for key, value in first.items()}
        if kind is TensorMeta:
            return self._meta(first, second)
        if is_dataclass(first):
            return kind(
                *(self.between(getattr(first, f.name), getattr(second, f.name)) for f in fields(first))
            )
        raise Unlike(f"{str(first)[:40]} is {str(second)[:40]} at another size")

    def _meta(self, first: TensorMeta, second: TensorMeta) -> TensorMeta:
        """Return the layout at `at`. Where a dimension is 1 in only one of the graphs, torch may choose other strides
        there."""
        meta = TensorMeta(
            *(self.between(getattr(first, f.name), getattr(second, f.name)) for f in fields(first))
        )
        for sizes in zip(first.shape, second.shape, meta.shape, first.stride, second.stride, strict=True):
            size_at_0, size_at_1, size, stride, next_stride = sizes
            if size_at_0 != size_at_1 and (
                size == 1 or (1 in (size_at_0, size_at_1) and stride != next_stride)
            ):
                raise Unlike(f"{first} is {second} at another size, and {meta}")
        return meta

    def _whole(self, first: int, second: int) -> int:
        if self.degrees is not None and (second > first) == (self.degrees[1] > self.degrees[0]):
            if (first, second) == self.degrees:
                return self.degree
            raise Unlike(f"{first} is {second} where more ranks share a layer")
        size = first + (second - first) * self.at
        if size.denominator != 1 or size < 0:
            raise Unlike(f"a size of {first} and {second} would be {size}")
        return int(size)


_NODE = tuple(field.name for field in fields(Node))
_SIZED = frozenset({"args", "kwargs"})
