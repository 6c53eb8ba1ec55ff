"""Devices, links, nodes and collectives of a cluster, and a catalog of hardware with its sources."""

from stagewright.cluster.cluster import Cluster, MeasuredBandwidth, NodeGroup
from stagewright.cluster.collectives import (
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    reduce_scatter_seconds,
    ring_shift_seconds,
)
from stagewright.cluster.device import Device, PerPrecision, PerPrecisionFraction
from stagewright.cluster.dispatch import Tokens, dispatch_seconds
from stagewright.cluster.host import Host
from stagewright.cluster.link import Link
from stagewright.cluster.load import given_cluster, load_cluster, save_cluster
from stagewright.cluster.measured import MeasuredCollective
from stagewright.cluster.profile import OperatorProfile, load_profile
from stagewright.cluster.variants import arranged, with_slower_devices, with_slower_links, without

__all__ = [
    "Cluster",
    "Device",
    "Host",
    "Link",
    "MeasuredBandwidth",
    "MeasuredCollective",
    "NodeGroup",
    "OperatorProfile",
    "PerPrecision",
    "PerPrecisionFraction",
    "Tokens",
    "all_gather_seconds",
    "all_reduce_seconds",
    "all_to_all_seconds",
    "arranged",
    "dispatch_seconds",
    "given_cluster",
    "load_cluster",
    "load_profile",
    "reduce_scatter_seconds",
    "ring_shift_seconds",
    "save_cluster",
    "with_slower_devices",
    "with_slower_links",
    "without",
]
