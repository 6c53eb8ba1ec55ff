"""Costs of every layer of a model, from which bounds follow; the graph may leave equal layers out."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from stagewright.arrays import Floats
from stagewright.cluster import Cluster, Device
from stagewright.estimation.stages import RangeCosts
from stagewright.estimation.time import Costing, together
from stagewright.graph import Node, OperatorGraph
from stagewright.graph.layers import layer_begins, layer_of
from stagewright.graph.repeat import REPEATS
from stagewright.graph.split import split_graph
from stagewright.graph.stage import Stage
from stagewright.graph.tensor_parallel import (
    ALL_GATHER,
    COLLECTIVES,
    CONTEXT_GROUP,
    GROUP,
    REDUCE_SCATTER,
    group_of,
    local_values,
)
from stagewright.planning.configuration import Recompute
from stagewright.planning.job import Job
from stagewright.planning.prediction.regions import kept_policy, layers_policy, selective_policy
from stagewright.planning.prediction.staged_model import costing


@dataclass(frozen=True, eq=False)
class LayerCosts:
    """Costs of one microbatch per numbered layer, with one entry before and one after them for the rest of the model.

    * `forward`, `backward`: three columns from which `together` computes seconds; recomputation is in `backward`;
    * `state_bytes`: parameters, gradients and optimizer state;
    * `saved_bytes`: values that the forward saves for the backward;
    * `trained_bytes`: the part of `state_bytes` that belongs to trained parameters.
    """

    forward: Floats
    backward: Floats
    state_bytes: Floats
    saved_bytes: Floats
    trained_bytes: Floats
    boundary_bytes: float
    """Bytes that one layer sends to the next."""

    @property
    def num_layers(self) -> int:
        return len(self.state_bytes) - 2

    @cached_property
    def seconds(self) -> Floats:
        """Seconds of forward and backward."""
        return together(*self.forward.T) + together(*self.backward.T)

    @cached_property
    def total_seconds(self) -> float:
        """Seconds of the whole model on one device."""
        return float(together(*self.forward.sum(axis=0)) + together(*self.backward.sum(axis=0)))


def stage_seconds(
    costs: Sequence[LayerCosts], layers_per_stage: Sequence[int] | None
) -> tuple[Floats, Floats]:
    """Return the seconds of the forward and the backward of every stage on its device; its layers are as in `stage_sums`."""
    forward, backward = (
        stage_sums(columns, layers_per_stage)
        for columns in (
            [layer_costs.forward for layer_costs in costs],
            [layer_costs.backward for layer_costs in costs],
        )
    )
    return together(*forward.T), together(*backward.T)


def stage_sums(columns: Sequence[Floats], layers_per_stage: Sequence[int] | None) -> Floats:
    """Return, for every stage, the sum over its layers of the stage's column, shaped like the fields of `LayerCosts`.

    The first stage also has what precedes the layers, and the last what follows them. Without `layers_per_stage` every stage
    has an even share of everything.

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
    """The layers of `graph` as the job's runtime runs it on devices of `cluster`; a model without numbered layers is all in
    the entry before them."""

    def __init__(self, graph: OperatorGraph, cluster: Cluster, job: Job) -> None:
        graph = self.graph = job.rewritten(graph)
        self._cluster = cluster
        self._model_costs = RangeCosts(graph, costing(graph, cluster, job))
        begins = layer_begins(graph)
        names = [layer_of(graph.nodes[graph.forward_ids[place]].module) for place in begins]
        numbered = [
            place for place, node in enumerate(graph.forward_ids) if layer_of(graph.nodes[node].module)
        ]
        size = len(graph.forward_ids)
        self._ends = np.array([0, *begins, numbered[-1] + 1, size] if begins else [0, size, size])
        self._inner_ends: list[int] = self._ends[1:-1].tolist()
        self._counts = np.ones(len(self._ends) - 1, np.int64)
        for repeat in graph.facts.get(REPEATS, ()):
            self._counts[1 + names.index(repeat.layer(repeat.before[-1]))] += len(repeat.missing)
        self.stage = cache(self._stage)
        """The whole graph as one stage, by what is recomputed."""
        self.costs = cache(self._costs)
        """Costs of every layer, by the kind of device and what is recomputed."""

    def _costs(self, device: Device, recompute: Recompute) -> LayerCosts:
        model_costs, ends, stage = self._model_costs.on(device), self._ends, self.stage(recompute)
        backward = *stage.rebuild.nodes, *stage.backward.nodes
        state = np.diff(model_costs.state_bytes[ends])
        columns = (
            self._spent(stage.forward.nodes, stage, model_costs.costing), self._spent(backward, stage, model_costs.costing),
            state, self._saved(stage), np.diff(model_costs.trained_bytes[ends]),
        )  # fmt: skip
        repeated = (np.repeat(column, self._counts, axis=0) for column in columns)
        return LayerCosts(*repeated, boundary_bytes=self._boundary_bytes)

    @cached_property
    def growing_share(self) -> float:
        """Lower bound on the time of a sample in larger microbatches, as a fraction of its time in these; the minimum over
        the kinds of devices."""
        return min(map(self._growing_share, {group.device for group in self._cluster.nodes}))

    def _growing_share(self, device: Device) -> float:
        stage, costing = self.stage("none"), self._model_costs.on(device).costing
        nodes = *stage.forward.nodes, *stage.backward.nodes
        growing = sum(
            costing.growing(node, stage.value) * self._counts[layer]
            for node, layer in zip(nodes, self._layers(nodes), strict=True)
        )
        return min(1.0, growing / self.costs(device, "none").total_seconds)

    def wider_seconds(self, tp: int, cp: int) -> float:
        """Return a lower bound on the seconds of a microbatch of the whole model with `tp` times the tensor parallel degree
        and `cp` times the context parallel degree, without costs that are fixed.

        The ranks of a context parallel group divide all their work. Those of a tensor parallel group divide only operators
        on values that differ between them; each runs the others itself. What a group gathers and scatters does not shrink.
        """
        stage, costing, seconds = self.stage("none"), self._model_costs.costing, 0.0
        whole = set(range(len(self.graph.values))) - local_values(self.graph)
        times = {GROUP: tp, CONTEXT_GROUP: cp}
        nodes = *stage.forward.nodes, *stage.backward.nodes
        for node, layer in zip(nodes, self._layers(nodes), strict=True):
            group, size = group_of(node) if node.op in COLLECTIVES else ("", 1)
            if group == GROUP or (group == CONTEXT_GROUP and node.op in (ALL_GATHER, REDUCE_SCATTER)):
                factor = times[group]
                node_s = costing.growing_among(node, stage.value, factor * size) * factor / (tp * cp)
            else:
                is_whole = whole.issuperset(
                    value for value in (*node.inputs, *node.outputs) if value is not None
                )
                node_s = costing.growing_with(node, stage.value, 1 / (cp if is_whole else tp * cp))
            seconds += node_s * self._counts[layer]
        return seconds

    @cached_property
    def _boundary_bytes(self) -> float:
        return float(self._model_costs.cuts.value_bytes[self._ends[-3]]) if len(self._ends) > 4 else 0.0

    def _stage(self, recompute: Recompute) -> Stage:
        policy = {"none": kept_policy, "selective": selective_policy, "full": layers_policy}[recompute]
        return split_graph(self.graph, [], [policy(self.graph)])[0]

    def _spent(self, nodes: Sequence[Node], stage: Stage, costing: Costing) -> Floats:
        """Return the costs by layer of nodes in the order they run."""
        spent = np.zeros((len(self._counts), 3))
        np.add.at(spent, self._layers(nodes), costing.columns(nodes, stage.value).T)
        return spent

    def _layers(self, nodes: Sequence[Node]) -> list[int]:
        """Return the layer of each node, in the order they run; nodes added by splitting belong to the layer before."""
        layer, layers, position = 0, list[int](), self.graph.position
        for node in nodes:
            if node.forward in position:
                layer = self._layer(position[node.forward])
            layers.append(layer)
        return layers

    def _saved(self, stage: Stage) -> Floats:
        """Return the bytes of values saved by the forward, by the layer that produces them."""
        saved = np.zeros(len(self._counts))
        graph, position = self.graph, self.graph.position
        for root in {stage.value(value).storage for value in stage.saved}:
            maker = graph.values[root].node if root < len(graph.values) else -1
            if maker in position:
                saved[self._layer(position[maker])] += graph.storage_bytes[root]
        return saved

    def _layer(self, place: int) -> int:
        return bisect.bisect_right(self._inner_ends, place)
