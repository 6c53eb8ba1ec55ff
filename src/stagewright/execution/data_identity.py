"""Identity of training data: a short description that distinguishes it from other data. Nothing here imports torch."""

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
"""Version of the rule that orders samples; another version counts as other data."""
_WHOLE_BYTES = 2**30
_BLOCK_BYTES = 2**20


class DataIdentity(StrictModel):
    """The source of a run's samples: `kind` says how they are made, the other fields describe the file.

    For a `store` of documents, `sha256` covers their tokens and so distinguishes tokenizers too; for a `factory`, it covers
    the code that makes the dataset; a `mixture` is identified by its parts. For weights from `elsewhere`, the data is
    unknown.

    `sha256` covers the whole file up to 1 GiB. For a larger file it covers the size and 1,024 blocks of 1 MiB: the first,
    the last and others evenly between (`is_sampled`). That distinguishes other files within seconds, but may miss a few
    changed tokens.
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
    """Share of this part in a mixture."""
    parts: tuple[DataIdentity, ...] = ()

    @property
    def nameless(self) -> DataIdentity:
        return self.model_copy(update={"name": None, "parts": tuple(part.nameless for part in self.parts)})

    def is_same(self, other: DataIdentity) -> bool:
        """Return whether it gives the same samples, whatever its name."""
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
    """Return the tokens of a data file as one memory-mapped row: the numbers of a ``.npy``, the bytes of a text. Raises
    `InputError` where the file cannot be read or does not hold integers."""
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
    except Exception as error:  # from headers, which numpy evaluates
        raise InputError(f"data file '{data}' is not an array of token ids: {error}") from None
    if tokens.dtype.kind not in "iu":
        raise InputError(
            f"data file '{data}' holds numbers of type {tokens.dtype}, but token ids are integers: save them as integers"
        )
    return tokens


def identity_of(data: DataIdentity | str | Path | None) -> DataIdentity:
    """Return the identity of a text, an array of tokens, or synthetic samples (None). Raises `InputError` where the file
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
    """Return the SHA-256 of a file, or of its size and `num_blocks` blocks of 1 MiB where it is larger than these: the
    first, the last and others evenly between; by default as many as `DataIdentity` says."""
    size, count = path.stat().st_size, num_blocks or _WHOLE_BYTES // _BLOCK_BYTES
    with path.open("rb", buffering=0) as file:
        if size <= count * _BLOCK_BYTES:
            return hashlib.file_digest(file, "sha256").hexdigest()
        sha = hashlib.sha256(str(size).encode())
        for block in range(count):
            file.seek((size - _BLOCK_BYTES) * block // (count - 1), os.SEEK_SET)
            sha.update(file.read(_BLOCK_BYTES))
        return sha.hexdigest()
