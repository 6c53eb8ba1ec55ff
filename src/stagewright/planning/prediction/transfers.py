"""Transfers between stages: their seconds, and the time that they cost the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from stagewright.arrays import Floats
from stagewright.cluster import Cluster, all_gather_seconds
from stagewright.graph.messages import messages
from stagewright.schedule.lanes import LANE_CTAS

if TYPE_CHECKING:
    from stagewright.planning.prediction.staged_model import StagedModel


_CTA_BYTES_PER_S = 33e9
"""Bytes per second of a thread block that sends or receives over NVLink.

Source: NCCL's sends and receives between two H100, 66.1 GB/s at 8 MB and 131.5 GB/s at 64 MB with at most 4 thread blocks,
of which it uses 2 and 4 (meta-pytorch/torchcomms#2670 and #2635, May 2026). Ignores: what other devices attain.
"""

_FEW_CTAS_BYTES = 2 * 2**24
"""Bytes above which a message uses all its thread blocks; a smaller one uses half of them.

Source: NCCL, `addP2pToPlan`: parts of at most 32 steps of 512 KiB; what torchcomms#2635 counted."""

_NETWORK_CHANNELS = 2
"""Channels of a transfer to another node, one multiprocessor each. Source: NCCL, `ncclTopoGetNchannels`."""

_MULTIPROCESSORS = 132
"""Multiprocessors of a device whose description does not give them: those of an H100."""


def transfer_seconds(staged: StagedModel, edges: Sequence[tuple[int, int]]) -> dict[tuple[int, int], float]:
    """Return the point-to-point seconds by (source, target) stage, of values one way and gradients the other way; the
    messages of a transfer follow each other.

    A transfer begins after the time that its sender is busy (`posting_seconds`).
    """
    seconds = {}
    for source, target, num_bytes in _sent(staged, edges):
        if not num_bytes or _blocks_while(staged) is not None:  # then part of `posting_seconds`
            seconds[source, target] = 0.0
            continue
        is_async = _message_overhead(staged, source) is None
        seconds[source, target] = message_seconds(staged, source, target, num_bytes if is_async else 0)
    return seconds


def taken_share(staged: StagedModel, pipeline_rank: int) -> float:
    """Return the fraction of a rank's multiprocessors that communication kernels take from overlapped computations; 0 on a
    CPU."""
    is_cpu = staged.device_of(pipeline_rank).kind == "cpu"
    return 0.0 if is_cpu else staged.job.profile.waits.beside_share


def transfers_slow(staged: StagedModel, transfer_s: Mapping[tuple[int, int], float]) -> Floats:
    """Return by how many seconds overlapped transfers slow a forward plus a backward of each stage.

    Their kernels occupy multiprocessors at both ends: within a node as many as those of collectives, between nodes two
    channels. On lanes only the sender is slowed, as its receiver waits, and within a node only by a lane's thread blocks.

    Source: NCCL, `ncclTopoGetNchannels`, for transfers between nodes; that of `taken_share` within one. Ignores:
    memory traffic of transfers; that a rank may have nothing to compute during them; that a send occupies its
    multiprocessors from when it is issued, though its receiver may still compute (3 % of an H100 until then).
    """
    placed = staged.program.placement.rank_of_stage
    slowed = np.zeros(len(placed))
    for (source, target), seconds in transfer_s.items():
        ends = staged.first_rank(placed[source]), staged.first_rank(placed[target])
        between_nodes = staged.cluster.node_of(ends[0]) != staged.cluster.node_of(ends[1])
        slowed_stages = (source,) if staged.uses_lanes else (source, target)
        for stage in slowed_stages if placed[source] != placed[target] else ():
            share, products = taken_share(staged, placed[stage]), staged.device_of(placed[stage]).products
            num = products.num_multiprocessors if products else _MULTIPROCESSORS
            if between_nodes:
                share = min(share, _NETWORK_CHANNELS / num)
            elif staged.uses_lanes:
                share = min(share, LANE_CTAS / num)
            slowed[stage] += seconds * share
    return slowed


def posting_seconds(staged: StagedModel, edges: Sequence[tuple[int, int]]) -> tuple[Floats, Floats]:
    """Return the seconds that a forward and a backward of each stage spend on sending and on posting receive buffers.

    Sending lasts until the bytes have left. Both are 0 if another processor than the one that computes does this, and
    between stages of one rank.

    Ignores: that a buffer is posted a microbatch ahead; copies by the system at the receiver's end.
    """
    placed = staged.program.placement.rank_of_stage
    forward, backward = np.zeros(len(placed)), np.zeros(len(placed))
    for source, target, num_bytes in _sent(staged, edges):
        if placed[source] == placed[target]:
            continue
        busy = forward if source < target else backward
        if (blocking := _blocks_while(staged)) is not None:
            blocked_s = _blocking_seconds(staged, source, target, num_bytes)
            busy[source] += blocked_s
            if blocking == "sends and receives":
                busy[target] += blocked_s
            continue
        if (overhead_s := _message_overhead(staged, target)) is not None:
            busy[target] += _num_messages(staged, source, target) * overhead_s
        if (overhead_s := _message_overhead(staged, source)) is not None:
            latency_s = message_seconds(staged, source, target, 0)
            leaving_s = message_seconds(staged, source, target, num_bytes) - latency_s
            busy[source] += _num_messages(staged, source, target) * overhead_s + leaving_s
    return forward, backward


def _blocks_while(staged: StagedModel) -> str | None:
    """Return the operations that block a rank, as `Runtime.transfers`; None if transfers overlap with computations."""
    transfers = staged.job.profile.transfers
    if transfers == "overlapped if interleaved":
        return None if len(staged.stages) > staged.pp else "sends"
    return None if transfers == "overlapped" else transfers


def _message_overhead(staged: StagedModel, stage: int) -> float | None:
    """Return the seconds that a message costs the processor that computes a stage; None if another processor sends."""
    return staged.device_of(staged.program.placement.rank_of_stage[stage]).message_overhead_s


def _blocking_seconds(staged: StagedModel, source: int, target: int, num_bytes: float) -> float:
    """Return the seconds that a rank waits for its own blocking send.

    Source: Megatron-LM's scatter-gather optimisation, Narayanan et al. 2021 (arXiv 2104.04473), section 4.1.
    """
    profile = staged.job.profile
    overhead_s = profile.host.member_s + profile.waits.message_s
    if not profile.scatters_boundaries or staged.tp == 1 or staged.sequence_parallel:
        return message_seconds(staged, source, target, num_bytes) + overhead_s
    placed = staged.program.placement.rank_of_stage
    here, there = staged.first_rank(placed[source]), staged.first_rank(placed[target])
    gathered_s = all_gather_seconds(staged.cluster, num_bytes, range(there, there + staged.tp))
    sent_s = message_seconds(staged, source, target, num_bytes / staged.tp)
    between_nodes = staged.cluster.node_of(here) != staged.cluster.node_of(there)
    return sent_s + gathered_s + overhead_s + between_nodes * profile.waits.scattered_s


def message_seconds(staged: StagedModel, source: int, target: int, num_bytes: float) -> float:
    """Return the seconds of one message from a stage to another, in the replica where it takes longest."""
    placed = staged.program.placement.rank_of_stage
    ends = staged.first_rank(placed[source]), staged.first_rank(placed[target])
    seconds = lane_seconds if staged.uses_lanes else Cluster.blocks_seconds
    return seconds(staged.cluster, num_bytes, *ends, staged.ranks_per_stage)


def lane_seconds(cluster: Cluster, num_bytes: float, source: int, target: int, width: int) -> float:
    """Return `Cluster.blocks_seconds`, limited by the speed at which the thread blocks of a lane copy."""
    if source == target:
        return 0.0
    num_ctas = LANE_CTAS if num_bytes > _FEW_CTAS_BYTES else LANE_CTAS / 2
    copied_s = num_bytes / (num_ctas * _CTA_BYTES_PER_S)
    latency_s = cluster.blocks_seconds(0, source, target, width)
    return max(cluster.blocks_seconds(num_bytes, source, target, width), latency_s + copied_s)


def _sent(staged: StagedModel, edges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Yield (source, target, bytes) of every edge, in both directions."""
    for low, high in edges:
        yield low, high, staged.summaries[low].sent_bytes.get(high, 0)
        yield high, low, staged.summaries[high].returned_bytes.get(low, 0)


def _num_messages(staged: StagedModel, source: int, target: int) -> int:
    stage = staged.stages[source]
    sent = stage.sends if source < target else stage.grad_sends
    values = next((transfer.values for transfer in sent if transfer.stage == target), ())
    return len(messages(stage.value(value) for value in values))
