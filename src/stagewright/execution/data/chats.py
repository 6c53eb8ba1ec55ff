"""Rendering of chats by a tokenizer's template, with the spans of the assistant's text."""

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
"""Marker that a template may have around the assistant's text."""
_MOST_SECONDS = 10.0
"""Maximum CPU seconds for rendering a chat: templates take milliseconds, unless they never end."""

Messages = Sequence[Mapping[str, Any]]
Contents = Literal["texts", "parts", "any"]


@dataclass(frozen=True)
class Rendered:
    """The text of a chat, and the spans (start, end) of characters that count in the loss."""

    text: str
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of a transformers `tokenizer`, called `name` in messages."""

    tokenizer: Any
    name: str

    @cached_property
    def contents(self) -> Contents:
        """The forms of content that the template supports, found with a chat of two words.

        Templates for text alone write a list of parts as Python would, and templates for images omit a content that is a
        text; neither raises an error.
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
        """Return the text of a chat, and the spans of it that count in the loss.

        The assistant's text is what the template marks as such (``{% generation %}``), or else what it adds in each turn
        after the prompt for that turn, with the mark that ends it. For a turn that is rendered differently once others
        follow (without its reasoning, say), it is the part that is still shown, if the turn alone ends with that part.

        Raises:
            InputError: the template rejects the chat, never ends, or does not show which text is the assistant's; names the
                place of the chat.
        """
        with _limited(f"{_place(chat)}the chat template of {self.name}"):
            messages = self._accepted(chat)
            whole = self.text(chat, messages)
            is_marked = _MARKERS.search(self.tokenizer.get_chat_template(tools=chat.tools)) is not None
            # Turns that a template merges with others would have no span of their own; nothing needs it if all are learnt.
            turns = [] if is_marked and not chat.given else list(self._turns(chat, messages, whole))
            shift = len(chat.messages) - len(messages)  # 1 where a system's turn became part of the next
            given = [span for turn, span in turns if turn + shift in chat.given]
            spans = self._marked(chat, messages) if is_marked else (span for _, span in turns)
            return Rendered(whole, tuple(span for span in spans if not _is_within(span, given)))

    def text(self, chat: Chat, messages: Messages, is_prompt: bool = False) -> str:
        """Render `messages` of a chat; if they are a prompt, with the opening of the assistant's next turn."""
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), tools=chat.tools, tokenize=False, add_generation_prompt=is_prompt
            )
        except _EndlessTemplate:
            raise
        except Exception as error:  # templates may raise anything
            reason = " ".join(str(error).split())[:200]
            raise InputError(f"{_place(chat)}the chat template of {self.name} rejects it: {reason}") from None

    def _accepted(self, chat: Chat) -> Messages:
        """Return the messages in the first form that the template accepts: arguments of calls as objects or, in older
        templates, as JSON text, and turns that only have calls without a content or with an empty one."""
        if self.contents == "parts":
            messages = _in_parts(chat.messages)
        else:
            messages = _in_texts(chat.messages) if self.contents == "texts" else list(chat.messages)
        forms = [messages, _with_contents(messages)]
        forms += [_with_argument_texts(form) for form in forms]
        if messages[0].get("role") == "system":  # which some templates refuse
            forms += [joined for form in forms if (joined := _without_system(form)) is not None]
        refusal: InputError | None = None
        for form in forms:
            try:
                whole = self.text(chat, form)
            except InputError as error:
                refusal = refusal or error
                continue
            if not any(arguments and str(arguments) in whole for arguments in _argument_objects(form)):
                return form  # arguments are not written as Python objects
        raise refusal or InputError(
            f"{_place(chat)}the chat template of {self.name} writes arguments of tool calls as Python does, not as JSON: "
            "correct the template"
        )

    def _marked(self, chat: Chat, messages: Messages) -> tuple[tuple[int, int], ...]:
        """Return the character span of every token that the template marks as the assistant's."""
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

    def _turns(self, chat: Chat, messages: Messages, whole: str) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yield the number of each turn of the assistant, and its span in `whole`."""
        place, before = 0, ""
        for turn, message in enumerate(messages):
            if message.get("role") != _SPEAKER:
                continue
            prompt = self.text(chat, messages[:turn], is_prompt=True)
            until = self.text(chat, messages[: turn + 1])
            begin = len(prompt)
            if not until.startswith(prompt):
                # The opening of an assistant's turn may end with text that only a new answer has, such as <think>.
                earlier = self.text(chat, messages[:turn])
                begin = sum(
                    1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, until, strict=False))
                )
                begin = begin if begin >= len(earlier) and prompt.startswith(earlier) else None
            span = None if begin is None else _shown(whole, until, begin, before, place)
            if span is None:
                raise InputError(
                    f"{_place(chat)}the chat template of {self.name} does not show which text is the assistant's (message "
                    f"{turn + 1} is rendered differently once others follow): use a template that marks it with "
                    "{% generation %}, or that renders turns one after another"
                )
            yield turn, span
            place, before = span[1], until


def _shown(whole: str, until: str, begin: int, before: str, place: int) -> tuple[int, int] | None:
    """Return the span in `whole` of a turn that ends the text `until`, in which the turn's words begin at `begin`; None if
    it is not shown. `before` is the text up to the end of the previous turn, which ends at `place` of `whole`.

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


def _without_system(messages: Messages) -> list[dict[str, Any]] | None:
    """Return messages whose first, of the system, is empty and part of the next, of the user; None for other messages."""
    system, *others = messages
    if not others or others[0].get("role") != "user":
        return None
    contents = [message.get("content", "") for message in (system, others[0])]
    if not all(isinstance(content, str) for content in contents):
        return None
    return [{**others[0], "content": "\n\n".join(contents)}, *map(dict, others[1:])]


def _is_within(span: tuple[int, int], others: Sequence[tuple[int, int]]) -> bool:
    return any(start <= span[0] and span[1] <= end for start, end in others)


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
    """Raise `InputError` about the tokenizer `what` for everything that its library raises in the context, including panics,
    which are not `Exception`s."""
    try:
        yield
    except (StagewrightError, KeyboardInterrupt, SystemExit, _EndlessTemplate):
        raise
    except BaseException as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise InputError(
            f"{what} cannot make tokens of the text ({reason}): correct the text or the tokenizer"
        ) from None


# -- endless templates --------------------------------------------------------------------------------------------------


class _EndlessTemplate(Exception):
    """Raised inside a template that has exceeded its time limit."""


@contextmanager
def _limited(what: str) -> Iterator[None]:
    """Limit Python code in the context to `_MOST_SECONDS` of CPU time; raise `InputError` about `what` beyond that.

    Ignores: threads other than the main thread, which get no signals.
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
            f"{what} has taken {_MOST_SECONDS:g} s for one chat: correct the template, which may never end"
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, handler)
