"""Rank files: the node and device of each rank, one line per rank."""

from __future__ import annotations

from pathlib import Path

from stagewright.cluster import Cluster
from stagewright.documents import read_csv
from stagewright.errors import InputError
from stagewright.units import parse_count

HEADER = ("rank", "node", "device")


def read_rank_file(path: str | Path, cluster: Cluster, num_ranks: int) -> tuple[int, ...]:
    """Return the device of every rank, as `cluster` numbers them, from a file that `stagewright plan --ranks` wrote.

    Raises:
        InputError: a wrong line; the message has the file, the line and the rule.
    """
    rows = [tuple(cell.strip() for cell in row) for row in read_csv(path, "rank file")]
    if not rows or rows[0] != HEADER:
        raise InputError(f"{path}: the first line must be '{','.join(HEADER)}'")
    device_of_rank: dict[int, int] = {}
    for row in rows[1:]:
        numbers = [number for cell in row if (number := parse_count(cell)) is not None]
        if len(row) != len(HEADER) or len(numbers) != len(row):
            raise InputError(f"{path}: '{','.join(row)[:80]}' is not a line of three whole numbers")
        rank, node, device = numbers
        device_of_rank[rank] = _device(cluster, node, device, path)
    if sorted(device_of_rank) != list(range(num_ranks)) or sorted(device_of_rank.values()) != list(
        range(num_ranks)
    ):
        raise InputError(
            f"{path}: must give each of the plan's {num_ranks} ranks one of the first {num_ranks} devices of cluster "
            f"'{cluster.name}', none twice"
        )
    return tuple(device_of_rank[rank] for rank in range(num_ranks))


def _device(cluster: Cluster, node: int, device: int, path: str | Path) -> int:
    if node >= cluster.num_nodes or device >= len(cluster.ranks_of(node)):
        raise InputError(
            f"{path}: cluster '{cluster.name}' has no device {device} on a node {node}: it has {cluster.num_nodes} nodes"
        )
    return cluster.ranks_of(node)[device]
