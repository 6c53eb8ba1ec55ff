"""Optimizer state on hosts, for ranks whose devices have no memory for it, together with offloaded values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from stagewright.cluster import Cluster
from stagewright.errors import InputError, PlanError, nearest
from stagewright.estimation.stages import RangeCosts
from stagewright.planning.candidate import SHRINKS, Candidate, fastest_fitted, make_program
from stagewright.planning.checkpointing.fit import TooSlow
from stagewright.planning.configuration import Configuration
from stagewright.planning.prediction.predict import host_of, rank_memories
from stagewright.planning.prediction.staged_model import StagedModel
from stagewright.planning.space import HOST_OPTIMIZER, HostOptimizer
from stagewright.schedule import Kind
from stagewright.units import format_bytes


def check_host_optimizer(setting: str, cluster: Cluster) -> None:
    """Check a host optimizer setting for `cluster`.

    Raises:
        InputError: an unknown setting, or one that needs hosts that the cluster does not describe.
    """
    if setting not in HOST_OPTIMIZER:
        raise InputError(
            f"--host-optimizer {setting}{nearest(setting, HOST_OPTIMIZER)}: give auto, never or always"
        )
    if setting == "always":
        host_of(cluster, 0)


def may_use_host(cluster: Cluster) -> bool:
    """Return whether all devices of `cluster` are accelerators whose hosts are described."""
    return all(group.device.kind != "cpu" and group.host is not None for group in cluster.nodes)


def may_stream(cluster: Cluster) -> bool:
    """Return whether all devices of `cluster` have a link to a memory of their host."""
    return not any(group.device.shares_host_memory for group in cluster.nodes)


def steps_once(configuration: Configuration) -> bool:
    """Return whether parameters are updated only at the end of a batch."""
    return not any(action.kind is Kind.STEP for action in make_program(configuration))


def with_devices_filled(candidate: Candidate) -> Candidate:
    """Return `candidate`, which fits, with optimizer state back on every device that has the memory for it."""
    staged = candidate.staged
    on_devices = replace(staged, host_optimizer=frozenset())
    full = frozenset(
        memory.rank for memory in rank_memories(on_devices) if on_devices.missing_bytes([memory]) > 0
    )
    mixed = replace(staged, host_optimizer=full)
    memories = rank_memories(mixed)
    return replace(candidate, staged=mixed, memories=memories, excess_bytes=mixed.missing_bytes(memories))


def ways_on_hosts(candidate: Candidate, host_optimizer: HostOptimizer) -> list[Candidate]:
    """Return the candidates to try, the fastest first: `candidate` with as little state on hosts as possible, if the setting
    allows that, and as it is."""
    chooses = host_optimizer == "auto" and candidate.configuration.host_optimizer
    return [with_devices_filled(candidate), candidate] if chooses else [candidate]


def host_excess_bytes(staged: StagedModel) -> int:
    """Return the bytes by which the fullest host is over with state, streamed weights and offloaded values of `staged`;
    negative for headroom. Hosts that are not described are taken to have enough memory."""
    on_node: Counter[int] = Counter()
    for rank in range(staged.pp):
        has_state = staged.is_streamed or rank in staged.host_optimizer
        state = staged.resident(rank).host_bytes if has_state else 0
        saved = staged.offloaded_bytes(rank)
        for member in range(staged.first_rank(rank), staged.first_rank(rank + 1)):
            if staged.cluster.group_of(member).host is not None:
                on_node[staged.cluster.node_of(member)] += state + saved
    return max((total - _usable_bytes(staged.cluster, node) for node, total in on_node.items()), default=-1)


def saving_with_hosts(
    kept: Sequence[Candidate],
    model_costs: RangeCosts,
    host_optimizer: HostOptimizer,
    *,
    offload: bool,
    below_s: float = math.inf,
    longest_s: float = math.inf,
    thorough: bool = False,
    shrinks: Sequence[float] = SHRINKS,
) -> Candidate | TooSlow | None:
    """Return the result of `fastest_fitted`, without offloading where it does not fit on the hosts."""

    def fitted(offload: bool) -> Candidate | TooSlow | None:
        return fastest_fitted(
            kept, model_costs, offload=offload, below_s=below_s, longest_s=longest_s, thorough=thorough,
            shrinks=shrinks,
        )  # fmt: skip

    candidate = fitted(offload)
    if not isinstance(candidate, Candidate):
        return candidate
    if not any(summary.offloaded_bytes for summary in candidate.staged.summaries):
        return candidate
    fits = any(host_excess_bytes(option.staged) <= 0 for option in ways_on_hosts(candidate, host_optimizer))
    if fits or candidate.configuration.streamed:
        return candidate
    return fitted(offload=False)


def misses_host(configuration: Configuration, missing: int, host_optimizer: HostOptimizer) -> PlanError:
    """Return the error for a search in which nothing fits; the best `configuration` is over by `missing` bytes on a host."""
    instead = "leave out --host-optimizer always" if host_optimizer == "always" else "plan for more nodes"
    return PlanError(
        f"no configuration fits: the best ({configuration}) lacks {format_bytes(missing)} of memory on a host. It would "
        f"fit with as much more in [nodes.host] of the cluster; or {instead}"
    )


def _usable_bytes(cluster: Cluster, node: int) -> int:
    ranks = cluster.ranks_of(node)
    return len(ranks) * host_of(cluster, ranks[0]).usable_bytes
