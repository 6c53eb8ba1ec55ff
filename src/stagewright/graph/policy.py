"""Memory policies: keep, recompute or offload for each value that a stage's forward saves for its backward.

Besides the policies that a plan chooses, there are those of the model's own regions of `torch.utils.checkpoint`, and the
attention scores that selective recomputation drops.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stagewright.graph.graph import Node, OperatorGraph, Part, makers_of, short_name

Reruns = tuple[tuple[int, tuple[int, ...]], ...]
"""Pairs of an operator (id) and the operators that run again in its backward."""


@dataclass(frozen=True)
class Policy:
    """The values that a stage recomputes or offloads; it keeps all others that its backward needs.

    * `recompute`: computed again from kept values, each right before the backward uses it; `everything` means all values
      that `checkpoints` does not name.
    * `checkpoints`: kept to recompute from, whether or not the backward needs them.
    * `reruns`: pairs of an operator (id) and others: in the backward of the first the others run again, each right before it
      is used there and as often as it is named. This determines what is kept: what is used before it is computed again.
      `recompute`, `everything` and `checkpoints` are then ignored. I and W of a split backward recompute the others once
      each.
    * `offload`: copied to the host after its last use in F and back before its first use in the backward, recomputation
      included. At most `fetch_ahead` bytes are fetched before their first use, and at most as many are being offloaded.

    A value stands for its whole storage, views included. Values that a stage does not save are ignored, and so are
    checkpoints that nothing is recomputed from. Checkpointing every layer is `everything` with the inputs of the layers as
    checkpoints.
    """

    recompute: frozenset[int] = frozenset()
    offload: frozenset[int] = frozenset()
    everything: bool = False
    checkpoints: frozenset[int] = frozenset()
    fetch_ahead: int = 0
    reruns: Reruns = ()

    @property
    def recomputes(self) -> bool:
        return self.everything or bool(self.recompute) or bool(self.reruns)


KEEP = Policy()
RECOMPUTE_ALL = Policy(everything=True)


def has_regions(graph: OperatorGraph) -> bool:
    """Whether the model's code checkpoints anything."""
    return any(node.region >= 0 for node in graph.nodes)


def region_policy(graph: OperatorGraph) -> Policy:
    """Return the policy of the model's own checkpoint regions, the same for every stage; `KEEP` if it has none."""
    inside = {node.id for node in graph.nodes if node.region >= 0}
    if not inside:
        return KEEP
    kept = {maker.id for maker in _needed_elsewhere(graph)}
    kept |= {node for node in inside if graph.nodes[node].is_kept}
    return Policy(frozenset(_roots(graph, inside - kept)), checkpoints=frozenset(_roots(graph, kept)))


def _needed_elsewhere(graph: OperatorGraph) -> Iterator[Node]:
    """Yield the makers of values that a region needs from outside, and of values in a region that a backward outside
    needs."""
    for node in graph.nodes:
        if node.part < Part.FORWARD:
            continue
        here = graph.nodes[node.forward].region if node.forward >= 0 else -1
        is_backward = node.part is not Part.FORWARD
        for value in node.inputs:
            made_by = graph.values[graph.values[value].storage].node
            maker = graph.nodes[made_by]
            if made_by < 0 or maker.part is not Part.FORWARD or maker.region == here:
                continue
            if maker.region >= 0 if is_backward else here >= 0:
                yield maker


def _roots(graph: OperatorGraph, nodes: set[int]) -> Iterator[int]:
    """Yield the storages that `nodes` create."""
    values = (value for node in nodes for value in graph.nodes[node].outputs if value is not None)
    return (value for value in values if graph.values[value].storage == value)


_SOFTMAX = frozenset({"softmax", "_softmax", "_safe_softmax"})
_PRODUCTS = frozenset({"bmm", "baddbmm", "mm", "addmm"})


def attention_scores(graph: OperatorGraph) -> frozenset[int]:
    """Return the storages between the two matmuls of attention: scores, their softmax and its dropout.

    Source: selective recomputation, Korthikanti et al. 2022 (arXiv 2205.05198), section 5. Empty where attention is one
    kernel.
    """
    maker = makers_of(graph.nodes)
    scores: set[int] = set()
    for node in graph.nodes:
        is_softmax = node.part is Part.FORWARD and short_name(node.op) in _SOFTMAX
        if is_softmax and (following := _after(graph, node)):
            scores.update(following, _before(node, maker))
    return frozenset(graph.values[value].storage for value in scores)


def _before(softmax: Node, maker: dict[int, Node]) -> Iterator[int]:
    """Yield the values from the softmax back to the matmul that computes the scores."""
    value = softmax.inputs[0]
    while value in maker and maker[value].part is Part.FORWARD:
        yield value
        if short_name(maker[value].op) in _PRODUCTS:
            return
        value = maker[value].inputs[0]


def _after(graph: OperatorGraph, softmax: Node) -> set[int]:
    """Return the values of the scores' size from the softmax on to the matmul with the attention values. Empty for a softmax
    with another purpose, such as the choice of experts."""
    size = _elements(graph, softmax)
    waiting, reached, meets_product = [softmax], set[int](), False
    while waiting:
        node = waiting.pop()
        results = [value for value in node.outputs if value is not None and value not in reached]
        reached.update(results)
        users = [graph.nodes[user] for value in results for user in graph.consumers.get(value, ())]
        for user in users:
            if user.part is not Part.FORWARD:
                continue
            if short_name(user.op) in _PRODUCTS:
                meets_product = True
            elif _elements(graph, user) == size:
                waiting.append(user)
    return reached if meets_product else set()


def _elements(graph: OperatorGraph, node: Node) -> int:
    result = node.outputs[0]
    return 0 if result is None else graph.values[result].meta.num_elements
