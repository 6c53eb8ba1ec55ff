"""From files to token ids: what is a document, what of it is learnt, and what is refused."""

from __future__ import annotations

import gzip
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from texts import CHATML, END, WORDS, tokenizer_file, tokenizer_folder, write_lines

from stagewright.errors import InputError
from stagewright.execution.data.documents import Chat, Completion, Document, Text, data_files, documents_of
from stagewright.execution.data.encoding import encoded
from stagewright.execution.data.store import open_store, verified, write_store
from stagewright.execution.data.tokenizers import Tokenizer, load_tokenizer
from stagewright.execution.data_identity import tokens_of

RECORDS = [
    {"text": "A whale."},
    {"prompt": "Call me", "completion": " Ishmael"},
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
]
DOCUMENTS = [Text("A whale."), Completion("Call me", " Ishmael"), Chat(RECORDS[2]["messages"])]  # type: ignore[arg-type]


def read(path: Path, field: str | None = None) -> list[Document]:
    return [document for file in data_files(path) for document in documents_of(file, field)]


# -- documents ----------------------------------------------------------------------------------------------------------


def test_records_are_read_from_lines_lists_and_folders(tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "a.jsonl", RECORDS)
    (tmp_path / "list.json").write_text(json.dumps(RECORDS))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b"\n" + lines.read_bytes()))
    assert read(lines) == read(tmp_path / "list.json") == read(tmp_path / "b.jsonl.gz") == DOCUMENTS
    assert read(tmp_path) == 3 * DOCUMENTS
    assert read(write_lines(tmp_path / "c.jsonl", [{"body": "x", "text": "y"}]), "body") == [Text("x")]


def test_parquet_and_folders_of_datasets_are_read(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    records = [{"text": "one", "id": 1}, {"text": "two", "id": 2}]
    table = arrow.Table.from_pylist(records)
    parquet.write_table(table, tmp_path / "rows.parquet")
    assert read(tmp_path / "rows.parquet") == [Text("one"), Text("two")]
    saved = tmp_path / "saved" / "train"
    saved.mkdir(parents=True)
    path = str(saved / "data-00000-of-00001.arrow")
    with arrow.OSFile(path, "wb") as file, arrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    (saved / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]})
    )
    (tmp_path / "saved" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    assert read(tmp_path / "saved") == read(saved) == [Text("one"), Text("two")]
    (tmp_path / "saved" / "dataset_dict.json").write_text(json.dumps({"splits": ["test"]}))
    with pytest.raises(InputError, match="splits test, and none called train"):
        read(tmp_path / "saved")


def packed(num_lines: int) -> bytes:
    """An archive that is the same in every process, as names of tests must be."""
    return gzip.compress(b'{"text": "x"}\n' * num_lines, mtime=0)


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("a.jsonl", '{"text": "x"}\n{"text": }\n', r"line 2 of .*a\.jsonl' is not JSON"),
        ("a.jsonl", '["x"]\n', "line 1 of .* is not a record"),
        ("a.jsonl", '{"body": "x"}\n', "has body, but neither text, nor prompt .* --text-field"),
        ("a.jsonl", '{"text": 3}\n', "'text' of line 1 .* is a int, not a text"),
        ("a.jsonl", '{"messages": "hello"}\n', "line 1 of .*: messages are a list"),
        ("a.jsonl", '\n{"text": "broken \\ud83d half"}\n', r"line 2 of .* has half a character \('.ud83d'\)"),
        ("a.jsonl", b'{"text": "caf\xe9"}\n', r"line 1 of .* is not UTF-8 text"),
        (
            "a.jsonl",
            '{"text": "a", "m": ' + "[" * 200_000 + "]" * 200_000 + "}\n",
            "line 1 .* not JSON .*too deep",
        ),
        (
            "a.jsonl.gz",
            packed(900)[:-30],
            r"'.*gz' is a damaged archive at line \d+ \(",
        ),
        ("a.jsonl.gz", packed(9)[:-8] + bytes(8), "damaged archive at line"),
        ("a.jsonl.gz", packed(1)[:12] + b"\xff" * 9, "damaged archive at line 1"),
        ("a.jsonl.zst", b"x", "is an unsupported archive: unpack it"),
        (
            "a.jsonl",
            '{"prompt": [{"role": "user"}], "completion": "x"}',
            "is a list.* give a chat as one list 'messages'",
        ),
        ("a.json", '{"text": "x"}', "not a list of records"),
        ("a.txt", '{"text": "x"}\n', r"holds JSON records: call it a\.jsonl"),
        ("a.csv", "text\nx\n", "is not text"),
        ("a.txt", b"\xff\xfe", "is not UTF-8 text"),
        ("a.parquet", b"PAR1", "pyarrow"),
    ],
)
def test_what_are_no_documents_is_refused(
    name: str, content: str | bytes, match: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=match):
        read(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("state.json", [1]),
        ("state.json", {"_data_files": None}),
        ("state.json", {"_data_files": [{}]}),
        ("state.json", {"_data_files": [{"filename": "../x"}]}),
        ("state.json", {"_data_files": [{"filename": "gone.arrow"}]}),
        ("dataset_dict.json", [1]),
        ("dataset_dict.json", {"splits": 3}),
        ("dataset_dict.json", {"splits": [3]}),
        ("a.jsonl.zst", "packed"),
    ],
)
def test_folders_of_other_shapes_are_refused_by_file(name: str, content: object, tmp_path: Path) -> None:
    write_lines(tmp_path / "b.jsonl", RECORDS)
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"state\.json|dataset_dict\.json|outside|gone\.arrow|zst"):
        read(tmp_path)


def test_what_may_have_no_end_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "zero.jsonl").symlink_to("/dev/zero")
    for path in (tmp_path / "pipe.jsonl", tmp_path / "zero.jsonl", Path("/dev/zero")):
        with pytest.raises(InputError, match="is a pipe or a device"):
            read(path)
        with pytest.raises(InputError, match="is a pipe or a device"):
            tokens_of(path)
    monkeypatch.setattr("stagewright.execution.data.documents.MOST_LINE_BYTES", 64)
    write_lines(tmp_path / "long.jsonl", [{"text": "short"}, {"text": "long " * 20}])
    with pytest.raises(InputError, match=r"line 2 of '.*long\.jsonl' has more than 64 bytes"):
        read(tmp_path / "long.jsonl")


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def called(arguments: object, **message: object) -> dict[str, object]:
    calls = [{"type": "function", "function": {"name": "weather", "arguments": arguments}}]
    return {"role": "assistant", "tool_calls": calls, **message}


@pytest.mark.parametrize(
    ("record", "match"),
    [
        ({"messages": [called("{")]}, "arguments of tool call 1 of message 1 of line 1 .* not JSON"),
        ({"messages": [called([1])]}, "arguments of tool call 1 .* are a list: give a JSON object"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": 1}]}]},
            "tool call 1 of message 1 .* has no name",
        ),
        ({"messages": [{"role": "user", "content": 3}]}, "content of message 1 of line 1 .* is a int"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "message 1 .* has a part of type 'image'",
        ),
        ({"messages": [{"role": "user", "content": "x"}], "tools": "{"}, "tools of line 1 .* not JSON"),
        (
            {"messages": [{"role": "user", "content": "x"}], "tools": [3]},
            "tools of line 1 .* not JSON schemas",
        ),
        (
            {"messages": [{"role": "user", "content": "x"}], "tools": {"a": 1}},
            "tools of line 1 .* are a dict",
        ),
    ],
)
def test_what_is_no_chat_is_refused_by_its_place(record: object, match: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=match):
        read(write_lines(tmp_path / "a.jsonl", [record]))


def test_json_in_texts_and_nulls_of_tables_are_as_written_out(tmp_path: Path) -> None:
    plain = {"messages": [{"role": "user", "content": "x"}, called({"place": "Oslo"})], "tools": [TOOL]}
    texts = {
        "messages": [{"role": "user", "content": "x"}, called('{"place": "Oslo"}', content=None)],
        "tools": json.dumps([TOOL]),
    }
    items = {**texts, "tools": [json.dumps(TOOL)]}
    (chat, *others) = read(write_lines(tmp_path / "a.jsonl", [plain, texts, items]))
    assert others == [chat, chat] and isinstance(chat, Chat)
    assert chat.messages[1]["tool_calls"][0]["function"]["arguments"] == {"place": "Oslo"}
    none = read(
        write_lines(tmp_path / "b.jsonl", [{**plain, "tools": tools} for tools in ("", "[]", [], None)])
    )
    assert all(isinstance(chat, Chat) and chat.tools is None for chat in none)
    kept = read(write_lines(tmp_path / "c.jsonl", [{"messages": [called({"place": None})]}]))
    assert kept[0].messages[0]["tool_calls"][0]["function"]["arguments"] == {"place": None}  # type: ignore[union-attr]

    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    other = {"messages": [called({"zone": "UTC"})], "tools": [{**TOOL, "strict": True}]}
    parquet.write_table(arrow.Table.from_pylist([plain, other]), tmp_path / "rows.parquet")
    assert read(tmp_path / "rows.parquet") == read(write_lines(tmp_path / "d.jsonl", [plain, other]))


def test_a_long_text_is_one_document_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stagewright.execution.data.documents._PIECE_CHARACTERS", 64)
    (tmp_path / "long.txt").write_text((WORDS + "\n") * 5)
    pieces = read(tmp_path / "long.txt")
    assert len(pieces) == 5 and "".join(piece.text for piece in pieces) == (WORDS + "\n") * 5  # type: ignore[union-attr]
    store = write_store(
        tmp_path / "made", encoded(pieces, load_tokenizer(None)), load_tokenizer(None), "long"
    )
    assert store.ends.tolist() == [5 * (len(WORDS) + 1)]


# -- tokens -------------------------------------------------------------------------------------------------------------


def learnt_text(document: Document, tokenizer: Tokenizer) -> tuple[str, str]:
    """All of a document as its tokens say it, and what of it is learnt."""
    inner = tokenizer._inner  # type: ignore[attr-defined]
    (made,) = encoded([document], tokenizer)
    assert made.learnt is not None
    decode = lambda ids: inner.decode(ids.tolist(), skip_special_tokens=False)  # noqa: E731
    return decode(made.ids), decode(made.ids[made.learnt])


def test_the_loss_is_on_completions_and_what_ends_them(tmp_path: Path) -> None:
    for tokenizer in (
        load_tokenizer(str(tokenizer_file(tmp_path))),
        load_tokenizer(str(tokenizer_folder(tmp_path / "hf"))),
    ):
        whole, learnt = learnt_text(Completion("some ", "years ago"), tokenizer)
        assert whole == "some years ago<|endoftext|>" and learnt in (
            " years ago<|endoftext|>",
            "years ago<|endoftext|>",
        )
        (text,) = encoded([Text(WORDS)], tokenizer)
        assert text.learnt is None and text.ids[-1] == END
    (made,) = encoded([Completion("é", "ü!")], load_tokenizer(None))
    assert bytes(made.ids[made.learnt].astype(np.uint8)).decode() == "ü!"  # type: ignore[index]


CHAT = Chat(
    [
        {"role": "user", "content": "the sea"},
        {"role": "assistant", "content": "the sea"},
        {"role": "user", "content": "bye"},
        {"role": "assistant", "content": "call me"},
    ]
)
MARKED = CHATML.replace("m['content'] + '<|im_end|>\n'", "''").replace(
    "{% endfor %}{% if add",
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}"
    "{% endif %}{{ '<|im_end|>\n' }}{% endfor %}{% if add",
)
THINKING = CHATML.replace(
    "m['content'] +", "('<think>' if loop.last and m['role'] == 'assistant' else '') + m['content'] +"
)


@pytest.mark.parametrize(
    ("template", "learnt"),
    [
        (CHATML, "the sea<|im_end|>\ncall me<|im_end|>\n"),
        (MARKED, "the seacall me"),
        (THINKING, "the sea<|im_end|>\n<think>call me<|im_end|>\n"),
    ],
)
def test_the_loss_is_on_the_turns_of_the_assistant(template: str, learnt: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(tokenizer_folder(tmp_path, template)))
    whole, found = learnt_text(CHAT, tokenizer)
    assert found == learnt
    assert whole.startswith("<|im_start|>user\nthe sea<|im_end|>\n<|im_start|>assistant\nthe sea")


# Of reasoning models: what is in <think> goes from all turns but those after the last user's, or from every turn.
_THOUGHT = "{% set c = m['content'] or '' %}{% set told = c.split('</think>')[-1] %}"
REASONING = CHATML.replace(
    "{% for m", "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m", 1,
).replace("{{ '<|im_start|>'", _THOUGHT + "{{ '<|im_start|>'", 1).replace(
    "m['content'] +", "(told if loop.index0 < ns.last else c) +", 1
)  # fmt: skip
FORGETTING = REASONING.replace("if loop.index0 < ns.last else c", "", 1).replace(
    "'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>'"
)
CALLS = "{% for t in m.tool_calls %}{{ '[' + t.function.name + ' ' + ARGUMENTS + ']' }}{% endfor %}"
CALLING = CHATML.replace("m['content'] +", "(m['content'] or '') +").replace(
    "{% endfor %}", CALLS + "{% endfor %}", 1
)


def thought(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": f"<think>call{text}</think>{text}"}


def said(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


TWICE = Chat([said("sea: sea"), thought("sea"), said("sea"), thought("sea"), said("ship"), thought("men")])
WITH_TOOL = Chat(
    [said("sea"), thought("a"), {"role": "tool", "content": "b"}, thought("c"), said("d"), thought("e")]
)


@pytest.mark.parametrize(
    ("template", "chat", "learnt"),
    [
        (REASONING, TWICE, ["sea", "sea", "<think>callmen</think>men"]),
        (REASONING, WITH_TOOL, ["a", "c", "<think>calle</think>e"]),
        (FORGETTING, TWICE, ["sea", "sea", "men"]),
        (CHATML, WITH_TOOL, [f"<think>call{text}</think>{text}" for text in "ace"]),
    ],
)
def test_of_reasoning_that_is_dropped_what_is_shown_is_learnt(
    template: str, chat: Chat, learnt: list[str], tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(str(tokenizer_folder(tmp_path, template)))
    assert learnt_text(chat, tokenizer)[1] == "".join(f"{text}<|im_end|>\n" for text in learnt)


def test_a_turn_that_is_written_otherwise_is_refused_by_its_place(tmp_path: Path) -> None:
    shouting = REASONING.replace("(told if", "((told | upper) if")
    tokenizer = load_tokenizer(str(tokenizer_folder(tmp_path, shouting)))
    with pytest.raises(
        InputError, match=r"line 7: the chat template .* does not show .*message 2 is rendered"
    ):
        learnt_text(replace(TWICE, place="line 7"), tokenizer)


def test_templates_get_contents_and_arguments_in_the_form_they_take(tmp_path: Path) -> None:
    parts = CHATML.replace("m['content'] +", "m['content'][0]['text'] +")
    both = CHATML.replace(
        "m['content'] +", "(m['content'] if m['content'] is string else m['content'][0]['text']) +"
    )
    in_parts = [
        {**message, "content": [{"type": "text", "text": message["content"]}]} for message in CHAT.messages
    ]
    learnt = "the sea<|im_end|>\ncall me<|im_end|>\n"
    for number, template in enumerate((CHATML, parts, both)):
        tokenizer = load_tokenizer(str(tokenizer_folder(tmp_path / f"{number}", template)))
        for chat in (CHAT, Chat(in_parts)):
            assert learnt_text(chat, tokenizer)[1] == learnt
    call = Chat([said("sea"), called({"a": "men"})])
    for number, form in enumerate(
        ("(t.function.arguments | tojson)", "t.function.arguments", "(t.function.arguments ~ '')")
    ):
        template = CALLING.replace("ARGUMENTS", form)
        tokenizer = load_tokenizer(str(tokenizer_folder(tmp_path / f"call {number}", template)))
        assert '[weather {"a": "men"}]' in learnt_text(call, tokenizer)[1]


def test_tokenizers_that_fail_panic_or_have_no_end_are_errors_of_a_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {"type": "WordLevel", "vocab": {"b": 1}, "unk_token": "[UNK]"}
    (tmp_path / "words.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    pattern = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    bomb = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": pattern,
        "model": {**model, "vocab": {"[UNK]": 0}},
    }
    (tmp_path / "bomb.json").write_text(json.dumps(bomb))
    texts = [Text("b", place="line 1"), Text("a" * 40 + "!", place="line 2")]
    for name, reason in (("words.json", "Missing"), ("bomb.json", "retry-limit")):
        with pytest.raises(InputError, match=rf"line 2: tokenizer '.*{name}' cannot make tokens .*{reason}"):
            list(encoded(texts, load_tokenizer(str(tmp_path / name))))
    monkeypatch.setattr("stagewright.execution.data.chats._MOST_SECONDS", 0.1)
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    tokenizer = load_tokenizer(str(tokenizer_folder(tmp_path / "endless", endless)))
    with pytest.raises(InputError, match=r"line 3: the chat template of .* has taken 0\.1 s"):
        list(encoded([replace(CHAT, place="line 3")], tokenizer))


def test_chats_need_a_template(tmp_path: Path) -> None:
    for path in (tokenizer_file(tmp_path), tokenizer_folder(tmp_path / "hf", None), None):
        with pytest.raises(InputError, match="has no chat template"):
            list(encoded([CHAT], load_tokenizer(None if path is None else str(path))))


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    for path, match in (
        ("no", "there is no tokenizer"),
        ("tokenizer.json", "is not a tokenizer.json"),
        ("", "tokenizer in"),
    ):
        with pytest.raises(InputError, match=match):
            load_tokenizer(str(tmp_path / path) if path else str(tmp_path))


# -- the store ----------------------------------------------------------------------------------------------------------


def test_a_store_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(None)

    def some() -> object:
        yield from encoded(DOCUMENTS[:2], tokenizer)
        raise InputError("the second file is damaged")

    with pytest.raises(InputError, match="damaged"):
        write_store(tmp_path / "made", some(), tokenizer, "some")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
    store = write_store(tmp_path / "made", encoded(DOCUMENTS[:2], tokenizer), tokenizer, "some")
    again = open_store(tmp_path / "made")
    assert again.manifest == store.manifest
    assert bytes(again.tokens.astype(np.uint8)) == b"A whale.Call me Ishmael" and again.ends.tolist() == [
        8,
        23,
    ]
    assert again.learnt is not None and again.learnt.tolist() == [True] * 8 + [False] * 7 + [True] * 8
    assert (again.manifest.num_learnt, again.manifest.longest) == (16, 15)
    with pytest.raises(InputError, match="exists already"):
        write_store(tmp_path / "made", encoded(DOCUMENTS[:1], tokenizer), tokenizer, "some")
    with (tmp_path / "made" / "tokens.bin").open("ab") as file:
        file.write(b"x")
    with pytest.raises(InputError, match=r"tokens\.bin has 47 bytes, and 46 were written"):
        open_store(tmp_path / "made")


@pytest.mark.parametrize("name", ["tokens.bin", "learnt.bin", "ends.bin"])
@pytest.mark.parametrize("remembers", [False, True])
def test_a_flipped_bit_of_a_store_is_noticed(
    name: str, remembers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAGEWRIGHT_CACHE", str(tmp_path / "cache"))
    if remembers:
        monkeypatch.setattr("stagewright.execution.data.store._REMEMBERED_BYTES", 0)
    tokenizer = load_tokenizer(None)
    store = write_store(tmp_path / "made", encoded(DOCUMENTS[:2], tokenizer), tokenizer, "some")
    assert verified(verified(store)) == store
    content = bytearray((tmp_path / "made" / name).read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "made" / name).write_bytes(content)
    os.utime(tmp_path / "made" / name, ns=(0, 1))
    with pytest.raises(InputError, match="is damaged: its tokens do not match the SHA-256"):
        verified(open_store(tmp_path / "made"))
