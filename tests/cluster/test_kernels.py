"""What a library's choice of kernels adds to products, against the measured ones that the tables are of."""

from __future__ import annotations

import math
import tomllib
from importlib import resources

import pytest

from stagewright.cluster import load_cluster
from stagewright.cluster.kernel_choice import kernel_factor
from stagewright.cluster.matmul import MatmulShape

TABLES = resources.files("stagewright.cluster") / "catalog" / "kernels"


def seconds(shape: MatmulShape, dtype: str = "bf16", device: str = "h100", *, best: bool = False) -> float:
    described = load_cluster(f"1x-{device}").device
    if best:
        described = described.with_best_kernels()
    batch, rows, columns, inner = shape
    num_bytes = 2 * batch * (rows * columns + rows * inner + inner * columns)
    return described.shaped_matmul_seconds([shape], dtype, num_bytes, alone=True)


# Microseconds, of the products by shape that aiconfigurator publishes, without the launch.
@pytest.mark.parametrize(
    ("device", "shape", "microseconds"),
    [
        ("h100", (257, 16384, 12288), 158),
        ("b200", (257, 16384, 12288), 91),
        ("a100-80", (3328, 4096, 8192), 853),
    ],
)
def test_measured_products_are_nearer_with_the_kernels_that_were_chosen(
    device: str, shape: tuple[int, int, int], microseconds: float
) -> None:
    asked = MatmulShape(1, *shape)
    errors = [
        abs(seconds(asked, device=device, best=best) / (microseconds * 1e-6) - 1) for best in (False, True)
    ]
    assert errors[0] < min(0.06, errors[1])


def test_products_unlike_any_measured_are_not_corrected() -> None:
    assert kernel_factor("h100", 4096, 4096, 1e12, 132) == pytest.approx(1.0, abs=1e-3)
    assert kernel_factor("h100", 0, 4096, 4096, 132) == 1.0


@pytest.mark.parametrize("of_weights", [False, True])
def test_more_samples_take_no_less_than_the_least_says(of_weights: bool) -> None:
    """Of measured products and up to 256 times as many samples, each at the rate that tiles and waves never beat."""
    device = load_cluster("1x-h100").device
    assert device.products is not None
    best = 0.0
    for rows, columns, inner, _ in tomllib.loads((TABLES / "h100.toml").read_text())["products"][::20]:
        least = device.products.least_kernel_factor(
            MatmulShape(1, rows, columns, inner), of_weights=of_weights
        )
        for times in (1, 2, 16, 256):
            grown = (rows, columns, times * inner) if of_weights else (times * rows, columns, inner)
            taken = device.shaped_matmul_seconds([MatmulShape(1, *grown)], "bf16", 0.0)
            rate = 2 * math.prod(grown) / taken / device.matmul_flops("bf16")
            assert rate * least <= 1.0 + 1e-9
            best = max(best, rate)
    assert best > 1.0  # kernels that are chosen beat it


@pytest.mark.parametrize(("batch", "dtype"), [(8, "bf16"), (1, "fp32"), (1, "fp8")])
def test_batches_and_other_types_have_no_measured_kernels(batch: int, dtype: str) -> None:
    asked = MatmulShape(batch, 1025, 5120, 3584)
    assert seconds(asked, dtype) == seconds(asked, dtype, best=True)


@pytest.mark.parametrize("device", ["h200", "gb300", "a100-80"])
def test_devices_of_a_kind_share_a_table(device: str) -> None:
    asked = MatmulShape(1, 2817, 2560, 3584)
    assert seconds(asked, device=device) != seconds(asked, device=device, best=True)
