"""The documents of files: texts, records of a prompt and its completion, and chats.

Read from text, JSON and JSON Lines, Parquet, folders that `datasets` has saved, and folders of such files. Nothing here
imports torch.
"""

from __future__ import annotations

import gzip
import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stagewright.errors import InputError, nearest
from stagewright.files import inside

_LINES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
_RECORDS = (*_LINES, ".json", ".parquet", ".arrow")
_PIECE_CHARACTERS = 2**20
_NO_TEXT = (
    ".gz", ".zst", ".bz2", ".xz", ".zip", ".tar", ".tgz", ".7z", ".bin", ".pt", ".pth", ".safetensors", ".npz", ".pkl",
    ".pdf", ".csv", ".tsv", ".png", ".jpg", ".jpeg", ".webp", ".h5", ".tfrecord",
)  # fmt: skip
_SAVED = ("state.json", "dataset_dict.json")
"""One of them is in a folder that `datasets` has saved: of one dataset, or of several splits."""


@dataclass(frozen=True)
class Text:
    """A text, or a piece of one; the next piece follows unless `is_end`."""

    text: str
    is_start: bool = True
    is_end: bool = True


@dataclass(frozen=True)
class Completion:
    """A prompt and what is to be learnt to follow it."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Chat:
    """Messages by turns, of which those of the assistant are to be learnt; `tools` are what it may call."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Any] | None = None


Document = Text | Completion | Chat


def has_records(path: Path) -> bool:
    """Whether a file or folder holds records, or files of them, rather than one text or array."""
    return path.is_dir() or path.name.lower().endswith(_RECORDS)


def data_files(path: Path) -> list[Path]:
    """The files that `documents_of` reads, in order. Raises `InputError` where there is none of a kind it knows."""
    if not path.exists():
        raise InputError(f"data file '{path}' cannot be read: check the path")
    if not path.is_dir():
        return [path]
    if (path / "dataset_dict.json").exists():
        splits = _json(path / "dataset_dict.json").get("splits", [])
        if "train" not in splits:
            raise InputError(
                f"data folder '{path}' has the splits {', '.join(map(str, splits))}, and none called train: name the folder "
                "of one, such as "
                f"{path / str(splits[0] if splits else 'SPLIT')}"
            )
        return data_files(path / "train")
    if (path / "state.json").exists():
        listed = _json(path / "state.json").get("_data_files", [])
        return [inside(path, str(one["filename"])) for one in listed]
    found = sorted(one for one in path.rglob("*") if one.is_file() and one.name.lower().endswith(_RECORDS))
    found = found or sorted(path.rglob("*.txt"))
    if not found:
        raise InputError(
            f"data folder '{path}' holds nothing to train on: name one of .jsonl, .parquet or .txt files, one that "
            "datasets has saved (save_to_disk), or one that stagewright tokenize has written"
        )
    return found


def documents_of(path: Path, field: str | None = None) -> Iterator[Document]:
    """All documents of a file; the text of each record is in its `field`, or where its keys say. Raises `InputError` where
    something is no document; says where."""
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
    """Raises `InputError` for what is no text by its name, or is records by another name: its bytes would teach a model
    nothing that was meant."""
    if path.name.lower().endswith(_NO_TEXT):
        raise InputError(
            f"data file '{path}' is no text: give text, JSON Lines (.jsonl), Parquet, token ids as .npy, or a dataset as "
            "package.module:factory"
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
        raise InputError(f'{place} is no record: give JSON objects such as {{"text": "..."}}')
    if field is not None:
        if field not in record:
            hint = nearest(field, map(str, record))
            raise InputError(
                f"{place} has no '{field}'{hint}: it has {_keys(record)}; name one with --text-field"
            )
        return Text(_text(record[field], f"'{field}' of {place}"))
    if "messages" in record:
        return Chat(_messages(record["messages"], place), record.get("tools") or None)
    if "prompt" in record and "completion" in record:
        prompt, completion = record["prompt"], record["completion"]
        return Completion(
            _text(prompt, f"'prompt' of {place}"), _text(completion, f"'completion' of {place}")
        )
    if "text" in record:
        return Text(_text(record["text"], f"'text' of {place}"))
    raise InputError(
        f"{place} has {_keys(record)}, and neither text, nor prompt and completion, nor messages: name the field of the "
        "text with --text-field"
    )


def _keys(record: Mapping[str, Any]) -> str:
    return ", ".join(str(key) for key in list(record)[:8]) or "no keys"


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise InputError(
            f"{what} is a {type(value).__name__}, not a text: name another field with --text-field"
        )
    return value


def _messages(value: Any, place: str) -> list[Mapping[str, Any]]:
    is_chat = isinstance(value, list) and bool(value)
    if not is_chat or not all(isinstance(one, Mapping) and isinstance(one.get("role"), str) for one in value):
        raise InputError(
            f'{place}: messages are a list of {{"role": ..., "content": ...}}, with roles such as user and assistant'
        )
    return [{key: item for key, item in one.items() if item is not None} for one in value]


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
        yield from ((f"record {number} of '{path}'", one) for number, one in enumerate(content, 1))
    else:
        yield from ((f"row {number} of '{path}'", one) for number, one in enumerate(_rows(path), 1))


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    with gzip.open(path, "rb") if path.name.lower().endswith(".gz") else path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield f"line {number} of '{path}'", json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InputError(
                    f"line {number} of '{path}' is not JSON ({error}): correct it or leave it out"
                ) from None


def _rows(path: Path) -> Iterator[Any]:
    try:
        arrow = importlib.import_module("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise InputError(f"reading '{path}' takes pyarrow: pip install pyarrow") from None
    try:
        if path.name.lower().endswith(".parquet"):
            for batch in parquet.ParquetFile(path).iter_batches():
                yield from batch.to_pylist()
        else:
            with arrow.memory_map(str(path)) as mapped, arrow.ipc.open_stream(mapped) as stream:
                for batch in stream:
                    yield from batch.to_pylist()
    except (arrow.ArrowException, ValueError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"data file '{path}' cannot be read by pyarrow ({reason}): write it again") from None


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InputError(f"data file '{path}' is not JSON ({error}): correct it") from None


# -- text ---------------------------------------------------------------------------------------------------------------


def _pieces(path: Path) -> Iterator[Text]:
    """A text in pieces of whole lines, so that a long one need not be in memory at once.

    Ignores: that a tokenizer might join characters on both sides of the end of a line.
    """
    refuse_no_text(path)
    is_start, waiting, size = True, [], 0
    with path.open(encoding="utf-8", newline="") as file:
        for line in file:
            if size >= _PIECE_CHARACTERS:
                yield Text("".join(waiting), is_start, is_end=False)
                is_start, waiting, size = False, [], 0
            waiting.append(line)
            size += len(line)
    if waiting or is_start:
        yield Text("".join(waiting), is_start)
