"""What the environment of a process says, where it is not what a launcher or a terminal says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import stagewright
from stagewright import cli
from stagewright.errors import InputError
from stagewright.execution import launch
from stagewright.execution.accelerator import use_expandable_segments
from stagewright.execution.launch_environment import check_launcher, start_timeout_s

RANK = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"RANK": "abc"}, "RANK='abc': a launcher sets a whole number"),
        ({"RANK": "-1"}, "RANK='-1'"),
        ({"WORLD_SIZE": "2.0"}, "WORLD_SIZE='2.0'"),
        ({"LOCAL_RANK": ""}, "LOCAL_RANK=''"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT='x'"),
        ({"TORCHELASTIC_RESTART_COUNT": "9" * 5000}, "TORCHELASTIC_RESTART_COUNT="),
        ({"RANK": "2"}, "RANK=2 and WORLD_SIZE=2: ranks begin at 0"),
        ({"MASTER_ADDR": None}, "no MASTER_ADDR: set it"),
        ({"MASTER_PORT": None}, "no MASTER_PORT: set it"),
    ],
)
def test_a_launcher_that_says_what_cannot_be_is_refused_by_name(
    changes: dict[str, str | None], match: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("STAGEWRIGHT_RENDEZVOUS", raising=False)
    for name, value in RANK.items():
        monkeypatch.setenv(name, value)
    check_launcher()
    for name, value in changes.items():
        monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
    for start in (
        check_launcher,
        lambda: launch.run(tmp_path / "p"),
        lambda: stagewright.Trainer(tmp_path / "p"),
    ):
        with pytest.raises(InputError, match=match):
            start()


@pytest.mark.parametrize("value", ["abc", "0", "-1", "nan", ""])
def test_a_start_timeout_that_is_none_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGEWRIGHT_START_TIMEOUT", value)
    with pytest.raises(InputError, match="STAGEWRIGHT_START_TIMEOUT="):
        start_timeout_s(None)
    assert start_timeout_s(3.0) == 3.0


@pytest.mark.parametrize("columns", ["0", "-5", "abc", "", "99999999", "40"])
def test_any_number_of_columns_will_do(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr("sys.argv", ["stagewright", "clusters"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code in (None, 0) and "h100" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("before", "after", "warns"),
    [
        ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, False),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"},
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"},
            False,
        ),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments: True"}, {"PYTORCH_ALLOC_CONF": "expandable_segments: True"}, False),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, True),
        ({"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}, {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}, True),
    ],
)  # fmt: skip
def test_segments_expand_unless_the_user_decides(
    before: dict[str, str], after: dict[str, str], warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    for name in names:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    warning = use_expandable_segments()
    assert {name: os.environ[name] for name in names if name in os.environ} == after
    assert (warning is not None) == warns and (warning is None or "fragmentation" in warning)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert "before it joined the run" in (use_expandable_segments() or "") and not any(
        name in os.environ for name in names
    )
