"""Sizes: the graph of a model with other microbatches, or shared by other numbers of ranks, follows from its graphs at two.

A dimension of a tensor is a sum of products in each of which the number of samples stands once at most, and so does one over
the number of ranks that share a layer; so are strides, and what operators are told of sizes. All of them are thus on a line
through those of two graphs, which must be the same in everything else: operators, their order, and who uses what.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from fractions import Fraction
from typing import Any

from stagewright.errors import ContractError
from stagewright.graph.graph import Node, OperatorGraph
from stagewright.graph.tensor import TensorMeta


class Unlike(ContractError):
    """Graphs that differ in more than sizes, or sizes that are on no line of whole numbers."""


def at_samples(
    one: OperatorGraph, other: OperatorGraph, known: tuple[int, int], num_samples: int
) -> OperatorGraph:
    """The graph of microbatches of `num_samples`, from two of those of `known` samples.

    Raises:
        Unlike: the two differ in more than sizes.
    """
    first, second = known
    return _on_line(one, other, _Line(Fraction(num_samples - first, second - first)))


def at_width(one: OperatorGraph, other: OperatorGraph, known: tuple[int, int], width: int) -> OperatorGraph:
    """The graph of one of `width` ranks that share what each of `known` numbers of them does in two others.

    Raises:
        Unlike: the two differ in more than sizes, or ranks cannot share it evenly.
    """
    first, second = (Fraction(1, ranks) for ranks in known)
    return _on_line(one, other, _Line((Fraction(1, width) - first) / (second - first), known, width))


def _on_line(one: OperatorGraph, other: OperatorGraph, line: _Line) -> OperatorGraph:
    """The graph at a place of a line; operators are alike there that are alike in both."""
    if len(one.nodes) != len(other.nodes):
        raise Unlike(f"model '{one.name}' has other operators at another size")
    rest = {
        field.name: line.between(getattr(one, field.name), getattr(other, field.name))
        for field in fields(OperatorGraph)
        if field.name != "nodes"
    }
    return OperatorGraph(**rest, nodes=tuple(map(line.node, one.nodes, other.nodes)))


class _Line:
    """Whole numbers at `at`, between or beyond those at 0 and at 1.

    Of numbers of ranks `widths` those at 0 and at 1 are known: nothing else is larger where there are more ranks.
    """

    def __init__(self, at: Fraction, widths: tuple[int, int] | None = None, width: int = 0) -> None:
        self.at, self.widths, self.width = at, widths, width
        self.signatures: dict[tuple[int, int], int] = {}

    def node(self, one: Node, other: Node) -> Node:
        """A call; two that are alike in one of the graphs only, by chance of their sizes, are not alike."""
        pair = one.signature, other.signature
        made = [
            getattr(one, name)
            if name not in _SIZED
            else self.between(getattr(one, name), getattr(other, name))
            for name in _NODE
        ]
        made[_NODE.index("signature")] = self.signatures.setdefault(pair, len(self.signatures))
        for name in _NODE:
            if name not in _SIZED and name != "signature" and getattr(one, name) != getattr(other, name):
                raise Unlike(f"'{one.name}' is another operator at another size")
        return Node(*made)

    def between(self, one: Any, other: Any) -> Any:
        """What stands in the place of `one` and `other`."""
        kind = type(one)
        if kind is not type(other):
            raise Unlike(f"{one!r} is {other!r} at another size")
        if one == other:
            return one
        if kind is int:
            return self._whole(one, other)
        if kind is tuple:
            if len(one) != len(other):
                raise Unlike("an operator has other arguments at another size")
            return tuple(map(self.between, one, other))
        if kind is dict:
            if list(one) != list(other):
                raise Unlike("a graph has other names at another size")
            return {key: self.between(value, other[key]) for key, value in one.items()}
        if kind is TensorMeta:
            return self._meta(one, other)
        if is_dataclass(one):
            return kind(*(self.between(getattr(one, f.name), getattr(other, f.name)) for f in fields(one)))
        raise Unlike(f"{str(one)[:40]} is {str(other)[:40]} at another size")

    def _meta(self, one: TensorMeta, other: TensorMeta) -> TensorMeta:
        """A layout. Where a dimension is 1 in one of the graphs alone, torch is free to lay it out in another way there."""
        made = TensorMeta(*(self.between(getattr(one, f.name), getattr(other, f.name)) for f in fields(one)))
        for sizes in zip(one.shape, other.shape, made.shape, one.stride, other.stride, strict=True):
            first, second, size, stride, next_stride = sizes
            if first != second and (size == 1 or (1 in (first, second) and stride != next_stride)):
                raise Unlike(f"{one} is {other} at another size, and {made}")
        return made

    def _whole(self, one: int, other: int) -> int:
        if self.widths is not None and (other > one) == (self.widths[1] > self.widths[0]):
            if (one, other) == self.widths:
                return self.width
            raise Unlike(f"{one} is {other} where more ranks share a layer")
        found = one + (other - one) * self.at
        if found.denominator != 1 or found < 0:
            raise Unlike(f"a size of {one} and {other} would be {found}")
        return int(found)


_NODE = tuple(field.name for field in fields(Node))
_SIZED = frozenset({"args", "kwargs"})
