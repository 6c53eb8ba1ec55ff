"""Records in the shapes that people have: the same chat from each, with the loss on what the assistant says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from texts import CHATML, tokenizer_folder, write_lines

from stagewright.errors import InputError
from stagewright.execution.data.documents import Chat, Document, documents_of
from stagewright.execution.data.encoding import encoded
from stagewright.execution.data.tokenizers import load_tokenizer

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"name": "weather", "arguments": {"place": "Oslo"}}
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Rain?"},
    {"role": "assistant", "tool_calls": [{"type": "function", "function": CALL}]},
    {"role": "tool", "content": "dry"},
    {"role": "assistant", "content": "No."},
]
WITH_TOOLS = (
    "{% for t in tools or [] %}<tool>{{ t['function']['name'] }}</tool>{% endfor %}"
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] or '' }}"
    "{% for c in m['tool_calls'] or [] %}[{{ c['function']['name'] }} {{ c['function']['arguments'] | tojson }}]{% endfor %}"
    "</>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
MARKED = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}</>"
    "{% endgeneration %}{% else %}{{ m['content'] }}</>{% endif %}{% endfor %}"
)


def read(folder: Path, *records: object) -> list[Document]:
    return list(documents_of(write_lines(folder / "data.jsonl", records)))


def learnt(folder: Path, template: str | None, record: object) -> tuple[str, str]:
    """The text that is made of a record, and the part of it that counts in the loss."""
    tokenizer = load_tokenizer(str(tokenizer_folder(folder / ("chats" if template else "plain"), template)))
    (document,) = encoded(read(folder, record), tokenizer)
    assert document.learnt is not None
    inner = tokenizer._inner  # type: ignore[attr-defined]
    return inner.decode(document.ids), inner.decode(document.ids[document.learnt])


def test_sharegpt_is_the_chat_that_it_writes_otherwise(tmp_path: Path) -> None:
    turns = [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "Rain?"},
        {"from": "function_call", "value": json.dumps(CALL)},
        {"from": "observation", "value": "dry"},
        {"from": "gpt", "value": "No."},
    ]
    shapes = (
        {"messages": MESSAGES, "tools": [TOOL]},
        {"conversations": turns, "tools": json.dumps([TOOL])},
        {"conversations": turns[1:], "system": "Be brief.", "tools": [TOOL]},
        {"conversations": MESSAGES, "tools": [TOOL]},
    )
    first, *others = read(tmp_path, *shapes)
    assert others == [first] * 3
    text, words = learnt(tmp_path, WITH_TOOLS, shapes[1])
    assert text == (
        '<tool>weather</tool><system>Be brief.</><user>Rain?</><assistant>[weather {"place": "Oslo"}]</><tool>dry</>'
        "<assistant>No.</>"
    )
    assert words == '[weather {"place": "Oslo"}]</>No.</>'


def test_instructions_are_chats_and_alpacas_prompt_without_a_template(tmp_path: Path) -> None:
    record = {"instruction": "Add.", "input": "1 and 2", "output": "3", "text": "all of it"}
    assert learnt(tmp_path, CHATML, record)[1] == "3<|im_end|>\n"
    text, words = learnt(tmp_path, None, record)
    assert words == "3<|endoftext|>"
    assert text.startswith("Below is an instruction that describes a task, paired with an input")
    assert text.endswith("### Instruction:\nAdd.\n\n### Input:\n1 and 2\n\n### Response:\n3<|endoftext|>")
    plain = {**record, "input": ""}
    assert "### Input" not in learnt(tmp_path, None, plain)[0]
    (same, *others) = read(
        tmp_path,
        {"question": "Add.", "answer": "3"},
        {"prompt": "Add.", "response": "3"},
        {"instruction": "Add.", "context": "", "response": "3"},
    )
    assert others == [same, same]
    (chat,) = read(tmp_path, {**record, "system": "Sums.", "history": [["Hi", "Hello"]]})
    assert isinstance(chat, Chat) and [message["role"] for message in chat.messages] == [
        "system", "user", "assistant", "user", "assistant",
    ]  # fmt: skip
    with pytest.raises(InputError, match="has no chat template"):
        learnt(tmp_path, None, {**record, "history": [["Hi", "Hello"]]})


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_turns_that_are_given_do_not_count(template: str, tmp_path: Path) -> None:
    """As part of a prompt, by OpenAI's weight or axolotl's mark."""
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": "Me"},
    ]
    wanted = learnt(tmp_path, template, {"prompt": turns[:3], "completion": turns[3:]})
    assert "Me" in wanted[1] and "Hello" in wanted[0] and "Hello" not in wanted[1]
    for key, value in (("weight", 0), ("train", False)):
        marked = [turns[0], {**turns[1], key: value}, *turns[2:]]
        assert learnt(tmp_path, template, {"messages": marked}) == wanted
    assert "Hello" in learnt(tmp_path, template, {"messages": turns})[1]


def test_a_template_without_a_system_gets_its_words_with_the_user_s(tmp_path: Path) -> None:
    record = {"messages": [MESSAGES[0], MESSAGES[1], MESSAGES[4], MESSAGES[1], {**MESSAGES[4], "weight": 0}]}
    text, words = learnt(tmp_path, NO_SYSTEM, record)
    assert text.startswith("<|im_start|>user\nBe brief.\n\nRain?<|im_end|>")
    assert words == "No.<|im_end|>\n"
    with pytest.raises(InputError, match="no system"):
        learnt(tmp_path, NO_SYSTEM, {"messages": [MESSAGES[0], MESSAGES[4]]})


@pytest.mark.parametrize(
    ("record", "match"),
    [
        ({"prompt": "x", "chosen": "y", "rejected": "z"}, r"line 1 .* preference between answers \(chosen, rejected\)"),
        ({"conversations": [], "chosen": {}, "rejected": {}}, "which trains by DPO"),
        ({"prompt": "x", "completion": "y", "label": True}, r"preference .* \(prompt, completion, label\)"),
        ({"messages": MESSAGES, "label": False}, r"preference .* \(messages, label\)"),
        ({"conversations": [{"from": "alien", "value": "x"}]}, "turn 1 of line 1 .* is from 'alien': give it a 'from'"),
        ({"conversations": "x"}, "conversations are a list"),
        ({"conversations": [{"from": "function_call", "value": "{"}]}, "turn 1 .* function_call that is not JSON"),
        ({"instruction": "x", "output": "y", "history": [1]}, "history of line 1 .* no list of pairs"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_on_is_named(record: object, match: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=match):
        read(tmp_path, record)
