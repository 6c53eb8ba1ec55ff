"""What configurations take at the least: seconds and bytes by layers, from graphs that leave equal layers out."""

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
from stagewright.planning.prediction.pipeline import body_costs
from stagewright.planning.prediction.predict import host_of, host_step_seconds, optimizer_step_seconds
from stagewright.planning.prediction.sharding import NUM_BUFFERS
from stagewright.planning.prediction.shortening import built
from stagewright.schedule.in_flight import changes
from stagewright.tracing.models.reference import ModelReference

Trace = Callable[..., OperatorGraph]


_FILLED = 0.03
"""Part by which some shapes of a product may fill a device better than its rate at any."""


@dataclass
class Coarse:
    """The graphs of a search, and bounds from the costs of their layers."""

    reference: ModelReference
    cluster: Cluster
    job: Job
    report: Callable[[str], None]
    trace: Trace
    graphs: dict[Configuration, OperatorGraph] = field(default_factory=dict)
    _bodies: dict[Configuration, RangeCosts] = field(default_factory=dict)
    _layers: dict[Configuration, Layers] = field(default_factory=dict)
    _splits: dict[Any, tuple[int, ...]] = field(default_factory=dict)
    _shares: dict[Configuration, float] = field(default_factory=dict)

    def trace_arguments(self, key: Configuration) -> dict[str, Any]:
        """Arguments of the tracer."""
        how = self.job.traced(self.cluster.nodes[0].device.kind)
        return {"microbatch_size": key.microbatch, **how, **key.trace_arguments, "expand": False}

    def graph(self, key: Configuration) -> OperatorGraph:
        """Return the graph of one rank, which may leave layers out. Raises what the tracer does."""
        if key not in self.graphs:
            self.graphs[key] = self.trace(self.reference, report=self.report, **self.trace_arguments(key))
        return self.graphs[key]

    def body(self, key: Configuration) -> RangeCosts:
        """Return the costs of ranges of the whole graph."""
        if key not in self._bodies:
            self._bodies[key] = body_costs(self.graph(key), self.cluster, self.job)
        return self._bodies[key]

    @property
    def without_rule(self) -> set[str]:
        """Operators so far whose costs no rule gives."""
        return {name for body in self._bodies.values() for name in body.few_costing.without_rule}

    def costs(
        self, key: Configuration, device: Device | None = None, recompute: Recompute = "none"
    ) -> LayerCosts:
        """Return the costs of every layer on one kind of device, by default the first of the cluster."""
        if key not in self._layers:
            self._layers[key] = Layers(self.graph(key), self.cluster, self.job)
        return self._layers[key].costs(device or self.cluster.nodes[0].device, recompute)

    def growing_share(self, key: Configuration) -> float:
        """Of what a sample takes, the least that it takes in larger microbatches."""
        if key not in self._shares:
            self.costs(key)
            self._shares[key] = self._layers[key].growing_share
        return self._shares[key]

    def narrower(self, key: Configuration, others: Iterable[Configuration] = ()) -> Configuration | None:
        """The widest of the graphs that there are, or would be of `others`, which says what `key` takes at the least; None
        where none does, as on devices of several kinds."""
        found = (
            known
            for known in (*self.graphs, *others)
            if self.cluster.is_homogeneous and known.ep == key.ep and (known.tp, known.cp) != (key.tp, key.cp)
            and _is_narrower(known.tp, key.tp) and _is_narrower(known.cp, key.cp)
        )  # fmt: skip
        return max(found, key=lambda known: (known.tp * known.cp, -known.microbatch), default=None)

    def wider_s(self, key: Configuration, known: Configuration) -> float:
        """The least that a step takes whose ranks share layers and samples as `key` says, however many stages and replicas
        there are, from the graph of `known`, which is `narrower`."""
        self.costs(known)
        seconds = self._layers[known].wider_seconds(key.tp / known.tp, key.cp / known.cp)
        num_ranks = self.cluster.num_devices / (key.tp * key.cp)
        return (1 - _FILLED) * self.job.global_batch * seconds / known.microbatch / num_ranks

    # -- seconds -----------------------------------------------------------------------------------------------------

    def first_bound_s(self, configuration: Configuration, key: Configuration, cluster: Cluster) -> float:
        """As if ranks could share the layers of every microbatch evenly, each on the fastest of their devices."""
        first, *others = {id(costs): costs for costs in self.columns(configuration, key, cluster)}.values()
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
        how = recompute or configuration.recomputed_alike
        own = [self._slowest(key, devices, how) for devices in devices_of_ranks(cluster, configuration.pp)]
        return own * (configuration.chunks or 1)

    def _slowest(self, key: Configuration, devices: Sequence[Device], recompute: Recompute) -> LayerCosts:
        first, *others = (self.costs(key, device, recompute) for device in devices)
        return max((first, *others), key=lambda costs: float(costs.seconds.sum())) if others else first

    def split(
        self, configuration: Configuration, key: Configuration, cluster: Cluster, most: Sequence[int] = ()
    ) -> tuple[int, ...] | None:
        """Layers of every stage, at most so many; None where the runtime's own partition is taken, or without layers."""
        columns = self.columns(configuration, key, cluster)
        if configuration.pp == 1 or not self.costs(key).num_layers:
            return None
        if most:
            return balanced_layers([each.seconds for each in columns], most)
        alike = key, configuration.pp, configuration.chunks, configuration.recomputed_alike, cluster
        if alike not in self._splits:
            self._splits[alike] = balanced_layers([each.seconds for each in columns])
        return self._splits[alike]

    def bound_s(self, configuration: Configuration, key: Configuration, cluster: Cluster) -> float:
        """No step of stages of whole layers is faster: every rank has its passes behind each other.

        In front of these and behind them there are those of one microbatch on the stages in front of its first; in between
        it waits for its first microbatch where that takes longer than the forwards it runs until then. There nothing is
        recomputed that may be while a rank waits.
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
        """What comes behind the batch at the least under our own runtime, as if all ranks had as many parameters: the
        optimizer, parameters that others have updated, and sums of gradients that nothing overlaps."""
        precision, parameters = self.job.precision, self._parameters(configuration, key)
        shards = (
            (configuration.shard_group or configuration.num_holders)
            if configuration.level >= OPTIMIZER
            else 1
        )
        fastest = max({group.device for group in cluster.nodes}, key=lambda device: device.memory_bandwidth)
        gradients = parameters * ITEM_BYTES[precision.gradient]
        if configuration.host_optimizer:
            seconds = host_step_seconds(self.job, gradients / shards, fastest, host_of(cluster, 0))
        else:
            seconds = optimizer_step_seconds(self.job, gradients / shards, fastest)
        holders = range(0, configuration.num_holders * configuration.tp, configuration.tp)
        if configuration.zero is None and len(holders) > 1:
            seconds += all_reduce_seconds(cluster, gradients, holders)
        if OPTIMIZER <= configuration.level < PARAMETERS:
            item = ITEM_BYTES[self.job.torch_name]
            seconds += all_gather_seconds(cluster, parameters * item, holders[:shards])
        return seconds

    def sharding_s(self, configuration: Configuration, key: Configuration, cluster: Cluster) -> float:
        """What the network takes to gather parameters and to reduce gradients, however much of it nobody waits for; of whole
        stages where there is room for these."""
        parameters = self._parameters(configuration, key)
        whole = parameters / (configuration.chunks or 1) * ITEM_BYTES[self.job.precision.gradient]
        if configuration.level >= PARAMETERS:
            whole += parameters / (configuration.chunks or 1) * ITEM_BYTES[self.job.torch_name]
        usable = usable_bytes_of_ranks(self.job, cluster, configuration.pp)[0]
        state = self.missing_anywhere(configuration, key, cluster) + usable
        has_room = state + NUM_BUFFERS * whole <= OF_STATE * usable
        return network_seconds(configuration, parameters, cluster, self.job, in_units=not has_room)

    def _parameters(self, configuration: Configuration, key: Configuration) -> float:
        """That are trained, of a rank, as if all had as many."""
        return (
            float(self.costs(key).trained_bytes.sum())
            / self.job.precision.bytes_per_parameter
            / configuration.pp
        )

    # -- bytes -------------------------------------------------------------------------------------------------------

    def missing_bytes(self, configuration: Configuration, key: Configuration, cluster: Cluster) -> int:
        """What the first or the last rank lacks at the least: of state, and of what microbatches in flight keep."""
        costs = self.columns(configuration, key, cluster)[0]
        kept, state = (
            stage_sums([column] * configuration.num_stages, configuration.layers_per_stage)
            for column in (costs.saved_bytes, costs.state_bytes)
        )
        share = configuration.state_share(self.job.precision)
        lacking = []
        usable = usable_bytes_of_ranks(self.job, cluster, configuration.pp)
        for rank in {0, configuration.pp - 1}:
            alive = _alive(
                configuration.schedule,
                configuration.pp,
                _enough(configuration),
                configuration.chunks or 1,
                rank,
            )
            own = slice(rank, None, configuration.pp)
            needed = share * state[own].sum() + float((alive @ kept[own]).max())
            lacking.append(needed - usable[rank])
        return int(max(lacking))

    def missing_anywhere(
        self, configuration: Configuration, key: Configuration, cluster: Cluster, num_saved: float = 0.0
    ) -> int:
        """What ranks lack on the average, wherever the model is cut: of state, and of what so many microbatches save."""
        costs = self.costs(key)
        share = configuration.state_share(self.job.precision)
        needed = share * float(costs.state_bytes.sum()) + num_saved * float(costs.saved_bytes.sum())
        return int(
            (needed - sum(usable_bytes_of_ranks(self.job, cluster, configuration.pp))) / configuration.pp
        )


def _is_narrower(known: int, width: int) -> bool:
    """Whether fewer ranks, of which there are several where there are in `width`, share what so many do."""
    return known == width or (1 < known < width and width % known == 0)


def _enough(configuration: Configuration) -> int:
    """Microbatches after which a program keeps no more than before."""
    wanted = configuration.pp + 1 if (configuration.chunks or 1) == 1 else 2 * configuration.pp
    return min(configuration.num_microbatches, wanted)


@lru_cache(maxsize=512)
def _alive(schedule: str, pp: int, num_microbatches: int, num_chunks: int, rank: int) -> Floats:
    """After every forward of a rank, of how many microbatches each of its stages keeps what it saves."""
    program = built(schedule, pp, num_microbatches, num_chunks if num_chunks > 1 else None)
    now: Counter[int] = Counter()
    rows: list[list[int]] = []
    for stage, change in changes(program.without_pairs().actions(rank)):
        now[stage // pp] += change
        if change > 0:
            rows.append([now[each] for each in range(num_chunks)])
    return np.unique(np.array(rows, float), axis=0)
