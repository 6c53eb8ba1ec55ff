"""Chats as a tokenizer's template writes them, and which characters of them the assistant has said."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stagewright.errors import InputError
from stagewright.execution.data.documents import Chat

_SPEAKER = "assistant"
_MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""What a template has around the assistant's words, if its author says which these are."""


@dataclass(frozen=True)
class Rendered:
    """The text of a chat, and `spans` of characters that are to be learnt: (from, to)."""

    text: str
    spans: tuple[tuple[int, int], ...]


def rendered(tokenizer: Any, chat: Chat, name: str) -> Rendered:
    """A chat as the template of a transformers `tokenizer` writes it.

    What the assistant says is what the template marks as such (``{% generation %}``), or else what it adds in each turn
    behind the prompt for that turn, with the mark that ends it.
    A template that writes a turn otherwise once others follow (without its reasoning, say) is met by looking for the
    turn's own words. Raises `InputError` where neither can be told apart.
    """

    def render(messages: Sequence[Mapping[str, Any]], is_prompt: bool = False) -> str:
        try:
            return tokenizer.apply_chat_template(
                list(messages), tools=chat.tools, tokenize=False, add_generation_prompt=is_prompt
            )
        except Exception as error:  # templates raise what they like
            reason = " ".join(str(error).split())[:200]
            raise InputError(f"the chat template of {name} refuses messages of the data: {reason}") from None

    whole, spans, place = render(chat.messages), [], 0
    if _MARKERS.search(tokenizer.get_chat_template(tools=chat.tools)):
        return Rendered(whole, _marked(tokenizer, chat))
    for turn, message in enumerate(chat.messages):
        if message.get("role") != _SPEAKER:
            continue
        prompt = render(chat.messages[:turn], is_prompt=True)
        until = render(chat.messages[: turn + 1])
        if whole.startswith(prompt) and whole.startswith(until) and len(prompt) < len(until):
            span = len(prompt), len(until)
        else:
            place = len(prompt) if whole.startswith(prompt) else place
            span = _by_words(whole, until, str(message.get("content") or "").strip(), place)
        if span is None:
            raise InputError(
                f"the chat template of {name} does not show which text is the assistant's (turn {turn + 1} of a chat is "
                "written otherwise once others follow): use a template that writes turns one after the other"
            )
        spans.append(span)
        place = span[1]
    return Rendered(whole, tuple(spans))


def _marked(tokenizer: Any, chat: Chat) -> tuple[tuple[int, int], ...]:
    """The characters of every token that the template itself marks as the assistant's."""
    made = tokenizer.apply_chat_template(
        list(chat.messages),
        tools=chat.tools,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        tokenizer_kwargs={"return_offsets_mapping": True},
    )
    pairs = zip(made["offset_mapping"], made["assistant_masks"], strict=True)
    return tuple((start, end) for (start, end), is_marked in pairs if is_marked)


def _by_words(whole: str, until: str, words: str, place: int) -> tuple[int, int] | None:
    """Where the words of a turn are in `whole` from `place` on, with what closes them in `until`, which ends with them."""
    start, last = whole.find(words, place), until.rfind(words)
    if not words or start < 0 or last < 0:
        return None
    end, mark = start + len(words), until[last + len(words) :]
    return start, end + len(mark) if whole.startswith(mark, end) else end
