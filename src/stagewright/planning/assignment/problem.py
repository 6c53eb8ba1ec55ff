"""The rank assignment problem: the costs of placing units of devices in a configuration."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stagewright.arrays import Floats, Ints
from stagewright.cluster import Cluster
from stagewright.errors import InputError
from stagewright.planning.assignment.kernels import AssignmentArrays, cost


@dataclass(frozen=True, eq=False)
class AssignmentProblem:
    """The problem of assigning units of devices (tensor parallel groups) to `num_replicas` pipelines of `num_stages` stages.

    Args:
        transfer: [unit, unit] seconds per step that a pipeline waits for transfers between two of its units, both ways.
        ring: [unit, unit] seconds per step to pass a stage's gradients from one unit to the next in its ring.
        ring_share: [stage] gradients of a stage as a fraction of those assumed in `ring`.
        tie: [unit, unit] seconds to reduce gradients of parameters that both stages `tied` hold; None: nothing is tied.
        node: [unit] the node of a unit; None: each has its own.
        by_default: the unit at each place by default; empty: units in their own order.
    """

    num_replicas: int
    num_stages: int
    transfer: Floats
    ring: Floats
    ring_share: Floats
    by_default: tuple[int, ...] = ()
    tie: Floats | None = None
    tied: tuple[int, int] = (0, 0)
    node: Ints | None = None

    def __post_init__(self) -> None:
        units, stages = self.num_units, self.num_stages
        wanted = {"transfer": (units, units), "ring": (units, units), "ring_share": (stages,)}
        for name, shape in wanted.items():
            if getattr(self, name).shape != shape:
                raise InputError(f"{name} has shape {getattr(self, name).shape}: give {shape}")

    @property
    def num_units(self) -> int:
        return self.num_replicas * self.num_stages

    @property
    def default(self) -> Ints:
        """The unit at each place by default."""
        return np.array(self.by_default or range(self.num_units), dtype=np.int64)

    def seconds(self, order: Ints) -> float:
        """Return the seconds of a step with unit ``order[replica * num_stages + stage]`` at each place.

        The slowest pipeline waits for its transfers, then the slowest ring reduces gradients, and the slowest pair of units
        those of tied parameters.
        Source: Pipette's objective (Yim et al., DATE 2024), with every stage's ring, both directions of a link and tied
        parameters, without computations, which do not depend on the order. Ignores: several rings and pipelines on one link
        at a time.
        """
        return float(cost(order, self.terms))

    @property
    def terms(self) -> AssignmentArrays:
        """The arguments of the kernels."""
        tie = np.zeros((self.num_units, self.num_units)) if self.tie is None else self.tie
        return AssignmentArrays(
            self.num_replicas, self.num_stages, self.transfer, self.ring, self.ring_share, tie, *self.tied,
            *self._nodes,
        )  # fmt: skip

    @property
    def _nodes(self) -> tuple[Ints, bool]:
        """The node of every unit, and whether a node has several units."""
        given = np.arange(self.num_units) if self.node is None else self.node
        nodes, node = np.unique(given, return_inverse=True)
        return node.astype(np.int64), len(nodes) < self.num_units

    @property
    def has_equal_links(self) -> bool:
        """Whether all links are equal, so that the order of units does not matter."""
        off_diagonal = ~np.eye(self.num_units, dtype=bool)
        return all(
            links is None or np.ptp(links[off_diagonal]) == 0
            for links in (self.transfer, self.ring, self.tie)
        )


@dataclass(frozen=True)
class Assignment:
    """A rank assignment: `units[replica * num_stages + stage]` at each place, and the seconds that depend on it."""

    units: tuple[int, ...]
    seconds: float
    seconds_by_default: float
    """Seconds with the default order."""
    is_proved: bool
    """Whether no assignment is better."""


@dataclass(frozen=True, eq=False)
class Traffic:
    """Bytes that a device of every unit sends in a step, and how often pipelines wait for them."""

    boundary_bytes: float
    """Bytes to the next stage per microbatch."""
    gradient_bytes: Floats
    """[stage] bytes reduced over replicas."""
    num_exposed: float
    """Number of times per step that a pipeline waits for its transfers."""
    num_sharing: int | None = None
    """Devices that reduce the same gradients, where a unit has several; None: one per replica."""
    tied_bytes: float = 0.0
    """Bytes of gradients that two stages of every pipeline reduce."""
    tied: tuple[int, int] = (0, 0)
    """These stages."""


def assignment_problem(
    cluster: Cluster, traffic: Traffic, *, tp: int, num_replicas: int, num_stages: int
) -> AssignmentProblem:
    """Return the assignment problem of a configuration on `cluster`, whose units are `tp` consecutive ranks; by default the
    replicas of a stage are next to each other, as Megatron numbers them.

    Args:
        tp: devices of a unit; with context and expert parallelism, those of all groups that stay together.

    Raises:
        InputError: the degrees do not fill the cluster, or a unit would span nodes of several kinds.
    """
    num_units = num_replicas * num_stages
    if num_units * tp != cluster.num_devices:
        raise InputError(
            f"tp {tp} x {num_replicas} replicas x {num_stages} stages are {num_units * tp} devices, but cluster "
            f"'{cluster.name}' has {cluster.num_devices}: choose degrees with that product"
        )
    latency, rate = _unit_links(cluster, tp, num_units)
    one_way = latency + traffic.boundary_bytes / rate
    sharing = traffic.num_sharing or num_replicas
    share = 2 * (sharing - 1) / sharing
    both_ways = np.maximum(latency, latency.T), np.minimum(rate, rate.T)
    heaviest = float(np.max(traffic.gradient_bytes)) or 1.0
    nodes = np.array([cluster.node_of(unit * tp) for unit in range(num_units)])
    ring = share * heaviest / rate + 2 * (num_replicas - 1) * latency
    for a, b in zip(*np.nonzero(np.equal.outer(nodes, nodes)), strict=True):
        inside = cluster.link_between(int(a) * tp, int(b) * tp).collectives if a != b else None
        is_inside = sharing <= _devices(cluster, int(nodes[a]))  # such a ring stays inside its node
        if inside is not None and is_inside:
            ring[a, b] = inside.seconds("all-reduce", sharing, heaviest)
    return AssignmentProblem(
        num_replicas, num_stages, traffic.num_exposed * (one_way + one_way.T), ring,
        np.asarray(traffic.gradient_bytes) / heaviest,
        as_numbered(num_replicas, num_stages),
        2 * both_ways[0] + traffic.tied_bytes / both_ways[1] if traffic.tied_bytes else None,
        traffic.tied,
        nodes,
    )  # fmt: skip


def as_numbered(num_replicas: int, num_stages: int) -> tuple[int, ...]:
    """Return the unit at each place when the replicas of a stage are next to each other, as Megatron numbers them.

    >>> as_numbered(2, 3)
    (0, 2, 4, 1, 3, 5)
    """
    return tuple(
        stage * num_replicas + replica for replica in range(num_replicas) for stage in range(num_stages)
    )


def _unit_links(cluster: Cluster, tp: int, num_units: int) -> tuple[Floats, Floats]:
    """Return latency and bytes/s from unit to unit: those of the slowest pair of their devices; a unit to itself is free."""
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
    by_nodes: dict[tuple[int, int], tuple[float, float]] = {}
    by_node = cluster.measured is None or cluster.measured.between == "nodes"
    nodes = [cluster.node_of(unit * tp) for unit in range(num_units)]
    for a in range(num_units):
        for b in range(num_units):
            if a == b:
                continue
            key = (nodes[a], nodes[b]) if by_node and tp <= _devices(cluster, nodes[a]) else (-1 - a, -1 - b)
            if key not in by_nodes:
                links = [cluster.link_between(a * tp + i, b * tp + i) for i in range(tp)]
                by_nodes[key] = max(link.latency_s for link in links), min(link.bandwidth for link in links)
            latency[a, b], rate[a, b] = by_nodes[key]
    return latency, rate


def _devices(cluster: Cluster, node: int) -> int:
    return len(cluster.ranks_of(node))
