"""Chats as a tokenizer's template writes them, and which characters of them the assistant has said."""

from __future__ import annotations

import json
import re
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any, Literal

from stagewright.errors import InputError, StagewrightError
from stagewright.execution.data.messages import Chat

_SPEAKER = "assistant"
_MARKERS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
"""What a template has around the assistant's words, if its author says which these are."""
_MOST_SECONDS = 10.0
"""CPU time of this process for a chat: templates take milliseconds, unless they have no end."""

Messages = Sequence[Mapping[str, Any]]
Contents = Literal["texts", "parts", "any"]


@dataclass(frozen=True)
class Rendered:
    """The text of a chat, and `spans` of characters that are to be learnt: (from, to)."""

    text: str
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of a transformers `tokenizer`, which `name` names."""

    tokenizer: Any
    name: str

    @cached_property
    def contents(self) -> Contents:
        """What contents the template writes as they are, seen in a chat of two words.

        Templates for text alone write a list of parts as Python would, and templates for images leave out a content that is
        a text; neither raises an error.
        """
        words = {"user": "sunflower", _SPEAKER: "moonlight"}
        texts = [{"role": role, "content": word} for role, word in words.items()]
        written = []
        for messages in (texts, _in_parts(texts)):
            try:
                text = self.text(Chat(messages), messages)
            except InputError:
                text = None
            written.append(text if text and all(word in text for word in words.values()) else None)
        as_text, as_parts = written
        if as_text == as_parts:
            return "any"
        return "parts" if as_text is None else "texts"

    def render(self, chat: Chat) -> Rendered:
        """The text of a chat, and what of it is to be learnt.

        What the assistant says is what the template marks as such (``{% generation %}``), or else what it adds in each turn
        after the prompt for that turn, with the mark that ends it. Of a turn that is written otherwise once others follow
        (without its reasoning, say) that is what is still shown, if it is the end of what the turn was by itself.

        Raises:
            InputError: the template refuses the chat, or has no end, or does not show what is the assistant's; names the
                place of the chat.
        """
        with _limited(f"{_place(chat)}the chat template of {self.name}"):
            messages = self._accepted(chat)
            whole = self.text(chat, messages)
            if _MARKERS.search(self.tokenizer.get_chat_template(tools=chat.tools)):
                return Rendered(whole, self._marked(chat, messages))
            return Rendered(whole, tuple(self._turns(chat, messages, whole)))

    def text(self, chat: Chat, messages: Messages, is_prompt: bool = False) -> str:
        """`messages` of a chat as text; with what opens the next turn of the assistant if they are a prompt."""
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), tools=chat.tools, tokenize=False, add_generation_prompt=is_prompt
            )
        except _EndlessTemplate:
            raise
        except Exception as error:  # templates raise what they like
            reason = " ".join(str(error).split())[:200]
            raise InputError(f"{_place(chat)}the chat template of {self.name} refuses it: {reason}") from None

    def _accepted(self, chat: Chat) -> Messages:
        """The messages in the first form that the template takes: arguments of calls as objects or, in older templates, as
        the text of them, and turns of calls alone without a content or with an empty one."""
        if self.contents == "parts":
            messages = _in_parts(chat.messages)
        else:
            messages = _in_texts(chat.messages) if self.contents == "texts" else list(chat.messages)
        forms = [messages, _with_contents(messages)]
        forms += [_with_argument_texts(form) for form in forms]
        refusal: InputError | None = None
        for form in forms:
            try:
                whole = self.text(chat, form)
            except InputError as error:
                refusal = refusal or error
                continue
            if not any(arguments and str(arguments) in whole for arguments in _argument_objects(form)):
                return form  # and not as Python writes objects
        raise refusal or InputError(
            f"{_place(chat)}the chat template of {self.name} writes arguments of tool calls as Python does, not as JSON: "
            "correct the template"
        )

    def _marked(self, chat: Chat, messages: Messages) -> tuple[tuple[int, int], ...]:
        """The characters of every token that the template itself marks as the assistant's."""
        with refusing(f"{_place(chat)}{self.name}"):
            encoding = self.tokenizer.apply_chat_template(
                list(messages),
                tools=chat.tools,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
                tokenizer_kwargs={"return_offsets_mapping": True},
            )
        pairs = zip(encoding["offset_mapping"], encoding["assistant_masks"], strict=True)
        return tuple((start, end) for (start, end), is_marked in pairs if is_marked)

    def _turns(self, chat: Chat, messages: Messages, whole: str) -> Iterator[tuple[int, int]]:
        """Where each turn of the assistant is in `whole`."""
        place, before = 0, ""
        for turn, message in enumerate(messages):
            if message.get("role") != _SPEAKER:
                continue
            prompt = self.text(chat, messages[:turn], is_prompt=True)
            until = self.text(chat, messages[: turn + 1])
            begin = len(prompt)
            if not until.startswith(prompt):
                # What opens a turn of the assistant may end with what only a new answer has, such as <think>.
                earlier = self.text(chat, messages[:turn])
                begin = sum(
                    1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, until, strict=False))
                )
                begin = begin if begin >= len(earlier) and prompt.startswith(earlier) else None
            span = None if begin is None else _shown(whole, until, begin, before, place)
            if span is None:
                raise InputError(
                    f"{_place(chat)}the chat template of {self.name} does not show which text is the assistant's (message "
                    f"{turn + 1} is written otherwise once others follow): use a template that marks it with "
                    "{% generation %}, or that writes turns one after the other"
                )
            yield span
            place, before = span[1], until


def _shown(whole: str, until: str, begin: int, before: str, place: int) -> tuple[int, int] | None:
    """What `whole` shows of a turn that ends `until`, where its words begin at `begin`. `before` is what ends with the turn
    before it, which ends at `place` of `whole`.

    >>> _shown("Q:a A:b; Q:c A:d;", "Q:a A:<t>b;", 6, "", 0)
    (6, 8)
    """
    if whole.startswith(until[:begin]):
        start = begin
    elif before and until.startswith(before) and whole.startswith(until[len(before) : begin], place):
        start = place + begin - len(before)
    else:
        return None
    words = until[begin:]
    if not words:
        return start, start
    for dropped in range(len(words)):
        if whole.startswith(words[dropped:], start) and words[dropped:].strip():
            return start, start + len(words) - dropped
    return None


# -- forms of messages --------------------------------------------------------------------------------------------------


def _in_texts(messages: Messages) -> list[dict[str, Any]]:
    def text(content: Any) -> Any:
        return "".join(part["text"] for part in content) if isinstance(content, list) else content

    return [
        {key: text(item) if key == "content" else item for key, item in message.items()}
        for message in messages
    ]


def _in_parts(messages: Messages) -> list[dict[str, Any]]:
    def parts(content: Any) -> Any:
        return [{"type": "text", "text": content}] if isinstance(content, str) else content

    return [
        {key: parts(item) if key == "content" else item for key, item in message.items()}
        for message in messages
    ]


def _with_contents(messages: Messages) -> list[dict[str, Any]]:
    return [{"content": "", **message} for message in messages]


def _with_argument_texts(messages: Messages) -> list[dict[str, Any]]:
    def text(call: Mapping[str, Any]) -> dict[str, Any]:
        if "function" in call:
            return {**call, "function": text(call["function"])}
        return {**call, "arguments": json.dumps(call.get("arguments", {}), ensure_ascii=False)}

    return [
        {**message, "tool_calls": [text(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else dict(message)
        for message in messages
    ]


def _argument_objects(messages: Messages) -> Iterator[dict[str, Any]]:
    for message in messages:
        for call in message.get("tool_calls", ()):
            arguments = call.get("function", call).get("arguments")
            if isinstance(arguments, dict):
                yield arguments


def _place(chat: Chat) -> str:
    return f"{chat.place}: " if chat.place else ""


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Raises `InputError` about the tokenizer `what` for all that its library raises, also for a panic, which is no
    `Exception`."""
    try:
        yield
    except (StagewrightError, KeyboardInterrupt, SystemExit, _EndlessTemplate):
        raise
    except BaseException as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise InputError(
            f"{what} cannot make tokens of the text ({reason}): correct the text or the tokenizer"
        ) from None


# -- templates without end ----------------------------------------------------------------------------------------------


class _EndlessTemplate(Exception):
    """Raised inside a template that has taken its time."""


@contextmanager
def _limited(what: str) -> Iterator[None]:
    """Inside, Python code has `_MOST_SECONDS` of CPU time; raises `InputError` about `what` then.

    Ignores: threads other than the first, which get no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: object) -> None:
        raise _EndlessTemplate

    handler = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, _MOST_SECONDS)
    try:
        yield
    except _EndlessTemplate:
        raise InputError(
            f"{what} has taken {_MOST_SECONDS:g} s for one chat: it may have no end, correct it"
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, handler)
