"""Records of other shapes as chats: ShareGPT, Alpaca, prompts that are messages, questions with answers.

Source: the data formats of LLaMA-Factory, axolotl and TRL, as their documentation describes them; the prompt of Alpaca from
Taori et al. 2023, "Stanford Alpaca".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from stagewright.errors import InputError
from stagewright.execution.data.messages import Chat, read_chat

_SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "model": "assistant", "assistant": "assistant", "system": "system", "tool": "tool", "observation": "tool",
    "function_response": "tool", "function_call": "assistant",
}  # fmt: skip
_QUESTIONS = ("instruction", "question", "query", "prompt", "input")
_ANSWERS = ("output", "response", "answer")
_CONTEXTS = ("input", "context")
"""Keys of what a question is about, besides itself."""
_ALPACA = (
    "Below is an instruction that describes a task{}. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{}\n\n{}### Response:\n"
)
_PREFERENCES = (("chosen", "rejected"), ("prompt", "completion", "label"), ("messages", "label"))
"""Keys of preferences: pairs of answers, and answers that are wanted or not."""


def refuse_preferences(record: Mapping[str, Any], place: str) -> None:
    """Raise `InputError` for preferences between answers, by the keys that they have."""
    for keys in _PREFERENCES:
        if all(key in record for key in keys) and ("label" not in keys or isinstance(record["label"], bool)):
            named = ", ".join(keys)
            raise InputError(
                f"{place} is a preference between answers ({named}), which trains by DPO, KTO or a reward model, not by the "
                "loss of a text: give the answers that are wanted alone, as messages or as prompt and completion"
            )


def chat_of(record: Mapping[str, Any], place: str) -> Chat | None:
    """Return the chat of a record of one of these shapes, or None. Raises `InputError` where it is one and cannot be read;
    names its `place`."""
    if "messages" in record:
        return read_chat(record, place)
    if "conversations" in record or "conversation" in record:
        return _of_sharegpt(record, place)
    if isinstance(record.get("prompt"), list) and isinstance(record.get("completion"), list):
        both = {**record, "messages": [*record["prompt"], *record["completion"]]}
        return read_chat(both, place, num_given=len(record["prompt"]))
    question = next((key for key in _QUESTIONS if isinstance(record.get(key), str)), None)
    answer = next((key for key in _ANSWERS if isinstance(record.get(key), str)), None)
    return None if question is None or answer is None else _of_question(record, question, answer, place)


def _of_sharegpt(record: Mapping[str, Any], place: str) -> Chat:
    turns = record.get("conversations", record.get("conversation"))
    if not isinstance(turns, list) or not turns:
        raise InputError(f'{place}: conversations are a list of {{"from": "human", "value": ...}}')
    messages: list[Any] = []
    if isinstance(record.get("system"), str) and record["system"]:
        messages.append({"role": "system", "content": record["system"]})
    for number, turn in enumerate(turns, 1):
        what = f"turn {number} of {place}"
        if isinstance(turn, Mapping) and "role" in turn:
            messages.append(turn)
            continue
        speaker = turn.get("from") if isinstance(turn, Mapping) else None
        if not isinstance(speaker, str) or speaker not in _SHAREGPT_ROLES:
            named = ", ".join(_SHAREGPT_ROLES)
            raise InputError(f"{what} is from {speaker!r}: give it a 'from' that is one of {named}")
        message: dict[str, Any] = {"role": _SHAREGPT_ROLES[speaker], "content": turn.get("value")}
        if speaker == "function_call":
            message = {"role": "assistant", "tool_calls": _calls(turn.get("value"), what)}
        kept = {key: turn[key] for key in ("weight", "train") if key in turn}
        messages.append({**message, **kept})
    return read_chat({"messages": messages, "tools": record.get("tools")}, place)


def _calls(value: Any, what: str) -> list[dict[str, Any]]:
    """Return the calls in the value of a ``function_call`` turn: the JSON of one, or of a list of them."""
    try:
        decoded = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise InputError(f"{what} is a function_call that is not JSON ({error}): correct it there") from None
    return [
        {"type": "function", "function": call}
        for call in (decoded if isinstance(decoded, list) else [decoded])
    ]


def _of_question(record: Mapping[str, Any], question: str, answer: str, place: str) -> Chat:
    """Return the chat of an instruction with its answer, after a system's text and earlier turns (``history``) if any."""
    context = next(
        (
            record[key]
            for key in _CONTEXTS
            if key != question and isinstance(record.get(key), str) and record[key]
        ),
        "",
    )
    messages = []
    if isinstance(record.get("system"), str) and record["system"]:
        messages.append({"role": "system", "content": record["system"]})
    history = record.get("history") or []
    if not isinstance(history, list) or not all(
        isinstance(pair, list) and len(pair) == 2 for pair in history
    ):
        raise InputError(f"history of {place} is no list of pairs: give [[question, answer], ...]")
    for pair in [*history, [record[question] + (f"\n{context}" if context else ""), record[answer]]]:
        for role, text in zip(("user", "assistant"), pair, strict=True):
            messages.append({"role": role, "content": text})
    plain = None
    if len(messages) == 2:
        given = f"### Input:\n{context}\n\n" if context else ""
        about = ", paired with an input that provides further context" if context else ""
        plain = (_ALPACA.format(about, record[question], given), record[answer])
    return read_chat({"messages": messages, "tools": record.get("tools")}, place, plain=plain)
