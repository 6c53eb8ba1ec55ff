"""From files to token ids: what is a document, what of it is learnt, and what is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from texts import CHATML, END, WORDS, tokenizer_file, tokenizer_folder, write_lines

from stagewright.errors import InputError
from stagewright.execution.data.documents import Chat, Completion, Document, Text, data_files, documents_of
from stagewright.execution.data.encoding import encoded
from stagewright.execution.data.store import open_store, write_store
from stagewright.execution.data.tokenizers import Tokenizer, load_tokenizer

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


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("a.jsonl", '{"text": "x"}\n{"text": }\n', r"line 2 of .*a\.jsonl' is not JSON"),
        ("a.jsonl", '["x"]\n', "line 1 of .* is no record"),
        ("a.jsonl", '{"body": "x"}\n', "has body, and neither text, nor prompt .* --text-field"),
        ("a.jsonl", '{"text": 3}\n', "'text' of line 1 .* is a int, not a text"),
        ("a.jsonl", '{"messages": "hello"}\n', "messages are a list"),
        ("a.json", '{"text": "x"}', "not a list of records"),
        ("a.txt", '{"text": "x"}\n', r"holds JSON records: call it a\.jsonl"),
        ("a.csv", "text\nx\n", "is no text"),
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


def test_chats_need_a_template(tmp_path: Path) -> None:
    for path in (tokenizer_file(tmp_path), tokenizer_folder(tmp_path / "hf", None), None):
        with pytest.raises(InputError, match="has no chat template"):
            list(encoded([CHAT], load_tokenizer(None if path is None else str(path))))


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    for path, match in (
        ("no", "there is no tokenizer"),
        ("tokenizer.json", "is no tokenizer.json"),
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
    with pytest.raises(InputError, match="is there already"):
        write_store(tmp_path / "made", encoded(DOCUMENTS[:1], tokenizer), tokenizer, "some")
    with (tmp_path / "made" / "tokens.bin").open("ab") as file:
        file.write(b"x")
    with pytest.raises(InputError, match=r"tokens\.bin has 47 bytes, and 46 were written"):
        open_store(tmp_path / "made")
