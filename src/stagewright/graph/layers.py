"""Layers: the numbered modules of a model, cuts between them, and their inputs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from stagewright.errors import PlanError
from stagewright.graph.graph import OperatorGraph, Part


@lru_cache(maxsize=4096)
def layer_of(module: str) -> str:
    """Return the path of a module up to the first number in it; empty where there is none.

    >>> layer_of("model.layers.3.mlp.experts.1"), layer_of("model.norm")
    ('model.layers.3', '')
    """
    parts = module.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdigit()), None)
    return "" if number is None else ".".join(parts[: number + 1])


def layers_of(graph: OperatorGraph) -> tuple[str, ...]:
    """Return the layer of every forward operator."""
    return tuple(layer_of(graph.nodes[node].module) for node in graph.forward_ids)


def layer_begins(graph: OperatorGraph) -> list[int]:
    """Return the cut indices at which numbered layers begin, in order."""
    layers = layers_of(graph)
    seen: dict[str, int] = {}
    for position, layer in enumerate(layers):
        if layer:
            seen.setdefault(layer, position)
    return list(seen.values())


def even_layers(graph: OperatorGraph, num_stages: int) -> tuple[int, ...]:
    """Return the number of layers of every stage, as even as possible; the first stages have more.

    Raises:
        PlanError: fewer layers than stages.
    """
    num_layers = len(layer_begins(graph))
    if num_layers < num_stages:
        raise PlanError(f"{num_layers} layers cannot fill {num_stages} stages: choose fewer")
    base, more = divmod(num_layers, num_stages)
    return tuple(base + (stage < more) for stage in range(num_stages))


def layer_cuts(graph: OperatorGraph, layers_per_stage: Sequence[int]) -> tuple[int, ...]:
    """Return the cuts for stages with `layers_per_stage` layers: before the first layer of each stage but the first.

    The first and the last stage may have none: then they hold only what comes before or after the layers.

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
    """Return the cut index after the last layer."""
    return 1 + graph.position[max(node for node in graph.forward_ids if layer_of(graph.nodes[node].module))]


def layer_inputs(graph: OperatorGraph) -> frozenset[int]:
    """Return root values that the forward computes before a place where a layer begins or ends, and uses after it.

    They are the checkpoints of activation checkpointing of every layer. The loss and the modules around the layers recompute
    their values too.
    """
    layers = layers_of(graph)
    begins = [
        0,
        *(at for at, (layer, next_layer) in enumerate(pairwise(layers), start=1) if layer != next_layer),
    ]
    piece = _pieces(begins, len(layers))
    roots: set[int] = set()
    for node in graph.nodes:
        if node.part is not Part.FORWARD:
            continue
        for value in node.inputs:
            root = graph.values[value].storage
            maker = graph.position.get(graph.values[root].node)
            if maker is not None and piece[maker] < piece[graph.position[node.id]]:
                roots.add(root)
    return frozenset(roots)


def _pieces(begins: Sequence[int], size: int) -> list[int]:
    """Return the number of the piece at every position."""
    pieces = [0] * size
    for number, (start, stop) in enumerate(pairwise([*begins, size])):
        pieces[start:stop] = [number] * (stop - start)
    return pieces


def pattern_of(name: str) -> str:
    """Return the common form of a parameter's names in all layers.

    >>> pattern_of("model.layers.12.mlp.up_proj.weight")
    'model.layers.N.mlp.up_proj.weight'
    """
    return re.sub(r"\d+", "N", name)
