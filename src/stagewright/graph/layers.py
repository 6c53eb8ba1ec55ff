"""Layers: the numbered modules of a model, and what enters each of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from stagewright.errors import PlanError
from stagewright.graph.graph import OperatorGraph, Part


@lru_cache(maxsize=4096)
def layer_of(module: str) -> str:
    """The path of a module up to the first number in it; empty where there is none.

    >>> layer_of("model.layers.3.mlp.experts.1"), layer_of("model.norm")
    ('model.layers.3', '')
    """
    parts = module.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdigit()), None)
    return "" if number is None else ".".join(parts[: number + 1])


def layers_of(graph: OperatorGraph) -> tuple[str, ...]:
    """The layer of every operator of the body."""
    return tuple(layer_of(graph.nodes[node].module) for node in graph.body)


def layer_begins(graph: OperatorGraph) -> list[int]:
    """Positions in the body at which numbered layers begin, in order."""
    layers = layers_of(graph)
    seen: dict[str, int] = {}
    for position, layer in enumerate(layers):
        if layer:
            seen.setdefault(layer, position)
    return list(seen.values())


def even_layers(graph: OperatorGraph, num_stages: int) -> tuple[int, ...]:
    """Layers of every stage, as even as their number allows, the first stages having more.

    Raises:
        PlanError: fewer layers than stages.
    """
    num_layers = len(layer_begins(graph))
    if num_layers < num_stages:
        raise PlanError(f"{num_layers} layers cannot fill {num_stages} stages: choose fewer")
    each, more = divmod(num_layers, num_stages)
    return tuple(each + (stage < more) for stage in range(num_stages))


def layer_cuts(graph: OperatorGraph, layers_per_stage: Sequence[int]) -> tuple[int, ...]:
    """Where stages of so many layers are cut: in front of the first layer of each but the first.

    A stage may have none: at the beginning only what is in front of the layers, at the end only what is behind.

    Raises:
        PlanError: the counts do not add up to the layers of the model.
    """
    begins = layer_begins(graph)
    if sum(layers_per_stage) != len(begins) or min(layers_per_stage) < 0:
        raise PlanError(
            f"layers per stage {','.join(map(str, layers_per_stage))} add up to {sum(layers_per_stage)}, but the model has "
            f"{len(begins)} layers: give one count per stage that add up"
        )
    if 0 in layers_per_stage[1:-1]:
        raise PlanError(
            f"layers per stage {','.join(map(str, layers_per_stage))}: only the first and the last stage may have none"
        )
    before = list(accumulate(layers_per_stage))[:-1]
    places = [*begins, layer_end(graph)]
    return tuple(places[count] for count in before)


def layer_end(graph: OperatorGraph) -> int:
    """The position in the body behind the last layer."""
    return 1 + graph.position[max(node for node in graph.body if layer_of(graph.nodes[node].module))]


def layer_inputs(graph: OperatorGraph) -> frozenset[int]:
    """Root values that are made in front of a place where a layer begins or ends, and used behind it by the forward.

    Kept as checkpoints, they are what checkpointing every layer keeps; what the loss and the modules around the layers
    compute is theirs to recompute too.
    """
    layers = layers_of(graph)
    begins = [0, *(at for at, (one, other) in enumerate(pairwise(layers), start=1) if one != other)]
    piece = _pieces(begins, len(layers))
    found: set[int] = set()
    for node in graph.nodes:
        if node.part is not Part.FORWARD:
            continue
        for value in node.inputs:
            root = graph.values[value].storage
            maker = graph.position.get(graph.values[root].node)
            if maker is not None and piece[maker] < piece[graph.position[node.id]]:
                found.add(root)
    return frozenset(found)


def _pieces(begins: Sequence[int], size: int) -> list[int]:
    """For every position the number of the piece that it is in."""
    found = [0] * size
    for number, (start, stop) in enumerate(pairwise([*begins, size])):
        found[start:stop] = [number] * (stop - start)
    return found


def pattern_of(name: str) -> str:
    """What the names of a parameter in all layers have in common.

    >>> pattern_of("model.layers.12.mlp.up_proj.weight")
    'model.layers.N.mlp.up_proj.weight'
    """
    return re.sub(r"\d+", "N", name)
