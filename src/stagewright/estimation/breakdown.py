"""Breakdown of the time of one microbatch by operator, layer, or category of kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from stagewright.errors import InputError, nearest
from stagewright.estimation.operators import work
from stagewright.estimation.time import Costing
from stagewright.graph import Node, Part
from stagewright.graph.graph import short_name
from stagewright.graph.layers import layer_of

WAYS = ("operator", "layer", "category")

_T = TypeVar("_T")


@dataclass(frozen=True)
class Share:
    """Total seconds, FLOP and memory traffic of operators of one name, for one microbatch through the whole model."""

    name: str
    num_calls: int
    forward_s: float
    backward_s: float
    flop: float
    bytes_moved: float

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s


def breakdown(costing: Costing, by: str) -> tuple[Share, ...]:
    """Return the shares of the graph of `costing`, the largest first; layers in the order of the model.

    Seconds are those of the device or of the host, whichever bounds the run as a whole. Ignores: transfers and the optimizer
    step.

    Raises:
        InputError: `by` is none of `WAYS`.
    """
    if by not in WAYS:
        raise InputError(f"no breakdown by '{by}'{nearest(by, WAYS)}: use one of {', '.join(WAYS)}")
    graph, name = costing.graph, _naming(costing, by)
    device_s, (_, host_s, flop, *_) = costing.device_seconds, costing.arrays
    seconds = device_s if device_s.sum() >= host_s.sum() else host_s
    moved = _once_per_signature(lambda node: work(node, graph.values.__getitem__).bytes_moved)
    sums_by_name: dict[str, list[float]] = {
        name(graph.nodes[number]): [0.0] * 5 for number in graph.forward_ids
    }
    for index, node in enumerate(graph.nodes):
        sums = sums_by_name.setdefault(name(node), [0.0] * 5)
        sums[0] += 1
        sums[1 if node.part <= Part.FORWARD else 2] += float(seconds[index])
        sums[3] += float(flop[index])
        sums[4] += moved(node)
    shares = [Share(key, int(calls), *sums) for key, (calls, *sums) in sums_by_name.items()]
    return tuple(shares if by == "layer" else sorted(shares, key=lambda share: -share.seconds))


def _naming(costing: Costing, by: str) -> Callable[[Node], str]:
    """Return the function that maps a node to the name of its share."""
    if by == "operator":
        return lambda node: short_name(node.op)
    if by == "layer":
        return lambda node: _layer_or_module(node.module)
    return _once_per_signature(lambda node: work(node, costing.graph.values.__getitem__).kernel.value)


def _layer_or_module(module: str) -> str:
    """Return the layer of a module, or, outside of layers, the first names of its path.

    >>> _layer_or_module("model.layers.3.mlp.up_proj"), _layer_or_module("model.embed_tokens"), _layer_or_module("")
    ('model.layers.3', 'model.embed_tokens', '(model)')
    """
    return layer_of(module) or ".".join(module.split(".")[:2]) or "(model)"


def _once_per_signature(function: Callable[[Node], _T]) -> Callable[[Node], _T]:
    """Return `function` with results cached by signature."""
    results: dict[int, _T] = {}

    def cached(node: Node) -> _T:
        if node.signature not in results or node.signature < 0:
            results[node.signature] = function(node)
        return results[node.signature]

    return cached
