"""The device order of a configuration on measured links, before its partition is chosen."""

from __future__ import annotations

from functools import lru_cache

from stagewright.cluster import Cluster, arranged
from stagewright.cluster.variants import ArrangedCluster
from stagewright.estimation.stages import RangeCosts
from stagewright.planning.assignment.placing import placed
from stagewright.planning.candidate import fastest_partition, with_cuts
from stagewright.planning.configuration import Configuration
from stagewright.planning.job import Job
from stagewright.planning.plan import ClusterSection, Plan


def cluster_for(configuration: Configuration, model_costs: RangeCosts, cluster: Cluster, job: Job) -> Cluster:
    """Return `cluster` in the device order that suits a configuration; unchanged where links were not measured.

    The cuts are those for links as described: otherwise a slow link that the device order avoids would determine cuts and
    parallel degrees.

    Raises:
        PlanError: more stages than legal cuts allow.
    """
    if cluster.measured is None:
        return cluster
    cuts, _ = fastest_partition(model_costs, configuration, _as_described(cluster))
    _, devices = placed(with_cuts(model_costs, configuration, cuts, cluster, job).staged)
    return arranged(cluster, devices)


@lru_cache(maxsize=4)
def _as_described(cluster: Cluster) -> Cluster:
    figures = {name: getattr(cluster, name) for name in Cluster.model_fields if name != "measured"}
    return Cluster(**figures)


def on_devices_of(plan: Plan, cluster: Cluster, where: Cluster) -> Plan:
    """Return a plan made for `where`, a device order of `cluster`, with the device of every rank."""
    if not isinstance(where, ArrangedCluster):
        return plan
    return plan.model_copy(update={"cluster": ClusterSection.of(cluster), "devices": where.order})
