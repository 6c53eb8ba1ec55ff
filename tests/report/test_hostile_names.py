"""Names are text, in pictures and pages as on the terminal: no tag, no template, no style and no code of a terminal."""

from __future__ import annotations

import io
import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from rich.table import Table

from stagewright.cli.failure import fail
from stagewright.cli.options import warn
from stagewright.cli.output import show
from stagewright.cli.progress import Progress
from stagewright.errors import TRACEBACK, InputError
from stagewright.report.console import stdout
from stagewright.report.pictures import chrome_trace, html_page, scene_of, svg_image
from stagewright.report.pictures.scene import Scene
from stagewright.report.tables import facts, table
from stagewright.schedule import build
from stagewright.simulation import StageCosts, simulate
from stagewright.text import printable

NAMES = (
    "<!--<script>", "</script><script>alert(1)</script>", "</title><b>", "{{data}}", "{{script}}{{style}}",
    '"onload="alert(1)',
    "]]>", "<![CDATA[", "&amp;&lt;&#0;", "\x1b[2J\x1b]0;owned\x07", "\x9b31m", "\x00\x08\x0c\r", "\ufffe\uffff", "\ud800",
    "\u202egpj.exe", "a\u2028b", "\\", "[red]x[/red]", "[link=file:///etc/passwd]x[/link]", ":smile:", "層",
)  # fmt: skip


SCRIPT = '</script>\n<script type="module">\n'


def scene(name: str) -> Scene:
    return scene_of(simulate(replace(build("zb-h1", 2, 2), name=name), StageCosts.uniform(2)))


class Page(HTMLParser):
    """What a page has: its tags, its title, and the text of each of its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: dict[str, list[str]] = {"title": [], "script": []}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] in self.texts:
            self.texts[self.tags[-1]].append(data)


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_picture_shows_any_name_as_text(name: str) -> None:
    drawn = scene(name)
    root = ET.fromstring(svg_image(drawn).encode())
    plain = ET.fromstring(svg_image(scene("name")).encode())
    assert [one.tag for one in root.iter()] == [one.tag for one in plain.iter()]
    titles = [one.text for one in root.iter() if one.tag.endswith("}text")]
    assert titles[0] == printable(drawn.title)


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_page_has_any_name_as_data(name: str) -> None:
    drawn = scene(name)
    text = html_page(drawn)
    text.encode()
    page, plain = Page(text), Page(html_page(scene("name")))
    assert page.tags == plain.tags
    data, script = text.split('type="application/json">')[1].split(SCRIPT, 1)
    assert "<" not in data and json.loads(data)["title"] == printable(drawn.title)
    assert script == html_page(scene("name")).split(SCRIPT, 1)[1]
    assert page.texts["title"][0] == printable(drawn.title)


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_trace_has_any_name_as_data(name: str) -> None:
    drawn = scene(name)
    text = chrome_trace(drawn)
    text.encode()
    assert json.loads(text)["otherData"]["title"] == printable(drawn.title)


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_table_shows_any_name_as_text(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    bare = Table(name)
    bare.add_row(name)
    show(name, table(name, [name, name], [[name, name]]), facts([(name, name)]), bare)
    shown = capsys.readouterr().out
    assert shown.replace("\n", "").isprintable()
    if "\r" not in name and len(name) > 2:  # what stands for several lines is spread over several
        assert shown.count(printable(name)) == 10


def test_a_terminal_gets_no_links_and_no_styles_of_names(monkeypatch: pytest.MonkeyPatch) -> None:
    console = stdout()
    console.file = io.StringIO()
    console._force_terminal = True
    console.print("[link=file:///etc/passwd]x[/link] [red]y[/red] \x1b[2J")
    assert console.file.getvalue() == "[link=file:///etc/passwd]x[/link] [red]y[/red] \\x1b[2J\n"


@pytest.mark.parametrize("traceback", ["0", "1"])
@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_an_error_shows_any_name_as_text(
    name: str, traceback: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TRACEBACK, traceback)
    with pytest.raises(BaseException, match="2"):
        fail(InputError(f"no model '{name}'"))
    warn([f"no model '{name}'"])
    shown = capsys.readouterr().err
    assert shown.replace("\n", "").isprintable()
    assert shown.count(f"no model '{printable(name)}'") == 2


def test_progress_takes_nothing_for_a_style() -> None:
    with Progress("simulating [red]\x1b[2J") as progress:
        assert progress._line().plain == "simulating [red]\\x1b[2J"
        assert not progress._line().spans
