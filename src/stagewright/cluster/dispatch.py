"""Time to bring tokens to the experts of other ranks and back, with kernels that send a token to a node once.

Multiprocessors copy tokens through the links, two for each channel: one that sends and one that receives. What they manage,
the links inside the nodes and the network bound an exchange together.

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
"""That DeepEP takes by itself (`Buffer.num_sms`)."""

_AGREEMENTS = 4.75
"""How often the ranks of a node agree before and after: as often as so many collectives begin."""

_NOTIFY_S = 34e-6
"""To tell twice as many nodes how many tokens come."""

_TOKEN_S = 0.3e-6
"""Of a channel with a token, however long and wherever it goes."""

_COPY_RATE = 45e9
"""Bytes/s at which a channel copies tokens to one device after the other."""

_FORWARD_RATE = 29e9
"""Bytes/s at which it hands them on to one node after the other, where there are several."""

_SUMS = 2.2
"""How much longer that takes for what nodes add up on the way back."""

_SUM_S = 1.43e-9
"""For every byte of a token, until the first one is added up."""

_OVERLAP = 3.0
"""How well what bounds an exchange hides behind the others: seconds are (a^p + b^p + c^p)^(1/p)."""


class Tokens(NamedTuple):
    """The tokens of a rank: how many, of how many bytes each, and how many of the ranks and of their nodes have experts of
    one, on the average, all equally likely."""

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
    """Time until every rank's `tokens` have reached the devices that hold their experts; with `sums`, until what these made
    of them is back and added up.

    A token crosses to each of its nodes once and goes on inside it to each of its devices once, both in a stream.
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
    """Of a channel with one token."""
    seconds = _TOKEN_S + tokens.num_devices * tokens.num_bytes / _COPY_RATE
    if group.num_nodes > 1:
        seconds += tokens.num_nodes * tokens.num_bytes / _FORWARD_RATE * (_SUMS if sums else 1.0)
    return seconds


def _start_seconds(group: Communicator) -> float:
    begins = group.node.start_s if group.node else group.intra_latency_s
    return _AGREEMENTS * begins + _NOTIFY_S * math.log2(group.num_nodes)
