"""Every block of shell or Python in the README and the docs runs as printed, or says why it does not.

`<!-- not run: why -->` in front of a block leaves it out, `<!-- slow: how long -->` until the full check. A page's blocks
run in their order, in a folder that has what `PREPARED` makes; a block of Python or TOML whose first line names a file is
written to it.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from stagewright.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]

PREPARED = (
    "plan tiny-llama --cluster 2x-rtx3090 --pp 2 --schedule 1f1b --global-batch 4 --sequence-length 32 -o plan.json",
)
"""Commands that make what pages take to be there; `_prepare` writes what is no command's."""

_LAYERS = "layer,forward_s,input_grad_s,weight_grad_s,parameter_bytes,activation_bytes,boundary_bytes\n"

_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>not run|slow): (?P<why>[^\n]+?) -->\n)?"
    r"^```(?P<language>sh|bash|py|python|toml)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_FILE = re.compile(r"# (?P<name>[a-z_]+\.(?:py|toml))\b")


@dataclass(frozen=True)
class Block:
    """A block of code of a page; `mark` is why it does not run here, None where it does."""

    language: str
    text: str
    mark: str | None

    @property
    def lines(self) -> list[str]:
        """The commands of a shell block, continued lines joined, without comments."""
        joined = self.text.replace("\\\n", " ").splitlines()
        commands = (shlex.join(shlex.split(line, comments=True)) for line in joined)
        return [command for command in commands if command]


def blocks(page: Path) -> list[Block]:
    return [Block(m["language"], m["text"], m["mark"]) for m in _BLOCK.finditer(page.read_text())]


def of(page: Path, *marks: str | None) -> bool:
    return any(block.mark in marks and block.language != "toml" for block in blocks(page))


def _named(pages: list[Path]) -> list[Any]:
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in pages]


@pytest.fixture
def folder(
    tmp_path: Path, once: Callable[[str, Callable[[], Any]], Any], monkeypatch: pytest.MonkeyPatch
) -> Path:
    """What pages take to be there, in the present folder; traces are shared."""
    monkeypatch.setenv("STAGEWRIGHT_CACHE", str(tmp_path.parents[1] / "traces-of-code-blocks"))
    monkeypatch.chdir(tmp_path)
    _prepare(tmp_path)
    plan = once("plan-of-code-blocks", _planned)
    (tmp_path / "plan.json").write_text(plan)
    return tmp_path


def _planned() -> str:
    for command in PREPARED:
        _invoke(command)
    return Path("plan.json").read_text()


def _prepare(folder: Path) -> None:
    from stagewright.cluster.load import load_cluster, save_cluster

    save_cluster(load_cluster("2x-rtx3090"), folder / "local.toml", "for the tests of code blocks")
    row = "0.001,0.001,0.001,1000000,1000000,1000000\n"
    (folder / "layers.csv").write_text(_LAYERS + "".join(f"layer {i},{row}" for i in range(16)))


def _invoke(command: str) -> None:
    done = CliRunner().invoke(app, shlex.split(command))
    assert done.exit_code == 0, f"{command}: {done.output}"


def _written(block: Block, folder: Path) -> None:
    named = _FILE.match(block.text)
    if named is not None:
        (folder / named["name"]).write_text(block.text)


@pytest.mark.parametrize("page", _named([page for page in PAGES if of(page, None)]))
def test_blocks_run_as_printed(page: Path, folder: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.mark is not None:
            continue
        if block.language in ("py", "python", "toml"):
            _written(block, folder)
        if block.language in ("py", "python"):
            exec(compile(block.text, page.name, "exec"), names)
        if block.language in ("sh", "bash"):
            for command in block.lines:
                assert command.startswith("stagewright "), f"{page.name}: say why '{command}' is not run here"
                _invoke(command.removeprefix("stagewright "))


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", _named([page for page in PAGES if of(page, "slow")]))
def test_slow_blocks_run_as_printed(page: Path, folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    for block in blocks(page):
        if block.mark == "not run":
            continue
        if block.language in ("py", "python", "toml"):
            _written(block, folder)
        if block.language in ("py", "python"):
            subprocess.run([sys.executable, "-c", block.text], cwd=folder, env=environment, check=True)
        if block.language in ("sh", "bash"):
            for command in block.lines:
                words = [sys.executable, "-m", "stagewright.cli", *shlex.split(command)[1:]]
                subprocess.run(words, cwd=folder, env=environment, check=True)


def test_blocks_are_found() -> None:
    assert of(ROOT / "docs" / "tutorial.md", None)
    assert of(ROOT / "docs" / "tutorial.md", "slow")
    assert of(ROOT / "docs" / "security.md", "not run")
