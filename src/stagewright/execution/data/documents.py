"""Documents from files: texts, records of a prompt and its completion, and chats, which other shapes of records become.

Supported are text, JSON and JSON Lines, Parquet, folders that `datasets` has saved, and folders of such files. Nothing here
imports torch.
"""

from __future__ import annotations

import gzip
import importlib
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stagewright.documents import half_character, read_json
from stagewright.errors import InputError, nearest
from stagewright.execution.data.messages import Chat
from stagewright.execution.data.shapes import chat_of, refuse_preferences
from stagewright.files import check_regular, inside

_LINES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
_RECORDS = (*_LINES, ".json", ".parquet", ".arrow")
_PACKED = (".zst", ".bz2", ".xz", ".lz4", ".json.gz", ".txt.gz", ".zip")
"""Endings of unsupported archives."""
_PIECE_CHARACTERS = 2**20
MOST_LINE_BYTES = 2**26
"""Maximum bytes of a line of records: tokenising takes 30 bytes of memory for each of its characters."""
MOST_LIST_BYTES = 2**30
"""Maximum bytes of a JSON list of records, which is read as a whole."""
_ROWS = 1024
"""Number of rows of an Arrow table that are in memory at once."""
_NO_TEXT = (
    ".gz", ".zst", ".bz2", ".xz", ".zip", ".tar", ".tgz", ".7z", ".bin", ".pt", ".pth", ".safetensors", ".npz", ".pkl",
    ".pdf", ".csv", ".tsv", ".png", ".jpg", ".jpeg", ".webp", ".h5", ".tfrecord",
)  # fmt: skip
_SAVED = ("state.json", "dataset_dict.json")
"""Files of which one is in every folder that `datasets` has saved: for one dataset, or for several splits."""


@dataclass(frozen=True)
class Text:
    """A text, or a piece of one, which another piece follows unless `is_end`. `place` names file and line for messages."""

    text: str
    is_start: bool = True
    is_end: bool = True
    place: str = field(default="", compare=False)


@dataclass(frozen=True)
class Completion:
    """A prompt and its completion, which alone counts in the loss."""

    prompt: str
    completion: str
    place: str = field(default="", compare=False)


Document = Text | Completion | Chat


def has_records(path: Path) -> bool:
    """Return whether a file or folder holds records, or files of them, rather than one text or array."""
    return path.is_dir() or path.name.lower().endswith(_RECORDS)


def data_files(path: Path) -> list[Path]:
    """Return the files that `documents_of` reads, in order. Raises `InputError` where there is none of a supported kind."""
    if not path.is_dir():
        check_regular(path, "data file")
        return [path]
    if (path / "dataset_dict.json").exists():
        described = _object(path / "dataset_dict.json")
        splits = described.get("splits")
        if not isinstance(splits, list) or not all(isinstance(split, str) for split in splits):
            raise InputError(
                f"'{path / 'dataset_dict.json'}' does not list the splits of a dataset: save it again with save_to_disk()"
            )
        if "train" not in splits:
            raise InputError(
                f"data folder '{path}' has the splits {', '.join(splits)}, and none called train: name the folder "
                f"of one, such as {path / (splits[0] if splits else 'SPLIT')}"
            )
        return data_files(inside(path, "train"))
    if (path / "state.json").exists():
        return _saved_files(path)
    files = sorted(entry for entry in path.rglob("*") if entry.is_file())
    records = [file for file in files if file.name.lower().endswith(_RECORDS)]
    packed = [file for file in files if file.name.lower().endswith(_PACKED)]
    if packed:
        raise InputError(
            f"data folder '{path}' holds '{packed[0].relative_to(path)}', an unsupported archive: unpack it, pack "
            "JSON Lines as .jsonl.gz, or move it elsewhere"
        )
    texts = records or [file for file in files if file.name.endswith(".txt")]
    if not texts:
        raise InputError(
            f"data folder '{path}' holds nothing to train on: name a folder of .jsonl, .parquet or .txt files, one that "
            "datasets has saved (save_to_disk), or one that stagewright tokenize has written"
        )
    return texts


def _saved_files(folder: Path) -> list[Path]:
    """Return the files of a dataset that `datasets` has saved."""
    listed = _object(folder / "state.json").get("_data_files")
    entries = listed if isinstance(listed, list) else [None]
    names = [entry.get("filename") if isinstance(entry, dict) else None for entry in entries]
    if not names or not all(isinstance(name, str) for name in names):
        raise InputError(
            f"'{folder / 'state.json'}' does not list the files of a dataset (_data_files): save it again with "
            "save_to_disk()"
        )
    files = [inside(folder, str(name)) for name in names]
    for file in files:
        check_regular(file, "data file")
    return files


def documents_of(path: Path, field: str | None = None) -> Iterator[Document]:
    """Yield all documents of a file; the text of a record is in its `field`, or found by its keys. Raises `InputError` where
    something is not a document; names the place."""
    check_regular(path, "data file")
    try:
        if path.name.lower().endswith(_RECORDS):
            for place, record in _records(path):
                yield _document(record, place, field)
        else:
            yield from _pieces(path)
    except OSError as error:
        raise InputError(f"data file '{path}' cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise InputError(
            f"data file '{path}' is not UTF-8 text ({error.reason} at byte {error.start}): convert it"
        ) from None


def refuse_no_text(path: Path) -> None:
    """Raise `InputError` for a file that is not text by its name, or has records under another name: training on its bytes
    would not be intended."""
    if path.name.lower().endswith(_NO_TEXT):
        packed = path.name.lower().endswith((*_PACKED, ".gz"))
        raise InputError(
            f"data file '{path}' is {'an unsupported archive: unpack it, or' if packed else 'not text:'} give text, "
            "JSON Lines (.jsonl, .jsonl.gz), Parquet, token ids as .npy, or a dataset as package.module:factory"
        )
    with path.open("rb") as file:
        line = file.readline(2**20).strip()
    if line.startswith(b"{") and line.endswith(b"}"):
        try:
            is_record = isinstance(json.loads(line), dict)
        except ValueError:
            is_record = False
        if is_record:
            raise InputError(
                f"data file '{path}' holds JSON records: call it {path.stem}.jsonl to train on their text, not on their "
                "braces and quotes"
            )


# -- records ------------------------------------------------------------------------------------------------------------


def _document(record: Any, place: str, field: str | None) -> Document:
    if not isinstance(record, Mapping):
        raise InputError(f'{place} is not a record: give JSON objects such as {{"text": "..."}}')
    if field is not None:
        if field not in record:
            hint = nearest(field, map(str, record))
            raise InputError(
                f"{place} has no '{field}'{hint}: it has {_keys(record)}; name one with --text-field"
            )
        return Text(_text(record[field], f"'{field}' of {place}"), place=place)
    refuse_preferences(record, place)
    if (chat := chat_of(record, place)) is not None:
        return chat
    if "prompt" in record and "completion" in record:
        prompt, completion = record["prompt"], record["completion"]
        return Completion(
            _text(prompt, f"'prompt' of {place}"), _text(completion, f"'completion' of {place}"), place
        )
    if "text" in record:
        return Text(_text(record["text"], f"'text' of {place}"), place=place)
    raise InputError(
        f"{place} has {_keys(record)}, but neither text, nor prompt and completion, nor messages or conversations, nor "
        "instruction and output: name the field of the text with --text-field, or rename the fields"
    )


def _keys(record: Mapping[str, Any]) -> str:
    return ", ".join(str(key) for key in list(record)[:8]) or "no keys"


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        remedy = "give a chat as one list 'messages', or " if isinstance(value, list) else ""
        raise InputError(
            f"{what} is a {type(value).__name__}, not a text: {remedy}name another field with --text-field"
        )
    return value


def _records(path: Path) -> Iterator[tuple[str, Any]]:
    name = path.name.lower()
    if name.endswith(_LINES):
        yield from _lines(path)
    elif name.endswith(".json"):
        content = _json(path)
        if not isinstance(content, list):
            raise InputError(
                f"data file '{path}' holds one JSON {type(content).__name__}, not a list of records: give a list, or a "
                "record per line as .jsonl"
            )
        yield from ((f"record {number} of '{path}'", record) for number, record in enumerate(content, 1))
    else:
        yield from ((f"row {number} of '{path}'", record) for number, record in enumerate(_rows(path), 1))


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    number = 0
    with gzip.open(path, "rb") if path.name.lower().endswith(".gz") else path.open("rb") as file:
        while True:
            number += 1
            place = f"line {number} of '{path}'"
            try:
                line = file.readline(MOST_LINE_BYTES + 1)
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                reason = "it ends too early" if isinstance(error, EOFError) else error
                raise InputError(
                    f"data file '{path}' is a damaged archive at line {number} ({reason}): copy or pack it again"
                ) from None
            if not line:
                return
            if len(line) > MOST_LINE_BYTES:
                raise InputError(
                    f"{place} has more than {MOST_LINE_BYTES:,} bytes, the maximum of a record: divide it into several"
                )
            if line.strip():
                yield place, _value(line, place, is_first=number == 1)


def _value(content: bytes, what: str, is_first: bool = True) -> Any:
    """Return the value of JSON text, whose first line may have a byte order mark."""
    try:
        text = content.decode("utf-8-sig" if is_first else "utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{what} is not UTF-8 text ({error.reason} at byte {error.start}): convert the file"
        ) from None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "its values are nested too deeply" if isinstance(error, RecursionError) else error
        raise InputError(f"{what} is not JSON ({reason}): correct it or leave it out") from None
    if "\\u" in text and (half := half_character(value)) is not None:
        raise InputError(
            f"{what} has half a character ({half}), which is not valid text: correct it or leave it out"
        )
    return value


def _rows(path: Path) -> Iterator[Any]:
    """Yield the records of an Arrow table, in which missing keys are null."""
    try:
        arrow = importlib.import_module("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise InputError(f"reading '{path}' needs pyarrow: pip install pyarrow") from None
    try:
        if path.name.lower().endswith(".parquet"):
            with parquet.ParquetFile(path) as file:
                for batch in file.iter_batches(_ROWS):
                    yield from map(_without_nulls, batch.to_pylist())
        else:
            with arrow.memory_map(str(path)) as mapped, arrow.ipc.open_stream(mapped) as stream:
                for batch in stream:
                    yield from map(_without_nulls, batch.to_pylist())
    except (arrow.ArrowException, ValueError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"data file '{path}' cannot be read by pyarrow ({reason}): write it again") from None


def _without_nulls(value: Any) -> Any:
    """Return `value` without keys whose value is null, at every depth: Arrow gives every record the keys of all others."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _json(path: Path) -> Any:
    size = path.stat().st_size
    if size > MOST_LIST_BYTES:
        raise InputError(
            f"data file '{path}' has {size:,} bytes, more than the {MOST_LIST_BYTES:,} of a JSON file, which is read as a "
            "whole: write a record per line as .jsonl"
        )
    return _value(path.read_bytes(), f"data file '{path}'")


def _object(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file that describes a dataset."""
    content = read_json(path, "description of a dataset", "save it again with save_to_disk()")
    if not isinstance(content, dict):
        raise InputError(
            f"'{path}' is a {type(content).__name__}, not an object: save the dataset again with save_to_disk()"
        )
    return content


# -- text ---------------------------------------------------------------------------------------------------------------


def _pieces(path: Path) -> Iterator[Text]:
    """Yield a text in pieces of whole lines, so that a long text need not be in memory at once.

    Ignores: that a tokenizer might join characters across the end of a line, or of a piece of a longer line.
    """
    refuse_no_text(path)
    is_start, waiting, size, number = True, [], 0, 0
    with path.open(encoding="utf-8", newline="") as file:
        while line := file.readline(16 * _PIECE_CHARACTERS):
            if size >= _PIECE_CHARACTERS:
                yield Text("".join(waiting), is_start, is_end=False, place=f"line {number} of '{path}'")
                is_start, waiting, size = False, [], 0
            waiting.append(line)
            size += len(line)
            number += line.endswith("\n")
    if waiting or is_start:
        yield Text("".join(waiting), is_start, place=f"line {number} of '{path}'")
