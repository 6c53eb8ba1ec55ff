"""The operator graph of a model, its legal cuts and its stages; free of torch."""

from stagewright.graph.graph import Node, OperatorGraph, Origin, Part, Ref, Symbol, Value, renumbered
from stagewright.graph.tensor import TensorMeta, contiguous

__all__ = [
    "Node",
    "OperatorGraph",
    "Origin",
    "Part",
    "Ref",
    "Symbol",
    "TensorMeta",
    "Value",
    "contiguous",
    "renumbered",
]
