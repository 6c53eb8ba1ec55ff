"""Sharding units: where a stage is divided, so that replicas gather and reduce it piece by piece."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np

from stagewright.arrays import Bools, Floats
from stagewright.errors import InputError
from stagewright.estimation.runtime import runtime_of
from stagewright.estimation.stages import RangeCosts
from stagewright.graph.flat_buffers import GRADIENTS
from stagewright.graph.layers import layers_of
from stagewright.planning.prediction.pipeline import Pipeline

_TRIED_PARTS = 2, 4
"""Tried beside whole stages and units of a layer: so many units a stage (as many as a rank has buffers for), and a unit for
so many layers."""
_PARTS_WITHOUT_LAYERS = 32
"""Units of the whole model where its modules are not numbered."""
_PART_OF_LAYER = 0.1
"""Of a layer, what is no unit of its own."""
_WINDOW = 0.5
"""A cut may be this part of a unit away from where units would be equal, if less crosses it there or a layer begins."""


def check_shard_units(zero: int | None, shard_units: int | None) -> None:
    """Raises `InputError` for a number of units where neither gradients nor parameters are sharded."""
    if shard_units is not None and (zero or 0) < GRADIENTS:
        raise InputError(
            f"shard_units = {shard_units} says in how many pieces a stage is gathered and reduced, which --zero 2 "
            "and 3 do: give one of them, or leave out --shard-units"
        )
    if shard_units is not None and shard_units < 1:
        raise InputError(f"shard_units = {shard_units}: a stage is one unit at least; give 1 or more")


def units_to_try(body: RangeCosts, cuts: Sequence[int], asked: int | None) -> Iterator[list[list[int]]]:
    """Ways to divide every stage between `cuts`, as the cuts inside it: into so many units as are `asked` for; or as the
    runtime does; or into units of about a layer, then of about four, two units, and whole stages."""
    if asked is None and runtime_of(body.graph).shard_units == "layers":
        yield _between_layers(body, cuts)
        return
    for numbers in _numbers_to_try(body, cuts, asked):
        yield unit_cuts(body, cuts, numbers)


def _between_layers(body: RangeCosts, cuts: Sequence[int]) -> list[list[int]]:
    """Of every stage, the legal cuts inside it at which a layer begins or the last one ends."""
    inside = np.intersect1d(np.flatnonzero(_begins_layer(body)), body.legal_cuts).tolist()
    return [[at for at in inside if start < at < stop] for start, stop in pairwise((0, *cuts, body.size))]


def around_layers(line: Pipeline) -> tuple[int, ...]:
    """The stages of a lone pipeline rank that hold no part of a numbered layer, where others do."""
    if line.pp > 1:
        return ()
    graph = line.stages[0].graph
    layers = layers_of(graph)
    found = [stage.index for stage in line.stages if not any(layers[stage.start : stage.stop])]
    return tuple(found) if len(found) < len(line.stages) else ()


def _numbers_to_try(body: RangeCosts, cuts: Sequence[int], asked: int | None) -> list[tuple[int, ...]]:
    """Numbers of units of every stage."""
    if asked is not None:
        return [(asked,) * (len(cuts) + 1)]
    layers = [_num_layers(body, start, stop) for start, stop in pairwise((0, *cuts, body.size))]
    few, apart = _TRIED_PARTS
    ways = [
        tuple(layers),
        tuple(min(count, max(few, -(-count // apart))) for count in layers),
        tuple(min(few, count) for count in layers),
        tuple(1 for _ in layers),
    ]
    return list(dict.fromkeys(ways))


def unit_cuts(body: RangeCosts, cuts: Sequence[int], numbers: Sequence[int]) -> list[list[int]]:
    """Of every stage, the cuts inside it that make it so many units of about equal parameters and seconds, each at the
    narrowest place near, of equally narrow ones where a layer begins; fewer where there are too few legal cuts."""
    ends = (0, *cuts, body.size)
    return [
        _inside(body, start, stop, number)
        for (start, stop), number in zip(pairwise(ends), numbers, strict=True)
    ]


def _inside(body: RangeCosts, start: int, stop: int, number: int) -> list[int]:
    legal = body.legal_cuts
    legal = legal[(legal > start) & (legal < stop)]
    if number == 1 or not len(legal):
        return []
    measure = _measure(body)
    low, step = measure[start], (measure[stop] - measure[start]) / number
    width, begins = body.boundary_bytes[legal], _begins_layer(body)[legal]
    chosen: set[int] = set()
    for index in range(1, number):
        apart = np.abs(measure[legal] - (low + index * step))
        near = np.flatnonzero(apart <= max(_WINDOW * step, float(apart.min())))
        best = near[np.lexsort((apart[near], ~begins[near], width[near]))[0]]
        chosen.add(int(legal[best]))
    return sorted(chosen)


def _num_layers(body: RangeCosts, start: int, stop: int) -> int:
    """How many units of about a layer a stage is; what is more than a part of a layer is one more."""
    measure = _measure(body)
    return max(1, math.ceil(float(measure[stop] - measure[start]) / _layer_measure(body) - _PART_OF_LAYER))


@lru_cache(maxsize=4)
def _measure(body: RangeCosts) -> Floats:
    """Up to every position, the part of the model's parameters plus the part of its seconds."""
    parts = [column / max(float(column[-1]), 1e-300) for column in (body.state_bytes, body.seconds)]
    return parts[0] + parts[1]


@lru_cache(maxsize=4)
def _layer_measure(body: RangeCosts) -> float:
    """What the numbered modules of the model, its layers, measure: their median."""
    amounts = np.diff(_measure(body))
    layers: dict[str, float] = defaultdict(float)
    for layer, amount in zip(_layers(body), amounts.tolist(), strict=True):
        if layer:
            layers[layer] += amount
    return float(np.median(list(layers.values()))) if layers else 2 / _PARTS_WITHOUT_LAYERS


@lru_cache(maxsize=4)
def _begins_layer(body: RangeCosts) -> Bools:
    """Of every position, whether its operator is of another layer than the one before."""
    layers = _layers(body)
    return np.array([True, *(one != other for one, other in pairwise(layers)), True])


@lru_cache(maxsize=4)
def _layers(body: RangeCosts) -> tuple[str, ...]:
    """The layer of every operator."""
    return layers_of(body.graph)
