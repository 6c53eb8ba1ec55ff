"""This machine's processors as a cluster, for plans that are run here and not judged by their times."""

from __future__ import annotations

from stagewright.cluster import Cluster, load_cluster


def local(num_devices: int, like: str = "a10g") -> Cluster:
    """So many processors, taken to be as fast as GPUs, which nobody looks at."""
    found = load_cluster(f"4x-{like}")
    (node,) = found.nodes
    device = node.device.model_copy(update={"kind": "cpu", "name": "cpu"})
    only = node.model_copy(update={"device": device, "devices_per_node": num_devices})
    return found.model_copy(update={"name": "this machine", "nodes": (only,)})
