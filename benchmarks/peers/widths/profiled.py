"""What strategies that work from profiles are given: layers with measured times, nodes with nominal rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from stagewright.arrays import Floats
from stagewright.errors import InputError


@dataclass(frozen=True)
class Widths:
    """One configuration; `boundaries` are the places where stages begin, and the number of layers at the end.

    Ranks number tensor-parallel neighbours first, then replicas, then stages.
    """

    tp: int
    dp: int
    pp: int
    microbatch_size: int
    boundaries: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.boundaries) != self.pp + 1 or any(a >= b for a, b in pairwise(self.boundaries)):
            raise InputError(
                f"boundaries {list(self.boundaries)} do not make {self.pp} stages: give {self.pp + 1} rising numbers"
            )

    @property
    def num_ranks(self) -> int:
        return self.tp * self.dp * self.pp

    def rank(self, stage: int, replica: int, shard: int) -> int:
        """
        >>> Widths(2, 2, 2, 1, (0, 1, 2)).rank(1, 0, 1)
        5
        """
        return (stage * self.dp + replica) * self.tp + shard


@dataclass(frozen=True, eq=False)
class ProfiledLayers:
    """Layers of a model in order; arrays of one length, per sample.

    Args:
        seconds: by tensor-parallel width, forward and backward of one sample, as measured.
        elements: what each layer hands on.
        parameters: of each layer, not split.
        shared: of those, what several layers of one stage keep once (a tied embedding); 0 for the others.
    """

    seconds: Mapping[int, Floats]
    elements: Floats
    parameters: Floats
    shared: Floats

    @property
    def num_layers(self) -> int:
        return len(self.elements)

    def stage_seconds(self, widths: Widths) -> Floats:
        """Forward and backward of one microbatch on every stage.

        Raises:
            InputError: no profile of that width.
        """
        if widths.tp not in self.seconds:
            known = ", ".join(map(str, self.seconds))
            raise InputError(f"no layer times for tp {widths.tp}: use one of {known}, or measure it")
        each = self.seconds[widths.tp] * widths.microbatch_size
        return np.array([each[a:b].sum() for a, b in pairwise(widths.boundaries)])

    def stage_parameters(self, widths: Widths) -> Floats:
        """Parameters of every stage on one device; what layers share counts once."""
        return np.array(
            [
                (self.parameters[a:b].sum() + self.shared[a:b].max(initial=0.0)) / widths.tp
                for a, b in pairwise(widths.boundaries)
            ]
        )


@dataclass(frozen=True)
class NodeRates:
    """Nominal bytes/s of a node: to other nodes, and between its own devices."""

    inter: float
    intra: float
    num_devices: int


def rate_between(nodes: tuple[NodeRates, ...], a: int, b: int) -> float:
    """Nominal bytes/s between two ranks, which number devices node after node."""
    first, second = _node(nodes, a), _node(nodes, b)
    if first == second:
        return nodes[first].intra
    return min(nodes[first].inter, nodes[second].inter)


def _node(nodes: tuple[NodeRates, ...], rank: int) -> int:
    for index, node in enumerate(nodes):
        if rank < node.num_devices:
            return index
        rank -= node.num_devices
    raise InputError(f"rank {rank} is beyond the last of {len(nodes)} nodes: give more nodes")
