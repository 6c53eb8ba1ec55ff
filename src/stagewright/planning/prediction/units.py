"""Sharding units: divisions of a stage, which replicas gather and reduce unit by unit."""

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
from stagewright.planning.prediction.staged_model import StagedModel

_FEW_UNITS, _LAYERS_PER_UNIT = 2, 4
"""Divisions tried besides whole stages and units of a layer: units per stage (as many as a rank has buffers), and layers per
unit."""
_PARTS_WITHOUT_LAYERS = 32
"""Units of the whole model where its modules are not numbered."""
_PART_OF_LAYER = 0.1
"""Fraction of a layer that is too small to be a unit."""
_WINDOW = 0.5
"""Maximum distance of a cut from where units would be equal, in units, where the boundary is smaller or a layer begins."""


def check_shard_units(zero: int | None, shard_units: int | None) -> None:
    """Raise `InputError` for a number of units where neither gradients nor parameters are sharded."""
    if shard_units is not None and (zero or 0) < GRADIENTS:
        raise InputError(
            f"shard_units = {shard_units} is the number of units in which a stage is gathered and reduced, which only "
            "--zero 2 and 3 do: give one of them, or leave out --shard-units"
        )
    if shard_units is not None and shard_units < 1:
        raise InputError(f"shard_units = {shard_units}: a stage has at least one unit; give 1 or more")


def units_to_try(
    model_costs: RangeCosts, cuts: Sequence[int], num_units: int | None
) -> Iterator[list[list[int]]]:
    """Yield divisions of the stages between `cuts`, each as the cuts inside every stage.

    They have `num_units` units, or those of the runtime; by default units of about one layer, units of about four layers,
    two units, and whole stages.
    """
    if num_units is None and runtime_of(model_costs.graph).shard_units == "layers":
        yield _between_layers(model_costs, cuts)
        return
    for numbers in _numbers_to_try(model_costs, cuts, num_units):
        yield unit_cuts(model_costs, cuts, numbers)


def _between_layers(model_costs: RangeCosts, cuts: Sequence[int]) -> list[list[int]]:
    """Return, for every stage, the legal cuts inside it at which a layer begins or the last layer ends."""
    inside = np.intersect1d(np.flatnonzero(_begins_layer(model_costs)), model_costs.legal_cuts).tolist()
    return [
        [at for at in inside if start < at < stop] for start, stop in pairwise((0, *cuts, model_costs.size))
    ]


def around_layers(staged: StagedModel) -> tuple[int, ...]:
    """Return the stages of a single pipeline rank that hold no part of a numbered layer, where others do."""
    if staged.pp > 1:
        return ()
    graph = staged.stages[0].graph
    layers = layers_of(graph)
    outside = [stage.index for stage in staged.stages if not any(layers[stage.start : stage.stop])]
    return tuple(outside) if len(outside) < len(staged.stages) else ()


def _numbers_to_try(
    model_costs: RangeCosts, cuts: Sequence[int], num_units: int | None
) -> list[tuple[int, ...]]:
    """Return the numbers of units per stage to try."""
    if num_units is not None:
        return [(num_units,) * (len(cuts) + 1)]
    layers = [_num_layers(model_costs, start, stop) for start, stop in pairwise((0, *cuts, model_costs.size))]
    divisions = [
        tuple(layers),
        tuple(min(count, max(_FEW_UNITS, -(-count // _LAYERS_PER_UNIT))) for count in layers),
        tuple(min(_FEW_UNITS, count) for count in layers),
        tuple(1 for _ in layers),
    ]
    return list(dict.fromkeys(divisions))


def unit_cuts(model_costs: RangeCosts, cuts: Sequence[int], numbers: Sequence[int]) -> list[list[int]]:
    """Return, for every stage, the cuts that divide it into units of about equal parameters and seconds.

    Each cut is at the smallest boundary nearby, of equal ones where a layer begins; there are fewer units where there are
    too few legal cuts.
    """
    ends = (0, *cuts, model_costs.size)
    return [
        _inside(model_costs, start, stop, number)
        for (start, stop), number in zip(pairwise(ends), numbers, strict=True)
    ]


def _inside(model_costs: RangeCosts, start: int, stop: int, number: int) -> list[int]:
    legal = model_costs.legal_cuts
    legal = legal[(legal > start) & (legal < stop)]
    if number == 1 or not len(legal):
        return []
    measure = _measure(model_costs)
    low, step = measure[start], (measure[stop] - measure[start]) / number
    boundary, begins = model_costs.boundary_bytes[legal], _begins_layer(model_costs)[legal]
    chosen: set[int] = set()
    for index in range(1, number):
        apart = np.abs(measure[legal] - (low + index * step))
        near = np.flatnonzero(apart <= max(_WINDOW * step, float(apart.min())))
        best = near[np.lexsort((apart[near], ~begins[near], boundary[near]))[0]]
        chosen.add(int(legal[best]))
    return sorted(chosen)


def _num_layers(model_costs: RangeCosts, start: int, stop: int) -> int:
    """Return the number of units of about a layer in a stage; a large enough remainder counts as one more."""
    measure = _measure(model_costs)
    return max(
        1, math.ceil(float(measure[stop] - measure[start]) / _layer_measure(model_costs) - _PART_OF_LAYER)
    )


@lru_cache(maxsize=4)
def _measure(model_costs: RangeCosts) -> Floats:
    """Return, up to every position, the fraction of the model's parameters plus the fraction of its seconds."""
    parts = [
        column / max(float(column[-1]), 1e-300) for column in (model_costs.state_bytes, model_costs.seconds)
    ]
    return parts[0] + parts[1]


@lru_cache(maxsize=4)
def _layer_measure(model_costs: RangeCosts) -> float:
    """Return the median measure of the layers, the numbered modules of the model."""
    amounts = np.diff(_measure(model_costs))
    layers: dict[str, float] = defaultdict(float)
    for layer, amount in zip(_layers(model_costs), amounts.tolist(), strict=True):
        if layer:
            layers[layer] += amount
    return float(np.median(list(layers.values()))) if layers else 2 / _PARTS_WITHOUT_LAYERS


@lru_cache(maxsize=4)
def _begins_layer(model_costs: RangeCosts) -> Bools:
    """Return, for every position, whether its operator is in another layer than the one before."""
    layers = _layers(model_costs)
    return np.array([True, *(before != after for before, after in pairwise(layers)), True])


@lru_cache(maxsize=4)
def _layers(model_costs: RangeCosts) -> tuple[str, ...]:
    """Return the layer of every operator."""
    return layers_of(model_costs.graph)
