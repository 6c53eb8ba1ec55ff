"""Which GPU a rank takes, by what its launcher shows it."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from stagewright.errors import InputError
from stagewright.execution import accelerator, device


class _Devices:
    """GPUs that a process sees; remembers which one became the current one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_visible: int) -> None:
        self.current: torch.device | None = None
        monkeypatch.setattr(accelerator, "num_devices", lambda kind: num_visible)
        monkeypatch.setattr(accelerator, "accelerator_of", self._of)

    def _of(self, chosen: torch.device) -> _Devices:
        self._chosen = chosen
        return self

    def make_current(self) -> None:
        self.current = self._chosen


@pytest.mark.parametrize(("num_visible", "local_rank", "index"), [(8, "3", 3), (1, "3", 0), (1, None, 0)])
def test_a_rank_takes_the_device_that_its_launcher_means(
    monkeypatch: pytest.MonkeyPatch, num_visible: int, local_rank: str | None, index: int
) -> None:
    """torchrun shows every process all devices; Ray, Slurm and accelerate may show each its own only."""
    devices = _Devices(monkeypatch, num_visible)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert device.local_device("cuda") == devices.current == torch.device("cuda", index)


def test_ranks_share_devices_where_nccl_is_told_to_let_them(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = _Devices(monkeypatch, 2)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv(device.SHARING, "1")
    assert device.local_device("cuda") == devices.current == torch.device("cuda", 1)
    plan = SimpleNamespace(cluster=SimpleNamespace(kind="cuda"))
    assert device.kind_of("auto", plan, 4) == "cuda"  # type: ignore[arg-type]
    monkeypatch.setenv(device.SHARING, "0")
    with pytest.raises(InputError, match=f"4 ranks of the plan.*or set {device.SHARING}=1"):
        device.kind_of("cuda", plan, 4)  # type: ignore[arg-type]


@pytest.mark.parametrize(("local_rank", "says"), [(None, "does not say which"), ("8", "LOCAL_RANK is 8")])
def test_a_device_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, local_rank: str | None, says: str
) -> None:
    _Devices(monkeypatch, 8)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    with pytest.raises(InputError, match=says):
        device.local_device("cuda")


def test_who_starts_ranks_on_cpus_needs_no_torch() -> None:
    code = (
        "import sys\n"
        "from types import SimpleNamespace\n"
        "from stagewright.execution.launch import kind_of\n"
        "for kind in ('cpu', 'auto'):\n"
        "    assert kind_of(kind, SimpleNamespace(cluster=SimpleNamespace(kind='cpu')), 2) == 'cpu'\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
