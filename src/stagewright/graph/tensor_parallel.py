"""Tensor parallelism of a graph: shards of parameters, collectives, and the values that differ between ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stagewright.errors import ContractError, UnevenDegreeError
from stagewright.graph.expert_parallel import ALL_TO_ALL, EXPERT_GROUP, expert_parallelism
from stagewright.graph.graph import Node, OperatorGraph, Origin, Part

GROUP = "tp"
"""Name of the tensor-parallel group in collectives."""

CONTEXT_GROUP = "cp"
"""Name of the context-parallel group, whose ranks have a part of the sequence each."""

ENTER = "stagewright.enter.default"
ALL_REDUCE = "stagewright.all_reduce.default"
ALL_GATHER = "stagewright.all_gather.default"
REDUCE_SCATTER = "stagewright.reduce_scatter.default"
SHARD = "stagewright.shard.default"
GROUP_RANK = "stagewright.group_rank.default"

COLLECTIVES = frozenset({ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL})
"""Operators in which all ranks of a group take part; the group's name and size are among the arguments."""

_ALIKE = frozenset({ALL_REDUCE, ALL_GATHER})
_SPLITTING = frozenset({REDUCE_SCATTER, SHARD})


@dataclass(frozen=True)
class TensorShard:
    """A tensor that is split into equal parts along `dim`, one per rank.

    `blocks` are sizes along `dim` of parts of the whole that are split separately (query, key and value of a fused
    projection); `padding` zeros are added at the end before splitting, if there is one block.

    >>> TensorShard(0, (6, 6)).ranges(2, 1)
    [(3, 6), (9, 12)]
    >>> TensorShard(0, (5,), padding=1).ranges(2, 1)
    [(3, 6)]
    """

    dim: int
    blocks: tuple[int, ...]
    padding: int = 0

    @property
    def whole_size(self) -> int:
        """Elements along `dim` of the whole tensor, without padding."""
        return sum(self.blocks)

    def ranges(self, num_ranks: int, rank: int) -> list[tuple[int, int]]:
        """Return the ranges of `rank` along `dim` of the whole, padded tensor."""
        ranges, start = [], 0
        for size in self.padded_blocks:
            part = size // num_ranks
            ranges.append((start + rank * part, start + (rank + 1) * part))
            start += size
        return ranges

    @property
    def padded_blocks(self) -> tuple[int, ...]:
        return (*self.blocks[:-1], self.blocks[-1] + self.padding)


@dataclass(frozen=True)
class TensorParallel:
    """The tensor parallelism of a graph: its degree, and its sharded parameters by name.

    Every other parameter is whole on every rank and gets the same updates on all of them. With `sequence` (sequence
    parallelism), values between the parallel layers are split along the sequence.
    """

    size: int
    sequence: bool = False
    shards: Mapping[str, TensorShard] = field(default_factory=dict)


def even(what: str, amount: int, size: int) -> int:
    """Return `amount` divided by `size`.

    Raises:
        UnevenDegreeError: it does not divide.
    """
    if amount % size:
        divisors = [degree for degree in range(2, amount + 1) if amount % degree == 0 and degree <= 64]
        remedy = f"choose a degree among {', '.join(map(str, divisors))}" if divisors else "leave --tp out"
        raise UnevenDegreeError(f"tensor parallelism of {size} does not divide {what} ({amount}): {remedy}")
    return amount // size


def group_of(node: Node) -> tuple[str, int]:
    """Return the name and size of the group of a collective."""
    place = next(index for index, argument in enumerate(node.args) if isinstance(argument, str))
    return node.args[place], node.args[place + 1]


def entry_of(graph: OperatorGraph, node: Node) -> Node | None:
    """Return the forward operator at which local work of tensor-parallel ranks begins, if `node` is the collective that
    gathers its input or reduces its gradients."""
    if node.op not in COLLECTIVES or group_of(node)[0] != GROUP or node.forward < 0:
        return None
    entry = graph.nodes[node.forward]
    return entry if entry.part is Part.FORWARD and entry.op in (ALL_GATHER, ENTER) else None


def neighbour_strides(graph: OperatorGraph) -> dict[str, int]:
    """Return the distance in rank numbers between neighbours, by the name of the group."""
    size, experts = tensor_parallel_size(graph), expert_parallelism(graph)
    return {GROUP: 1, CONTEXT_GROUP: size, EXPERT_GROUP: experts.stride if experts else size}


def parallelism(graph: OperatorGraph) -> TensorParallel | None:
    """Return the tensor parallelism that `graph` was traced with; None where every layer is whole."""
    return graph.facts.get("tensor_parallel")


def tensor_parallel_size(graph: OperatorGraph) -> int:
    """Return the number of tensor-parallel ranks of `graph`."""
    parallel = parallelism(graph)
    return parallel.size if parallel else 1


def local_values(graph: OperatorGraph) -> frozenset[int]:
    """Return the values that differ between ranks: computed from shards, and not reduced or gathered since."""
    parallel = parallelism(graph)
    if parallel is None:
        return frozenset()
    shares = _own_parameters(graph, parallel)
    local = {value for name, value in graph.parameters.items() if name in shares}
    # One value may be added to several gradients: that of a sum to those of its terms.
    gradients_of: dict[int, list[int]] = {}
    for gradient, results in graph.contributions.items():
        for _, value in results:
            gradients_of.setdefault(value, []).append(gradient)
    for node in graph.nodes:
        if node.op in _ALIKE and group_of(node)[0] == GROUP:
            continue
        splits = node.op in _SPLITTING and group_of(node)[0] == GROUP
        if splits or node.op == GROUP_RANK or any(value in local for value in node.inputs):
            results = [value for value in node.outputs if value is not None]
            while results:
                local.update(results)
                results = [gradient for value in results for gradient in gradients_of.get(value, ())]
    return frozenset(local)


def _own_parameters(graph: OperatorGraph, parallel: TensorParallel) -> frozenset[str]:
    """Return the names of parameters that differ between ranks: shards, and experts divided over these ranks."""
    experts = expert_parallelism(graph)
    shared = experts.parameters if experts is not None and experts.stride < parallel.size else ()
    return frozenset((*parallel.shards, *shared))


def local_draws(graph: OperatorGraph) -> frozenset[int]:
    """Return the random draws for values that differ between ranks, so that they must differ too."""
    if parallelism(graph) is None:
        return frozenset()
    local = local_values(graph)
    return frozenset(
        node.draw for node in graph.nodes if node.draw >= 0 and any(value in local for value in node.inputs)
    )


def verify_parallel(graph: OperatorGraph) -> None:
    """Check that the loss, buffers and gradients of whole parameters are equal on all ranks, and that inputs of collectives
    differ between ranks.

    Raises:
        ContractError: a check fails; names the parameter, buffer or operator.
    """
    parallel = parallelism(graph)
    if parallel is None:
        return
    local = local_values(graph)
    for node in graph.nodes:
        if node.op not in _ALIKE | _SPLITTING or group_of(node)[0] != GROUP:
            continue
        if node.op == SHARD and node.inputs[0] in local:
            raise ContractError(f"an operator splits what every rank has another of: {graph.describe(node)}")
        if node.op in COLLECTIVES and node.inputs[0] not in local:
            raise ContractError(f"an operator sums or gathers what all ranks have: {graph.describe(node)}")
    if graph.loss in local:
        raise ContractError(
            f"model '{graph.name}' split over {parallel.size} ranks has another loss on each of them"
        )
    names = {value: name for name, value in graph.parameters.items()}
    local_names = _own_parameters(graph, parallel)
    for buffer, value in graph.mutations:
        if value in local:
            raise ContractError(
                f"buffer '{graph.values[buffer].name}' would differ between the ranks that share its layer: run with --tp 1"
            )
    for value, gradient in graph.gradients.items():
        if (
            gradient in local
            and graph.values[value].origin is Origin.PARAMETER
            and names[value] not in local_names
        ):
            raise ContractError(
                f"every rank would have another gradient of '{names[value]}', which all of them hold whole: "
                "the model's tensor-parallel plan leaves out a layer; run with --tp 1"
            )
