"""Lower bounds on the seconds and bytes of configurations by layers, from graphs that leave equal layers out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from stagewright.arrays import Floats
from stagewright.cluster import (
    Cluster,
    Device,
    all_gather_seconds,
    all_reduce_seconds,
)
from stagewright.estimation.stages import RangeCosts
from stagewright.graph import OperatorGraph
from stagewright.graph.flat_buffers import OPTIMIZER, PARAMETERS
from stagewright.graph.tensor import ITEM_BYTES
from stagewright.planning.assignment.device_order import devices_of_ranks, usable_bytes_of_ranks
from stagewright.planning.bounds.layer_costs import LayerCosts, Layers, stage_seconds, stage_sums
from stagewright.planning.candidate import OF_STATE, network_seconds
from stagewright.planning.configuration import Configuration, Recompute
from stagewright.planning.job import Job
from stagewright.planning.partition.layers import balanced_layers
from stagewright.planning.prediction.predict import host_of, host_step_seconds, optimizer_step_seconds
from stagewright.planning.prediction.staged_model import costs_of_model
from stagewright.schedule.builders import built
from stagewright.schedule.in_flight import changes
from stagewright.schedule.sharding import NUM_BUFFERS
from stagewright.tracing.models.reference import ModelReference

Trace = Callable[..., OperatorGraph]


_FILLED = 0.03
"""Fraction by which some shapes of a matmul may use a device better than its modelled rate."""


@dataclass
class Coarse:
    """The graphs of a search, and bounds from the costs of their layers."""

    reference: ModelReference
    cluster: Cluster
    job: Job
    report: Callable[[str], None]
    trace: Trace
    graphs: dict[Configuration, OperatorGraph] = field(default_factory=dict)
    _known_costs: dict[Configuration, RangeCosts] = field(default_factory=dict)
    _layers: dict[Configuration, Layers] = field(default_factory=dict)
    _splits: dict[Any, tuple[int, ...]] = field(default_factory=dict)

    def trace_arguments(self, key: Configuration) -> dict[str, Any]:
        """Return the arguments of the tracer."""
        of_job = self.job.traced(self.cluster.nodes[0].device.kind)
        return {"microbatch_size": key.microbatch, **of_job, **key.trace_arguments, "expand": False}

    def graph(self, key: Configuration) -> OperatorGraph:
        """Return the graph of one rank, which may leave equal layers out. Raises what the tracer raises."""
        if key not in self.graphs:
            self.graphs[key] = self.trace(self.reference, report=self.report, **self.trace_arguments(key))
        return self.graphs[key]

    def model_costs(self, key: Configuration) -> RangeCosts:
        """Return the costs of ranges of the whole graph."""
        if key not in self._known_costs:
            self._known_costs[key] = costs_of_model(self.graph(key), self.cluster, self.job)
        return self._known_costs[key]

    @property
    def without_rule(self) -> set[str]:
        """Operators seen so far without a cost rule."""
        return {
            name
            for model_costs in self._known_costs.values()
            for name in model_costs.few_costing.without_rule
        }

    def costs(
        self, key: Configuration, device: Device | None = None, recompute: Recompute = "none"
    ) -> LayerCosts:
        """Return the costs of every layer on one kind of device, by default the first of the cluster."""
        return self._layers_of(key).costs(device or self.cluster.nodes[0].device, recompute)

    def _layers_of(self, key: Configuration) -> Layers:
        if key not in self._layers:
            self._layers[key] = Layers(self.graph(key), self.cluster, self.job)
        return self._layers[key]

    def growing_share(self, key: Configuration) -> float:
        """Return a lower bound on the time of a sample in larger microbatches, as a fraction of its time in these."""
        return self._layers_of(key).growing_share

    def narrower(self, key: Configuration, others: Iterable[Configuration] = ()) -> Configuration | None:
        """Return the largest degrees, of the traced graphs and `others`, whose graph gives a lower bound for `key`, or None,
        as on devices of several kinds."""
        candidates = (
            degrees
            for degrees in (*self.graphs, *others)
            if self.cluster.is_homogeneous and degrees.ep == key.ep and (degrees.tp, degrees.cp) != (key.tp, key.cp)
            and _is_narrower(degrees.tp, key.tp) and _is_narrower(degrees.cp, key.cp)
        )  # fmt: skip
        return max(
            candidates, key=lambda degrees: (degrees.tp * degrees.cp, -degrees.microbatch), default=None
        )

    def wider_s(self, key: Configuration, narrower: Configuration) -> float:
        """Return a lower bound on a step with the degrees of `key`, for any number of stages and replicas, from the graph of
        the smaller degrees `narrower`."""
        seconds = self._layers_of(narrower).wider_seconds(key.tp // narrower.tp, key.cp // narrower.cp)
        num_ranks = self.cluster.num_devices / (key.tp * key.cp)
        return (1 - _FILLED) * self.job.global_batch * seconds / narrower.microbatch / num_ranks

    # -- seconds -----------------------------------------------------------------------------------------------------

    def first_bound_s(self, configuration: Configuration, key: Configuration, cluster: Cluster) -> float:
        """Return the step seconds if ranks could divide the layers of every microbatch evenly, on the fastest devices."""
        first, *others = dict.fromkeys(self.columns(configuration, key, cluster))
        whole_s = first.total_seconds
        if others:
            whole_s = float(np.min([costs.seconds for costs in (first, *others)], axis=0).sum())
        return configuration.num_microbatches * whole_s / configuration.pp

    def columns(
        self,
        configuration: Configuration,
        key: Configuration,
        cluster: Cluster,
        recompute: Recompute | None = None,
    ) -> list[LayerCosts]:
        """Return, for every stage, the costs of all layers on the slowest of its devices; `recompute` replaces that of the
        configuration."""
        setting = recompute or configuration.recomputed_alike
        if cluster.is_homogeneous:
            return [self.costs(key, cluster.device, setting)] * configuration.num_stages
        rank_costs = [
            self._slowest(key, devices, setting) for devices in devices_of_ranks(cluster, configuration.pp)
        ]
        return rank_costs * (configuration.chunks or 1)

    def _slowest(self, key: Configuration, devices: Sequence[Device], recompute: Recompute) -> LayerCosts:
        first, *others = (self.costs(key, device, recompute) for device in devices)
        return max((first, *others), key=lambda costs: float(costs.seconds.sum())) if others else first

    def split(
        self, configuration: Configuration, key: Configuration, cluster: Cluster, most: Sequence[int] = ()
    ) -> tuple[int, ...] | None:
        """Return the numbers of layers per stage, at most `most`, or None for a single stage or a model without layers."""
        columns = self.columns(configuration, key, cluster)
        if configuration.pp == 1 or not self.costs(key).num_layers:
            return None
        if most:
            return balanced_layers([costs.seconds for costs in columns], most)
        alike = key, configuration.pp, configuration.chunks, configuration.recomputed_alike, cluster
        if alike not in self._splits:
            self._splits[alike] = balanced_layers([costs.seconds for costs in columns])
        return self._splits[alike]

    def bound_s(self, configuration: Configuration, key: Configuration, cluster: Cluster) -> float:
        """Return a lower bound on the seconds of a batch with stages of whole layers: a rank runs one action at a time.

        Before and after these, one microbatch runs on the stages before the rank's first; in between the rank waits for the
        backward of its first microbatch where that takes longer than the forwards it runs until then. Recomputation that may
        run while a rank waits is not counted there.
        """
        columns = self.columns(configuration, key, cluster)
        forward_s, backward_s = stage_seconds(columns, configuration.layers_per_stage)
        first_s = forward_s + backward_s
        busy_s = first_s.reshape(-1, configuration.pp).sum(axis=0)
        if self.job.profile.recomputes_ahead:
            plain = self.columns(configuration, key, cluster, "none")
            first_s = np.add(*stage_seconds(plain, configuration.layers_per_stage))
        passed = np.concatenate([[0.0], first_s[: configuration.pp].cumsum()])
        fill = passed[:-1]
        if configuration.num_stages == configuration.pp:
            # Its first microbatch comes back while it runs the forwards of the next ones.
            ahead = np.minimum(np.arange(configuration.pp, 0, -1), configuration.num_microbatches) - 1
            fill = fill + np.maximum(0.0, passed[-1] - passed[1:] - ahead * forward_s)
        return float((busy_s * configuration.num_microbatches + fill).max())

    def after_s(self, configuration: Configuration, key: Configuration, cluster: Cluster) -> float:
        """Return a lower bound on the time after the batch under our own runtime, as if all ranks had equally many
        parameters: the optimizer, the all-gather of updated parameters, and gradient reductions that nothing overlaps."""
        precision, parameters = self.job.precision, self._parameters(configuration, key)
        shards = (
            (configuration.shard_group or configuration.num_holders)
            if configuration.level >= OPTIMIZER
            else 1
        )
        fastest = max({group.device for group in cluster.nodes}, key=lambda device: device.memory_bandwidth)
        gradients = parameters * ITEM_BYTES[precision.gradient]
        if configuration.host_optimizer:
            copied_from = None if configuration.streamed else fastest
            seconds = host_step_seconds(self.job, gradients / shards, copied_from, host_of(cluster, 0))
        else:
            seconds = optimizer_step_seconds(self.job, gradients / shards, fastest)
        holders = range(0, configuration.ranks_per_stage, configuration.tp)
        if configuration.zero is None and len(holders) > 1:
            seconds += all_reduce_seconds(cluster, gradients, holders)
        if OPTIMIZER <= configuration.level < PARAMETERS:
            item = ITEM_BYTES[self.job.torch_name]
            seconds += all_gather_seconds(cluster, parameters * item, holders[:shards])
        return seconds

    def sharding_s(self, configuration: Configuration, key: Configuration, cluster: Cluster) -> float:
        """Return the seconds of gathering parameters and reducing gradients, hidden or not: of whole stages at a time where
        these fit in memory, otherwise of units."""
        if configuration.streamed:
            return self._streaming_s(configuration, key, cluster)
        parameters = self._parameters(configuration, key)
        whole = parameters / (configuration.chunks or 1) * ITEM_BYTES[self.job.precision.gradient]
        if configuration.level >= PARAMETERS:
            whole += parameters / (configuration.chunks or 1) * ITEM_BYTES[self.job.torch_name]
        usable = usable_bytes_of_ranks(self.job, cluster, configuration.pp)[0]
        state = self.missing_anywhere(configuration, key, cluster) + usable
        fits_whole = state + NUM_BUFFERS * whole <= OF_STATE * usable
        return network_seconds(configuration, parameters, cluster, self.job, in_units=not fits_whole)

    def _streaming_s(self, configuration: Configuration, key: Configuration, cluster: Cluster) -> float:
        """Return a lower bound on the seconds to copy streamed weights to the devices: twice per batch, except for stages in
        a rank's buffers when it turns from forwards to backwards."""
        precision, costs = self.job.precision, self.costs(key)
        trained = (
            float(costs.trained_bytes.sum()) / precision.bytes_per_parameter * ITEM_BYTES[precision.parameter]
        )
        frozen = float((costs.state_bytes - costs.trained_bytes).sum())
        streamed = frozen + (trained if configuration.host_optimizer else 0.0)
        times = 2 * (1 - NUM_BUFFERS / (configuration.chunks or NUM_BUFFERS))
        fastest = max(group.device.host_link_bandwidth for group in cluster.nodes)
        return times * streamed / configuration.pp / fastest

    def _parameters(self, configuration: Configuration, key: Configuration) -> float:
        """Return the number of trained parameters of a rank, as if all ranks had equally many."""
        return (
            float(self.costs(key).trained_bytes.sum())
            / self.job.precision.bytes_per_parameter
            / configuration.pp
        )

    # -- bytes -------------------------------------------------------------------------------------------------------

    def missing_bytes(self, configuration: Configuration, key: Configuration, cluster: Cluster) -> int:
        """Return a lower bound on the bytes by which the fullest rank is over, from state and saved values: of the
        microbatches in flight on the first and the last rank, of one on the others."""

        def by_rank(column: Floats) -> Floats:
            columns = [column] * configuration.num_stages
            return stage_sums(columns, configuration.layers_per_stage).reshape(-1, configuration.pp)

        costs = self.columns(configuration, key, cluster)[0]
        saved, state = (
            by_rank(costs.saved_bytes),
            by_rank(configuration.kept_state(costs, self.job.precision)),
        )
        needed = state.sum(axis=0) + saved.max(axis=0)
        for rank in {0, configuration.pp - 1}:
            alive = _alive(
                configuration.schedule,
                configuration.pp,
                _enough(configuration),
                configuration.chunks or 1,
                rank,
            )
            needed[rank] = state[:, rank].sum() + float((alive @ saved[:, rank]).max())
        return int((needed - usable_bytes_of_ranks(self.job, cluster, configuration.pp)).max())

    def missing_anywhere(self, configuration: Configuration, key: Configuration, cluster: Cluster) -> int:
        """Return the average bytes by which ranks are over, regardless of cuts, from their state alone."""
        needed = float(configuration.kept_state(self.costs(key), self.job.precision).sum())
        usable = sum(usable_bytes_of_ranks(self.job, cluster, configuration.pp))
        return int((needed - usable) / configuration.pp)


def _is_narrower(smaller: int, degree: int) -> bool:
    """Return whether the degree `smaller` bounds `degree`: it is equal, or divides it and is above 1."""
    return smaller == degree or (1 < smaller < degree and degree % smaller == 0)


def _enough(configuration: Configuration) -> int:
    """Return the number of microbatches of a batch, or fewer if the peak memory of the program does not grow with more."""
    enough = configuration.pp + 1 if (configuration.chunks or 1) == 1 else 2 * configuration.pp
    return min(configuration.num_microbatches, enough)


@lru_cache(maxsize=512)
def _alive(schedule: str, pp: int, num_microbatches: int, num_chunks: int, rank: int) -> Floats:
    """Return, after every forward of a rank, the number of microbatches whose saved values each of its stages keeps; equal
    rows once."""
    program = built(schedule, pp, num_microbatches, num_chunks if num_chunks > 1 else None)
    now: Counter[int] = Counter()
    rows: list[list[int]] = []
    for stage, change in changes(program.actions(rank)):
        now[stage // pp] += change
        if change > 0:
            rows.append([now[chunk] for chunk in range(num_chunks)])
    return np.unique(np.array(rows, float), axis=0)
