"""Documents made wrong: what hypothesis draws to change values, keys and bytes of a valid one."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import strategies as st

from stagewright.cluster.load import dumps

_RAW = "\ue000{}\ue001"
"""Marks a text that stands in a document as it is, such as a number that no library writes."""

WORDS = (
    "", " ", "cpu", "keep", "0F0", "1F0&0B1", "0" * 300, "-", "\x1b[2J\x1b]0;owned\x07", "\u202egpj.exe", "a\nok  all: fine",
    "[red]x[/red]", "[link=file:///etc/passwd]x[/link]", "<!--<script>", "</script><script>alert(1)</script>", "{{data}}",
    '"onload="alert(1)', "]]>", "&amp;&", "../../../etc/passwd", "%s{0}{x!r}", "\x9b31m", "no\u200bwidth", "~nobody-here/x",
    "x:y", "no/where", "nan", "1e400", "9" * 5000, "16GiB", "-1 GB/s", "1e-300 B/s", "层",
)  # fmt: skip
NUMBERS = (
    0, -1, 1, 2, 3, 7, 0.5, -0.0, -1.5, 5e-324, 1e-300, 1e-13, 1e9, 1e30, 1e308, -1e308, 2**31, 2**53, 2**63, 2**64, 
    -(2**63), 10**12, 10**18, 10**30, True, False,
)  # fmt: skip
LITERALS = (
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "9" * 5000,
    "-" + "9" * 400,
    "1" + "0" * 38,
    "[" * 2000,
    "nan",
    "-inf",
)

values: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(NUMBERS),
    st.sampled_from(WORDS),
    st.sampled_from([None, [], {}, [[]], [0], [None], {"a": 1}, [[0, 1], [1]], ["0F0", 3], [-1] * 5]),
    st.sampled_from(LITERALS).map(_RAW.format),
    st.integers(2, 500).map(lambda depth: _RAW.format("[" * depth + "]" * depth)),
)


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every value inside `tree`, as what holds it and its key or index there."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield tree, key
        if isinstance(value, dict | list):
            yield from places(value)


def _place(draw: st.DrawFn, tree: Any) -> tuple[Any, Any]:
    """One of them: a step down at a time, so that keys at the top are not lost among those of long lists."""
    key = draw(st.sampled_from(list(tree) if isinstance(tree, dict) else range(len(tree))))
    inside = tree[key]
    if isinstance(inside, dict | list) and inside and draw(st.integers(0, 3)):
        return _place(draw, inside)
    return tree, key


@st.composite
def mutated(draw: st.DrawFn, document: Any, write: Callable[[Any], str]) -> bytes:
    """A file of `document` with up to three wrongs: of its values and keys, or of its bytes.

    Most are small, so that what reads a document is not stopped at its first line: a number one larger, the value of another
    place, neighbours in the other order.
    """
    tree = copy.deepcopy(document)
    for _ in range(draw(st.integers(0, 3))):
        if tree:
            _change(draw, tree, *_place(draw, tree))
    content = _with_literals(write(tree)).encode("utf-8", "surrogatepass")
    return _damaged(draw, content) if draw(st.integers(0, 7)) == 0 else content


def _change(draw: st.DrawFn, tree: Any, holder: Any, key: Any) -> None:
    value = holder[key]
    what = draw(
        st.sampled_from(["other", "nudge", "swap", "scale", "other", "hostile", "again", "drop", "rename"])
    )
    if what == "drop":
        del holder[key]
    elif what == "again" and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(value))
    elif what == "again":
        holder[f"{key}\ue002"] = copy.deepcopy(value)
    elif what == "rename" and isinstance(holder, dict):
        holder[draw(st.sampled_from(WORDS))] = holder.pop(key)
    elif what == "other":
        alike = [there[name] for there, name in places(tree) if type(there[name]) is type(value)]
        holder[key] = copy.deepcopy(draw(st.sampled_from(alike)))
    elif what == "swap" and isinstance(holder, list):
        other = draw(st.integers(0, len(holder) - 1))
        holder[key], holder[other] = holder[other], holder[key]
    elif what == "nudge" and type(value) in (int, float):
        holder[key] = value + draw(st.sampled_from([1, -1, 2]))
    elif what == "scale" and type(value) in (int, float):
        holder[key] = type(value)(min(abs(value) * draw(st.sampled_from([0, 0.5, 2, 3, 1000, 1e6])), 1e300))
    else:
        holder[key] = copy.deepcopy(draw(values))


def _with_literals(text: str) -> str:
    """`text` with marked texts as they are, and keys that are there again under their own name."""
    text = re.sub('"?(?:\ue000|\\\\ue000)(.*?)(?:\ue001|\\\\ue001)"?', lambda match: match[1], text)
    return re.sub("\ue002|\\\\ue002", "", text)


def _damaged(draw: st.DrawFn, content: bytes) -> bytes:
    place = draw(st.integers(0, len(content)))
    what = draw(st.sampled_from(["flip", "cut", "insert", "double"]))
    if what == "cut":
        return content[:place]
    if what == "double":
        return content[:place] + content[max(place - 40, 0) :]
    if what == "insert":
        return (
            content[:place]
            + draw(st.sampled_from([b"\0", b"\xff", b"\xef\xbb\xbf", b"\x1b[2J", b'"', b"\r"]))
            + content[place:]
        )
    flipped = content[place : place + 1]
    return (
        content[:place] + bytes(byte ^ draw(st.integers(1, 255)) for byte in flipped) + content[place + 1 :]
    )


def as_json(tree: Any) -> str:
    return json.dumps(tree, default=repr)


def as_toml(tree: Any) -> str:
    return dumps(tree) if isinstance(tree, dict) else str(tree)


def as_lines(tree: Any) -> str:
    """A table of cells as CSV without quotes, or lines as they are."""
    return "".join(_line(row) + "\n" for row in (tree if isinstance(tree, list) else [tree]))


def as_words(tree: Any) -> str:
    """Lines of words."""
    rows = tree if isinstance(tree, list) else [tree]
    return "".join(" ".join(map(_cell, row if isinstance(row, list) else [row])) + "\n" for row in rows)


def _line(row: Any) -> str:
    return ",".join(map(_cell, row)) if isinstance(row, list) else _cell(row)


def _cell(value: Any) -> str:
    return str(value) if not isinstance(value, float) or math.isfinite(value) else repr(value)
