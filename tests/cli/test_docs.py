"""Commands, names, options, results and versions that the README and the pages show are those that there are."""

from __future__ import annotations

import importlib.util
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import stagewright
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


def test_every_public_name_is_in_the_reference() -> None:
    page = (ROOT / "docs" / "reference" / "python.md").read_text()
    for name in stagewright.__all__:
        assert f"`{name}`" in page, name
        if name != "__version__":
            home = getattr(stagewright, name)
            assert f"\n## stagewright.{name}\n" in page, name
            assert f"\n::: {home.__module__}.{name}\n" in page, name


def test_the_site_lists_every_option() -> None:
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "site_hooks.py")
    assert spec is not None and spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    page = "\n".join(hooks.options())
    for verb, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        if hasattr(command, "commands"):
            assert all(f"## {verb} {name}\n" in page for name in command.commands)
            continue
        part = page.partition(f"## {verb}\n")[2].partition("\n## ")[0]
        for parameter in command.params:
            for option in parameter.opts if parameter.param_type_name == "option" else ():
                assert option in part, (verb, option)


def test_the_newest_results_are_on_the_page_of_benchmarks() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    newest: dict[str, str] = {}
    for path in (ROOT / "benchmarks" / "results").glob("*-20??-??-??*.md"):
        name, date = path.stem[:-11], path.stem[-10:]
        if re.fullmatch(r"\d{4}-\d\d-\d\d", date):
            newest[name] = max(newest.get(name, ""), date)
    assert newest
    for name, date in newest.items():
        assert f"(../benchmarks/results/{name}-{date}.md)" in page, f"docs/benchmarks.md lacks {name}-{date}"


def test_the_pictures_of_the_gallery_are_shown_and_stay_small() -> None:
    page = (ROOT / "docs" / "gallery.md").read_text()
    pictures = [path for path in (ROOT / "docs" / "images" / "gallery").iterdir() if path.suffix != ".json"]
    assert len(pictures) >= 18
    assert all(f"(images/gallery/{path.name})" in page for path in pictures)
    everything = (path for path in (ROOT / "docs" / "images").rglob("*") if path.is_file())
    assert sum(path.stat().st_size for path in everything) < 2e6


def _required() -> Iterator[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for lines in (project["dependencies"], *project["optional-dependencies"].values()):
        yield from (one for one in map(Requirement, lines) if one.name != "stagewright")


def test_the_lock_file_has_a_version_of_everything_required() -> None:
    """`make lock` writes it anew."""
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    versions = {canonicalize_name(name): version for name, version in pinned.items()}
    for one in _required():
        version = versions.get(canonicalize_name(one.name))
        assert version is not None, f"requirements.lock lacks {one.name}: make lock"
        assert one.specifier.contains(version), (
            f"requirements.lock has {one.name} {version}, not {one.specifier}"
        )
    torch = re.search(r"^TORCH_VERSION \?= (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert torch is not None and versions["torch"] == torch[1]
