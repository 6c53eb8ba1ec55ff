"""What a run is trained on, in a few words that tell it from other data. Nothing here imports torch."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Literal

import numpy as np

from stagewright.cluster.schema import StrictModel
from stagewright.errors import InputError
from stagewright.files import check_regular

ORDER = 2
"""Version of the rule that says which sample comes when; another is other data."""
_WHOLE_BYTES = 2**30
_BLOCK_BYTES = 2**20


class DataIdentity(StrictModel):
    """What the samples of a run were made from: `kind` says how, the rest is of the file.

    Of a `store` of documents `sha256` is of their tokens, which tell tokenizers apart too; of a `factory` it is of the code
    that makes the dataset; a `mixture` is known by its parts. Of weights that came from `elsewhere` nothing is known.

    `sha256` is of the whole file up to 1 GiB. Of a larger one it is of its size and of 1,024 blocks of 1 MiB, the first, the
    last and those evenly between them (`is_sampled`): another file is told from it within seconds, a few changed tokens need
    not be.
    """

    kind: Literal["synthetic", "text", "tokens", "store", "factory", "mixture", "elsewhere"]
    order: int = ORDER
    name: str | None = None
    bytes: int | None = None
    sha256: str | None = None
    is_sampled: bool = False
    dtype: str | None = None
    num_tokens: int | None = None
    num_documents: int | None = None
    weight: float | None = None
    """The share of a mixture that is from this part."""
    parts: tuple[DataIdentity, ...] = ()

    @property
    def nameless(self) -> DataIdentity:
        return self.model_copy(update={"name": None, "parts": tuple(part.nameless for part in self.parts)})

    def is_same(self, other: DataIdentity) -> bool:
        """Whether it gives the same samples, by whatever name."""
        return self.nameless == other.nameless

    def __str__(self) -> str:
        order = "" if self.order == ORDER else f", in order {self.order}"
        if self.parts:
            parts = (f"{part.weight or 0:.3g} of {part}" for part in self.parts)
            return f"{'; '.join(parts)}{order}"
        if self.sha256 is None:
            return f"{self.kind}{order}"
        if self.kind == "factory":
            return f"'{self.name}' (source of SHA-256 {self.sha256[:12]}{order})"
        return f"'{self.name}' ({self.num_tokens} tokens of {self.dtype}, SHA-256 {self.sha256[:12]}{order})"


def tokens_of(data: str | Path) -> np.ndarray:
    """The tokens of a data file in one row, read when they are looked at: of a ``.npy`` its numbers, of a text its bytes.
    Raises `InputError` where it cannot be read or holds no integers."""
    path = Path(data)
    check_regular(path, "data file")
    try:
        if path.suffix == ".npy":
            tokens = np.load(path, mmap_mode="r", allow_pickle=False).reshape(-1)
        elif path.stat().st_size:
            tokens = np.memmap(path, dtype=np.uint8, mode="r")
        else:
            tokens = np.array([], np.uint8)
    except OSError as error:
        raise InputError(f"data file '{data}' cannot be read: {error.strerror or error}") from None
    except Exception as error:  # of headers, which numpy evaluates
        raise InputError(f"data file '{data}' is not an array of token ids: {error}") from None
    if tokens.dtype.kind not in "iu":
        raise InputError(
            f"data file '{data}' holds numbers of type {tokens.dtype}, but token ids are integers: save them so"
        )
    return tokens


def identity_of(data: DataIdentity | str | Path | None) -> DataIdentity:
    """Of a text or an array of tokens, or of synthetic samples where there is none. Raises `InputError` where the file
    cannot be read."""
    if data is None:
        return DataIdentity(kind="synthetic")
    if isinstance(data, DataIdentity):
        return data
    path, tokens = Path(data), tokens_of(data)
    try:
        size = path.stat().st_size
        digest = contents_digest(path)
    except OSError as error:
        raise InputError(f"data file '{data}' cannot be read: {error.strerror or error}") from None
    return DataIdentity(
        kind="tokens" if path.suffix == ".npy" else "text",
        name=path.name,
        bytes=size,
        sha256=digest,
        is_sampled=size > _WHOLE_BYTES,
        dtype=str(tokens.dtype),
        num_tokens=len(tokens),
    )


def contents_digest(path: Path, num_blocks: int | None = None) -> str:
    """SHA-256 of a file, or of its size and `num_blocks` of 1 MiB where it is larger than these: the first, the last and
    those evenly between; by default as many as `DataIdentity` says."""
    size, count = path.stat().st_size, num_blocks or _WHOLE_BYTES // _BLOCK_BYTES
    with path.open("rb", buffering=0) as file:
        if size <= count * _BLOCK_BYTES:
            return hashlib.file_digest(file, "sha256").hexdigest()
        found = hashlib.sha256(str(size).encode())
        for block in range(count):
            file.seek((size - _BLOCK_BYTES) * block // (count - 1), os.SEEK_SET)
            found.update(file.read(_BLOCK_BYTES))
        return found.hexdigest()
