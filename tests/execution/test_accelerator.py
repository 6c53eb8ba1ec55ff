"""The accelerator seam, as far as a machine without a GPU can tell."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from stagewright.execution import accelerator
from stagewright.execution.accelerator import accelerator_of, seed_generators
from stagewright.execution.clock import ActionTimer
from stagewright.execution.offload import HostCopies

HOST, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_a_process_has_one_accelerator_for_each_device() -> None:
    assert accelerator_of(torch.device("cpu")) is accelerator_of(torch.device("cpu", 0))
    assert accelerator_of(GPU) is accelerator_of(torch.device("cuda", 0))
    assert accelerator_of(GPU) is not accelerator_of(torch.device("cuda", 1))
    assert not accelerator_of(HOST).is_asynchronous and accelerator_of(GPU).is_asynchronous


def test_marks_of_the_host_are_moments_of_its_clock() -> None:
    timer = ActionTimer(HOST)
    timer.begin()
    before = time.perf_counter()
    mark = timer.mark()
    after = time.perf_counter()
    timer.begin()  # of the next batch: marks of the one before are still read
    assert before - 1e-6 <= timer.seconds(mark) <= after + 1e-6


def test_copies_in_a_process_share_their_streams() -> None:
    host = accelerator_of(HOST)
    assert host.copy_streams is host.copy_streams
    first, second = HostCopies(HOST), HostCopies(HOST)
    assert first._accelerator is second._accelerator is host


def test_what_is_on_the_host_already_is_not_offloaded() -> None:
    """The seed and offset of a fused attention are numbers of the host among the results of a GPU's operator."""
    copies = HostCopies(GPU)
    seed = torch.tensor(7)
    copy = copies.offload(seed, offset=0, num_bytes=8)
    copies.offloaded(copy, seed)
    flat = copies.fetch(copy)
    (back,) = copies.fetched(copy, flat, places=[0])
    assert back.device == HOST and back.item() == 7
    assert back.data_ptr() == seed.data_ptr()


@pytest.fixture
def tf32_as_before() -> Iterator[None]:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    yield
    matmul.allow_tf32, cudnn.allow_tf32 = before


@pytest.mark.parametrize("is_allowed", [True, False])
def test_tf32_is_of_matmuls_and_convolutions_alike(is_allowed: bool, tf32_as_before: None) -> None:
    """Whatever a user has set before by the newer names."""
    torch.backends.cuda.matmul.fp32_precision = "ieee" if is_allowed else "tf32"
    accelerator_of(GPU).allow_tf32(is_allowed)
    assert torch.backends.cuda.matmul.allow_tf32 is is_allowed
    assert torch.backends.cudnn.allow_tf32 is is_allowed
    assert torch.get_float32_matmul_precision() == ("high" if is_allowed else "highest")


def test_only_the_current_device_is_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Module:
        default_generators = tuple(torch.Generator() for _ in range(3))

        @staticmethod
        def is_initialized() -> bool:
            return True

        @staticmethod
        def current_device() -> int:
            return 1

    monkeypatch.setattr(accelerator.torch.accelerator, "current_accelerator", lambda: GPU)
    monkeypatch.setattr(accelerator.torch, "get_device_module", lambda device: Module)
    before = [generator.initial_seed() for generator in Module.default_generators]
    seed_generators(1234)
    after = [generator.initial_seed() for generator in Module.default_generators]
    assert after == [before[0], 1234, before[2]]
    assert torch.initial_seed() == 1234
