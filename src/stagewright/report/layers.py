"""The layers of a model, found again in the module paths of its operators."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from stagewright.graph import OperatorGraph


@dataclass(frozen=True, slots=True)
class Layers:
    """Modules that differ only in the number in their path; `kinds` counts the equal ones together."""

    pattern: str
    kinds: tuple[int, ...]

    @property
    def count(self) -> int:
        return sum(self.kinds)


def find_layers(graph: OperatorGraph) -> list[Layers]:
    """Numbered modules in the order of the model; two are equal when they run the same operators.

    An operator belongs to the first number in the path of its module: experts count with their layer.
    """
    operators: dict[tuple[str, int], list[tuple[str, int]]] = defaultdict(list)
    for node_id in graph.body:
        node = graph.nodes[node_id]
        if (place := _numbered(node.module)) is not None:
            operators[place].append((node.op, node.signature))
    kinds: dict[str, dict[tuple[tuple[str, int], ...], int]] = defaultdict(lambda: defaultdict(int))
    for (pattern, _), found in operators.items():
        kinds[pattern][tuple(found)] += 1
    return [Layers(pattern, tuple(counts.values())) for pattern, counts in kinds.items()]


def _numbered(module: str) -> tuple[str, int] | None:
    """
    >>> _numbered("model.layers.3.mlp.experts.1"), _numbered("model.norm")
    (('model.layers.*', 3), None)
    """
    parts = module.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join([*parts[:index], "*"]), int(part)
    return None
