"""Tokenizers: bytes, a ``tokenizer.json``, or the folder of a Hugging Face tokenizer with its chat template.

Nothing is downloaded, and no code of a tokenizer's folder is run.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stagewright.errors import InputError
from stagewright.execution.data.chats import ChatTemplate, Rendered, refusing
from stagewright.execution.data.messages import Chat
from stagewright.execution.weight_files import CONFIG
from stagewright.files import digest_of

_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>", "[EOS]", "[SEP]")
"""Tokens that end texts in tokenizers whose file does not say, the most common first."""
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "vocab.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
"""Names of a tokenizer's files in a folder."""


@dataclass(frozen=True)
class Encoding:
    """Token ids of a text, each with the characters that it stands for: from `starts` to `ends`, equal where none."""

    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray


class Tokenizer(ABC):
    """An encoder of texts as token ids.

    `digest` identifies the tokenizer, `vocabulary` is above every id, `end` ends a document (None: nothing does), `pad`
    fills the remainder of a sample.
    """

    name: str
    digest: str
    vocabulary: int
    end: int | None
    pad: int
    has_chat_template = False

    @abstractmethod
    def encode(self, texts: Sequence[str], is_whole: bool = True) -> list[Encoding]:
        """Encode each text, with the special tokens that begin and end a text if it `is_whole`."""

    def render(self, chat: Chat) -> Rendered:
        """Render a chat as text. Raises `InputError` where there is no chat template."""
        place = f"{chat.place}: " if chat.place else ""
        raise InputError(
            f"{place}{self.name} has no chat template, which records of messages need: give a Hugging Face folder that has "
            "one with --tokenizer, or records of prompt and completion"
        )


def load_tokenizer(path: str | None) -> Tokenizer:
    """Load the tokenizer at `path`, a file or a folder; None is bytes. Raises `InputError` where it cannot be read."""
    if path is None:
        return Bytes()
    location = Path(path).expanduser()
    if location.is_dir():
        return HuggingFace(location)
    if location.is_file():
        return TokenizerFile(location)
    raise InputError(
        f"there is no tokenizer '{path}': give a tokenizer.json, or a folder that save_pretrained() has written"
    )


class Bytes(Tokenizer):
    """A tokenizer whose tokens are the bytes of UTF-8 text."""

    name, digest, vocabulary, end, pad = "bytes", "bytes", 256, None, 0

    def encode(self, texts: Sequence[str], is_whole: bool = True) -> list[Encoding]:
        return [self._encoding(text) for text in texts]

    def _encoding(self, text: str) -> Encoding:
        ids = np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8).astype(np.int64)
        starts = np.cumsum((ids & 0xC0) != 0x80) - 1  # a character's first byte is not a continuation
        return Encoding(ids, starts, starts + 1)


class TokenizerFile(Tokenizer):
    """The tokenizer in a ``tokenizer.json`` of the tokenizers library."""

    def __init__(self, path: Path) -> None:
        import tokenizers

        try:
            self._inner = tokenizers.Tokenizer.from_file(str(path))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # plain exceptions and panics
            raise InputError(
                f"'{path}' is not a tokenizer.json ({_one_line(error)}): give a tokenizer.json, or its folder"
            ) from None
        self._inner.no_truncation()
        self._inner.no_padding()
        self.name = f"tokenizer '{path}'"
        self.digest = digest_of(path)
        self.vocabulary = max(self._inner.get_vocab(with_added_tokens=True).values(), default=0) + 1
        ids = (self._inner.token_to_id(name) for name in _ENDS)
        self.end = next((token for token in ids if token is not None), None)
        pads = [self._inner.token_to_id(name) for name in ("<pad>", "[PAD]", "<|pad|>")]
        self.pad = next((token for token in (*pads, self.end) if token is not None), 0)

    def encode(self, texts: Sequence[str], is_whole: bool = True) -> list[Encoding]:
        with refusing(self.name):
            encodings = self._inner.encode_batch(list(texts), add_special_tokens=is_whole)
        return [_encoding(encoding.ids, encoding.offsets) for encoding in encodings]


class HuggingFace(Tokenizer):
    """The tokenizer in a folder, as `AutoTokenizer.save_pretrained` writes it."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        if not any((folder / name).is_file() for name in TOKENIZER_FILES):
            raise InputError(
                f"folder '{folder}' holds no tokenizer: give one that AutoTokenizer.save_pretrained() has written, or a "
                "tokenizer.json"
            )
        try:
            self._inner: Any = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, use_fast=True, trust_remote_code=False
            )
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # of many types, all about the folder's contents
            if "trust_remote_code" in str(error):
                raise InputError(
                    f"the tokenizer in '{folder}' is custom code (auto_map), which is never run: give its tokenizer.json if "
                    "it has one, or a folder that a class of transformers has saved"
                ) from None
            raise InputError(
                f"the tokenizer in '{folder}' cannot be read ({_one_line(error)}): save it again"
            ) from None
        if not self._inner.is_fast:
            raise InputError(
                f"the tokenizer in '{folder}' has no tokenizer.json: save it as a fast tokenizer"
            )
        self.name = f"tokenizer '{folder}'"
        self._template = ChatTemplate(self._inner, self.name)
        self.has_chat_template = bool(self._inner.chat_template)
        files = [
            *(folder / name for name in (*TOKENIZER_FILES, CONFIG)),
            *sorted((folder / "additional_chat_templates").glob("*")),
        ]
        digests = [f"{path.name} {digest_of(path)}" for path in files if path.is_file()]
        self.digest = hashlib.sha256("\n".join(digests).encode()).hexdigest()
        self.vocabulary = max(self._inner.get_vocab().values(), default=0) + 1
        self.end = (
            self._inner.eos_token_id if self._inner.eos_token_id is not None else self._inner.sep_token_id
        )
        pad = self._inner.pad_token_id
        self.pad = next((token for token in (pad, self.end) if token is not None), 0)

    def encode(self, texts: Sequence[str], is_whole: bool = True) -> list[Encoding]:
        with refusing(self.name):
            encodings = self._inner(
                list(texts),
                add_special_tokens=is_whole,
                return_offsets_mapping=True,
                return_attention_mask=False,
                truncation=False,
                padding=False,
                verbose=False,
            )
        pairs = zip(encodings["input_ids"], encodings["offset_mapping"], strict=True)
        return [_encoding(ids, offsets) for ids, offsets in pairs]

    def render(self, chat: Chat) -> Rendered:
        if not self.has_chat_template:
            return super().render(chat)
        return self._template.render(chat)


def _encoding(ids: Sequence[int], offsets: Sequence[tuple[int, int]]) -> Encoding:
    places = np.array(offsets, np.int64).reshape(-1, 2)
    return Encoding(np.array(ids, np.int64), places[:, 0], places[:, 1])


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
