"""What crosses the body of a graph at each position where it may be cut."""

from __future__ import annotations

from dataclasses import dataclass

from stagewright.graph import OperatorGraph
from stagewright.graph.cuts import find_cuts


@dataclass(frozen=True, slots=True)
class Boundary:
    """A cut before forward operator `position`: the values that travel, and their bytes per microbatch."""

    position: int
    num_tensors: int
    num_bytes: int


def boundaries(graph: OperatorGraph) -> list[Boundary]:
    """Every legal cut of `graph`, in order, with what one forward sends across it."""
    cuts = find_cuts(graph)
    return [
        Boundary(position, int(cuts.num_values[position]), int(cuts.value_bytes[position]))
        for position in cuts.positions.tolist()
    ]
