"""Every catalog entry loads, and every figure in it says where it comes from."""

from __future__ import annotations

import subprocess
import sys

import pytest

from stagewright.cluster import load_cluster
from stagewright.cluster.catalog import device_names
from stagewright.errors import InputError

# A source is a publication, a datasheet, a repository or an admitted guess.
RECOGNISED = (
    "guess",
    "datasheet",
    "whitepaper",
    "github.com",
    "paper",
    "PyTorch",
    "fit",
    "Gbit/s",
    "platform",
)
NODE_FIGURES = {"devices_per_node", "num_devices", "num_nics"}


@pytest.mark.parametrize("name", device_names())
def test_every_figure_names_its_source(name: str) -> None:
    (group,) = load_cluster(f"8x-{name}").nodes[:1]
    assert group.host is not None
    for part in (group, group.device, group.intra_node, group.inter_node, group.host):
        assert part.figures(), "a part without figures would make this test vacuous"
        assert all(map(part.source_of, part.figures()))
        for figure in set(part.figures()) - NODE_FIGURES:
            source = part.source_of(figure) or ""
            assert any(word in source for word in RECOGNISED), f"{name}: {figure}: {source!r}"


@pytest.mark.parametrize("name", device_names())
def test_figures_are_plausible(name: str) -> None:
    device = load_cluster(f"8x-{name}").device
    assert device.name == name
    assert 8 * 2**30 < device.usable_bytes < device.memory_bytes < 300 * 2**30
    assert set(device.matmul_efficiency.available()) == set(device.peak_flops.available())
    assert device.products is not None
    # No clock is above that of the peak.
    best = "bf16" if device.peak_flops.bf16 else "fp16"
    assert device.products.boost * (device.matmul_efficiency.get(best) or 0.0) < 1


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("8x-h100", [(1, 8, 8)]),
        ("128x-h100", [(16, 8, 8)]),
        ("12x-h100", [(1, 8, 8), (1, 4, 4)]),
        ("4x-rtx4090", [(1, 4, 1)]),
        ("2x4x-a100-40", [(2, 4, 4)]),
        ("8x-gh200", [(2, 4, 4)]),
        ("8XH100", [(1, 8, 8)]),
        ("4x-v100-16+4x-t4", [(1, 4, 2), (1, 4, 1)]),
    ],
)
def test_names_multiply_the_catalog_node(name: str, sizes: list[tuple[int, int, int]]) -> None:
    cluster = load_cluster(name)
    assert [(g.count, g.devices_per_node, g.num_nics) for g in cluster.nodes] == sizes
    assert cluster.num_devices == sum(count * size for count, size, _ in sizes)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("8x-h10", "did you mean 'h100'"),
        ("h100", "did you mean"),
        ("0x-h100", "at least 1"),
        ("no/such.toml", "no cluster file"),
        ("4x-h100+bogus", "no cluster"),
    ],
)
def test_unknown_names_teach(name: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        load_cluster(name)


def test_import_needs_no_torch() -> None:
    code = "import sys, stagewright.cluster; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
