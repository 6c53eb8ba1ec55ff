"""Where values lie in a stage: what arrives lies in the storage it was received in, and so do views of it.

The graph knows the storages of the undivided model. A stage that receives one of three pieces of a storage has that
piece only; a stage that receives all three has them in one storage (see `payload`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from stagewright.graph.graph import Node, OperatorGraph, Value
from stagewright.graph.payload import messages


class Located:
    """The values of one stage that the graph describes otherwise or not at all.

    Args:
        added: values made by carving, by id.
        instead: value of the graph -> the value this stage uses in its place.
    """

    def __init__(self, graph: OperatorGraph, added: dict[int, Value], instead: dict[int, int]) -> None:
        self.graph = graph
        self.values = dict(added)
        self.storage_bytes = {value.id: value.meta.storage_bytes for value in added.values()}
        self._stands_for: dict[int, list[int]] = defaultdict(list)
        for original, substitute in instead.items():
            self._stands_for[substitute].append(original)

    def value(self, index: int) -> Value:
        return self.values[index] if index in self.values else self.graph.values[index]

    def add(self, value: Value) -> None:
        """A value made by carving; its storage is known already, or its own."""
        self.values[value.id] = value
        if value.storage == value.id:
            self.storage_bytes[value.id] = value.meta.storage_bytes

    def bytes_of(self, storage: int) -> int:
        known = self.storage_bytes.get(storage)
        return self.graph.storage_bytes[storage] if known is None else known

    def arrive(self, sent: Iterable[Value]) -> None:
        """Values as their sender describes them, received as `messages` says."""
        for message in messages(sent):
            together = len(message.values) > 1
            first = message.values[0]
            size = message.num_elements if together else first.meta.extent
            self.storage_bytes[first.id] = size * first.meta.item_bytes
            for value in message.values:
                meta = value.meta if together else replace(value.meta, offset=0)
                self.values[value.id] = replace(value, storage=first.id, meta=meta)

    def follow(self, nodes: Iterable[Node]) -> None:
        """Views of what lies elsewhere than in the graph lie there too; `nodes` come in running order."""
        for node in nodes:
            if any(value in self.values or value in self._stands_for for value in node.inputs):
                for output in node.outputs:
                    if output is not None and output not in self.values:
                        self._follow(self.graph.values[output], node)

    def _follow(self, made: Value, node: Node) -> None:
        if made.storage == made.id:
            return
        for argument in node.inputs:
            known = [argument] if argument < len(self.graph.values) else []
            for name in (*self._stands_for.get(argument, ()), *known):
                base = self.graph.values[name]
                if base.storage == made.storage:
                    here = self.value(argument)
                    meta = replace(made.meta, offset=made.meta.offset + here.meta.offset - base.meta.offset)
                    self.values[made.id] = replace(made, storage=here.storage, meta=meta)
                    return
