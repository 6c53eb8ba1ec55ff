"""Encoding of documents as token ids, with a mask of the tokens that count in the loss."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from stagewright.errors import InputError
from stagewright.execution.data.documents import Completion, Document, Text
from stagewright.execution.data.messages import Chat
from stagewright.execution.data.tokenizers import Encoding, Tokenizer

_AT_ONCE = 256
"""Number of documents given to a tokenizer at once, which spreads them over its threads."""


@dataclass(frozen=True)
class Encoded:
    """Token ids of a document or a piece of one, and a mask of those that count in the loss; None where all do."""

    ids: np.ndarray
    learnt: np.ndarray | None
    is_end: bool = True


def encoded(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[Encoded]:
    """Encode every document in order, ended by the tokenizer's end of text, except chats, whose template ends turns."""
    waiting = iter(documents)
    while group := [_in_words(document, tokenizer) for document in islice(waiting, _AT_ONCE)]:
        written = [_written(document, tokenizer) for document in group]
        whole = [at for at, item in enumerate(group) if isinstance(item, Completion) or _is_whole(item)]
        pieces = sorted({*range(len(group))} - {*whole})
        encodings: dict[int, Encoding] = {}
        for places, is_whole in ((whole, True), (pieces, False)):
            texts = [written[at][0] for at in places]
            encodings.update(
                zip(places, _encodings(tokenizer, texts, is_whole, [group[at] for at in places]), strict=True)
            )
        for at, document in enumerate(group):
            yield _closed(document, encodings[at], *written[at], tokenizer.end)


def _in_words(document: Document, tokenizer: Tokenizer) -> Document:
    """Return an instruction as a prompt and its completion if the tokenizer has no template for chats."""
    if isinstance(document, Chat) and document.plain is not None and not tokenizer.has_chat_template:
        return Completion(*document.plain, document.place)
    return document


def _encodings(
    tokenizer: Tokenizer, texts: list[str], is_whole: bool, documents: Sequence[Document]
) -> list[Encoding]:
    """Encode texts together. Raises `InputError` that names the document that the tokenizer cannot encode."""
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
    """Return the text of a document, and the spans of characters that count in the loss; None for all."""
    if isinstance(document, Text):
        return document.text, None
    if isinstance(document, Completion):
        text = document.prompt + document.completion
        return text, [(len(document.prompt), len(text))]
    rendered = tokenizer.render(document)
    return rendered.text, rendered.spans


def _closed(
    document: Document,
    encoding: Encoding,
    text: str,
    spans: Sequence[tuple[int, int]] | None,
    end: int | None,
) -> Encoded:
    ids = encoding.ids
    learnt = None if spans is None else _within(encoding, spans)
    is_end = not isinstance(document, Text) or document.is_end
    if isinstance(document, Text | Completion) and is_end and end is not None:
        if not len(ids) or ids[-1] != end:
            ids = np.append(ids, end)
            learnt = None if learnt is None else np.append(learnt, True)
        elif learnt is not None:
            learnt[-1] = True
    return Encoded(ids, learnt, is_end)


def _within(encoding: Encoding, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return, for each token, whether it stands for a character in one of `spans`."""
    is_within = np.zeros(len(encoding.ids), bool)
    for start, end in spans:
        is_within |= (encoding.starts < end) & (encoding.ends > start) & (encoding.ends > encoding.starts)
    return is_within
