"""The user's request for training data, as a value. Nothing here imports torch."""

from __future__ import annotations

import contextlib
import importlib.resources
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from stagewright.cluster.schema import StrictModel
from stagewright.errors import InputError

MOST_WEIGHT = 1e6
"""Maximum weight of a source relative to another; a share of less than a millionth would hardly be seen."""


BUNDLED = "moby-dick"
"""Name of the text that comes with the package, for first runs; a file of that name takes precedence."""


class SourceRequest(StrictModel):
    """A file, folder or factory of samples; of several sources, each gives a share by its `weight`."""

    path: str
    weight: float = Field(default=1.0, gt=0, le=MOST_WEIGHT)

    @classmethod
    def parse(cls, text: str) -> SourceRequest:
        """Parse ``PATH`` or ``PATH=WEIGHT``, where the path may be `BUNDLED`.

        >>> SourceRequest.parse("books.jsonl=0.3")
        SourceRequest(path='books.jsonl', weight=0.3)
        """
        path, equals, weight = text.rpartition("=")
        number = None
        if equals and path and not Path(text).exists():
            with contextlib.suppress(ValueError):
                number = float(weight)
        if number is None:
            return cls(path=_resolved(text))
        if not 1 / MOST_WEIGHT <= number <= MOST_WEIGHT:
            raise InputError(f"data '{text}': a weight is a number from 1e-6 to 1e6, such as {path}=0.5")
        return cls(path=_resolved(path), weight=number)


class DataRequest(StrictModel):
    """A mixture of sources and how their text becomes tokens: by a `tokenizer` (a path; None takes bytes), from `text_field`
    of each record (None chooses by the record's keys)."""

    sources: tuple[SourceRequest, ...] = Field(min_length=1)
    tokenizer: str | None = None
    text_field: str | None = None

    @classmethod
    def of(
        cls,
        data: DataRequest | str | Path | Sequence[str | Path] | None,
        tokenizer: str | Path | None = None,
        text_field: str | None = None,
    ) -> DataRequest | None:
        """Return the request for one source or several, each as for `SourceRequest.parse`; None without any."""
        if isinstance(data, DataRequest):
            return data
        several = [data] if isinstance(data, str | Path) else list(data or ())
        if not several:
            if tokenizer is not None or text_field is not None:
                option = "--tokenizer" if tokenizer is not None else "--text-field"
                raise InputError(f"{option} needs --data: without it samples are random")
            return None
        sources = tuple(SourceRequest.parse(str(source)) for source in several)
        return cls(
            sources=sources, tokenizer=None if tokenizer is None else str(tokenizer), text_field=text_field
        )


def _resolved(path: str) -> str:
    if path != BUNDLED or Path(path).exists():
        return path
    return str(importlib.resources.files("stagewright") / "data" / "moby_dick.txt")
