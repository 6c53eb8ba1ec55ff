"""What every layer of a model costs: the figures that bounds are made of, from a graph that may leave equal layers out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from stagewright.arrays import Floats
from stagewright.cluster import Cluster, Device
from stagewright.estimation.operators import Kernel, work
from stagewright.estimation.stages import RangeCosts
from stagewright.estimation.time import Costing, together
from stagewright.graph import Node, OperatorGraph
from stagewright.graph.layers import layer_begins, layer_of
from stagewright.graph.repeat import REPEATS
from stagewright.graph.split import split_graph
from stagewright.graph.stage import Stage
from stagewright.graph.tensor_parallel import COLLECTIVES, GROUP, group_of
from stagewright.planning.configuration import Recompute
from stagewright.planning.job import Job
from stagewright.planning.prediction.pipeline import costing
from stagewright.planning.prediction.regions import kept_policy, layers_policy, selective_policy


@dataclass(frozen=True)
class LayerCosts:
    """Of one microbatch, per numbered layer, and one entry in front of these and one behind for what is around them.

    * `forward`, `backward`: what `together` makes seconds from, in five columns; what is recomputed is in the second;
    * `state_bytes`: parameters, gradients and optimizer state;
    * `saved_bytes`: what the forward leaves for the backward;
    * `trained_bytes`: of `state_bytes`, what belongs to parameters that are trained.
    """

    forward: Floats
    backward: Floats
    state_bytes: Floats
    saved_bytes: Floats
    trained_bytes: Floats
    boundary_bytes: float
    """What one layer hands to the next."""

    @property
    def num_layers(self) -> int:
        return len(self.state_bytes) - 2

    @cached_property
    def seconds(self) -> Floats:
        """Of forward and backward."""
        return together(*self.forward.T) + together(*self.backward.T)

    @cached_property
    def total_seconds(self) -> float:
        """Of the whole model on one device."""
        return float(together(*self.forward.sum(axis=0)) + together(*self.backward.sum(axis=0)))


def stage_seconds(
    costs: Sequence[LayerCosts], layers_per_stage: Sequence[int] | None
) -> tuple[Floats, Floats]:
    """Of every stage, on its device, the seconds of its forward and of its backward, of layers as `stage_sums` says."""
    forward, backward = (
        stage_sums(columns, layers_per_stage)
        for columns in ([one.forward for one in costs], [one.backward for one in costs])
    )
    return together(*forward.T), together(*backward.T)


def stage_sums(columns: Sequence[Floats], layers_per_stage: Sequence[int] | None) -> Floats:
    """Of every stage the sum of its layers, by the column of the stage, shaped as the fields of `LayerCosts`; the first has
    what is in front of the layers too, and the last what is behind.

    Without `layers_per_stage` every stage has an even share of everything.

    >>> stage_sums([np.array([1.0, 10, 10, 10, 5])] * 2, (2, 1)), stage_sums([np.array([4.0, 0])] * 2, None)
    (array([21., 15.]), array([2., 2.]))
    """
    if layers_per_stage is None:
        return np.array([column.sum(axis=0) / len(columns) for column in columns])
    ends = np.concatenate([[0], 1 + np.cumsum(layers_per_stage)])
    ends[-1] += 1
    ranges = zip(columns, ends[:-1], ends[1:], strict=True)
    return np.array([column[start:stop].sum(axis=0) for column, start, stop in ranges])


class Layers:
    """The layers of `graph` as the job's runtime runs it on devices of `cluster`; the whole of a model without numbered
    layers is in front of none."""

    def __init__(self, graph: OperatorGraph, cluster: Cluster, job: Job) -> None:
        graph = self.graph = job.rewritten(graph)
        self._cluster = cluster
        self._body = RangeCosts(graph, costing(graph, cluster, job))
        begins = layer_begins(graph)
        names = [layer_of(graph.nodes[graph.forward_ids[place]].module) for place in begins]
        numbered = [
            place for place, node in enumerate(graph.forward_ids) if layer_of(graph.nodes[node].module)
        ]
        size = len(graph.forward_ids)
        self._ends = np.array([0, *begins, numbered[-1] + 1, size] if begins else [0, size, size])
        self._counts = np.ones(len(self._ends) - 1, np.int64)
        for repeat in graph.facts.get(REPEATS, ()):
            self._counts[1 + names.index(repeat.layer(repeat.before[-1]))] += len(repeat.missing)
        self.stage = cache(self._stage)
        """All of the graph as one stage, of which as much is recomputed as that says."""
        self.costs = cache(self._costs)
        """Of every layer on a kind of device, where as much is recomputed as that says."""

    def _costs(self, device: Device, recompute: Recompute = "none") -> LayerCosts:
        body, ends, stage = self._body.on(device), self._ends, self.stage(recompute)
        backward = *stage.rebuild.nodes, *stage.backward.nodes
        state = np.diff(body.state_bytes[ends])
        columns = (
            self._spent(stage.forward.nodes, stage, body.costing), self._spent(backward, stage, body.costing),
            state, self._saved(stage), np.diff(body.trained_bytes[ends]),
        )  # fmt: skip
        repeated = (np.repeat(column, self._counts, axis=0) for column in columns)
        return LayerCosts(*repeated, boundary_bytes=self._boundary_bytes)

    @cached_property
    def growing_share(self) -> float:
        """Of what a sample takes, the least that it takes in larger microbatches; the least of all kinds of devices."""
        return min(map(self._growing_share, {group.device for group in self._cluster.nodes}))

    def _growing_share(self, device: Device) -> float:
        stage, costing = self.stage("none"), self._body.on(device).costing
        nodes = *stage.forward.nodes, *stage.backward.nodes
        return min(1.0, costing.growing_seconds(nodes, stage.value) / costing.seconds(nodes, stage.value))

    def wider_seconds(self, tp: float, cp: float) -> float:
        """Of the whole model, the least that a microbatch takes where `tp` times as many ranks share every layer and `cp`
        times as many every sample: what they tell each other of a layer does not become less, everything else that much, but
        for what does not grow with its size."""
        stage, costing = self.stage("none"), self._body.costing
        position, layer, seconds = self.graph.position, 0, 0.0
        for node in (*stage.forward.nodes, *stage.backward.nodes):
            if node.forward in position:
                layer = self._layer(position[node.forward])
            is_shared = node.op in COLLECTIVES and group_of(node)[0] == GROUP
            shrinks = cp if is_shared else tp * cp
            if work(node, stage.value).kernel is Kernel.MEMORY and node.op not in COLLECTIVES:
                continue  # which may run out of the cache where it is narrower
            seconds += costing.growing(node, stage.value) * self._counts[layer] / shrinks
        return seconds

    @cached_property
    def _boundary_bytes(self) -> float:
        return float(self._body.cuts.value_bytes[self._ends[-3]]) if len(self._ends) > 4 else 0.0

    def _stage(self, recompute: Recompute) -> Stage:
        policy = {"none": kept_policy, "selective": selective_policy, "full": layers_policy}[recompute]
        return split_graph(self.graph, [], [policy(self.graph)])[0]

    def _spent(self, nodes: Iterable[Node], stage: Stage, costing: Costing) -> Floats:
        """What nodes in running order cost by layer; what splitting adds belongs where the node in front of it does."""
        found = np.zeros((len(self._counts), 5))
        layer, position = 0, self.graph.position
        for node in nodes:
            if node.forward in position:
                layer = self._layer(position[node.forward])
            cost = costing.of(node, stage.value)
            found[layer] += cost.device_s, cost.host_s, cost.overlapped_s, cost.product_s, cost.hidden_s
        return found

    def _saved(self, stage: Stage) -> Floats:
        """What F leaves of what it made, by the layer that made it."""
        found = np.zeros(len(self._counts))
        graph, position = self.graph, self.graph.position
        for root in {stage.value(value).storage for value in stage.saved}:
            maker = graph.values[root].node if root < len(graph.values) else -1
            if maker in position:
                found[self._layer(position[maker])] += graph.storage_bytes[root]
        return found

    def _layer(self, place: int) -> int:
        return int(np.searchsorted(self._ends[1:-1], place, side="right"))
