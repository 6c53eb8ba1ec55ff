"""Cluster files: what they may leave out, what overrides do, and what their errors say."""

from __future__ import annotations

from pathlib import Path

import pytest

from stagewright.cluster import Cluster, load_cluster, save_cluster
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
