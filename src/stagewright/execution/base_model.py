"""Identity of the base model of adapters: its files, or the seed that it was drawn from.

Nothing here imports torch.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from stagewright.cluster.schema import StrictModel
from stagewright.execution.data_identity import contents_digest

_NUM_BLOCKS = 64
"""Number of blocks of 1 MiB that are read from a large file."""


class BaseFile(StrictModel):
    """A file of weights. `sha256` covers the whole file up to 64 MiB; for a larger file, its size and 64 blocks of 1 MiB:
    the first, with names and shapes, the last, and others evenly between."""

    bytes: int = Field(ge=0)
    sha256: str

    @classmethod
    def of(cls, path: Path) -> BaseFile:
        """Return the identity of the file at `path`. Raises `OSError` where it cannot be read."""
        return cls(bytes=path.stat().st_size, sha256=contents_digest(path, _NUM_BLOCKS))


class BaseModelIdentity(StrictModel):
    """The frozen model under adapters, which a checkpoint does not hold: `text` and `folder` say where it was, `files`
    which files its weights were read from; without files it was drawn from `seed`."""

    text: str
    folder: str | None = None
    files: dict[str, BaseFile] = Field(default_factory=dict)
    seed: int | None = None

    def is_same(self, other: BaseModelIdentity) -> bool:
        """Return whether it has the same weights, wherever they are stored."""
        return self.seed == other.seed and self.files == other.files

    def __str__(self) -> str:
        if self.folder is None:
            return f"'{self.text}' drawn from seed {self.seed}"
        return f"the weights in '{self.folder}'"
