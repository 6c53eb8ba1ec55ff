"""Rank files: which device of which node each rank has, one line per rank."""

from __future__ import annotations

from pathlib import Path

from stagewright.cluster import Cluster
from stagewright.documents import read_csv
from stagewright.errors import InputError
from stagewright.units import parse_count

HEADER = ("rank", "node", "device")


def read_rank_file(path: str | Path, cluster: Cluster, num_ranks: int) -> tuple[int, ...]:
    """The device of every rank, in the numbering of `cluster`, from a file as `stagewright plan --ranks` writes it.

    Raises:
        InputError: names the file, the line and what is wrong.
    """
    rows = [tuple(cell.strip() for cell in row) for row in read_csv(path, "rank file")]
    if not rows or rows[0] != HEADER:
        raise InputError(f"{path}: the first line must be '{','.join(HEADER)}'")
    found: dict[int, int] = {}
    for row in rows[1:]:
        numbers = [number for cell in row if (number := parse_count(cell)) is not None]
        if len(row) != len(HEADER) or len(numbers) != len(row):
            raise InputError(f"{path}: '{','.join(row)[:80]}' is no line of three whole numbers")
        rank, node, device = numbers
        found[rank] = _device(cluster, node, device, path)
    if sorted(found) != list(range(num_ranks)) or sorted(found.values()) != list(range(num_ranks)):
        raise InputError(
            f"{path}: must give each of the plan's {num_ranks} ranks one of the first {num_ranks} devices of cluster "
            f"'{cluster.name}', none twice"
        )
    return tuple(found[rank] for rank in range(num_ranks))


def _device(cluster: Cluster, node: int, device: int, path: str | Path) -> int:
    if node >= cluster.num_nodes or device >= len(cluster.ranks_of(node)):
        raise InputError(
            f"{path}: cluster '{cluster.name}' has no device {device} on a node {node}: it has {cluster.num_nodes} nodes"
        )
    return cluster.ranks_of(node)[device]
