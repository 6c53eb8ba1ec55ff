"""Memory policies: what a stage does with the values its forward makes for its backward.

Beside those that a plan chooses: what the model's own regions of `torch.utils.checkpoint` ask for, and the attention scores
that selective recomputation drops.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stagewright.graph.graph import Node, OperatorGraph, Part, makers_of, short_name

Reruns = tuple[tuple[int, tuple[int, ...]], ...]
"""Pairs of an operator (id) and those that run again in its backward."""


@dataclass(frozen=True)
class Policy:
    """Values of the joint graph that a stage does not keep from F to its backward; all others that this needs it keeps.

    * `recompute`: computed again from what is kept, each right before the backward uses it; `everything` means all that
      `checkpoints` does not name.
    * `checkpoints`: kept to recompute from, whether or not the backward itself needs them.
    * `reruns`: pairs of an operator (id) and others: in the backward of the first the others run again, each right before it
      is used there and as often as it is named. With these, what is kept follows: what is used before it is made again.
      `recompute`, `everything` and `checkpoints` are not looked at then. I and W of a split backward recompute the rest
      once each.
    * `offload`: moved to the host when F is done with it and brought back where the backward needs it, also to recompute
      from. At most `fetch_ahead` bytes are back before their first use, and as many on their way to the host.

    A value stands for its whole storage, views included. Ids that a stage does not save are ignored, and so are
    checkpoints that nothing is recomputed from. Checkpointing every layer is `everything` with what enters each layer as
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
    """The policy that the model's own code asks for, of every stage alike; `KEEP` where it has no regions."""
    inside = {node.id for node in graph.nodes if node.region >= 0}
    if not inside:
        return KEEP
    kept = {maker.id for maker in _needed_elsewhere(graph)}
    kept |= {node for node in inside if graph.nodes[node].is_kept}
    return Policy(frozenset(_roots(graph, inside - kept)), checkpoints=frozenset(_roots(graph, kept)))


def _needed_elsewhere(graph: OperatorGraph) -> Iterator[Node]:
    """Makers of what a region needs from outside, and of what is made in one for a backward outside."""
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
    """The storages that some nodes make."""
    made = (value for node in nodes for value in graph.nodes[node].outputs if value is not None)
    return (value for value in made if graph.values[value].storage == value)


_SOFTMAX = frozenset({"softmax", "_softmax", "_safe_softmax"})
_PRODUCTS = frozenset({"bmm", "baddbmm", "mm", "addmm"})


def attention_scores(graph: OperatorGraph) -> frozenset[int]:
    """Storages made between the product of queries and keys and that with the values: scores, their softmax, its dropout.

    Source: selective recomputation, Korthikanti et al. 2022 (arXiv 2205.05198), section 5. None where attention is one
    kernel.
    """
    maker = makers_of(graph.nodes)
    found: set[int] = set()
    for node in graph.nodes:
        is_softmax = node.part is Part.FORWARD and short_name(node.op) in _SOFTMAX
        if is_softmax and (behind := _behind(graph, node)):
            found.update(behind, _before(node, maker))
    return frozenset(graph.values[value].storage for value in found)


def _before(softmax: Node, maker: dict[int, Node]) -> Iterator[int]:
    """Back to the product that makes the scores."""
    value = softmax.inputs[0]
    while value in maker and maker[value].part is Part.FORWARD:
        yield value
        if short_name(maker[value].op) in _PRODUCTS:
            return
        value = maker[value].inputs[0]


def _behind(graph: OperatorGraph, softmax: Node) -> set[int]:
    """On to the product with the values: what is as large as the scores in between. Nothing of a softmax that is for
    something else, as the choice of experts."""
    size = _elements(graph, softmax)
    waiting, found, meets_product = [softmax], set[int](), False
    while waiting:
        node = waiting.pop()
        made = [value for value in node.outputs if value is not None and value not in found]
        found.update(made)
        users = [graph.nodes[user] for value in made for user in graph.consumers.get(value, ())]
        for user in users:
            if user.part is not Part.FORWARD:
                continue
            if short_name(user.op) in _PRODUCTS:
                meets_product = True
            elif _elements(graph, user) == size:
                waiting.append(user)
    return found if meets_product else set()


def _elements(graph: OperatorGraph, node: Node) -> int:
    made = node.outputs[0]
    return 0 if made is None else graph.values[made].meta.num_elements
