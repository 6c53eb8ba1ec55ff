"""Documents from users or untrusted sources: text, JSON, TOML, YAML and CSV, read within limits or rejected by name.

Callers need not handle what is rejected here: paths that are not files, files that are too large or not text, endlessly
nested values, impossible numbers, duplicate keys. The meaning of a document is up to its reader.

JSON that we write to read again has a `checksum` of its other content, so that a bit changed by a disk or a transfer is
noticed. Documents without one, written by hand or by other programs, are read as they are.
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
"""Maximum bytes of a document: a program of four million actions has 40 MB."""
MOST_RECORD_BYTES = 2**28
"""Maximum bytes of the record of a run, which has the times of every action."""
MOST_TOML_BYTES = 2**23
"""Maximum bytes of TOML, which is written by hand and has the slowest parser: 8 MiB take it seconds."""
MOST_LEVELS = 64
"""Maximum nesting of values: our deepest documents have eight levels."""
MOST_DIGITS = 40
"""Maximum digits of a whole number: 2**64 has twenty."""

CHECKSUM = "checksum"
"""Key of a sealed document: the digest of all other keys and values, whatever their order and indentation."""

_LONE_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""An escape that may be half of a surrogate pair, which no output can encode."""


def read_text(
    path: str | Path, what: str, fix: str = "check the path", most_bytes: int = MOST_TEXT_BYTES
) -> str:
    """Return the text of a file; `what` it should be and how to `fix` a wrong path are for the message.

    A path that is not a file (a folder, a pipe, a device) is rejected, not waited for.

    Raises:
        InputError: names the file and the error.
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
            f"{what} '{path}' is not text (line {text.count(chr(10), 0, place) + 1} has NUL): {fix}"
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
    except ValueError:  # the path contains NUL
        raise InputError(f"{what} {str(path)!r} is not a path: {fix}") from None


def _without_waiting(path: str, flags: int) -> int:
    """Open a file without waiting for the writer of a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


def parse_json(text: str, origin: str, fix: str = "correct it there", allows_infinity: bool = False) -> Any:
    """Return the value of a JSON text from `origin`; `allows_infinity` accepts Python's words for infinity.

    >>> parse_json('{"a": [1, 2.5]}', "here")
    {'a': [1, 2.5]}

    Raises:
        InputError: names the origin, the place and the broken rule.
    """
    try:
        return _checked_json(text, origin, fix, allows_infinity)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{origin} is not valid JSON at line {error.lineno}, column {error.colno} ({error.msg}): {fix}"
        ) from None


def parse_json_or_text(text: str, origin: str) -> Any:
    """Return the value of a JSON text from `origin`, or the text itself if it is not valid JSON.

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
    except _RuleBroken as error:
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
    """Return the value in a JSON file; `what` it should be and how to `fix` it are for the message.

    Raises:
        InputError: names the file, the place and the broken rule.
    """
    return parse_json(read_text(path, what, fix, most_bytes), f"{what} '{path}'", fix, allows_infinity)


def is_plan_file(path: str | Path) -> bool:
    """Return whether `path` names a file that holds a plan (and not, say, a model's configuration)."""
    if Path(path).suffix != ".json" or not os.path.isfile(path):
        return False
    try:
        document = read_json(path, "plan")
    except InputError:
        return False
    return isinstance(document, dict) and "predictions" in document


def sealed(text: str) -> str:
    """Return the text of a JSON object with the digest of its content as the first key.

    >>> sealed('{"a": 1}')
    '{"checksum": "sha256:015abd7f5cc57a2dd94b7590f04ad8084273905ee33ec5cebeae62276a97f862","a": 1}'
    """
    start = len(text) - len(text[1:].lstrip())
    return f'{text[:start]}"{CHECKSUM}": "{_digest(json.loads(text))}",{text[1:]}'


def unsealed(document: Any, origin: str) -> Any:
    """Return a JSON value from `origin` without its checksum, unchanged if it has none.

    Raises:
        InputError: its content has changed since it was sealed.
    """
    if not isinstance(document, dict) or CHECKSUM not in document:
        return document
    content = {key: value for key, value in document.items() if key != CHECKSUM}
    if document[CHECKSUM] != _digest(content):
        raise InputError(
            f"{origin} has changed since it was written: its content does not match its '{CHECKSUM}'. If that was on "
            f"purpose, remove the key '{CHECKSUM}'; otherwise copy or write it again"
        )
    return content


def read_sealed_json(
    path: str | Path, what: str, fix: str = "check the path", most_bytes: int = MOST_TEXT_BYTES
) -> Any:
    """Return the value in a JSON file as `read_json` does, after checking its checksum if it has one.

    Raises:
        InputError: names the file and the broken rule, or says that the file was changed.
    """
    return unsealed(read_json(path, what, fix, most_bytes), f"{what} '{path}'")


def _digest(content: Any) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(canonical.encode()).hexdigest()}"


def parse_toml(text: str, origin: str) -> dict[str, Any]:
    """Return the table of a TOML text from `origin`.

    >>> parse_toml("a = 1", "here")
    {'a': 1}

    Raises:
        InputError: names the origin, the place and the broken rule.
    """
    try:
        table = tomllib.loads(text, parse_float=_number)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{origin}: not valid TOML: {error}") from None
    except _RuleBroken as error:
        raise InputError(f"{origin}: {error}{error.place(text)}: correct it there") from None
    except RecursionError:
        raise InputError(_too_deep(origin, "write it flat")) from None
    except ValueError:  # a whole number that Python does not convert, or an impossible date
        raise InputError(
            f"{origin}: not valid TOML: a number or a date is impossible; correct it there"
        ) from None
    _check_levels(table, origin, "write it flat")
    return table


def parse_yaml(text: str, origin: str) -> Any:
    """Return the value of a YAML text from `origin`, of plain data and without aliases, by which few lines become many.

    >>> parse_yaml("a: [1, 2e-4, yes]", "here")
    {'a': [1, '2e-4', True]}

    Raises:
        InputError: names the origin, the place and the broken rule.
    """
    import yaml

    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
            raise InputError(f"{origin} has aliases (*name), which are not read: write the value again")
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        raise InputError(f"{origin}: not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise InputError(_too_deep(origin, "write it flat")) from None
    _check_levels(value, origin, "write it flat")
    return value


def read_toml(path: str | Path, what: str) -> dict[str, Any]:
    """Return the table in a TOML file.

    Raises:
        InputError: names the file, the place and the broken rule.
    """
    return parse_toml(read_text(path, what, most_bytes=MOST_TOML_BYTES), str(path))


def parse_csv(text: str, origin: str) -> list[list[str]]:
    """Return the non-empty rows of a CSV text from `origin`; cells are as written.

    >>> parse_csv("a,b\\n\\n1,2\\n", "here")
    [['a', 'b'], ['1', '2']]

    Raises:
        InputError: names the origin, the line and the error.
    """
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        return [row for row in reader if row]
    except csv.Error as error:
        raise InputError(
            f"{origin}, line {reader.line_num}: not valid CSV ({error}): correct it there"
        ) from None


def read_csv(path: str | Path, what: str, fix: str = "check the path") -> list[list[str]]:
    """Return the non-empty rows of a CSV file.

    Raises:
        InputError: names the file, the line and the error.
    """
    return parse_csv(read_text(path, what, fix), f"{what} '{path}'")


def read_csv_table(path: str | Path, what: str) -> list[dict[str, str]]:
    """Return the rows of a CSV file by the names in its header.

    Raises:
        InputError: names the file, the line or column and the error.
    """
    rows = read_csv(path, what)
    header = [name.strip() for name in rows[0]] if rows else []
    for name in header:
        if header.count(name) > 1:
            raise InputError(f"{what} '{path}' has column {name!r} twice: remove one of them")
    for number, row in enumerate(rows[1:], start=1):
        if len(row) > len(header):
            raise InputError(
                f"{what} '{path}', row {number}: {len(row)} entries for {len(header)} columns: remove the extra entries"
            )
    return [dict(zip(header, row, strict=False)) for row in rows[1:]]


class _RuleBroken(Exception):
    """A rule broken inside a parser, which does not tell its position; `digits` are those of a rejected number."""

    def __init__(self, reason: str, digits: str = "") -> None:
        super().__init__(reason)
        self.digits = digits

    def place(self, text: str) -> str:
        """Return the first line of `text` with the number."""
        return f" (line {text.count(chr(10), 0, text.find(self.digits)) + 1})" if self.digits else ""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        other_keys = ", ".join(repr(_cut(name)) for name in dict.fromkeys(names) if name != twice)
        raise _RuleBroken(
            f"key {_cut(twice)!r} occurs twice in the object"
            + (f" of {_cut(other_keys, 100)}" if other_keys else "")
        )
    return table


def _integer(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise _RuleBroken(f"a whole number of {len(digits)} digits is not supported", digits)
    return int(digits)


def _number(digits: str) -> float:
    number = float(digits)
    if number - number != 0:
        raise _RuleBroken(f"{_cut(digits)} is not a finite number", digits)
    return number


def _infinite(word: str) -> float:
    return float(word) if word.endswith("Infinity") else _number(word)


def _cut(text: str, most: int = 40) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


def _too_deep(origin: str, fix: str) -> str:
    return f"{origin} nests values in values more than {MOST_LEVELS} levels deep: {fix}"


def _check_levels(value: Any, origin: str, fix: str) -> None:
    """Raise `InputError` for values nested too deep; level by level, as they may be too deep for recursion."""
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
    """Return the first lone surrogate in the texts of a JSON value, escaped; None if every text can be encoded.

    >>> half_character({"a": ["\\ud83d"]}), half_character("\U0001f600")
    ("'\\\\ud83d'", None)
    """
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        text.encode()
    except UnicodeEncodeError as error:
        return f"{error.object[error.start]!a}"
    return None
