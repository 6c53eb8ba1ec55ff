"""What the environment of a process says, where it is not what a launcher or a terminal says."""

from __future__ import annotations

from pathlib import Path

import pytest

import stagewright
from stagewright import cli
from stagewright.errors import InputError
from stagewright.execution import launch
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
