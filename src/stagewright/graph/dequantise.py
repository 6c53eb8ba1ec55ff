"""Dequantised weights are never saved: what a backward needs of them it dequantises again, from the packed weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from stagewright.graph.graph import UNPACKING, Node, OperatorGraph, Part, Value, made_by
from stagewright.graph.simplify import renumbered_graph

DEQUANTISING = UNPACKING | {"stagewright.block_scales.default"}


def dequantised_again(graph: OperatorGraph) -> OperatorGraph:
    """Return `graph` with a copy, in the backward of each forward operator, of the operators that dequantise the weights it
    uses, casts and views of them included; unchanged if nothing is quantised."""
    again = _Dequantisers(graph.values, len(graph.nodes))
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.part is Part.FORWARD and again.is_of_weights(node):
            again.makers.update(dict.fromkeys(made_by([node]), node))
        elif node.part > Part.FORWARD:
            node = again.following(node, nodes)
        nodes.append(node)
    if not again.makers:
        return graph
    values = (*graph.values, *again.values)
    return renumbered_graph(replace(graph, nodes=tuple(nodes), values=values))


@dataclass
class _Dequantisers:
    """The operators that dequantise, and their copies: `makers` by value, `copies` of a value by the operator and the part
    of the backward that uses it."""

    originals: Sequence[Value]
    next_node: int
    makers: dict[int, Node] = field(default_factory=dict)
    copies: dict[tuple[int, Part, int], int] = field(default_factory=dict)
    values: list[Value] = field(default_factory=list)

    def is_of_weights(self, node: Node) -> bool:
        """Return whether a forward operator depends on packed weights alone."""
        is_alone = all(value in self.makers for value in node.inputs) and node.draw < 0 and bool(node.inputs)
        return node.op in DEQUANTISING or is_alone

    def following(self, node: Node, nodes: list[Node]) -> Node:
        """Return a node of the backward on copies of dequantised weights, whose operators are added to `nodes`."""
        return node.renamed(
            {value: self._copied(value, node, nodes) for value in node.inputs if value in self.makers}
        )

    def _copied(self, value: int, user: Node, nodes: list[Node]) -> int:
        key = (user.forward, user.part, value)
        if key not in self.copies:
            maker = self.makers[value]
            names = {used: self._copied(used, user, nodes) for used in maker.inputs if used in self.makers}
            for output in made_by([maker]):
                self.copies[user.forward, user.part, output] = self._add(output, names)
            outputs = tuple(
                None if out is None else self.copies[user.forward, user.part, out] for out in maker.outputs
            )
            copy = replace(
                maker.renamed(names), id=self.next_node, outputs=outputs, part=user.part, forward=user.forward, ordinal=-1,
                region=-1, is_kept=False,
            )  # fmt: skip
            self.next_node += 1
            nodes.append(copy)
        return self.copies[key]

    def _add(self, value: int, names: dict[int, int]) -> int:
        """Add a copy of a value, in a storage of its own unless it is a view of one of `names`."""
        original, number = self.originals[value], len(self.originals) + len(self.values)
        roots = {
            self.originals[used].storage: self.values[copy - len(self.originals)].storage
            for used, copy in names.items()
        }
        self.values.append(replace(original, id=number, storage=roots.get(original.storage, number)))
        return number
