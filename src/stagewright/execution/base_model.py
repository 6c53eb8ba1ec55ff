"""What the model is that adapters were trained for: its files, or the seed that it was drawn from.

Nothing here imports torch.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from stagewright.cluster.schema import StrictModel
from stagewright.execution.data_identity import contents_digest

_NUM_BLOCKS = 64
"""Of 1 MiB, that are looked at of a large file."""


class BaseFile(StrictModel):
    """A file of weights. `sha256` is of all of it up to 64 MiB; of a larger one of its size and 64 blocks of 1 MiB: the
    first, with names and shapes, the last and those evenly between."""

    bytes: int = Field(ge=0)
    sha256: str

    @classmethod
    def of(cls, path: Path) -> BaseFile:
        """Raises `OSError` where it cannot be read."""
        return cls(bytes=path.stat().st_size, sha256=contents_digest(path, _NUM_BLOCKS))


class BaseModelIdentity(StrictModel):
    """The frozen model beside adapters, which a checkpoint does not hold: `text` and `folder` are where it was, `files` what
    its weights were read from; without files it was drawn from `seed`."""

    text: str
    folder: str | None = None
    files: dict[str, BaseFile] = Field(default_factory=dict)
    seed: int | None = None

    def is_same(self, other: BaseModelIdentity) -> bool:
        """Whether it has the same weights, wherever they lie."""
        return self.seed == other.seed and self.files == other.files

    def __str__(self) -> str:
        if self.folder is None:
            return f"'{self.text}' drawn from seed {self.seed}"
        return f"the weights in '{self.folder}'"
