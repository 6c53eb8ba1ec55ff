"""Times of expert dispatch and combine, with kernels that send a token to each node once.

Multiprocessors copy tokens through the links, two per channel: one that sends and one that receives. Their rate, the links
inside the nodes and the network bound an exchange together.

Source: DeepEP (github.com/deepseek-ai/DeepEP, its normal kernels); DeepSeek-V3's report (arXiv 2412.19437), section 3.2.2.
Constants: fit of DeepEP's times on one, two and four nodes of eight H100, and one of eight B200, published with
github.com/ai-dynamo/aiconfigurator (095f58a5), half of the rows. Ignores: that what kernels of experts compute meanwhile has
fewer multiprocessors; routing that favours some experts; networks that give a group of many nodes less than their adapters;
links between devices of other nodes than those that stand for all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from stagewright.cluster.cluster import Cluster
from stagewright.cluster.collectives import Communicator, communicator

MULTIPROCESSORS = 20
"""Multiprocessors that DeepEP uses by default (`Buffer.num_sms`)."""

_AGREEMENTS = 4.75
"""Synchronisations of the ranks of a node before and after, in starts of collectives."""

_NOTIFY_S = 34e-6
"""Seconds to announce the number of tokens, per doubling of the number of nodes."""

_TOKEN_S = 0.3e-6
"""Seconds of a channel per token, independent of its size and destination."""

_COPY_RATE = 45e9
"""Bytes/s at which a channel copies tokens to one device after the other."""

_FORWARD_RATE = 29e9
"""Bytes/s at which it forwards them to one node after the other, if there are several."""

_SUMS = 2.2
"""Factor by which forwarding takes longer where nodes add up results on the way back."""

_SUM_S = 1.43e-9
"""Seconds per byte of a token until the first one is added up."""

_OVERLAP = 3.0
"""Exponent p of the overlap of the bounds of an exchange: seconds are (a^p + b^p + c^p)^(1/p)."""


class Tokens(NamedTuple):
    """The tokens of a rank: their number, the bytes of each, and the average number of ranks and of nodes with experts of
    one token, if all are equally likely."""

    number: float
    num_bytes: float
    num_devices: float
    num_nodes: float


def dispatch_seconds(
    cluster: Cluster,
    tokens: Tokens,
    ranks: Sequence[int],
    *,
    sums: bool = False,
    num_multiprocessors: int = MULTIPROCESSORS,
) -> float:
    """Return the seconds until every rank's `tokens` have reached the devices of their experts; with `sums`, until the
    results are back and added up.

    A token is sent to each of its nodes once, and inside the node to each of its devices once, both streamed.
    Source and ignores: the module.
    """
    if len(ranks) < 2:
        return 0.0
    group = communicator(cluster, ranks)
    num_bytes = tokens.number * tokens.num_bytes
    others = (group.per_node - 1) / group.per_node
    inside_s = (
        num_bytes * tokens.num_devices * others / group.intra.collective_bandwidth if group.intra else 0.0
    )
    crossing = num_bytes * tokens.num_nodes * (group.num_nodes - 1) / group.num_nodes
    crossing_s = crossing * group.per_node / group.inter_bandwidth
    copying_s = tokens.number * _token_seconds(group, tokens, sums) / (num_multiprocessors / 2)
    together = sum(bound**_OVERLAP for bound in (inside_s, crossing_s, copying_s)) ** (1 / _OVERLAP)
    return _start_seconds(group) + (_SUM_S * tokens.num_bytes if sums else 0.0) + together


def _token_seconds(group: Communicator, tokens: Tokens, sums: bool) -> float:
    """Return the seconds of a channel for one token."""
    seconds = _TOKEN_S + tokens.num_devices * tokens.num_bytes / _COPY_RATE
    if group.num_nodes > 1:
        seconds += tokens.num_nodes * tokens.num_bytes / _FORWARD_RATE * (_SUMS if sums else 1.0)
    return seconds


def _start_seconds(group: Communicator) -> float:
    begins = group.node.start_s if group.node else group.intra_latency_s
    return _AGREEMENTS * begins + _NOTIFY_S * math.log2(group.num_nodes)
