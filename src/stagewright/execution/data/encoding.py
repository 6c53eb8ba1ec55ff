"""Documents as token ids, with a mark on those that are to be learnt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from stagewright.errors import InputError
from stagewright.execution.data.documents import Completion, Document, Text
from stagewright.execution.data.tokenizers import Encoding, Tokenizer

_AT_ONCE = 256
"""Documents given to a tokenizer together, which spreads them over its threads."""


@dataclass(frozen=True)
class Encoded:
    """Token ids of a document or a piece of one, and which of them are learnt; None where all are."""

    ids: np.ndarray
    learnt: np.ndarray | None
    is_end: bool = True


def encoded(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[Encoded]:
    """Every document in order, closed by the tokenizer's end of text, unless it is a chat, whose template closes turns."""
    waiting = iter(documents)
    while group := list(islice(waiting, _AT_ONCE)):
        written = [_written(one, tokenizer) for one in group]
        whole = [at for at, one in enumerate(group) if isinstance(one, Completion) or _is_whole(one)]
        rest = sorted({*range(len(group))} - {*whole})
        made: dict[int, Encoding] = {}
        for places, is_whole in ((whole, True), (rest, False)):
            texts = [written[at][0] for at in places]
            made.update(
                zip(places, _encodings(tokenizer, texts, is_whole, [group[at] for at in places]), strict=True)
            )
        for at, document in enumerate(group):
            yield _closed(document, made[at], *written[at], tokenizer.end)


def _encodings(
    tokenizer: Tokenizer, texts: list[str], is_whole: bool, documents: Sequence[Document]
) -> list[Encoding]:
    """Raises `InputError` that names the document of which the tokenizer makes no tokens."""
    if not texts:
        return []
    try:
        return tokenizer.encode(texts, is_whole)
    except InputError:
        for text, document in zip(texts, documents, strict=True):
            try:
                tokenizer.encode([text], is_whole)
            except InputError as error:
                raise InputError(f"{document.place or 'a document'}: {error}") from None
        raise


def _is_whole(document: Document) -> bool:
    return isinstance(document, Text) and document.is_start and document.is_end


def _written(document: Document, tokenizer: Tokenizer) -> tuple[str, Sequence[tuple[int, int]] | None]:
    """The text of a document, and the characters in it that are learnt; None for all."""
    if isinstance(document, Text):
        return document.text, None
    if isinstance(document, Completion):
        text = document.prompt + document.completion
        return text, [(len(document.prompt), len(text))]
    made = tokenizer.render(document)
    return made.text, made.spans


def _closed(
    document: Document, made: Encoding, text: str, spans: Sequence[tuple[int, int]] | None, end: int | None
) -> Encoded:
    ids = made.ids
    learnt = None if spans is None else _within(made, spans)
    is_end = not isinstance(document, Text) or document.is_end
    if isinstance(document, Text | Completion) and is_end and end is not None:
        if not len(ids) or ids[-1] != end:
            ids = np.append(ids, end)
            learnt = None if learnt is None else np.append(learnt, True)
        elif learnt is not None:
            learnt[-1] = True
    return Encoded(ids, learnt, is_end)


def _within(made: Encoding, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """Of each token, whether it stands for a character of one of `spans`."""
    found = np.zeros(len(made.ids), bool)
    for start, end in spans:
        found |= (made.starts < end) & (made.ends > start) & (made.ends > made.starts)
    return found
