"""Documents that a user or a stranger hands over: text, JSON, TOML and CSV, read within limits or refused by name.

What is refused here need not be thought of further up: files that are none, that are too large or no text, values nested
without end, numbers that no machine has, keys that are there twice. What a document means is its reader's business.

JSON that we write to read it again has a `checksum` of the rest of its content, so that a bit which a disk or a transfer has
changed is noticed. What has none, as documents written by hand and by other programs, is read as it is.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import re
import stat
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stagewright.errors import InputError

MOST_TEXT_BYTES = 2**26
"""Of a document: a program of four million actions has 40 MB."""
MOST_RECORD_BYTES = 2**28
"""Of the record of a run, which has the times of every action."""
MOST_TOML_BYTES = 2**23
"""Written by hand, and read by the slowest parser: 8 MiB take it seconds."""
MOST_LEVELS = 64
"""Of values in values: our deepest documents have eight."""
MOST_DIGITS = 40
"""Of a whole number: 2**64 has twenty."""

CHECKSUM = "checksum"
"""The key of a sealed document: the digest of all others with their values, however they are ordered and indented."""

_LONE_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""What may be half of a pair of escapes, which no output can encode."""


def read_text(
    path: str | Path, what: str, fix: str = "check the path", most_bytes: int = MOST_TEXT_BYTES
) -> str:
    """The text of a file; `what` it should be and how to `fix` a wrong path are for the message.

    A file that is no file (a folder, a pipe, a device) is refused, not waited for.

    Raises:
        InputError: names the file and what is wrong with it.
    """
    content = _bytes(Path(path), what, fix, most_bytes)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"{what} '{path}' is not UTF-8 text (line {line}, byte {error.start}): {fix}"
        ) from None
    if text.startswith("\ufeff"):
        raise InputError(f"{what} '{path}' begins with a byte order mark: save it as UTF-8 without one")
    if (place := text.find("\0")) >= 0:
        raise InputError(
            f"{what} '{path}' is no text (line {text.count(chr(10), 0, place) + 1} has NUL): {fix}"
        )
    return text


def _bytes(path: Path, what: str, fix: str, most_bytes: int) -> bytes:
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            kind = os.fstat(file.fileno())
            if not stat.S_ISREG(kind.st_mode):
                named = "a folder" if stat.S_ISDIR(kind.st_mode) else "a pipe or a device"
                raise InputError(f"{what} '{path}' cannot be read (it is {named}, not a file): {fix}")
            if kind.st_size > most_bytes:
                raise InputError(
                    f"{what} '{path}' has {kind.st_size:,} bytes, more than the {most_bytes:,} of any such file: {fix}"
                )
            return file.read(most_bytes)
    except OSError as error:
        raise InputError(f"{what} '{path}' cannot be read ({error.strerror or error}): {fix}") from None
    except ValueError:  # a path with NUL in it
        raise InputError(f"{what} {str(path)!r} is no path: {fix}") from None


def _without_waiting(path: str, flags: int) -> int:
    """Opens a pipe even if nobody writes to it."""
    return os.open(path, flags | os.O_NONBLOCK)


def parse_json(text: str, origin: str, fix: str = "correct it there", allows_infinity: bool = False) -> Any:
    """The value of a JSON text from `origin`; with `allows_infinity` also the words for it that Python writes.

    >>> parse_json('{"a": [1, 2.5]}', "here")
    {'a': [1, 2.5]}

    Raises:
        InputError: names the origin, the place and the rule that is broken.
    """
    try:
        return _checked_json(text, origin, fix, allows_infinity)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{origin} is not valid JSON at line {error.lineno}, column {error.colno} ({error.msg}): {fix}"
        ) from None


def parse_json_or_text(text: str, origin: str) -> Any:
    """The value of a JSON text from `origin`, or the text itself where it is not valid JSON.

    >>> parse_json_or_text("2", "here"), parse_json_or_text("gelu", "here")
    (2, 'gelu')

    Raises:
        InputError: valid JSON that breaks a rule; names the origin and the rule.
    """
    try:
        return _checked_json(text, origin, "correct it there")
    except json.JSONDecodeError:
        return text


def _checked_json(text: str, origin: str, fix: str, allows_infinity: bool = False) -> Any:
    constant = _infinite if allows_infinity else _number
    try:
        value = json.loads(
            text, object_pairs_hook=_object, parse_int=_integer, parse_float=_number, parse_constant=constant
        )
    except _Refused as error:
        raise InputError(f"{origin}: {error}{error.place(text)}: {fix}") from None
    except RecursionError:
        raise InputError(_too_deep(origin, fix)) from None
    _check_levels(value, origin, fix)
    if "\\u" in text and _LONE_SURROGATE.search(text):
        _check_encodable(value, origin, fix)
    return value


def read_json(
    path: str | Path,
    what: str,
    fix: str = "check the path",
    most_bytes: int = MOST_TEXT_BYTES,
    allows_infinity: bool = False,
) -> Any:
    """The value in a JSON file; `what` it should be and how to `fix` it are for the message.

    Raises:
        InputError: names the file, the place and the rule that is broken.
    """
    return parse_json(read_text(path, what, fix, most_bytes), f"{what} '{path}'", fix, allows_infinity)


def sealed(text: str) -> str:
    """The text of a JSON object with the digest of its content as its first key.

    >>> sealed('{"a": 1}')
    '{"checksum": "sha256:015abd7f5cc57a2dd94b7590f04ad8084273905ee33ec5cebeae62276a97f862","a": 1}'
    """
    start = len(text) - len(text[1:].lstrip())
    return f'{text[:start]}"{CHECKSUM}": "{_digest(json.loads(text))}",{text[1:]}'


def unsealed(document: Any, origin: str) -> Any:
    """A JSON value from `origin` without its checksum; as it is where it has none.

    Raises:
        InputError: its content is not what it was when it was sealed.
    """
    if not isinstance(document, dict) or CHECKSUM not in document:
        return document
    content = {key: value for key, value in document.items() if key != CHECKSUM}
    if document[CHECKSUM] != _digest(content):
        raise InputError(
            f"{origin} was changed since it was written: its content is not what its '{CHECKSUM}' says. If that was on "
            f"purpose, remove the key '{CHECKSUM}' and it is taken as it is; otherwise copy or write it again"
        )
    return content


def read_sealed_json(
    path: str | Path, what: str, fix: str = "check the path", most_bytes: int = MOST_TEXT_BYTES
) -> Any:
    """The value in a JSON file, as `read_json`, that is as it was `sealed` if it was.

    Raises:
        InputError: names the file and the rule that is broken, or says that the file was changed.
    """
    return unsealed(read_json(path, what, fix, most_bytes), f"{what} '{path}'")


def _digest(content: Any) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(canonical.encode()).hexdigest()}"


def parse_toml(text: str, origin: str) -> dict[str, Any]:
    """The table of a TOML text from `origin`.

    >>> parse_toml("a = 1", "here")
    {'a': 1}

    Raises:
        InputError: names the origin, the place and the rule that is broken.
    """
    try:
        table = tomllib.loads(text, parse_float=_number)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{origin}: not valid TOML: {error}") from None
    except _Refused as error:
        raise InputError(f"{origin}: {error}{error.place(text)}: correct it there") from None
    except RecursionError:
        raise InputError(_too_deep(origin, "write it flat")) from None
    except ValueError:  # of a whole number that Python does not convert, or of a day that is in no calendar
        raise InputError(
            f"{origin}: not valid TOML: a number or a date is impossible; correct it there"
        ) from None
    _check_levels(table, origin, "write it flat")
    return table


def read_toml(path: str | Path, what: str) -> dict[str, Any]:
    """The table in a TOML file.

    Raises:
        InputError: names the file, the place and the rule that is broken.
    """
    return parse_toml(read_text(path, what, most_bytes=MOST_TOML_BYTES), str(path))


def parse_csv(text: str, origin: str) -> list[list[str]]:
    """The rows of a CSV text from `origin`, empty ones left out; cells are as written.

    >>> parse_csv("a,b\\n\\n1,2\\n", "here")
    [['a', 'b'], ['1', '2']]

    Raises:
        InputError: names the origin, the line and what is wrong with it.
    """
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        return [row for row in reader if row]
    except csv.Error as error:
        raise InputError(
            f"{origin}, line {reader.line_num}: not valid CSV ({error}): correct it there"
        ) from None


def read_csv(path: str | Path, what: str, fix: str = "check the path") -> list[list[str]]:
    """The rows of a CSV file, empty ones left out.

    Raises:
        InputError: names the file, the line and what is wrong with it.
    """
    return parse_csv(read_text(path, what, fix), f"{what} '{path}'")


def read_csv_table(path: str | Path, what: str) -> list[dict[str, str]]:
    """The rows of a CSV file by the names of its header.

    Raises:
        InputError: names the file, the line or column and what is wrong with it.
    """
    rows = read_csv(path, what)
    header = [name.strip() for name in rows[0]] if rows else []
    for name in header:
        if header.count(name) > 1:
            raise InputError(f"{what} '{path}' has column {name!r} twice: leave one of them out")
    for number, row in enumerate(rows[1:], start=1):
        if len(row) > len(header):
            raise InputError(
                f"{what} '{path}', row {number}: {len(row)} entries under {len(header)} columns: leave out what is too many"
            )
    return [dict(zip(header, row, strict=False)) for row in rows[1:]]


class _Refused(Exception):
    """Raised inside a parser, which does not say where it is; `digits` are those of a number that is refused."""

    def __init__(self, reason: str, digits: str = "") -> None:
        super().__init__(reason)
        self.digits = digits

    def place(self, text: str) -> str:
        """The line of `text` that first has the number."""
        return f" (line {text.count(chr(10), 0, text.find(self.digits)) + 1})" if self.digits else ""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        beside = ", ".join(repr(_cut(name)) for name in dict.fromkeys(names) if name != twice)
        raise _Refused(
            f"key {_cut(twice)!r} is twice in the object" + (f" of {_cut(beside, 100)}" if beside else "")
        )
    return table


def _integer(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise _Refused(f"a whole number of {len(digits)} digits is no figure", digits)
    return int(digits)


def _number(digits: str) -> float:
    number = float(digits)
    if number - number != 0:
        raise _Refused(f"{_cut(digits)} is no finite number", digits)
    return number


def _infinite(word: str) -> float:
    return float(word) if word.endswith("Infinity") else _number(word)


def _cut(text: str, most: int = 40) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


def _too_deep(origin: str, fix: str) -> str:
    return f"{origin} nests values in values more than {MOST_LEVELS} levels deep: {fix}"


def _check_levels(value: Any, origin: str, fix: str) -> None:
    """Level by level, since what is too deep for a recursion is what is looked for."""
    level = [value]
    for _ in range(MOST_LEVELS):
        level = [item for parent in level for item in _items(parent) if isinstance(item, dict | list)]
        if not level:
            return
    raise InputError(_too_deep(origin, fix))


def _items(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _check_encodable(value: Any, origin: str, fix: str) -> None:
    if (half := half_character(value)) is not None:
        raise InputError(f"{origin}: the text has half a character ({half}): {fix}")


def half_character(value: Any) -> str | None:
    """The first half of a pair of surrogates in the texts of a JSON value that lacks its other half, escaped; None where
    every text can be encoded.

    >>> half_character({"a": ["\\ud83d"]}), half_character("\U0001f600")
    ("'\\\\ud83d'", None)
    """
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        text.encode()
    except UnicodeEncodeError as error:
        return f"{error.object[error.start]!a}"
    return None
