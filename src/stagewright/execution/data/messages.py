"""Chats from records: messages by turns, contents in parts, and tools with their calls, decoded and checked.

Source: "Writing a chat template" and "Tool use" of transformers' documentation, and the format of OpenAI's chat completions
where texts hold JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stagewright.errors import InputError


@dataclass(frozen=True)
class Chat:
    """Messages by turns, of which those of the assistant count in the loss, and the `tools` that it may call.

    A content is a text or a list of parts that are texts; arguments of a call are an object. `place` names file and line for
    error messages.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    place: str = field(default="", compare=False)
    given: frozenset[int] = frozenset()
    """Turns of the assistant that do not count in the loss, by their index in `messages`."""
    plain: tuple[str, str] | None = None
    """Prompt and completion for a tokenizer without a chat template; None where a template is needed."""


def read_chat(
    record: Mapping[str, Any], place: str, num_given: int = 0, plain: tuple[str, str] | None = None
) -> Chat:
    """Return the chat of a record with `messages` and perhaps `tools`, whose first `num_given` messages are a prompt. Raises
    `InputError` where it is not a chat; names its `place` and turn."""
    messages = record["messages"]
    if not isinstance(messages, list) or not messages:
        raise InputError(_no_messages(place))
    turns = [_message(message, f"message {turn} of {place}") for turn, message in enumerate(messages, 1)]
    given = {turn for turn, message in enumerate(turns) if turn < num_given or not _counts(message)}
    turns = [{key: value for key, value in message.items() if key not in _LEARNT} for message in turns]
    return Chat(turns, _tools(record.get("tools"), place), place, frozenset(given), plain)


_LEARNT = ("weight", "train")
"""Keys of a message that say whether it counts in the loss, as OpenAI and axolotl write them."""


def _counts(message: Mapping[str, Any]) -> bool:
    return all(bool(message.get(key, True)) for key in _LEARNT)


def _no_messages(place: str) -> str:
    return f'{place}: messages are a list of {{"role": ..., "content": ...}}, with roles such as user and assistant'


def _message(message: Any, place: str) -> dict[str, Any]:
    """Return a checked message without keys whose value is null."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InputError(_no_messages(place))
    given = {key: value for key, value in message.items() if value is not None}
    if "content" in given:
        given["content"] = _content(given["content"], place)
    if "tool_calls" in given:
        given["tool_calls"] = _calls(given["tool_calls"], place)
    return given


def _content(content: Any, place: str) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InputError(
            f"the content of {place} is a {type(content).__name__}: give a text, or a list of parts such as "
            '{"type": "text", "text": "..."}'
        )
    parts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else part
        if not isinstance(text, str):
            kind = f"type {part.get('type')!r}" if isinstance(part, Mapping) else type(part).__name__
            raise InputError(
                f"the content of {place} has a part of {kind}: only parts of text can be trained on, leave it out"
            )
        parts.append({"type": "text", "text": text})
    return parts


def _calls(calls: Any, place: str) -> list[dict[str, Any]]:
    """Return tool calls with their arguments as objects."""
    if not isinstance(calls, list):
        raise InputError(f"tool_calls of {place} are a {type(calls).__name__}: give a list of them")
    decoded = []
    for number, call in enumerate(calls, 1):
        what = f"tool call {number} of {place}"
        function = call.get("function") if isinstance(call, Mapping) and "function" in call else call
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InputError(
                f'{what} has no name: give {{"function": {{"name": ..., "arguments": {{...}}}}}}'
            )
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = _decoded(arguments, f"arguments of {what}") if arguments.strip() else {}
        if arguments is not None and not isinstance(arguments, dict):
            raise InputError(
                f"arguments of {what} are a {type(arguments).__name__}: give a JSON object, or the text of one"
            )
        function = dict(function) if arguments is None else {**function, "arguments": arguments}
        decoded.append(function if "function" not in call else {**call, "function": function})
    return decoded


def _tools(tools: Any, place: str) -> list[Mapping[str, Any]] | None:
    """Return the tools of a chat, or None."""
    what = f"tools of {place}"
    if isinstance(tools, str):
        tools = _decoded(tools, what) if tools.strip() else None
    if not tools:
        return None
    if not isinstance(tools, list):
        raise InputError(f"{what} are a {type(tools).__name__}: give a list of them, or the JSON of one")
    decoded = [_decoded(tool, what) if isinstance(tool, str) else tool for tool in tools]
    if not all(isinstance(tool, Mapping) for tool in decoded):
        raise InputError(f"{what} are not JSON schemas: give objects with type and function")
    return decoded


def _decoded(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{what} are a text that is not JSON ({error}): correct it there") from None
