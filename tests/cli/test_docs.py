"""Every `stagewright` command that the README and the user's pages show is one the command line accepts."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer.main

from stagewright.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "examples" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def commands(page: Path) -> list[str]:
    """Commands in shell blocks, continued lines joined."""
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    found = (line.split("#")[0].strip() for line in lines)
    return [line for line in found if re.match(r"(stagewright|torchrun .*stagewright\.cli) ", line)]


SHOWN = [(page.name, command) for page in PAGES for command in commands(page)]


@pytest.mark.parametrize(("page", "command"), SHOWN)
def test_a_shown_command_is_accepted(page: str, command: str) -> None:
    words = shlex.split(command)
    words = words[words.index("stagewright.cli") + 1 :] if words[0] == "torchrun" else words[1:]
    group = typer.main.get_command(app)
    verb, context = words[0], None
    context = group.make_context("stagewright", [verb], resilient_parsing=True)
    chosen = group.get_command(context, verb)  # type: ignore[attr-defined]
    assert chosen is not None, f"{page}: there is no verb '{verb}'"
    chosen.make_context(verb, words[1:])  # raises for an unknown option or a missing argument


def test_the_pages_show_commands() -> None:
    assert {page for page, _ in SHOWN} >= {"README.md", "models.md", "running.md", "tutorial.md"}


def test_every_verb_is_in_the_list_of_commands() -> None:
    listed = (ROOT / "docs" / "commands.md").read_text()
    for verb in typer.main.get_command(app).commands:  # type: ignore[attr-defined]
        assert f"`stagewright {verb}" in listed or f"`{verb}`" in listed, verb
