"""Measured links before a partition is chosen: on which devices the ranks of a choice will be."""

from __future__ import annotations

from functools import lru_cache

from stagewright.cluster import Cluster, arranged
from stagewright.cluster.variants import ArrangedCluster
from stagewright.estimation.stages import RangeCosts
from stagewright.planning.assignment.placing import placed
from stagewright.planning.candidate import Choice, fastest_partition, with_cuts
from stagewright.planning.job import Job
from stagewright.planning.plan import ClusterSection, Plan


def cluster_for(choice: Choice, body: RangeCosts, cluster: Cluster, job: Job) -> Cluster:
    """`cluster` with the ranks of a choice on the devices that suit it, by the cuts it would have if all links were as
    described: else a slow link that ranks can go around decides over cuts and widths. As it is where nothing was measured.

    Raises:
        PlanError: more stages than legal cuts allow.
    """
    if cluster.measured is None:
        return cluster
    cuts, _ = fastest_partition(body, choice, _as_described(cluster))
    _, devices = placed(with_cuts(body, choice, cuts, cluster, job).line)
    return arranged(cluster, devices)


@lru_cache(maxsize=4)
def _as_described(cluster: Cluster) -> Cluster:
    figures = {name: getattr(cluster, name) for name in Cluster.model_fields if name != "measured"}
    return Cluster(**figures)


def on_devices_of(plan: Plan, cluster: Cluster, where: Cluster) -> Plan:
    """A plan made for `where`, an arrangement of `cluster`, with the device of every rank."""
    if not isinstance(where, ArrangedCluster):
        return plan
    return plan.model_copy(update={"cluster": ClusterSection.of(cluster), "devices": where.order})
