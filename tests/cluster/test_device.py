"""Device figures: precisions, memory, and the two times that their efficiencies define."""

from __future__ import annotations

import pytest

from stagewright.cluster import Device, load_cluster
from stagewright.cluster.matmul import MatmulShape
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
    flop = 5e9
    a100 = device("a100-80").model_copy(update={"matmul_half_flop": flop})
    assert flop / a100.matmul_seconds(flop, "bf16") == pytest.approx(a100.matmul_flops("bf16") / 2)
    assert 1e15 / a100.matmul_seconds(1e15, "bf16") == pytest.approx(a100.matmul_flops("bf16"), rel=1e-4)
    assert a100.matmul_seconds(0, "bf16") == 0.0


def test_streaming_time_is_bytes_over_attained_bandwidth() -> None:
    a100 = device("a100-80")
    assert a100.memory_seconds(2.039e12 * a100.memory_efficiency) == pytest.approx(1.0)


def test_a_device_without_a_link_to_the_host_shares_its_memory() -> None:
    assert device("gb10").shares_host_memory and not device("rtx5090").shares_host_memory
    with pytest.raises(
        InputError, match=r"host_link_bandwidth = 0\.5: must be 0 or at least 1 bytes per second"
    ):
        load_cluster("1x-gb10", {"device.host_link_bandwidth": 0.5})
    with pytest.raises(InputError, match=r"host_link_bandwidth = -1"):
        load_cluster("1x-gb10", {"device.host_link_bandwidth": -1})


def test_usable_memory_leaves_out_context_and_reserve() -> None:
    cluster = load_cluster(
        "8x-h100",
        {"device.memory_bytes": 1000, "device.context_bytes": 100, "device.reserve_fraction": 0.25},
    )
    assert cluster.device.usable_bytes == 650


# Microseconds of fp16 forward products in GPT models (rows, inner, columns): published with Mist (EuroSys'25). The constants
# were fitted on half of the same set.
PUBLISHED_PRODUCTS = [
    ("v100-32", (2048, 2048, 8192), 797.135),
    ("v100-32", (2048, 2048, 2048), 225.174),
    ("v100-32", (8192, 2048, 8192), 3194.463),
    ("v100-32", (8192, 2048, 2048), 815.105),
    ("a100-40", (4096, 4096, 16384), 2310.133),
    ("a100-40", (4096, 4096, 4096), 587.881),
]


@pytest.mark.parametrize(("name", "sizes", "microseconds"), PUBLISHED_PRODUCTS)
def test_published_matrix_products(name: str, sizes: tuple[int, int, int], microseconds: float) -> None:
    rows, inner, columns = sizes
    moved = 2 * (rows * inner + inner * columns + rows * columns)
    seconds = device(name).shaped_matmul_seconds([MatmulShape(1, rows, columns, inner)], "fp16", moved)
    assert seconds == pytest.approx(microseconds * 1e-6, rel=0.16)


def product_s(rows: float, columns: float, inner: float, *, batch: int = 1, alone: bool = False) -> float:
    moved = 2.0 * batch * (rows * inner + inner * columns + rows * columns)
    return device("a100-80").shaped_matmul_seconds(
        [MatmulShape(batch, rows, columns, inner)], "bf16", moved, alone=alone
    )


def test_a_wave_that_is_not_full_takes_as_long_as_one_that_is() -> None:
    full = 108 * 128
    assert product_s(full, 256, 8192) == pytest.approx(product_s(full - 128 * 20, 256, 8192), rel=0.05)
    assert product_s(full + 128, 256, 8192) > 1.2 * product_s(full, 256, 8192)


def test_a_long_inner_dimension_is_split_over_idle_multiprocessors() -> None:
    """One tile of results would take a multiprocessor a hundred times as long."""
    a100 = device("a100-80")
    one_by_one = 2 * 256 * 128 * 1e6 / (a100.matmul_flops("bf16") / 108)
    assert product_s(256, 128, 1e6) < 0.2 * one_by_one


def test_products_of_a_batch_fill_the_device_together() -> None:
    assert product_s(512, 512, 512, batch=64) < 32 * product_s(512, 512, 512)


def test_thin_products_are_bound_by_memory() -> None:
    a100 = device("a100-80")
    assert product_s(64, 16384, 16384) > 2 * 16384**2 / a100.memory_bandwidth


def test_a_short_product_alone_has_higher_clocks_than_a_long_one_and_than_one_in_training() -> None:
    short, long = ((product_s(m, 8192, 8192) / product_s(m, 8192, 8192, alone=True)) for m in (256, 65536))
    assert 1.0 < long < short < 1.2
