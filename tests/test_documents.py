"""What a stranger's document can do wrong before its meaning is looked at: each is one message with file, place and fix."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from stagewright.documents import parse_json_or_text, read_csv_table, read_json, read_text, read_toml
from stagewright.errors import InputError

WRONG_JSON = {
    "a key twice": (b'{"a": 1,\n"dp": {"b": 1, "b": 2}}', r"key 'b' occurs twice in the object"),
    "a key thrice": (b'{"a": 1, "b": 2, "a": 3, "a": 4}', r"key 'a' occurs twice in the object of 'b'"),
    "lists without end": (b"[" * 100_000, "more than 64 levels"),
    "objects without end": (b'{"a":' * 100 + b"1" + b"}" * 100, "more than 64 levels"),
    "a number without end": (b'\n{"a": ' + b"9" * 5000 + b"}", r"whole number of 5000 digits.*line 2"),
    "a number that is none": (b'{"a":\nNaN}', r"NaN is not a finite number \(line 2\)"),
    "infinity": (b"[-Infinity]", "-Infinity is not a finite number"),
    "an overflow": (b"[1e999]", "1e999 is not a finite number"),
    "half a character": (b'{"a": "\\ud800"}', r"half a character \('\\ud800'\)"),
    "no JSON": (b'{\n"a" 1}', "not valid JSON at line 2, column 5"),
    "nothing": (b"", "not valid JSON at line 1"),
    "a mark": (b"\xef\xbb\xbf{}", "byte order mark: save it as UTF-8 without one"),
    "another encoding": (b'{"a":\n"\xe9"}', r"not UTF-8 text \(line 2, byte 7\)"),
    "zeros": (b'{"a":\n\0}', r"not text \(line 2 has NUL\)"),
}

WRONG_TOML = {
    "a key twice": ("a = 1\na = 2", "Cannot overwrite a value"),
    "lists without end": ("a = " + "[" * 10_000, "more than 64 levels"),
    "tables without end": (".".join("a" * 500) + " = 1", "more than 64 levels"),
    "a number without end": ("a = " + "9" * 5000, "impossible"),
    "a number that is none": ("\na = nan", r"nan is not a finite number \(line 2\)"),
    "a day in no calendar": ("a = 2026-13-40", "impossible|not valid TOML"),
    "half a character": ('a = "\\ud800"', "not a Unicode scalar value"),
}

WRONG_CSV = {
    "a column twice": ("layer,forward_s,layer\na,1,b\n", "column 'layer' twice"),
    "an entry too many": ("layer,forward_s\na,1,2\n", "row 1: 3 entries for 2 columns"),
    "an open quote": ('layer\n"a', "line 2: not valid CSV"),
    "a cell without end": ("a" * 200_000, "field larger than"),
}


@pytest.mark.parametrize(("content", "message"), WRONG_JSON.values(), ids=WRONG_JSON)
def test_wrong_json_is_refused_with_file_and_place(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=f"(?s)plan.*plan.json.*{message}"):
        read_json(path, "plan", "plan again")


@pytest.mark.parametrize(("content", "message"), WRONG_TOML.values(), ids=WRONG_TOML)
def test_wrong_toml_is_refused_with_file_and_place(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(content)
    with pytest.raises(InputError, match=f"job.toml.*({message})"):
        read_toml(path, "job file")


@pytest.mark.parametrize(("content", "message"), WRONG_CSV.values(), ids=WRONG_CSV)
def test_wrong_csv_is_refused_with_file_and_place(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "costs.csv"
    path.write_text(content)
    with pytest.raises(InputError, match=f"cost table '.*costs.csv'.*{message}"):
        read_csv_table(path, "cost table")


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, reason in (
        (tmp_path / "absent", "No such file"),
        (tmp_path, "Is a directory"),
        (tmp_path / "pipe", "a pipe or a device, not a file"),
        (Path("/dev/zero"), "a pipe or a device, not a file"),
        (Path("with\0zero"), "is not a path"),
    ):
        with pytest.raises(InputError, match=f"plan .*{reason}.*: check the path"):
            read_text(path, "plan")


def test_a_file_of_absurd_size_is_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / "plan.json").open("wb") as file:
        file.truncate(2**40)  # all holes
    with pytest.raises(InputError, match=r"has 1,099,511,627,776 bytes, more than"):
        read_json(tmp_path / "plan.json", "plan")


@pytest.mark.parametrize(("text", "value"), [("2", 2), ("gelu", "gelu"), ('{"a":', '{"a":'), ("[1]", [1])])
def test_a_setting_is_json_or_text(text: str, value: Any) -> None:
    assert parse_json_or_text(text, "--set") == value


@pytest.mark.parametrize("text", ["NaN", "1e400", "9" * 5000, "[" * 100_000, '{"a": 1, "a": 2}'])
def test_a_setting_that_is_json_within_no_limits_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="--set"):
        parse_json_or_text(text, "--set")
