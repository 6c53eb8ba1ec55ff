"""Device figures: precisions, memory, and the two times that their efficiencies define."""

from __future__ import annotations

import pytest

from stagewright.cluster import Device, load_cluster
from stagewright.errors import InputError


def device(name: str) -> Device:
    return load_cluster(f"8x-{name}").device


def test_precisions_go_by_their_torch_names_too() -> None:
    h100 = device("h100")
    assert h100.matmul_flops("bf16") == h100.matmul_flops("torch.bfloat16") == h100.matmul_flops("bfloat16")
    assert h100.peak_flops.get("int8") is None


def test_a_missing_precision_names_the_ones_there_are() -> None:
    with pytest.raises(InputError, match=r"'v100-32' has no figures for bf16 .* use one of fp64, fp32, fp16"):
        device("v100-32").matmul_flops("bfloat16")


def test_half_of_the_rate_is_reached_at_the_half_saturation_size() -> None:
    a100 = device("a100-80")
    flop = a100.matmul_half_flop
    assert flop / a100.matmul_seconds(flop, "bf16") == pytest.approx(a100.matmul_flops("bf16") / 2)
    assert 1e15 / a100.matmul_seconds(1e15, "bf16") == pytest.approx(a100.matmul_flops("bf16"), rel=1e-4)
    assert a100.matmul_seconds(0, "bf16") == 0.0


def test_streaming_time_is_bytes_over_attained_bandwidth() -> None:
    a100 = device("a100-80")
    assert a100.memory_seconds(2.039e12 * a100.memory_efficiency) == pytest.approx(1.0)


def test_usable_memory_leaves_out_context_and_reserve() -> None:
    cluster = load_cluster(
        "8x-h100",
        {"device.memory_bytes": 1000, "device.context_bytes": 100, "device.reserve_fraction": 0.25},
    )
    assert cluster.device.usable_bytes == 650


# Microseconds of fp16 forward products in GPT models (hidden to 4 hidden, or hidden to hidden) with their
# FLOP: published with Mist (EuroSys'25). The constants were fitted on all sizes of the same set.
PUBLISHED_PRODUCTS = [
    ("v100-32", 2 * 2048 * 8192 * 2048, 797.135),
    ("v100-32", 2 * 2048 * 2048 * 2048, 225.174),
    ("v100-32", 2 * 8192 * 8192 * 2048, 3194.463),
    ("v100-32", 2 * 8192 * 2048 * 2048, 815.105),
    ("a100-40", 2 * 4096 * 16384 * 4096, 2310.133),
    ("a100-40", 2 * 4096 * 4096 * 4096, 587.881),
]


@pytest.mark.parametrize(("name", "flop", "microseconds"), PUBLISHED_PRODUCTS)
def test_published_matrix_products(name: str, flop: float, microseconds: float) -> None:
    assert device(name).matmul_seconds(flop, "fp16") == pytest.approx(microseconds * 1e-6, rel=0.12)
