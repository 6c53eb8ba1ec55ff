"""This machine's processors as a cluster, for plans that are run here and not judged by their times; and ranks on them."""

from __future__ import annotations

import os
import sys

from stagewright.cluster import Cluster, load_cluster


def local(num_devices: int, like: str = "a10g") -> Cluster:
    """So many processors, taken to be as fast as GPUs, which nobody looks at."""
    found = load_cluster(f"4x-{like}")
    (node,) = found.nodes
    device = node.device.model_copy(update={"kind": "cpu", "name": "cpu"})
    only = node.model_copy(update={"device": device, "devices_per_node": num_devices})
    return found.model_copy(update={"name": "this machine", "nodes": (only,)})


def start_ranks(script: str, num_ranks: int, *arguments: str) -> None:
    """Run `script` as so many ranks until all have ended, each with one thread unless the environment says otherwise."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    config = LaunchConfig(
        1, 1, num_ranks, run_id="ranks", rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0
    )
    elastic_launch(config, sys.executable)(script, *arguments)
