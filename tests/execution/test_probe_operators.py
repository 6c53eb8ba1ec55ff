"""Operators timed in their places, and the figures that least squares make of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stagewright.estimation.operators import Kernel, Work
from stagewright.execution.probe_operators import ReferenceNetwork, Samples, fitted

HOST, VIEW, ATTENTION, CALL = 5e-6, 2e-6, 40e-6, 1.5e-6


def planted(noise: float = 0.0) -> Samples:
    """Operators of a machine with known figures; with noise some of them take far longer."""
    random = np.random.default_rng(0)
    samples: Samples = [(Work(Kernel.VIEW, "float32"), VIEW)] * 5
    for size in (1e3, 1e4, 1e5, 1e6):
        rows = size / 100
        samples += [
            (Work(Kernel.MEMORY, "float32", bytes_moved=size), HOST + size / 2e10),
            (Work(Kernel.MEMORY, "float32", bytes_moved=size, num_functions=size), HOST + size / 2e10 + size / 1e9),
            (Work(Kernel.MEMORY, "float32", bytes_moved=size, num_random=size), HOST + size / 2e10 + size / 1e8),
            (Work(Kernel.MEMORY, "float32", bytes_moved=size, num_scattered=rows), HOST + size / 2e10 + rows * CALL),
            (Work(Kernel.NORM, "float32", bytes_moved=size), HOST + size / 1e10),
            (Work(Kernel.MATMUL, "float32", arithmetic=size * 100), HOST + 3e-6 + size * 100 / 5e10),
            (Work(Kernel.ATTENTION, "float32", arithmetic=size * 100), HOST + ATTENTION + size * 100 / 4e10),
            (Work(Kernel.ATTENTION_BACKWARD, "float32", arithmetic=size * 100), HOST + ATTENTION + size * 100 / 3e10),
        ]  # fmt: skip
    return [(found, seconds * (1 + noise * float(random.exponential()))) for found, seconds in samples]


def test_planted_figures_are_found() -> None:
    found = fitted(planted())
    assert found.host_overhead_s == pytest.approx(HOST)
    assert found.view_overhead_s == pytest.approx(VIEW)
    assert found.attention_overhead_s == pytest.approx(ATTENTION)
    assert 1 / found.scatter_rate == pytest.approx(CALL)
    rates = (found.cache_bandwidth, found.norm_bandwidth, found.function_rate, found.random_rate)
    assert rates == pytest.approx((2e10, 1e10, 1e9, 1e8))
    assert (found.attention_flops, found.attention_backward_flops) == pytest.approx((4e10, 3e10))
    assert (found.matmul_s, 1 / found.flop_s) == pytest.approx((HOST + 3e-6, 5e10))


def test_what_is_expected_of_a_step_adds_up_to_what_it_took() -> None:
    samples = planted(noise=1.0)
    found = fitted(samples)
    taken = expected = 0.0
    for asked, seconds in samples:
        if asked.kernel in (Kernel.MEMORY, Kernel.NORM):
            rate = found.cache_bandwidth if asked.kernel is Kernel.MEMORY else found.norm_bandwidth
            taken += seconds
            expected += found.host_overhead_s + asked.bytes_moved / rate
            expected += asked.num_functions / found.function_rate + asked.num_random / found.random_rate
            expected += asked.num_scattered / found.scatter_rate
    assert expected == pytest.approx(taken, rel=0.02)


def test_a_network_has_every_kind_of_operator_that_figures_are_made_of() -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        network = ReferenceNetwork(16, 16)
        network.run(seconds=0.0)
        samples = network.samples()
    finally:
        torch.set_num_threads(threads)
    kernels = {found.kernel for found, _ in samples}
    assert kernels >= set(Kernel) - {Kernel.DEPTHWISE}
    assert any(found.num_functions for found, _ in samples) and any(found.num_random for found, _ in samples)
    assert all(1e-8 < seconds < 1.0 for _, seconds in samples)
    assert all(found.has_rule for found, _ in samples)
