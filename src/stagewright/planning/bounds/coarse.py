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
from stagewright.graph import OperatorGraph
from stagewright.graph.flat_buffers import OPTIMIZER, PARAMETERS
from stagewright.graph.tensor import ITEM_BYTES
from stagewright.planning.assignment.device_order import devices_of_ranks, usable_bytes_of_ranks
from stagewright.planning.bounds.layer_costs import LayerCosts, Layers, stage_seconds, stage_sums
from stagewright.planning.candidate import OF_STATE, Choice, network_seconds
from stagewright.planning.job import Job
from stagewright.planning.partition.layers import balanced_layers
from stagewright.planning.plan import shared_layers
from stagewright.planning.prediction.predict import host_of, host_step_seconds, optimizer_step_seconds
from stagewright.planning.prediction.sharding import NUM_BUFFERS
from stagewright.planning.prediction.shortening import built
from stagewright.planning.space import Recomputed, Sizes
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
    graphs: dict[Sizes, OperatorGraph] = field(default_factory=dict)
    _layers: dict[Sizes, Layers] = field(default_factory=dict)
    _splits: dict[Any, tuple[int, ...]] = field(default_factory=dict)
    _shares: dict[Sizes, float] = field(default_factory=dict)

    def traced(self, one: Sizes) -> dict[str, Any]:
        """What is asked of the tracer."""
        shared = shared_layers(one.tp, one.sequence_parallel, one.cp, one.ep)
        pieces = {"loss_pieces": one.loss_pieces} if one.loss_pieces > 1 else {}
        how = self.job.traced(self.cluster.nodes[0].device.kind)
        return {"microbatch_size": one.microbatch_size, **how, **shared, **pieces, "expand": False}

    def graph(self, one: Sizes) -> OperatorGraph:
        """Of one rank; may leave layers out. Raises what the tracer does."""
        if one not in self.graphs:
            self.graphs[one] = self.trace(self.reference, report=self.report, **self.traced(one))
        return self.graphs[one]

    def costs(self, one: Sizes, device: Device | None = None, recompute: Recomputed = "none") -> LayerCosts:
        """Of every layer on one kind of device, by default the first of the cluster."""
        if one not in self._layers:
            self._layers[one] = Layers(self.graph(one), self.cluster, self.job)
        return self._layers[one].costs(device or self.cluster.nodes[0].device, recompute)

    def growing_share(self, one: Sizes) -> float:
        """Of what a sample takes, the least that it takes in larger microbatches."""
        if one not in self._shares:
            self.costs(one)
            self._shares[one] = self._layers[one].growing_share
        return self._shares[one]

    def narrower(self, one: Sizes, others: Iterable[Sizes] = ()) -> Sizes | None:
        """The widest of the graphs that there are, or would be of `others`, which says what `one` takes at the least; None
        where none does, as on devices of several kinds."""
        found = (
            known
            for known in (*self.graphs, *others)
            if self.cluster.is_homogeneous and known.ep == one.ep and (known.tp, known.cp) != (one.tp, one.cp)
            and _is_narrower(known.tp, one.tp) and _is_narrower(known.cp, one.cp)
        )  # fmt: skip
        return max(found, key=lambda known: (known.tp * known.cp, -known.microbatch_size), default=None)

    def wider_s(self, one: Sizes, known: Sizes) -> float:
        """The least that a step takes whose ranks share layers and samples as `one` says, however many stages and replicas
        there are, from the graph of `known`, which is `narrower`."""
        self.costs(known)
        seconds = self._layers[known].wider_seconds(one.tp / known.tp, one.cp / known.cp)
        num_ranks = self.cluster.num_devices / (one.tp * one.cp)
        return (1 - _FILLED) * self.job.global_batch * seconds / known.microbatch_size / num_ranks

    # -- seconds -----------------------------------------------------------------------------------------------------

    def first_bound_s(self, choice: Choice, one: Sizes, cluster: Cluster) -> float:
        """As if ranks could share the layers of every microbatch evenly, each on the fastest of their devices."""
        first, *others = {id(costs): costs for costs in self.columns(choice, one, cluster)}.values()
        whole_s = first.total_seconds
        if others:
            whole_s = float(np.min([costs.seconds for costs in (first, *others)], axis=0).sum())
        return choice.num_microbatches * whole_s / choice.pp

    def columns(
        self, choice: Choice, one: Sizes, cluster: Cluster, recompute: Recomputed | None = None
    ) -> list[LayerCosts]:
        """Of every stage: the costs of all layers on the slowest of its devices, recomputed as `choice` says or as asked."""
        how = recompute or choice.recomputed_alike
        own = [self._slowest(one, devices, how) for devices in devices_of_ranks(cluster, choice.pp)]
        return own * (choice.num_chunks or 1)

    def _slowest(self, one: Sizes, devices: Sequence[Device], recompute: Recomputed) -> LayerCosts:
        first, *others = (self.costs(one, device, recompute) for device in devices)
        return max((first, *others), key=lambda costs: float(costs.seconds.sum())) if others else first

    def split(
        self, choice: Choice, one: Sizes, cluster: Cluster, most: Sequence[int] = ()
    ) -> tuple[int, ...] | None:
        """Layers of every stage, at most so many; None where the runtime's own partition is taken, or without layers."""
        columns = self.columns(choice, one, cluster)
        if choice.pp == 1 or not self.costs(one).num_layers:
            return None
        if most:
            return balanced_layers([each.seconds for each in columns], most)
        key = one, choice.pp, choice.num_chunks, choice.recomputed_alike, cluster
        if key not in self._splits:
            self._splits[key] = balanced_layers([each.seconds for each in columns])
        return self._splits[key]

    def bound_s(self, choice: Choice, one: Sizes, cluster: Cluster) -> float:
        """No step of stages of whole layers is faster: every rank has its passes behind each other.

        In front of these and behind them there are those of one microbatch on the stages in front of its first; in between
        it waits for its first microbatch where that takes longer than the forwards it runs until then. There nothing is
        recomputed that may be while a rank waits.
        """
        columns = self.columns(choice, one, cluster)
        forward_s, backward_s = stage_seconds(columns, choice.layers_per_stage)
        first_s = forward_s + backward_s
        busy_s = first_s.reshape(-1, choice.pp).sum(axis=0)
        if self.job.profile.recomputes_ahead:
            plain = self.columns(choice, one, cluster, "none")
            first_s = np.add(*stage_seconds(plain, choice.layers_per_stage))
        passed = np.concatenate([[0.0], first_s[: choice.pp].cumsum()])
        fill = passed[:-1]
        if choice.num_stages == choice.pp:
            # Its first microbatch comes back while it runs the forwards of the next ones.
            ahead = np.minimum(np.arange(choice.pp, 0, -1), choice.num_microbatches) - 1
            fill = fill + np.maximum(0.0, passed[-1] - passed[1:] - ahead * forward_s)
        return float((busy_s * choice.num_microbatches + fill).max())

    def after_s(self, choice: Choice, one: Sizes, cluster: Cluster) -> float:
        """What comes behind the batch at the least under our own runtime, as if all ranks had as many parameters: the
        optimizer, parameters that others have updated, and sums of gradients that nothing overlaps."""
        precision, parameters = self.job.precision, self._parameters(choice, one)
        shards = (choice.shard_size or choice.num_holders) if choice.level >= OPTIMIZER else 1
        fastest = max({group.device for group in cluster.nodes}, key=lambda device: device.memory_bandwidth)
        gradients = parameters * ITEM_BYTES[precision.gradient]
        if choice.host_optimizer:
            seconds = host_step_seconds(self.job, gradients / shards, fastest, host_of(cluster, 0))
        else:
            seconds = optimizer_step_seconds(self.job, gradients / shards, fastest)
        holders = range(0, choice.num_holders * choice.tp, choice.tp)
        if choice.zero is None and len(holders) > 1:
            seconds += all_reduce_seconds(cluster, gradients, holders)
        if OPTIMIZER <= choice.level < PARAMETERS:
            item = ITEM_BYTES[self.job.torch_name]
            seconds += all_gather_seconds(cluster, parameters * item, holders[:shards])
        return seconds

    def sharding_s(self, choice: Choice, one: Sizes, cluster: Cluster) -> float:
        """What the network takes to gather parameters and to reduce gradients, however much of it nobody waits for; of whole
        stages where there is room for these."""
        parameters = self._parameters(choice, one)
        whole = parameters / (choice.num_chunks or 1) * ITEM_BYTES[self.job.precision.gradient]
        if choice.level >= PARAMETERS:
            whole += parameters / (choice.num_chunks or 1) * ITEM_BYTES[self.job.torch_name]
        usable = usable_bytes_of_ranks(self.job, cluster, choice.pp)[0]
        state = self.missing_anywhere(choice, one, cluster) + usable
        has_room = state + NUM_BUFFERS * whole <= OF_STATE * usable
        return network_seconds(choice, parameters, cluster, self.job, in_units=not has_room)

    def _parameters(self, choice: Choice, one: Sizes) -> float:
        """That are trained, of a rank, as if all had as many."""
        return float(self.costs(one).trained_bytes.sum()) / self.job.precision.bytes_per_parameter / choice.pp

    # -- bytes -------------------------------------------------------------------------------------------------------

    def missing_bytes(self, choice: Choice, one: Sizes, cluster: Cluster) -> int:
        """What the first or the last rank lacks at the least: of state, and of what microbatches in flight keep."""
        costs = self.columns(choice, one, cluster)[0]
        kept, state = (
            stage_sums([column] * choice.num_stages, choice.layers_per_stage)
            for column in (costs.saved_bytes, costs.state_bytes)
        )
        share = choice.state_share(self.job.precision)
        lacking = []
        usable = usable_bytes_of_ranks(self.job, cluster, choice.pp)
        for rank in {0, choice.pp - 1}:
            alive = _alive(choice.schedule, choice.pp, _enough(choice), choice.num_chunks or 1, rank)
            own = slice(rank, None, choice.pp)
            needed = share * state[own].sum() + float((alive @ kept[own]).max())
            lacking.append(needed - usable[rank])
        return int(max(lacking))

    def missing_anywhere(self, choice: Choice, one: Sizes, cluster: Cluster, num_saved: float = 0.0) -> int:
        """What ranks lack on the average, wherever the model is cut: of state, and of what so many microbatches save."""
        costs = self.costs(one)
        share = choice.state_share(self.job.precision)
        needed = share * float(costs.state_bytes.sum()) + num_saved * float(costs.saved_bytes.sum())
        return int((needed - sum(usable_bytes_of_ranks(self.job, cluster, choice.pp))) / choice.pp)


def _is_narrower(known: int, width: int) -> bool:
    """Whether fewer ranks, of which there are several where there are in `width`, share what so many do."""
    return known == width or (1 < known < width and width % known == 0)


def _enough(choice: Choice) -> int:
    """Microbatches after which a program keeps no more than before."""
    wanted = choice.pp + 1 if (choice.num_chunks or 1) == 1 else 2 * choice.pp
    return min(choice.num_microbatches, wanted)


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
