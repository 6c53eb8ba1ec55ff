"""Link matrices in CSV files beside a cluster file."""

from __future__ import annotations

from pathlib import Path

import pytest

from stagewright.cluster import load_cluster
from stagewright.errors import InputError

CLUSTER = """
[[nodes]]
count = 3
device = "a100-80"
devices_per_node = 2

[measured]
bandwidth = "links.csv"
bandwidth_unit = "GB/s"
"""


def written(folder: Path, links: str, cluster: str = CLUSTER) -> Path:
    (folder / "links.csv").write_text(links)
    (folder / "three.toml").write_text(cluster)
    return folder / "three.toml"


@pytest.mark.parametrize(
    "links",
    [
        "x,a,b,c\na,,10,20\nb,11,,21\nc,12,22,\n",
        "a,b,c\n0,10,20\n11,0,21\n12,22,0\n",
        "0,10,20\n11,0,21\n12,22,0",
    ],
)
def test_a_file_of_links_overrides_the_description_in_each_direction(tmp_path: Path, links: str) -> None:
    cluster = load_cluster(written(tmp_path, links))
    assert cluster.link_between(0, 2).bandwidth == 10e9
    assert cluster.link_between(2, 0).bandwidth == 11e9
    assert cluster.link_between(4, 3).bandwidth == 22e9
    assert cluster.measured is not None and cluster.measured.source_of("bandwidth") == "links.csv"


@pytest.mark.parametrize(
    ("links", "message"),
    [
        ("0,1,2,3\n1,0,2,3", "square"),
        ("0,x,1\n1,0,1\n1,1,0", "row 0, column 1: 'x' is not a number"),
        ("0,0,1\n1,0,1\n1,1,0", "must be from 1 to"),
        ("0,1,fast\n1,0,1\n1,1,0", "row 0, column 2: 'fast' is not a number"),
        ("0,1,1,\n1,0,1,\n1,1,0,", "row 0, column"),
        ("0,nan,1\n1,0,1\n1,1,0", "must be a finite number"),
    ],
)
def test_wrong_matrices_are_named(tmp_path: Path, links: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_cluster(written(tmp_path, links))


def test_a_missing_file_and_a_wrong_unit_are_named(tmp_path: Path) -> None:
    path = written(tmp_path, "0", CLUSTER.replace("links.csv", "other.csv"))
    with pytest.raises(InputError, match=r"other\.csv"):
        load_cluster(path)
    with pytest.raises(InputError, match="MB/s or GB/s"):
        load_cluster(written(tmp_path, "0", CLUSTER.replace("GB/s", "GB")))


def test_a_latency_below_zero_is_refused_and_none_at_all_is_not(tmp_path: Path) -> None:
    links = "0,1,1\n1,0,1\n1,1,0"
    stated = CLUSTER + 'latency_s = "latency.csv"\n'
    (tmp_path / "latency.csv").write_text("0,1e-5,1e-5\n-1e-5,0,1e-5\n1e-5,1e-5,0")
    with pytest.raises(InputError, match=r"latency_s\[1\]\[0\] = -1e-05: must be from 0 to"):
        load_cluster(written(tmp_path, links, stated))
    (tmp_path / "latency.csv").write_text("0,0,0\n0,0,0\n0,0,0")
    assert load_cluster(written(tmp_path, links, stated)).link_between(0, 2).latency_s == 0


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ('bandwidth = "links.csv"\nbandwidth_unit = 5', "bandwidth_unit = 5: write bytes per second"),
        ('bandwidth = "links.csv"\nbandwidth_unit = "Gbit/s"', "bandwidth_unit = 'Gbit/s': write bytes"),
        ('bandwidth = [[0]]\nbandwidth_unit = "GB/s"', "is that of a CSV file"),
    ],
)
def test_wrong_units_are_named(tmp_path: Path, stated: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_cluster(written(tmp_path, "0", CLUSTER.split("bandwidth =")[0] + stated))


def test_a_file_that_is_no_text_and_a_table_that_is_none_are_named(tmp_path: Path) -> None:
    path = written(tmp_path, "0")
    (tmp_path / "links.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"links\.csv' is not UTF-8 text"):
        load_cluster(path)
    with pytest.raises(InputError, match=r"measured = 'links\.csv': must be a table"):
        load_cluster(written(tmp_path, "0", 'measured = "links.csv"\n' + CLUSTER.split("[measured]")[0]))
