"""Which operators of a traced model run with the backward: its loss, where that is evaluated in pieces."""

from __future__ import annotations

from dataclasses import replace

from stagewright.errors import TraceError
from stagewright.graph import OperatorGraph
from stagewright.tracing.models.pieces import LATE


def with_late_loss(graph: OperatorGraph) -> OperatorGraph:
    """`graph` with the position of the first operator of a loss in pieces among its facts; as it is where there is none.

    Raises:
        TraceError: an operator from there on draws random numbers or updates a buffer, so that the pieces are not the whole.
    """
    late = next((place for place, node in enumerate(graph.body) if graph.nodes[node].module == LATE), None)
    if late is None:
        return graph
    updating = {graph.values[value].node for _, value in graph.mutations}
    for number in graph.body[late:]:
        node = graph.nodes[number]
        if node.draw >= 0 or number in updating:
            does = "draws random numbers" if node.draw >= 0 else "updates a buffer"
            raise TraceError(
                f"{graph.describe(node)} is part of a loss in pieces and {does}, once per piece: use --loss-pieces 1"
            )
    return replace(graph, facts={**graph.facts, "late": late})
