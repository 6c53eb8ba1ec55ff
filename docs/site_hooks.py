"""What the site has besides the pages of this folder: other files that pages link to, and the options of every command.

Pages link to `../CONTRIBUTING.md` or `../benchmarks/results/x.md`, as a viewer of the repository wants it. On the site such
files are pages at their path from the root of the repository, and links are rewritten.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
"""Of the repository."""

FROM_ROOT = "CONTRIBUTING.md", "CHANGELOG.md"
"""Pages of the navigation that lie outside this folder."""

OPTIONS = "reference/options.md"
"""The page that the options of every command are written to."""

_CODE = {".py": "python", ".toml": "toml", ".sh": "sh", ".json": "json"}
"""Files that become a page of code, by ending."""

_FENCED = re.compile(r"^(```.*?^```\s*$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds what pages link to and what those link to."""
    waiting = [(f"docs/{file.src_uri}", file.content_string) for file in files.documentation_pages()]
    known = {path for path, _ in waiting}
    linked = list(FROM_ROOT)
    while waiting or linked:
        for path in linked:
            if path in known or (ROOT / "docs" / path).exists():
                continue
            known.add(path)
            file = _added(path, config)
            files.append(file)
            if path.endswith(".md"):
                waiting.append((path, file.content_string))
        linked = []
        if waiting:
            origin, markdown = waiting.pop()
            linked = [path for path in _targets(markdown, origin) if not path.startswith("docs/")]
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as the site has them, and the options."""
    uri = page.file.src_uri
    if uri == OPTIONS:
        markdown += "\n" + "\n".join(options())
    origin = uri if page.file.generated_by else f"docs/{uri}"

    def site_link(target: str, anchor: str) -> str:
        path = _path(target, origin)
        if path is None:
            return f"]({target}{anchor})"
        path = _page_of(path).removeprefix("docs/")
        return f"]({posixpath.relpath(path, posixpath.dirname(uri) or '.')}{anchor})"

    return _rewritten(markdown, site_link)


def _added(path: str, config: MkDocsConfig) -> File:
    source = ROOT / path
    language = _CODE.get(source.suffix)
    if language is None:
        return File.generated(config, path, abs_src_path=str(source))
    code = f"# {source.name}\n\n```{language}\n{source.read_text(encoding='utf-8')}```\n"
    return File.generated(config, _page_of(path), content=code)


def _page_of(path: str) -> str:
    """Where on the site a file of the repository is: code on a page of its own.

    >>> _page_of("examples/vision.py"), _page_of("README.md")
    ('examples/vision.py.md', 'docs/index.md')
    """
    if path == "README.md":
        return "docs/index.md"
    return f"{path}.md" if PurePosixPath(path).suffix in _CODE and not path.startswith("docs/") else path


def _targets(markdown: str, origin: str) -> Iterator[str]:
    found: list[str] = []

    def note(target: str, anchor: str) -> str:
        path = _path(target, origin)
        if path is not None and path != "README.md":
            found.append(path)
        return ""

    _rewritten(markdown, note)
    yield from found


def _path(target: str, origin: str) -> str | None:
    """A link's file from the root of the repository; None where it leads elsewhere, or to no file."""
    if ":" in target or target.startswith("/"):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
    return path if (ROOT / path).is_file() else None


def _rewritten(markdown: str, link: Callable[[str, str], str]) -> str:
    parts = _FENCED.split(markdown)
    parts[::2] = [_LINK.sub(lambda m: link(m[1], m[2] or ""), part) for part in parts[::2]]
    return "".join(parts)


def options() -> Iterator[str]:
    """Lines of Markdown: the help of every command, with all of its options."""
    import typer.main

    from stagewright.cli.app import app
    from stagewright.cli.groups import EVERYTHING

    def shown(command: Any, name: str, parent: Any) -> Iterator[str]:
        context = command.make_context(name, [], parent=parent, resilient_parsing=True)
        if hasattr(command, "commands"):
            for verb in command.list_commands(context):
                yield from shown(
                    command.commands[verb], verb if parent is None else f"{name} {verb}", context
                )
            return
        context.meta[EVERYTHING] = True
        yield f"## {name}\n\n```text\n{command.get_help(context).strip()}\n```\n"

    yield from shown(typer.main.get_command(app), "stagewright", None)
