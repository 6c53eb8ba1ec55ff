"""Every catalog entry loads, and every figure in it says where it comes from."""

from __future__ import annotations

import re
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

GEFORCE = [name for name in device_names() if re.fullmatch(r"rtx[2-5]0[0-9]{2}(ti)?(-[0-9]+)?", name)]
"""Consumer cards of NVIDIA, whose clocks go above the boost clock of their datasheets."""

# Multiprocessors (compute units), boost clock in MHz, FLOP per clock and multiprocessor in 16 bits with fp32 accumulation,
# bits of the memory's bus and Gbit/s of each: the datasheets' figures, so that a slip of a digit in the catalog fails.
DATASHEETS = {
    "a10": (72, 1695, 1024, 384, 12.5),
    "a100-40": (108, 1410, 2048, 5120, 2.43),
    "a100-80": (108, 1410, 2048, 5120, 3.186),
    "a10g": (80, 1710, 512, 384, 12.5),
    "a40": (84, 1740, 1024, 384, 14.5),
    "gb10": (48, 2525, 1024, 256, 8.533),
    "h100": (132, 1830, 4096, 5120, 5.23),
    "jetson-thor": (20, 1575, 8192, 256, 8.533),
    "l4": (58, 2040, 1024, 192, 12.5),
    "l40s": (142, 2490, 1024, 384, 18),
    "mi210": (104, 1700, 1024, 4096, 3.2),
    "mi250x": (110, 1700, 1024, 4096, 3.2),
    "mi300x": (304, 2100, 2048, 8192, 5.2),
    "rtx-a6000": (84, 1800, 1024, 384, 16),
    "rtx-pro-6000": (188, 2617, 1024, 512, 28),
    "rtx2080ti": (68, 1545, 512, 352, 14),
    "rtx3060-12": (28, 1777, 512, 192, 15),
    "rtx3080-10": (68, 1710, 512, 320, 19),
    "rtx3090": (82, 1695, 512, 384, 19.5),
    "rtx4070ti": (60, 2610, 512, 192, 21),
    "rtx4080": (76, 2505, 512, 256, 22.4),
    "rtx4090": (128, 2520, 512, 384, 21),
    "rtx5060ti-16": (36, 2572, 512, 128, 28),
    "rtx5070ti": (70, 2452, 512, 256, 28),
    "rtx5080": (84, 2617, 512, 256, 30),
    "rtx5090": (170, 2407, 512, 512, 28),
    "rtx6000-ada": (142, 2505, 1024, 384, 20),
    "rx7900xtx": (96, 2500, 512, 384, 20),
    "t4": (40, 1590, 1024, 256, 10),
    "titan-rtx": (72, 1770, 1024, 384, 14),
    "v100-32": (80, 1530, 1024, 4096, 1.755),
}


@pytest.mark.parametrize("name", device_names())
def test_every_figure_names_its_source(name: str) -> None:
    (group,) = load_cluster(f"8x-{name}").nodes[:1]
    assert (group.host is None) == group.device.shares_host_memory
    hosts = [group.host] if group.host else []
    for part in (group, group.device, group.intra_node, group.inter_node, *hosts):
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
    best = "bf16" if device.peak_flops.bf16 else "fp16"
    highest_clock = 1.15 if name in GEFORCE else 1.0  # over that of the peak
    assert device.products.boost * (device.matmul_efficiency.get(best) or 0.0) < highest_clock


@pytest.mark.parametrize("name", DATASHEETS)
def test_peaks_and_bandwidths_follow_from_clocks_and_widths(name: str) -> None:
    multiprocessors, mhz, flop, bits, gbit = DATASHEETS[name]
    device = load_cluster(f"1x-{name}").device
    assert device.products is not None and device.products.num_multiprocessors == multiprocessors
    half = multiprocessors * mhz * 1e6 * flop
    assert device.peak_flops.fp16 == pytest.approx(half, rel=0.01)
    assert device.peak_flops.bf16 in (None, device.peak_flops.fp16)
    assert device.memory_bandwidth == pytest.approx(bits * gbit * 1e9 / 8, rel=0.01)
    others = device.peak_flops.fp8, device.peak_flops.tf32
    for peak, ratios in zip(others, ((2,), (0.25, 0.5)), strict=True):
        assert peak is None or any(peak == pytest.approx(half * ratio, rel=0.03) for ratio in ratios)


@pytest.mark.parametrize("name", device_names())
def test_sources_that_say_how_a_figure_comes_about_agree_with_it(name: str) -> None:
    device = load_cluster(f"1x-{name}").device
    bus = re.search(r"(\d+) bits at ([\d.]+) Gbit/s", device.source_of("memory_bandwidth") or "")
    clock = re.search(r"(\d+) (?:multiprocessors|compute units) at", device.source_of("peak_flops") or "")
    memory = re.search(r"([\d.]+) GiB", device.source_of("memory_bytes") or "")
    if bus:
        assert device.memory_bandwidth == pytest.approx(int(bus[1]) * float(bus[2]) * 1e9 / 8, rel=2e-3)
    if clock:
        assert device.products and int(clock[1]) == device.products.num_multiprocessors
    if memory:
        assert device.memory_bytes / 2**30 == pytest.approx(float(memory[1]), abs=0.01)


@pytest.mark.parametrize("name", [name for name in GEFORCE if name >= "rtx3"])
def test_transfers_between_consumer_cards_go_through_host_memory(name: str) -> None:
    (group,) = load_cluster(f"2x-{name}").nodes
    link = group.intra_node
    assert "no peer access" in (link.source_of("bandwidth") or "")
    assert link.ring_bandwidth is not None
    assert link.ring_bandwidth < link.bandwidth < 0.75 * group.device.host_link_bandwidth


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("8x-h100", [(1, 8, 8)]),
        ("128x-h100", [(16, 8, 8)]),
        ("12x-h100", [(1, 8, 8), (1, 4, 4)]),
        ("4x-rtx4090", [(1, 4, 1)]),
        ("2x4x-a100-40", [(2, 4, 4)]),
        ("2x4x-A100-40GB", [(2, 4, 4)]),
        ("8x-gh200", [(2, 4, 4)]),
        ("8XH100", [(1, 8, 8)]),
        ("4x-v100-16+4x-t4", [(1, 4, 2), (1, 4, 1)]),
        ("2x-rtx5090", [(1, 2, 1)]),
        ("8x-rtx5080", [(2, 4, 1)]),
        ("2x-rtx5060ti-16+1x-rtx3060-12", [(1, 2, 1), (1, 1, 1)]),
        ("2x-gb10", [(2, 1, 1)]),
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
