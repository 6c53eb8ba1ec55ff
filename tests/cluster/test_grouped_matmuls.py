"""MatmulParameters of experts by one kernel, against hand-worked figures."""

from __future__ import annotations

import pytest

from stagewright.cluster import load_cluster
from stagewright.cluster.matmul import MatmulParameters, MatmulShape, shaped_matmul_seconds

PLAIN = MatmulParameters(num_multiprocessors=100, operand_share=0, fill_s=0, tail_share=1)
TILE_S = 2 * 128 * 128 * 6400 / 1e12
"""Of a tile of 128 x 128 on one of a hundred multiprocessors of 1e14 FLOP a second together."""


def seconds(shape: MatmulShape, *, grouped: bool = True, parameters: MatmulParameters = PLAIN) -> float:
    return shaped_matmul_seconds(parameters, shape, 1e14, 1e17, 0.0, grouped=grouped)


def test_rows_of_every_expert_are_rounded_up_to_tiles() -> None:
    # Ten experts with ten tiles of columns each: a wave of a hundred tiles, whether they fill them or not.
    for rows in (96, 128):
        assert seconds(MatmulShape(10, rows, 1280, 6400)) == pytest.approx(TILE_S, rel=1e-3)
    assert seconds(MatmulShape(10, 130, 1280, 6400)) > 1.4 * TILE_S
    # As one product, the same rows fill tiles.
    assert seconds(MatmulShape(1, 960, 1280, 6400)) < 0.9 * TILE_S


def test_no_inner_dimension_is_split() -> None:
    small = MatmulShape(1, 64, 64, 6400)
    assert seconds(small) == pytest.approx(TILE_S / 4, rel=1e-3)
    assert seconds(small, grouped=False) < 0.5 * TILE_S / 4


def test_a_kernel_may_run_at_less_than_the_dense_rate() -> None:
    shape = MatmulShape(10, 1280, 1280, 6400)
    slow = PLAIN.model_copy(update={"grouped_share": 0.5})
    assert seconds(shape, parameters=slow) == pytest.approx(2 * seconds(shape), rel=1e-2)
    assert seconds(shape, grouped=False, parameters=slow) == seconds(shape, grouped=False)


def test_pytorchs_kernel_on_b200_is_slower_than_those_of_runtimes() -> None:
    device = load_cluster("1x-b200").device
    shape, num_bytes = MatmulShape(4, 32000, 8192, 5120), 3e9
    own = device.shaped_matmul_seconds([shape], "bf16", num_bytes, grouped=True)
    others = device.with_grouped_share(1.0)
    assert others.shaped_matmul_seconds([shape], "bf16", num_bytes, grouped=True) == pytest.approx(
        0.73 * own, rel=0.05
    )
    assert others.with_grouped_share(1.0) is others
    h100 = load_cluster("1x-h100").device
    assert h100.with_grouped_share(1.0) is h100
    without = load_cluster("1x-mi300x").device.model_copy(update={"products": None})
    assert without.with_grouped_share(0.5) is without
