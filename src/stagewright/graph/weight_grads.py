"""Weight gradients of a stage: the nodes that compute contributions, and those that sum and accumulate them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from stagewright.graph.added_nodes import accumulate, addition, zeros
from stagewright.graph.graph import Node, Origin, Part, Symbol, made_by
from stagewright.graph.partition import Partition


@dataclass(frozen=True)
class WeightGrads:
    """The weight gradients of a stage. `nodes` compute contributions; `finishing` nodes (sums of contributions, the
    backward of derived values, accumulations) run as early as possible."""

    nodes: tuple[Node, ...]
    finishing: tuple[Node, ...]
    gradients: tuple[tuple[int, int], ...]  # parameter -> its gradient for one microbatch
    instead: dict[int, int]  # GRADIENT value -> the sum of this stage's contributions to it


def weight_grads(partition: Partition, index: int, fresh: Callable[..., int]) -> WeightGrads:
    """Return the weight gradients of stage `index`; ``fresh(like, storage)`` adds a value, in a new storage or a given one.

    Contributions are added in autograd's order. Gradients of derived values (views and casts of parameters) are turned
    into those of the parameters once per stage, whatever the number of uses. Only the pieces of a loss in pieces are not
    added to each other but each to the gradient's buffer, so that one of them is alive at a time: as many tensors of the
    size of the head as there are pieces would take more than the pieces save.
    """
    return _Finisher(partition, index, fresh).finish()


class _Finisher:
    def __init__(self, partition: Partition, index: int, fresh: Callable[..., int]) -> None:
        self.partition = partition
        self.graph = partition.graph
        self.index = index
        self.fresh = fresh
        self.finishing: list[Node] = []
        self.alone: dict[int, int] = {}  # values made for single pieces of the loss -> their storages

    def finish(self) -> WeightGrads:
        computing = [node for node in self.partition.nodes_of[self.index] if node.part is Part.WEIGHT_GRAD]
        floating = self.partition.floating_of[self.index]
        chains, apart = self._without_pieces(self._chains((*computing, *floating)), floating)
        sums: dict[int, int] = {}
        for gradient in chains:
            self._settle(gradient, chains, sums)
        trained = self.graph.owners
        gradients: list[tuple[int, int]] = []
        for gradient, total in sums.items():
            value = trained.get(gradient)
            if value is not None and self.graph.values[value].origin is Origin.PARAMETER:
                gradients.append((value, total))
                self.finishing.append(accumulate(value, total))
        for node in floating:
            for value in node.inputs:
                if self.graph.values[value].origin is Origin.GRADIENT and value not in sums:
                    sums[value] = self._nothing(value)
            self.finishing.append(node.renamed(sums))
        for gradient, value in apart:
            self._finish_alone(gradient, value, floating)
        return WeightGrads(tuple(computing), tuple(self.finishing), tuple(gradients), sums)

    # -- pieces of a loss --------------------------------------------------------------------------------------------

    def _without_pieces(
        self, chains: dict[int, list[int]], floating: Sequence[Node]
    ) -> tuple[dict[int, list[int]], list[tuple[int, int]]]:
        """Return the chains without contributions of pieces of the loss, and these as (gradient, value); the first piece
        stays where nothing else contributes."""
        late = self._made_late(chains, floating)
        kept: dict[int, list[int]] = {}
        apart: list[tuple[int, int]] = []
        for gradient, chain in chains.items():
            pieces = [value for value in chain if value in late]
            if len(pieces) == len(chain):
                pieces = pieces[1:]
            kept[gradient] = [value for value in chain if value not in pieces]
            apart += [(gradient, value) for value in pieces]
        return kept, apart

    def _made_late(self, chains: dict[int, list[int]], floating: Sequence[Node]) -> set[int]:
        """Return the values that only pieces of the loss contribute to."""
        position, start = self.graph.position, self.graph.late
        if start == len(self.graph.forward_ids):
            return set()
        late_nodes = (node for node in self.partition.nodes_of[self.index] if position[node.forward] >= start)
        late = made_by(late_nodes)
        for node in floating:
            given = {value for value in node.inputs if value in chains}
            if late.intersection(node.inputs) or any(late.issuperset(chains[value]) for value in given):
                late.update(output for output in node.outputs if output is not None)
        return late

    def _finish_alone(self, gradient: int, value: int, floating: Sequence[Node]) -> None:
        """Accumulate the contribution `value` to `gradient` separately: backwards of derived values are linear."""
        for source, owner in self.graph.gradients.items():
            if owner == gradient and self.graph.values[source].origin is Origin.PARAMETER:
                self.finishing.append(accumulate(source, value))
        names = {gradient: value}
        for node in floating:
            if names.keys().isdisjoint(node.inputs):
                continue
            copy = node.renamed(names)
            names |= {
                output: self._fresh_like(output, names) for output in node.outputs if output is not None
            }
            outputs = tuple(None if output is None else names[output] for output in node.outputs)
            self.finishing.append(replace(copy, id=-1, outputs=outputs))
        for target, contributions in self.graph.contributions.items():
            for _, contribution in contributions:
                if contribution in names and target != gradient:
                    self._finish_alone(target, names[contribution], floating)

    def _fresh_like(self, output: int, names: Mapping[int, int]) -> int:
        """Add a copy of `output`, where `names` are copies of other values: a view of the copy of its base."""
        like = self.graph.values[output]
        storage = None
        if like.storage != output:
            base = names.get(like.storage, like.storage)
            storage = self.alone[base] if base in self.alone else self.graph.values[base].storage
        copy = self.fresh(like, storage)
        self.alone[copy] = copy if storage is None else storage
        return copy

    # -- sums ---------------------------------------------------------------------------------------------------------

    def _chains(self, nodes: Iterable[Node]) -> dict[int, list[int]]:
        """Map each GRADIENT value to the contributions of this stage, in autograd's order."""
        results = made_by(nodes)
        gradients = self.partition.gradients_of[self.index]

        def is_local(node: int, value: int) -> bool:
            stage = self.partition.stage_of_forward.get(node)
            return value in results or value in others if stage is None else stage == self.index

        others = set(gradients)
        return {
            gradient: [value for node, value in self.graph.contributions[gradient] if is_local(node, value)]
            for gradient in gradients
        }

    def _settle(self, gradient: int, chains: dict[int, list[int]], sums: dict[int, int]) -> int:
        """Return the sum of the contributions to `gradient`, some of which are such sums themselves."""
        if gradient not in sums:
            addends = [
                self._settle(value, chains, sums) if value in chains else value for value in chains[gradient]
            ]
            sums[gradient] = self._sum(addends, gradient)
        return sums[gradient]

    def _sum(self, addends: list[int], gradient: int) -> int:
        total, *others = addends
        for value in others:
            partial = self.fresh(replace(self.graph.values[gradient], origin=Origin.NODE))
            self.finishing.append(addition(total, value, partial))
            total = partial
        return total

    def _nothing(self, gradient: int) -> int:
        zero = self.fresh(replace(self.graph.values[gradient], origin=Origin.NODE))
        device = Symbol("device", str(self.graph.facts.get("device", "cpu")))
        self.finishing.append(zeros(self.graph.values[gradient].meta, zero, device))
        return zero


def with_finishing(nodes: Sequence[Node], finishing: Sequence[Node]) -> list[Node]:
    """Return `nodes` in order, each `finishing` node as soon as its inputs exist, so that gradients are freed early."""
    if not finishing:
        return list(nodes)
    making = made_by((*nodes, *finishing))
    missing = [len(making.intersection(node.inputs)) for node in finishing]
    users: dict[int, list[int]] = defaultdict(list)
    for index, node in enumerate(finishing):
        for value in making.intersection(node.inputs):
            users[value].append(index)
    merged: list[Node] = []

    def run(node: Node) -> None:
        merged.append(node)
        for output in node.outputs:
            for index in users.get(output, ()) if output is not None else ():
                missing[index] -= 1
                if missing[index] == 0:
                    run(finishing[index])

    ready = [node for node, count in zip(finishing, missing, strict=True) if count == 0]
    for node in (*ready, *nodes):
        run(node)
    return merged
