"""Cluster files: what they may leave out, what overrides do, and what their errors say."""

from __future__ import annotations

from pathlib import Path

import pytest

from stagewright.cluster import Cluster, arranged, load_cluster, save_cluster, without
from stagewright.cluster.load import write_toml
from stagewright.errors import InputError

SMALL = """
[[nodes]]
count = 2
devices_per_node = 4
device = "a100-40"
[nodes.inter_node]
bandwidth = "10 GB/s"
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "site.toml"
    path.write_text(text)
    return path


def test_a_file_completes_itself_from_the_catalog(tmp_path: Path) -> None:
    cluster = load_cluster(written(tmp_path, SMALL))
    group = cluster.nodes[0]
    assert (cluster.name, cluster.num_nodes, cluster.num_devices) == ("site", 2, 8)
    assert group.inter_node.bandwidth == 10e9
    assert group.inter_node.latency_s == load_cluster("8x-a100-40").nodes[0].inter_node.latency_s
    assert "site.toml" in (group.inter_node.source_of("bandwidth") or "")
    assert "site.toml" not in (group.inter_node.source_of("latency_s") or "")


BOX = """
[[nodes]]
devices = ["rtx3090", "rtx3090", "rtx4090", "rtx4090"]
"""


def test_a_list_of_devices_is_one_node_on_pcie_without_a_host(tmp_path: Path) -> None:
    box = load_cluster(written(tmp_path, BOX))
    assert [box.device_of(rank).name for rank in range(4)] == ["rtx3090"] * 2 + ["rtx4090"] * 2
    assert (box.num_nodes, box.ranks_of(0), {box.node_of(rank) for rank in range(4)}) == (1, range(4), {0})
    slow, fast = (load_cluster(f"2x-{name}").nodes[0].intra_node for name in ("rtx3090", "rtx4090"))
    assert box.link_between(0, 1) == slow and box.link_between(2, 3) == fast
    assert box.link_between(1, 2).bandwidth == slow.bandwidth < fast.bandwidth
    assert all(group.host is None for group in box.nodes)
    assert repr(box) == "<Cluster site: 1 x 2 rtx3090 + 2 rtx4090>"


def test_unequal_cards_are_joined_by_the_slower_of_their_links(tmp_path: Path) -> None:
    cards = written(tmp_path, '[[nodes]]\ndevices = ["rtx3090", "rtx5090", "rtx-pro-6000", "rtx-pro-6000"]\n')
    box = load_cluster(cards)
    links = [
        load_cluster(f"2x-{name}").nodes[0].intra_node for name in ("rtx3090", "rtx5090", "rtx-pro-6000")
    ]
    assert [link.bandwidth for link in links] == sorted(link.bandwidth for link in links)
    assert box.link_between(0, 1).bandwidth == links[0].bandwidth
    assert box.link_between(1, 2).bandwidth == links[1].bandwidth  # staged: one of the two has no peer access
    assert box.link_between(2, 3) == links[2]
    assert box.link_between(0, 1).seconds(1e9) == 1e-5 + 1e9 / links[0].bandwidth


def test_the_node_of_a_list_states_its_links_and_host(tmp_path: Path) -> None:
    text = (
        f'name = "site"\n{BOX}count = 2\nintra_node = {{ bandwidth = "20 GB/s" }}\ninter_node = {{ bandwidth = "1 GB/s" }}\n'
        'host = { name = "desktop", memory_bytes = "64 GB", memory_bandwidth = "80 GB/s", memory_efficiency = 0.5 }\n'
    )
    boxes = load_cluster(written(tmp_path, text))
    assert (boxes.num_devices, boxes.num_nodes, boxes.ranks_of(1)) == (8, 2, range(4, 8))
    assert boxes.link_between(5, 6).bandwidth == 20e9
    assert boxes.link_between(0, 6, 1).bandwidth == 1e9 and boxes.link_between(0, 6).bandwidth == 0.25e9
    host = boxes.group_of(7).host
    assert host is not None and (host.name, host.num_devices) == ("desktop", 4)
    assert "site.toml" in (boxes.group_of(7).intra_node.source_of("bandwidth") or "")


def test_devices_of_a_list_leave_their_fast_links(tmp_path: Path) -> None:
    link = load_cluster(written(tmp_path, '[[nodes]]\ndevices = ["h100", "h100", "a100-80"]\n')).link_between(
        0, 1
    )
    assert link.bandwidth < 32e9 and link.collectives is None


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ('devices = "rtx3090"', r"nodes\[0\].devices = 'rtx3090': must be a list of names"),
        ("devices = []", r"nodes\[0\].devices = \[\]: must be a list of names"),
        ('devices = ["rtx3090", 4]', "must be a list of names"),
        ('devices = ["rtx3090", "rtx4900"]', "did you mean 'rtx4090'"),
        ('devices = ["rtx5090", "gb10"]', r"nodes\[0\].devices: gb10 is a machine of one device, not a card"),
        ('devices = ["t4"]\ndevice = "t4"', "has both devices and device:"),
        ('devices = ["t4"]\ndevices_per_node = 1', "has both devices and devices_per_node:"),
        ('devices = ["t4"]\ncount = 0', r"nodes\[0\].count = 0: must be a whole number from 1"),
        ('devices = ["t4", "l4"]\nlinks = 1', r"nodes\[0\]: unknown key 'links'"),
        ('devices = ["t4", "l4"]\nhost = { name = "x" }', "host.memory_bytes is missing"),
        ('device = "t4"\nsame_node = true', "means the node of the group before it"),
    ],
)
def test_bad_lists_of_devices_are_one_error(tmp_path: Path, changed: str, words: str) -> None:
    path = written(tmp_path, f"[[nodes]]\n{changed}\n")
    with pytest.raises(InputError, match=words) as refusal:
        load_cluster(path)
    assert str(refusal.value).count("nodes[") <= 1


def test_stating_a_bandwidth_drops_the_ring_figure_of_the_catalog(tmp_path: Path) -> None:
    text = SMALL.replace("a100-40", "v100-32").replace("inter_node", "intra_node")
    assert load_cluster("8x-v100-32").nodes[0].intra_node.ring_bandwidth is not None
    assert load_cluster(written(tmp_path, text)).nodes[0].intra_node.collective_bandwidth == 10e9


def test_overrides_reach_every_node_and_are_recorded() -> None:
    cluster = load_cluster(
        "12x-h100", {"device.memory_bytes": "64GiB", "device.peak_flops.bf16": 5e14, "name": "half"}
    )
    assert cluster.name == "half"
    for group in cluster.nodes:
        assert group.device.memory_bytes == 64 * 2**30
        assert group.device.peak_flops.bf16 == 5e14
        assert group.device.source_of("peak_flops.bf16") == "given as an override"
        assert "datasheet" in (group.device.source_of("peak_flops.fp8") or "")


def test_figures_of_hosts_that_earlier_versions_had_are_dropped(tmp_path: Path) -> None:
    figures = (
        "[nodes.host.peak_flops]\nbf16 = 1e12\n[nodes.host.sources]\n'matmul_efficiency.bf16' = 'a guess'\n"
    )
    host = load_cluster(written(tmp_path, SMALL + figures)).nodes[0].host
    assert host is not None and host == load_cluster("8x-a100-40").nodes[0].host
    with pytest.raises(InputError, match="unknown key 'peak_flop'"):
        load_cluster(written(tmp_path, SMALL + "[nodes.host]\npeak_flop = 1e12\n"))


def test_overrides_leave_the_catalog_alone() -> None:
    before = load_cluster("8x-h100")
    load_cluster("8x-h100", {"inter_node.bandwidth": 1.0})
    assert load_cluster("8x-h100") == before


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"device.memory_byte": 5}, r"^8x-h100: nodes\[0\]\.device: unknown key .*'memory_bytes'"),
        ({"device.memory_bytes": -5}, r"nodes\[0\]\.device\.memory_bytes = -5: must be greater"),
        ({"device.memory_efficiency": 1.5}, "must be less than or equal to 1"),
        ({"device.peak_flops.bf17": 1e12}, "unknown key 'bf17' .*'bf16'"),
        ({"inter_node.bandwidth": "200Gb/s"}, "bytes, not bits"),
        ({"device.memory_bytes": "lots"}, r"device\.memory_bytes = 'lots': .* not an amount"),
        ({"inter_node.bandwidth": "fast B/s"}, r"inter_node\.bandwidth = 'fast B/s': .* not an amount"),
        ({"device.sources.memory": "x"}, "names no figure"),
        ({"count": 0}, "count = 0"),
    ],
)  # fmt: skip
def test_bad_values_name_key_value_and_rule(overrides: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        load_cluster("8x-h100", overrides)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nodes = [", "site.toml: not valid TOML"),
        ("name = 'x'", "nodes is missing"),
        ("nodes = 3", "nodes = 3"),
        ("[nodes]\ndevice = 'h100'", r"nodes: must be a list: in TOML \[\[nodes\]\] begins"),
        ("[[nodes]]\ndevice = 'h1000'", "did you mean 'h100'"),
        ("[[nodes]]\ndevices_per_node = 4", "device is missing"),
        (SMALL + "latencys = 3", "unknown key 'latencys'"),
        (SMALL + "[measured]\nbandwidth = [[0, 1e9], [1e9, 0], [1, 1]]", "square"),
        (SMALL + "[measured]\nbandwidth = [[0.0]]", "the cluster has 2 nodes"),
        (SMALL + "[measured]\nbandwidth = [[0, 1e9], [-1, 0]]", r"bandwidth\[1\]\[0\]"),
    ],
)
def test_bad_files_name_the_file_and_the_fix(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        load_cluster(written(tmp_path, text))


@pytest.mark.parametrize("name", ["8x-h100", "4x-v100-16+4x-t4", "12x-gh200"])
def test_saved_clusters_read_back_equal(tmp_path: Path, name: str) -> None:
    path = tmp_path / "deep" / "copy.toml"
    cluster = load_cluster(name)
    save_cluster(cluster, path, "copied by a test\non two lines")
    assert load_cluster(path) == cluster
    assert path.read_text().startswith("# copied by a test\n# on two lines\n")
    assert [entry.name for entry in path.parent.iterdir()] == ["copy.toml"]


def test_nodes_of_several_kinds_survive_a_round_trip_and_the_loss_of_devices(tmp_path: Path) -> None:
    boxes = load_cluster(written(tmp_path, f"{BOX}count = 2\n"))
    save_cluster(boxes, tmp_path / "copy.toml", "copied by a test")
    assert load_cluster(tmp_path / "copy.toml") == boxes
    fewer = without(boxes, [0, 1, 5])
    assert [fewer.device_of(rank).name for rank in range(5)] == ["rtx4090"] * 2 + ["rtx3090"] + [
        "rtx4090"
    ] * 2
    assert [fewer.node_of(rank) for rank in range(5)] == [0, 0, 1, 1, 1]
    turned = arranged(boxes, [7, 0, 1, 2, 3, 4, 5, 6])
    assert (
        turned.device_of(0).name == "rtx4090"
        and turned.node_of(0) == 1
        and list(turned.ranks_of(0)) == [1, 2, 3, 4]
    )
    assert turned.link_between(0, 5) == boxes.link_between(7, 4)


def test_measured_bandwidth_survives_a_round_trip(tmp_path: Path) -> None:
    document = load_cluster("2x2x-h100").model_dump(exclude_none=True)
    document["measured"] = {"bandwidth": [[0, 2e10], [1.9e10, 0]], "sources": {"bandwidth": "a test"}}
    cluster = Cluster.model_validate(document)
    save_cluster(cluster, tmp_path / "m.toml", "test")
    assert load_cluster(tmp_path / "m.toml") == cluster


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "kept.toml"
    path.write_text("old = 1\n")

    class Unprintable:
        def __repr__(self) -> str:
            raise RuntimeError("cannot be written")

    with pytest.raises(RuntimeError):
        write_toml(path, {"value": Unprintable()}, "test")
    assert path.read_text() == "old = 1\n"
    assert [entry.name for entry in tmp_path.iterdir()] == ["kept.toml"]
