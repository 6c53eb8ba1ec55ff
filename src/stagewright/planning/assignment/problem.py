"""The places of a configuration and what it costs to put units of devices there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stagewright.arrays import Floats, Ints
from stagewright.cluster import Cluster
from stagewright.errors import InputError
from stagewright.planning.assignment.kernels import Terms, cost


@dataclass(frozen=True, eq=False)
class Grid:
    """`num_replicas` pipelines of `num_stages` places; a unit of devices (a tensor-parallel group) takes each.

    Args:
        hop: [unit, unit] seconds of a step that a pipeline waits between two of its units, both ways.
        ring: [unit, unit] seconds of a step to pass a stage's gradients from one unit to the next of its ring.
        ring_share: [stage] what a stage has of the gradients that `ring` is for.
        fill: [unit, stage] seconds of one microbatch, forward and backward.
        busy: [unit, stage] seconds of all other microbatches.
        tie: [unit, unit] seconds to add up gradients of parameters that both stages `tied` hold; none: nothing is tied.
        node: [unit] the node of a unit; none: each has its own.
        by_default: the unit at each place when nobody chooses; none: units in their own order.
    """

    num_replicas: int
    num_stages: int
    hop: Floats
    ring: Floats
    ring_share: Floats
    fill: Floats
    busy: Floats
    by_default: tuple[int, ...] = ()
    tie: Floats | None = None
    tied: tuple[int, int] = (0, 0)
    node: Ints | None = None

    def __post_init__(self) -> None:
        units, stages = self.num_units, self.num_stages
        wanted = {
            "hop": (units, units), "ring": (units, units), "ring_share": (stages,),
            "fill": (units, stages), "busy": (units, stages),
        }  # fmt: skip
        for name, shape in wanted.items():
            if getattr(self, name).shape != shape:
                raise InputError(f"{name} has shape {getattr(self, name).shape}: give {shape}")

    @property
    def num_units(self) -> int:
        return self.num_replicas * self.num_stages

    @property
    def default(self) -> Ints:
        """The unit at each place when nobody chooses."""
        return np.array(self.by_default or range(self.num_units), dtype=np.int64)

    def seconds(self, order: Ints) -> float:
        """Seconds of a step with unit ``order[replica * num_stages + stage]`` at each place.

        The slowest pipeline passes one microbatch, its slowest unit the others, then the slowest ring reduces gradients, and
        the slowest pair of units those of tied parameters.
        Source: Pipette's objective (Yim et al., DATE 2024), with every stage's ring, both directions of a link, tied
        parameters and the units' own times. Ignores: several rings and pipelines on one link at a time.
        """
        return float(cost(order, self.terms))

    @property
    def terms(self) -> Terms:
        """As the kernels take it."""
        tie = np.zeros((self.num_units, self.num_units)) if self.tie is None else self.tie
        return Terms(
            self.num_replicas, self.num_stages, self.hop, self.ring, self.ring_share, self.fill, self.busy,
            tie, *self.tied, *self._nodes,
        )  # fmt: skip

    @property
    def _nodes(self) -> tuple[Ints, bool]:
        """The node of every unit, and whether a node has several."""
        given = np.arange(self.num_units) if self.node is None else self.node
        nodes, node = np.unique(given, return_inverse=True)
        return node.astype(np.int64), len(nodes) < self.num_units

    @property
    def has_equal_links(self) -> bool:
        """Whether it does not matter which units are neighbours."""
        others = ~np.eye(self.num_units, dtype=bool)
        return all(links is None or np.ptp(links[others]) == 0 for links in (self.hop, self.ring, self.tie))


@dataclass(frozen=True)
class Assignment:
    """`units[replica * num_stages + stage]` at each place; seconds of a step that depend on it."""

    units: tuple[int, ...]
    seconds: float
    seconds_by_default: float
    """Of the units where nobody chooses."""
    is_proved: bool
    """Whether no assignment is better."""
    num_tried: int


def grid_of(
    cluster: Cluster,
    *,
    tp: int,
    num_replicas: int,
    num_stages: int,
    boundary_bytes: float,
    gradient_bytes: Floats,
    num_exposed: float,
    unit_seconds: Floats | None = None,
    num_microbatches: int = 1,
    num_sharing: int | None = None,
    tied_bytes: float = 0.0,
    tied: tuple[int, int] = (0, 0),
) -> Grid:
    """The places of a configuration on `cluster`, whose units are `tp` ranks in a row; by default the replicas of a stage
    are next to each other, as Megatron numbers them.

    Args:
        tp: devices of a unit, with context and expert parallelism those of all groups that stay together.
        boundary_bytes: what a device hands to the next stage per microbatch.
        gradient_bytes: [stage] what a device reduces over its replicas.
        num_exposed: how often per step a pipeline waits for its transfers.
        unit_seconds: [unit, stage] forward and backward of a microbatch; none: equal everywhere.
        num_sharing: devices that add up the same gradients, where a unit has several; by default `num_replicas`.
        tied_bytes, tied: gradients of a device that two stages of every pipeline add up, and these stages.

    Raises:
        InputError: the widths do not fill the cluster, or a unit would span nodes of several kinds.
    """
    num_units = num_replicas * num_stages
    if num_units * tp != cluster.num_devices:
        raise InputError(
            f"tp {tp} x {num_replicas} replicas x {num_stages} stages are {num_units * tp} devices, but cluster "
            f"'{cluster.name}' has {cluster.num_devices}: choose widths whose product is that"
        )
    latency, rate = _unit_links(cluster, tp, num_units)
    there = latency + boundary_bytes / rate
    sharing = num_sharing or num_replicas
    share = 2 * (sharing - 1) / sharing
    both_ways = np.maximum(latency, latency.T), np.minimum(rate, rate.T)
    heaviest = float(np.max(gradient_bytes)) or 1.0
    nodes = np.array([cluster.node_of(unit * tp) for unit in range(num_units)])
    ring = share * heaviest / rate + 2 * (num_replicas - 1) * latency
    for a, b in zip(*np.nonzero(np.equal.outer(nodes, nodes)), strict=True):
        inside = cluster.link_between(int(a) * tp, int(b) * tp).collectives if a != b else None
        if inside is not None and sharing <= _devices(
            cluster, int(nodes[a])
        ):  # such a ring stays inside its node
            ring[a, b] = inside.seconds("all-reduce", sharing, heaviest)
    seconds = np.zeros((num_units, num_stages)) if unit_seconds is None else np.asarray(unit_seconds, float)
    return Grid(
        num_replicas, num_stages, num_exposed * (there + there.T), ring, np.asarray(gradient_bytes) / heaviest,
        seconds, (num_microbatches - 1) * seconds,
        as_numbered(num_replicas, num_stages),
        2 * both_ways[0] + tied_bytes / both_ways[1] if tied_bytes else None,
        tied,
        nodes,
    )  # fmt: skip


def as_numbered(num_replicas: int, num_stages: int) -> tuple[int, ...]:
    """The unit at each place when the replicas of a stage are next to each other, as Megatron numbers them.

    >>> as_numbered(2, 3)
    (0, 2, 4, 1, 3, 5)
    """
    return tuple(
        stage * num_replicas + replica for replica in range(num_replicas) for stage in range(num_stages)
    )


def _unit_links(cluster: Cluster, tp: int, num_units: int) -> tuple[Floats, Floats]:
    """Latency and bytes/s from unit to unit: those of the slowest pair of their devices; a unit to itself is free."""
    latency, rate = np.zeros((num_units, num_units)), np.full((num_units, num_units), np.inf)
    if cluster.measured is None and len(cluster.nodes) == 1 and _devices(cluster, 0) % tp == 0:
        per_node = _devices(cluster, 0) // tp
        together = np.equal.outer(np.arange(num_units) // per_node, np.arange(num_units) // per_node)
        for same, pair in ((True, (0, tp)), (False, (0, per_node * tp))):
            if (together == same).sum() > (num_units if same else 0):
                link = cluster.link_between(*pair)
                latency[together == same], rate[together == same] = link.latency_s, link.bandwidth
        np.fill_diagonal(latency, 0.0)
        np.fill_diagonal(rate, np.inf)
        return latency, rate
    known: dict[tuple[int, int], tuple[float, float]] = {}
    by_node = cluster.measured is None or cluster.measured.between == "nodes"
    nodes = [cluster.node_of(unit * tp) for unit in range(num_units)]
    for a in range(num_units):
        for b in range(num_units):
            if a == b:
                continue
            key = (nodes[a], nodes[b]) if by_node and tp <= _devices(cluster, nodes[a]) else (-1 - a, -1 - b)
            if key not in known:
                links = [cluster.link_between(a * tp + i, b * tp + i) for i in range(tp)]
                known[key] = max(one.latency_s for one in links), min(one.bandwidth for one in links)
            latency[a, b], rate[a, b] = known[key]
    return latency, rate


def _devices(cluster: Cluster, node: int) -> int:
    return len(cluster.ranks_of(node))
