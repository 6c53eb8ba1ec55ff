"""Writes the part of TOML that cluster files use, all or nothing, under a comment on its origin."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stagewright.files import write_whole


def dumps(document: Mapping[str, Any]) -> str:
    """`document` (nested mappings, lists, strings, numbers, booleans; None is left out) as TOML text.

    >>> print(dumps({"name": "a", "size": 1e9, "link": {"latency_s": 1e-05}}), end="")
    name = "a"
    size = 1000000000.0
    <BLANKLINE>
    [link]
    latency_s = 1e-05
    """
    return "\n".join(_lines(document, "")).strip("\n") + "\n"


def _lines(table: Mapping[str, Any], path: str) -> Iterator[str]:
    for key, value in table.items():
        if value is not None and not _is_table(value) and not _is_table_array(value):
            yield f"{_key(key)} = {_value(value)}"
    for key, value in table.items():
        name = f"{path}.{_key(key)}" if path else _key(key)
        if _is_table(value) and value:
            yield from ("", f"[{name}]", *_lines(value, name))
        elif _is_table_array(value):
            for item in value:
                yield from ("", f"[[{name}]]", *_lines(item, name))


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_table_array(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0 and all(_is_table(item) for item in value)


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key, ensure_ascii=False)


def _value(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    return repr(value)


def write_toml(path: str | Path, document: Mapping[str, Any], provenance: str) -> None:
    """Writes `document` to `path` under a comment; readers see the old file or the whole new one.

    Raises:
        InputError: the file cannot be written.
    """
    comment = "".join(f"# {line}\n" for line in provenance.splitlines())
    write_whole(path, f"{comment}\n{dumps(document)}")
