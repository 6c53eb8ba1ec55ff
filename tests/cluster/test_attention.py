"""Fused attention by shape: what grows, what lies between what, and two figures by hand."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from stagewright.cluster import Device, load_cluster
from stagewright.cluster.attention import BACKWARD_FLOP, FORWARD_FLOP, Attention, Scores, attention_seconds

MEASURED = "a100-40", "a100-80", "b200", "b300", "gb200", "gb300", "gh200", "h100", "h100-hbm2e", "h200"
LENGTHS = 1, 77, 128, 129, 512, 1000, 4096, 8192, 16384
SMALL = Attention(exponential_rate=8e12, row_start_s=3e-6)


def device(name: str) -> Device:
    return load_cluster(f"1x-{name}").device


def full(queries: float, heads: float = 32, keys: float | None = None, width: int = 128) -> Scores:
    most = queries if keys is None else keys
    return Scores(heads, queries, most, 4 * width, most)


def causal(queries: float, heads: float = 32, width: int = 128) -> Scores:
    return Scores(heads, queries, queries, 4 * width, (queries + 1) / 2, 1)


def windowed(queries: float, window: float, heads: float = 32) -> Scores:
    seen = window - window * (window - 1) / (2 * queries)
    return Scores(heads, queries, window, FORWARD_FLOP, seen, 2)


def test_two_figures_by_hand() -> None:
    # A block: 128 x 128 scores x (512 FLOP at 4e14 less the exponentials', and they at 8e12) x 100 multiprocessors.
    block_s = 128 * 128 * 512 / 4e14 * 100
    rows = 32 * 4
    expected = 3e-6 + 2 * (3e-6 + 4 * block_s)  # 128 rows in two waves
    assert attention_seconds(SMALL, full(512), 4e14, 100, FORWARD_FLOP) == pytest.approx(expected, rel=1e-12)
    # Causal rows have one to four blocks, on average two and a half; heads of 64 have half the products, all exponentials.
    narrow_s = 128 * 128 * (256 * (1 / 4e14 - 1 / 8e12 / 512) + 1 / 8e12) * 100
    # Two narrow rows share a multiprocessor, and hide half of their starts, unless kernels keep it for one.
    for shares, start_s in ((True, 1.5e-6), (False, 3e-6)):
        expected = start_s + (rows / 100 + 1) * (start_s + (2.5 + 0.5 / 128) * narrow_s)
        longest = start_s + start_s + 4 * narrow_s
        kernel = SMALL.model_copy(update={"shares_narrow": shares})
        found = attention_seconds(kernel, causal(512, width=64), 4e14, 100, FORWARD_FLOP)
        assert found == pytest.approx(max(expected, longest), rel=1e-12)


@pytest.mark.parametrize("name", MEASURED)
def test_endless_sequences_attain_the_efficiency(name: str) -> None:
    gpu = device(name)
    peak = gpu.peak_flops.get("bf16") or 0.0
    heads, length = 64, 1 << 22
    for shape, share in ((full(length, heads), 1.0), (causal(length, heads), 0.5)):
        rate = share * FORWARD_FLOP * heads * length**2 / gpu.attention_seconds(shape, "bf16")
        assert rate == pytest.approx(gpu.attention_efficiency * peak, rel=1e-3)
    backward = full(length, heads)._replace(flop=BACKWARD_FLOP)
    rate = BACKWARD_FLOP * heads * length**2 / gpu.attention_seconds(backward, "bf16", backward=True)
    assert rate == pytest.approx(gpu.attention_backward_efficiency * peak, rel=1e-3)


@pytest.mark.parametrize("name", MEASURED)
def test_more_is_never_faster(name: str) -> None:
    gpu = device(name)

    def grow(shapes: list[Scores]) -> None:
        seconds = [gpu.attention_seconds(shape, "bf16") for shape in shapes]
        assert seconds == sorted(seconds)

    for heads in (1, 5, 64, 500):
        grow([full(length, heads) for length in LENGTHS])
        grow([causal(length, heads) for length in LENGTHS])
        grow([full(length, heads, keys=4096) for length in LENGTHS])
        grow([full(256, heads, keys=length) for length in LENGTHS])
        grow([windowed(16384, window, heads) for window in LENGTHS])
        grow([full(2048, heads, width=width) for width in (32, 64, 128, 192, 256)])
    grow([causal(2048, heads) for heads in range(1, 200)])


@pytest.mark.parametrize("name", MEASURED)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("heads", [1, 7, 64, 1000])
def test_a_causal_mask_saves_up_to_half(name: str, length: int, heads: int) -> None:
    gpu = device(name)
    whole, masked = (gpu.attention_seconds(shape(length, heads), "bf16") for shape in (full, causal))
    assert whole / 2 <= masked <= whole


@pytest.mark.parametrize("name", MEASURED)
def test_a_window_costs_what_it_shows(name: str) -> None:
    gpu = device(name)
    window = gpu.attention_seconds(windowed(16384, 1024), "bf16")
    assert window < gpu.attention_seconds(causal(16384), "bf16") / 4
    assert gpu.attention_seconds(full(16384, keys=512), "bf16") < window
    twice = gpu.attention_seconds(windowed(32768, 1024), "bf16")
    assert twice == pytest.approx(2 * window, rel=0.1)


def test_parts_of_a_context_take_together_as_long_as_the_whole() -> None:
    gpu = device("h100")
    whole = gpu.attention_seconds(causal(65536), "bf16")
    part = Scores(32, 65536 / 8, 65536, FORWARD_FLOP, (65536 + 1) / 2, 1)
    # Each part ends with a row of its own.
    assert whole < 8 * gpu.attention_seconds(part, "bf16") < 1.07 * whole


def test_kernels_bound_by_exponentials_take_as_long_with_any_width() -> None:
    slow = Attention(exponential_rate=1e11, row_start_s=0)
    seconds = [attention_seconds(slow, full(1024, width=w), 4e14, 100, FORWARD_FLOP) for w in (64, 256)]
    assert seconds[0] == pytest.approx(seconds[1])


def test_attention_needs_the_number_of_multiprocessors() -> None:
    described = device("h100").model_dump(exclude={"products", "sources"})
    with pytest.raises(ValidationError, match="add products"):
        Device.model_validate(described)
