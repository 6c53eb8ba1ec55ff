"""Device memory of the communicators of a rank, outside of the framework's allocator.

A communicator has buffers for each of its channels and each connected peer. A ring connects each rank with the previous and
the next one; reductions of small tensors use a tree, with a parent and a child.

Source: NVIDIA/nccl#1685, on 8 H100: two sizes of allocations, `RECEIVING_BYTES` and `SENDING_BYTES`, for each of 32
channels and 7 peers. These are the FIFOs of three protocols (0.5, 4.7 and 4 MiB), in steps of 2 MiB. NVIDIA/nccl#986:
linear in the number of channels; a ring has two connections however many ranks there are. Ignores: NVLink SHARP and
CollNet, which have separate buffers; buffers that users register; NCCL's kernels, which are part of a device's
`context_bytes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise

from stagewright.cluster import Cluster
from stagewright.schedule.lanes import LANE_CTAS, Lane
from stagewright.units import MIB

RECEIVING_BYTES, SENDING_BYTES = 10 * MIB, 2 * MIB
"""Bytes per channel and peer of the same node. Between nodes both ends have the receiver's size."""

_BASE_BYTES = 16 * MIB
"""Bytes of any communicator. Source: guess."""
_NVLINK_CHANNELS, _OTHER_CHANNELS = 24, 4
"""Channels of collectives with NVLink inside nodes, and of others. Source: guess, from common logs of NCCL."""
_NVLINK_BANDWIDTH = 100e9
"""Bytes/s between two devices of a node above which they are assumed to have NVLink."""
_PEERS = 3
"""Peers that a rank sends to, and receives from: one in the ring, two in the tree."""


def lane_bytes(lanes: Iterable[Lane], pipeline_rank: int, cluster: Cluster, ranks: Sequence[int]) -> int:
    """Return the bytes of lanes on `pipeline_rank`; `ranks` has the device of each pipeline rank."""
    total = 0
    for lane in lanes:
        if pipeline_rank in (lane.source, lane.target):
            is_local = cluster.node_of(ranks[lane.source]) == cluster.node_of(ranks[lane.target])
            sends = is_local and pipeline_rank == lane.source
            total += _BASE_BYTES + LANE_CTAS * (SENDING_BYTES if sends else RECEIVING_BYTES)
    return total


def group_bytes(devices: Sequence[int], cluster: Cluster, is_small: bool = False) -> int:
    """Return the bytes of the communicator of a group for collectives on each of its `devices`. A group that `is_small` has
    as few channels as a lane."""
    return _group_bytes(devices if isinstance(devices, range) else tuple(devices), cluster, is_small)


@lru_cache(maxsize=4096)  # groups have thousands of devices, and plans of a search the same groups
def _group_bytes(devices: range | tuple[int, ...], cluster: Cluster, is_small: bool) -> int:
    if len(devices) == 1:
        return 0
    ends = list(pairwise(devices))
    local = [pair for pair in ends if cluster.node_of(pair[0]) == cluster.node_of(pair[1])]
    has_nvlink = any(cluster.link_between(*pair).bandwidth >= _NVLINK_BANDWIDTH for pair in local[:1])
    num_channels = _NVLINK_CHANNELS if has_nvlink else _OTHER_CHANNELS
    if is_small:
        num_channels = min(num_channels, LANE_CTAS)
    sending = SENDING_BYTES if len(local) == len(ends) else RECEIVING_BYTES
    return _BASE_BYTES + num_channels * _PEERS * (RECEIVING_BYTES + sending)
