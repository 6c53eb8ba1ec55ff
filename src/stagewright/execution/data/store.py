"""Token stores: folders with the token ids of many documents, written completely or not at all, and memory-mapped.

``tokens.bin`` has the ids, ``learnt.bin`` a byte for each if some are masked in the loss, ``ends.bin`` the end of each
document, and ``store.json`` the description. All are plain arrays of little-endian numbers, for `numpy.memmap`.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from pydantic import Field

from stagewright.cluster.schema import StrictModel, validated
from stagewright.documents import read_sealed_json, sealed
from stagewright.errors import InputError
from stagewright.execution.data.encoding import Encoded
from stagewright.execution.data.order import Permutation
from stagewright.execution.data.tokenizers import Tokenizer
from stagewright.files import cache_folder, digest_of, whole_folder
from stagewright.text import say
from stagewright.units import format_bytes

MANIFEST = "store.json"
VERSION = 1
_TOKENS, _LEARNT, _ENDS = "tokens.bin", "learnt.bin", "ends.bin"


class StoreManifest(StrictModel):
    """The content of ``store.json``."""

    version: Literal[1] = VERSION
    source: str
    """Name of the file or folder of the documents."""
    tokenizer: str
    dtype: Literal["uint16", "uint32"]
    num_tokens: int = Field(ge=0)
    num_documents: int = Field(ge=0)
    num_learnt: int = Field(ge=0)
    """Number of tokens that count in the loss."""
    longest: int = Field(ge=0)
    """Number of tokens of the longest document."""
    largest: int = Field(ge=0)
    """Largest token id."""
    pad: int = Field(ge=0)
    is_masked: bool
    """Whether there is a ``learnt.bin``."""
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    """Digest of all tokens, of the mask of those that count in the loss, and of the ends of documents."""


class Ids(NamedTuple):
    """The facts of a tokenizer that a store records: its name, a number above every id, and the id that pads samples."""

    name: str
    vocabulary: int
    pad: int


@dataclass(frozen=True)
class TokenStore:
    """A complete store; its arrays are mapped into memory at first use."""

    path: Path
    manifest: StoreManifest

    @cached_property
    def tokens(self) -> np.ndarray:
        return self._array(_TOKENS, np.dtype(self.manifest.dtype).newbyteorder("<"))

    @cached_property
    def learnt(self) -> np.ndarray | None:
        return self._array(_LEARNT, np.dtype(np.bool_)) if self.manifest.is_masked else None

    @cached_property
    def ends(self) -> np.ndarray:
        return self._array(_ENDS, np.dtype("<i8"))

    def num_longer(self, length: int) -> int:
        """Return the number of documents of more than `length` tokens."""
        return int((np.diff(self.ends, prepend=0) > length).sum())

    def _array(self, name: str, dtype: np.dtype) -> np.ndarray:
        path = self.path / name
        return np.memmap(path, dtype, mode="r") if path.stat().st_size else np.array([], dtype)


def is_store(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def open_store(path: Path) -> TokenStore:
    """Open the store in a folder. Raises `InputError` where it is damaged or of another version."""
    fix = "tokenise the data again"
    content = read_sealed_json(path / MANIFEST, "store", fix)
    if isinstance(content, dict) and content.get("version") != VERSION:
        version = content.get("version")
        raise InputError(
            f"'{path}' has version {version}, and this stagewright reads version {VERSION}: {fix}"
        )
    manifest = validated(StoreManifest, content, f"'{path / MANIFEST}'")
    sizes = {
        _TOKENS: manifest.num_tokens * np.dtype(manifest.dtype).itemsize,
        _ENDS: manifest.num_documents * 8,
    }
    if manifest.is_masked:
        sizes[_LEARNT] = manifest.num_tokens
    for name, size in sizes.items():
        has = (path / name).stat().st_size if (path / name).is_file() else None
        if has != size:
            fault = "is missing" if has is None else f"has {has} bytes, and {size} were written"
            raise InputError(f"'{path}' is damaged: {name} {fault}: {fix}")
    return TokenStore(path, manifest)


_ANNOUNCED_BYTES = 2**30
"""Bytes of a store above which its verification is announced, since it takes seconds."""
_REMEMBERED_BYTES = 2**32
"""Bytes of a store above which it is not verified again for each run, if sizes and times of its files are unchanged."""


def verified(store: TokenStore) -> TokenStore:
    """Verify that a store's files are unchanged, and return it. One process on each machine reads them all before a run:
    SHA-256 takes about a second per GiB. Raises `InputError` where a bit has changed."""
    files = [store.path / name for name in (_TOKENS, _LEARNT, _ENDS) if (store.path / name).is_file()]
    states = [file.stat() for file in files]
    size = sum(state.st_size for state in states)
    facts = [str(store.path.resolve()), store.manifest.sha256]
    facts += [f"{state.st_ino} {state.st_size} {state.st_mtime_ns}" for state in states]
    mark = hashlib.sha256("\n".join(facts).encode()).hexdigest()
    if size > _REMEMBERED_BYTES and (cache_folder("verified") / mark).exists():
        return store
    if size > _ANNOUNCED_BYTES:
        say(f"verifying the {format_bytes(size)} of '{store.path}'")
    try:
        tokens, ends = (digest_of(store.path / name) for name in (_TOKENS, _ENDS))
        learnt = digest_of(store.path / _LEARNT) if store.manifest.is_masked else ""
    except OSError as error:
        raise InputError(f"'{store.path}' cannot be read: {error.strerror or error}") from None
    if _digest(store.manifest.dtype, tokens, learnt, ends) != store.manifest.sha256:
        raise InputError(
            f"'{store.path}' is damaged: its tokens do not match the SHA-256 in {MANIFEST}: tokenise the data again"
        )
    if size > _REMEMBERED_BYTES:
        (cache_folder("verified") / mark).touch()
    return store


def _digest(dtype: str, *parts: str) -> str:
    """Return the digest of a store whose arrays have the digests `parts`."""
    return hashlib.sha256(" ".join([str(np.dtype(dtype).itemsize), *parts]).encode()).hexdigest()


def write_store(folder: Path, documents: Iterable[Encoded], ids: Ids | Tokenizer, source: str) -> TokenStore:
    """Write all documents to a new `folder`, which gets its name when it is complete.

    Raises:
        InputError: the folder exists, or cannot be written.
    """
    if os.path.lexists(folder):
        raise InputError(f"'{folder}' exists already: name a new folder for the tokens, or remove it")
    scratch = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch.mkdir()
        manifest = _write(scratch, documents, ids, source)
        (scratch / MANIFEST).write_text(sealed(manifest.model_dump_json(indent=1)) + "\n")
        os.rename(scratch, folder)
    except OSError as error:
        raise InputError(
            f"the tokens cannot be written to '{folder}' ({error.strerror or error}): make room there, or name another"
        ) from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return TokenStore(folder, manifest)


def _write(folder: Path, documents: Iterable[Encoded], ids: Ids | Tokenizer, source: str) -> StoreManifest:
    dtype = np.dtype("<u2" if ids.vocabulary <= 2**16 else "<u4")
    tokens_digest, learnt_digest = hashlib.sha256(), hashlib.sha256()
    ends: list[int] = []
    total = num_learnt = longest = largest = start = 0
    is_masked = False
    with (folder / _TOKENS).open("wb") as tokens, (folder / _LEARNT).open("wb") as learnt:
        for document in documents:
            numbers = document.ids.astype(dtype).tobytes()
            marks = (
                np.ones(len(document.ids), np.bool_)
                if document.learnt is None
                else document.learnt.astype(np.bool_)
            )
            is_masked = is_masked or document.learnt is not None
            tokens.write(numbers)
            learnt.write(marks.tobytes())
            tokens_digest.update(numbers)
            learnt_digest.update(marks.tobytes())
            total += len(document.ids)
            num_learnt += int(marks.sum())
            largest = max(largest, int(document.ids.max(initial=0)))
            if document.is_end:
                longest = max(longest, total - start)
                if total > start:
                    ends.append(total)
                start = total
    if not is_masked:
        (folder / _LEARNT).unlink()
    places = np.array(ends, "<i8").tobytes()
    (folder / _ENDS).write_bytes(places)
    learnt_sha256 = learnt_digest.hexdigest() if is_masked else ""
    ends_sha256 = hashlib.sha256(places).hexdigest()
    return StoreManifest(
        source=source,
        tokenizer=ids.name,
        dtype="uint16" if dtype.itemsize == 2 else "uint32",
        num_tokens=total,
        num_documents=len(ends),
        num_learnt=num_learnt,
        longest=longest,
        largest=largest,
        pad=ids.pad,
        is_masked=is_masked,
        sha256=_digest(dtype.name, tokens_digest.hexdigest(), learnt_sha256, ends_sha256),
    )


TRAIN, HELD_OUT = "train", "held-out"
"""Folders of the two parts of a store that was divided."""


def divide(store: TokenStore, folder: Path, share: float, seed: int = 0) -> tuple[TokenStore, TokenStore]:
    """Write the documents of a store to the new stores `folder`/train and `folder`/held-out, the latter with about `share`
    of them, drawn by `seed`; of a single document, its end. Both are written or neither.

    Raises:
        InputError: there is too little to divide, or the folder exists or cannot be written.
    """
    parts = _divided(store, share, seed)
    if os.path.lexists(folder):
        raise InputError(f"'{folder}' exists already: name a new folder for the tokens, or remove it")
    manifest = store.manifest
    ids = Ids(manifest.tokenizer, 2 ** (8 * np.dtype(manifest.dtype).itemsize), manifest.pad)
    try:
        with whole_folder(folder) as scratch:
            for name, spans in zip((TRAIN, HELD_OUT), parts, strict=True):
                write_store(scratch / name, _documents(store, spans), ids, manifest.source)
    except OSError as error:
        raise InputError(
            f"the tokens cannot be written to '{folder}' ({error.strerror or error}): make room there, or name another"
        ) from None
    return open_store(folder / TRAIN), open_store(folder / HELD_OUT)


def _divided(store: TokenStore, share: float, seed: int) -> tuple[list[range], list[range]]:
    """Return the spans of tokens of the documents to train on, and of those that are held out, each in the store's order."""
    ends = [int(end) for end in store.ends]
    if len(ends) == 1:
        cut = ends[0] - max(1, round(share * ends[0]))
        if cut < 1:
            raise InputError(f"'{store.manifest.source}' has one token: give more data, or hold out nothing")
        return [range(cut)], [range(cut, ends[0])]
    count = min(max(1, round(share * len(ends))), len(ends) - 1)
    order = Permutation(len(ends), seed)
    chosen = {order[place] for place in range(count)}
    spans = [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    return (
        [span for number, span in enumerate(spans) if number not in chosen],
        [span for number, span in enumerate(spans) if number in chosen],
    )


def _documents(store: TokenStore, spans: Iterable[range]) -> Iterator[Encoded]:
    for span in spans:
        place = slice(span.start, span.stop)
        learnt = None if store.learnt is None else np.asarray(store.learnt[place])
        yield Encoded(np.asarray(store.tokens[place]), learnt)
