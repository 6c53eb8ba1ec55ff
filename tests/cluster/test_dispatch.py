"""Exchanges of tokens with experts of other ranks, against hand-worked figures."""

from __future__ import annotations

import pytest

from stagewright.cluster import Tokens, all_to_all_seconds, dispatch_seconds, load_cluster

PLAIN = {
    "intra_node.bandwidth": 1e11,
    "intra_node.latency_s": 2e-6,
    "inter_node.bandwidth": 1e9,
    "inter_node.latency_s": 1e-5,
    "num_nics": 8,
}


def together(*bounds: float) -> float:
    return sum(bound**3 for bound in bounds) ** (1 / 3)


def test_a_dispatch_crosses_once_per_node_and_spreads_inside() -> None:
    cluster, tokens = load_cluster("2x8x-h100", PLAIN), Tokens(1000, 1e4, 4, 2)
    # Of two nodes half the crossings are to the own one; eight ranks share what leaves a node. Ten channels copy a token to
    # four devices and hand it on to two nodes.
    crossing = 1000 * 1e4 * 2 * 0.5 * 8 / 8e9
    inside = 1000 * 1e4 * 4 * 7 / 8 / 1e11
    copying = 1000 * (0.3e-6 + 4 * 1e4 / 45e9 + 2 * 1e4 / 29e9) / 10
    start = 4.75 * 2e-6 + 34e-6
    seconds = dispatch_seconds(cluster, tokens, range(16))
    assert seconds == pytest.approx(start + together(crossing, inside, copying))
    # What comes back is added up in every node, the first token alone.
    copying = 1000 * (0.3e-6 + 4 * 1e4 / 45e9 + 2.2 * 2 * 1e4 / 29e9) / 10
    back = dispatch_seconds(cluster, tokens, range(16), sums=True)
    assert back == pytest.approx(start + 1.43e-9 * 1e4 + together(crossing, inside, copying))


def test_inside_a_node_nothing_crosses() -> None:
    cluster, tokens = load_cluster("8x-h100"), Tokens(4096, 14336, 5.25, 1)
    inside = 4096 * 14336 * 5.25 * 7 / 8 / 367e9
    copying = 4096 * (0.3e-6 + 5.25 * 14336 / 45e9) / 12
    seconds = dispatch_seconds(cluster, tokens, range(8), num_multiprocessors=24)
    assert seconds == pytest.approx(4.75 * 5.3e-6 + together(inside, copying))
    assert dispatch_seconds(cluster, tokens, [3]) == 0.0


def test_more_multiprocessors_are_faster_until_links_bound() -> None:
    cluster, tokens = load_cluster("4x8x-h100"), Tokens(4096, 7392, 7.2, 3.6)
    times = [
        dispatch_seconds(cluster, tokens, range(32), num_multiprocessors=count) for count in (4, 8, 24, 96)
    ]
    assert times == sorted(times, reverse=True)
    assert times[0] > 1.8 * times[1]
    assert times[2] < 1.2 * times[3]


def test_a_dispatch_of_many_tokens_is_faster_than_sending_every_copy() -> None:
    cluster, num_tokens, num_bytes = load_cluster("8x8x-h100"), 8192, 14336
    copies = all_to_all_seconds(cluster, 8.0 * num_tokens * num_bytes, range(64))
    assert dispatch_seconds(cluster, Tokens(num_tokens, num_bytes, 7.5, 5.25), range(64)) < copies


def test_times_grow_with_tokens() -> None:
    cluster = load_cluster("2x8x-b200")
    times = [
        dispatch_seconds(cluster, Tokens(number, 7168, 6, 2), range(16)) for number in (0, 16, 1024, 65536)
    ]
    assert 0 < times[0] < times[1] < times[2] < times[3]
