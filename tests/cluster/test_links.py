"""Which link joins two ranks, and what a message over it costs."""

from __future__ import annotations

import pytest

from stagewright.cluster import Cluster, Link, arranged, load_cluster
from stagewright.errors import InputError


def with_measured(name: str, measured: dict[str, object]) -> Cluster:
    return Cluster.model_validate({**load_cluster(name).model_dump(exclude_none=True), "measured": measured})


def test_ranks_count_node_after_node() -> None:
    cluster = load_cluster("2x4x-h100+1x2x-t4")
    assert [cluster.node_of(rank) for rank in range(10)] == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert list(cluster.ranks_of(2)) == [8, 9]
    assert [cluster.device_of(rank).name for rank in (0, 7, 8)] == ["h100", "h100", "t4"]
    with pytest.raises(InputError, match="ranks are 0 to 9"):
        cluster.node_of(10)
    with pytest.raises(InputError, match="mixes devices"):
        _ = cluster.device


def test_point_to_point_is_latency_plus_size_over_bandwidth() -> None:
    cluster = load_cluster(
        "2x8x-h100",
        {"intra_node.bandwidth": 1e11, "intra_node.latency_s": 1e-6, "inter_node.bandwidth": 1e10,
         "inter_node.latency_s": 1e-5},
    )  # fmt: skip
    assert cluster.point_to_point_seconds(1e9, 0, 1) == pytest.approx(1e-6 + 1e-2)
    assert cluster.point_to_point_seconds(1e9, 0, 8) == pytest.approx(1e-5 + 1e-1)
    assert cluster.point_to_point_seconds(1e9, 3, 3) == 0.0


def test_devices_of_a_node_share_its_adapters() -> None:
    cluster = load_cluster("2x8x-h100", {"num_nics": 2, "inter_node.bandwidth": 1e10})
    assert cluster.link_between(0, 8).bandwidth == pytest.approx(2e10 / 8)
    assert cluster.link_between(0, 8, flows_per_node=4).bandwidth == pytest.approx(2e10 / 4)
    assert cluster.link_between(0, 8, flows_per_node=1).bandwidth == pytest.approx(1e10)


def test_mixed_nodes_meet_at_the_slower_end() -> None:
    cluster = load_cluster("4x-h100+4x-t4")
    assert cluster.link_between(0, 4).bandwidth == cluster.nodes[1].network_share(4).bandwidth
    assert cluster.link_between(0, 4) == cluster.link_between(4, 0)


def test_measured_bandwidth_keeps_both_directions() -> None:
    nodes = with_measured("2x2x-h100", {"bandwidth": [[0, 2e10], [1e10, 0]]})
    assert nodes.link_between(0, 2).bandwidth == 2e10
    assert nodes.link_between(3, 1).bandwidth == 1e10
    assert nodes.link_between(0, 1) == nodes.nodes[0].intra_node
    ranks = with_measured("1x2x-h100", {"between": "ranks", "bandwidth": [[0, 3e9], [2e9, 0]],
                                        "latency_s": [[0, 1e-3], [2e-3, 0]]})  # fmt: skip
    assert ranks.link_between(1, 0).seconds(2e9) == pytest.approx(1.002)


def test_links_reject_impossible_figures() -> None:
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        Link(latency_s=0, bandwidth=0)
    with pytest.raises(ValueError, match="finite"):
        Link(latency_s=0, bandwidth=float("inf"))


def test_blocks_of_ranks_wait_for_the_slowest_of_their_links() -> None:
    cluster = load_cluster("24x-h100")
    for size in (0.0, 1e9):
        inside, across = (cluster.point_to_point_seconds(size, *ends) for ends in ((3, 6), (5, 8)))
        assert (
            cluster.blocks_seconds(size, 3, 6, 2) == inside < across == cluster.blocks_seconds(size, 3, 6, 3)
        )
    assert cluster.blocks_seconds(1e9, 3, 3, 3) == 0.0
    measured = with_measured("1x4x-h100", {"between": "ranks", "bandwidth": [[1e9 / (1 + i + 4 * j) for j in range(4)]
                                                                             for i in range(4)]})  # fmt: skip
    slowest = max(measured.point_to_point_seconds(1e9, *pair) for pair in ((0, 2), (1, 3)))
    assert measured.blocks_seconds(1e9, 0, 2, 2) == slowest == measured.point_to_point_seconds(1e9, 1, 3)
    swapped = arranged(cluster, [*range(8, 16), *range(8), *range(16, 24)])
    assert swapped.blocks_seconds(1e9, 3, 6, 3) == cluster.point_to_point_seconds(1e9, 13, 0)
