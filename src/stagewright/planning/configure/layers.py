"""What every layer of a model costs: the figures that bounds are made of, from a graph that may leave equal layers out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stagewright.cluster import Cluster, Device
from stagewright.estimation.stages import BodyCosts, Floats
from stagewright.graph import OperatorGraph
from stagewright.graph.depth import REPEATS
from stagewright.graph.layers import layer_begins, layer_of
from stagewright.planning.job import Job
from stagewright.planning.pipeline import costing
from stagewright.planning.regions import layers_policy


@dataclass(frozen=True)
class LayerCosts:
    """Of one microbatch, per numbered layer, and one entry in front of these and one behind for what is around them.

    * `seconds`: forward and both gradients; `forward_seconds` of these;
    * `state_bytes`: parameters, gradients and optimizer state;
    * `saved_bytes`: what the forward leaves for the backward; `input_bytes` where only what enters it is kept.
    """

    seconds: Floats
    forward_seconds: Floats
    state_bytes: Floats
    saved_bytes: Floats
    input_bytes: Floats
    boundary_bytes: float
    """What one layer hands to the next."""

    @property
    def num_layers(self) -> int:
        return len(self.seconds) - 2

    @property
    def again_seconds(self) -> Floats:
        """Of the second forward where every layer is recomputed; none of what is around the layers."""
        found = self.forward_seconds.copy()
        found[[0, -1]] = 0.0
        return found


def stage_sums(columns: Sequence[Floats], layers_per_stage: Sequence[int] | None) -> Floats:
    """Of every stage the sum of its layers, by the column of the stage, shaped as the fields of `LayerCosts`; the first has
    what is in front of the layers too, and the last what is behind.

    Without `layers_per_stage` every stage has an even share of everything.

    >>> stage_sums([np.array([1.0, 10, 10, 10, 5])] * 2, (2, 1)), stage_sums([np.array([4.0, 0])] * 2, None)
    (array([21., 15.]), array([2., 2.]))
    """
    if layers_per_stage is None:
        return np.array([column.sum() / len(columns) for column in columns])
    ends = np.concatenate([[0], 1 + np.cumsum(layers_per_stage)])
    ends[-1] += 1
    ranges = zip(columns, ends[:-1], ends[1:], strict=True)
    return np.array([column[start:stop].sum() for column, start, stop in ranges])


def layer_costs(graph: OperatorGraph, cluster: Cluster, job: Job, device: Device) -> LayerCosts:
    """Of `graph` as the job's runtime runs it on one kind of device of `cluster`; the whole of a model without numbered
    layers is in front of none."""
    fused = job.profile.rewrite(graph)
    body = BodyCosts(fused, costing(fused, cluster, job)).on(device)
    begins = layer_begins(fused)
    numbered = [place for place, node in enumerate(fused.body) if layer_of(fused.nodes[node].module)]
    behind = numbered[-1] + 1 if numbered else body.size
    ends = np.array([0, *begins, behind, body.size])
    if not begins:
        ends = np.array([0, body.size, body.size])
    names = [layer_of(fused.nodes[fused.body[place]].module) for place in begins]
    counts = np.ones(len(ends) - 1, np.int64)
    for repeat in graph.facts.get(REPEATS, ()):
        counts[1 + names.index(repeat.layer(repeat.before[-1]))] += len(repeat.missing)
    columns = (body.seconds, body.forward_seconds, body.state_bytes, body.saved_bytes, _inputs(body))
    boundary = float(body.cuts.value_bytes[begins[-1]]) if len(begins) > 1 else 0.0
    seconds, forward, state, saved, inputs = (np.repeat(np.diff(column[ends]), counts) for column in columns)
    return LayerCosts(seconds, forward, state, saved, inputs, boundary)


def _inputs(body: BodyCosts) -> Floats:
    """Bytes that enter layers, summed up to every position of the body."""
    graph, kept = body.graph, layers_policy(body.graph).checkpoints
    made = np.zeros(body.size + 1)
    for root in kept:
        place = graph.position.get(graph.values[root].node)
        if place is not None:
            made[place + 1] += graph.storage_bytes[root]
    return made.cumsum()
