"""Widths and sizes that a search may try on a cluster."""

from __future__ import annotations

import math
from collections.abc import Sequence

from stagewright.cluster import Cluster
from stagewright.errors import InputError
from stagewright.limits import MOST_ACTIONS
from stagewright.planning.job import Job


def tensor_widths_of(cluster: Cluster, tp: int | None) -> list[int]:
    """Numbers of ranks that may share layers: `tp`, or all that divide the devices of every node, the least first."""
    if tp is not None:
        if tp < 1 or cluster.num_devices % tp:
            raise InputError(
                f"tp = {tp} does not divide the {cluster.num_devices} devices of cluster '{cluster.name}': "
                f"use one of {', '.join(str(n) for n in _divisors(cluster.num_devices))}"
            )
        return [tp]
    return _divisors(math.gcd(*(group.devices_per_node for group in cluster.nodes)))


def widths_of(
    cluster: Cluster, job: Job, pp: int | None, dp: int | None, tp: int = 1
) -> list[tuple[int, int]]:
    """All (dp, pp) that use every device and divide the batch, deepest pipelines first."""
    count = cluster.num_devices // tp
    for name, fixed in (("pp", pp), ("dp", dp)):
        if fixed is not None and (fixed < 1 or count % fixed):
            raise InputError(
                f"{name} = {fixed} does not divide the {count} devices of cluster '{cluster.name}': "
                f"use one of {', '.join(str(n) for n in _divisors(count))}"
            )
    found = [
        (count // width, width)
        for width in reversed(_divisors(count))
        if pp in (None, width) and dp in (None, count // width) and job.global_batch % (count // width) == 0
    ]
    if not found:
        if dp is not None and pp is not None and dp * pp != count:
            shared = f" x tp {tp}" if tp > 1 else ""
            raise InputError(
                f"dp {dp} x pp {pp}{shared} is not the {cluster.num_devices} devices of cluster '{cluster.name}': "
                "leave dp or pp out"
            )
        replicas = count // pp if dp is None and pp is not None else dp
        raise InputError(
            f"dp = {replicas} does not divide the global batch of {job.global_batch}: change the batch, or the widths"
        )
    return found


def _divisors(number: int) -> list[int]:
    """
    >>> _divisors(12), _divisors(9)
    ([1, 2, 3, 4, 6, 12], [1, 3, 9])
    """
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return low + [number // n for n in reversed(low) if n * n != number]


def microbatch_sizes(widths: Sequence[tuple[int, int]], job: Job, fixed: int | None) -> list[int]:
    """Sizes to try, growing: powers of two that divide a replica's share, or all divisors of odd shares.

    Raises:
        InputError: the fixed size divides no share, or so many microbatches are too many to simulate.
    """
    shares = {job.global_batch // dp for dp, _ in widths}
    if fixed is not None:
        if not any(share % fixed == 0 for share in shares):
            raise InputError(
                f"microbatch = {fixed} divides no replica's share of the global batch of {job.global_batch} "
                f"({', '.join(map(str, sorted(shares)))} samples)"
            )
        sizes = {fixed}
    else:
        sizes = {size for share in shares for size in _divisors(share) if share % 2 or size & (size - 1) == 0}
    possible = sorted(size for size in sizes if whole_shares(widths, job, size))
    if not possible:
        raise InputError(
            f"a global batch of {job.global_batch:,} in microbatches of {max(sizes):,} makes programs of more than "
            f"{MOST_ACTIONS:,} actions: give a smaller batch, or a --microbatch that divides it into fewer"
        )
    return possible


def whole_shares(widths: Sequence[tuple[int, int]], job: Job, size: int) -> list[tuple[int, int, int]]:
    """(dp, pp, num_microbatches) of those (dp, pp) whose replicas have whole microbatches of `size` samples, and not
    more of them than can be simulated.

    >>> whole_shares([(1, 4), (2, 2), (4, 1)], Job(global_batch=8, sequence_length=1, dtype="fp32"), 4)
    [(1, 4, 2), (2, 2, 1)]
    """
    shares = ((dp, pp, divmod(job.global_batch // dp, size)) for dp, pp in widths)
    return [
        (dp, pp, count) for dp, pp, (count, rest) in shares if not rest and 2 * pp * count <= MOST_ACTIONS
    ]
