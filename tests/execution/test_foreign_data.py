"""Data and tokenizers from strangers: files of their own folder, and none of their code."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import tokenizers

from stagewright.errors import InputError
from stagewright.execution.data.documents import data_files
from stagewright.execution.data.tokenizers import load_tokenizer


@pytest.fixture
def coded(tmp_path: Path) -> Path:
    """The folder of a tokenizer whose class is code next to it, which makes a file."""
    vocabulary = {"a": 0, "b": 1, "[UNK]": 2}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": [None, "evil.Evil"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    mark = tmp_path / "mark"
    (tmp_path / "evil.py").write_text(
        f"open({str(mark)!r}, 'w')\nfrom transformers import PreTrainedTokenizerFast as Evil\n"
    )
    return tmp_path


def test_code_next_to_a_tokenizer_is_not_run_whatever_is_answered(
    coded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 10))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(
        InputError, match=r"is custom code \(auto_map\), which is never run: give its tokenizer.json"
    ):
        load_tokenizer(str(coded))
    assert not (coded / "mark").exists()
    assert load_tokenizer(str(coded / "tokenizer.json")).encode(["a"])[0].ids.tolist() == [0]


@pytest.mark.parametrize("name", ["{secret}", "../secret.txt", "part/../../secret.txt", "link.arrow"])
def test_a_saved_dataset_names_files_of_its_folder_alone(name: str, tmp_path: Path) -> None:
    secret, folder = tmp_path / "secret.txt", tmp_path / "saved"
    secret.write_text("what nobody else may read")
    folder.mkdir()
    (folder / "link.arrow").symlink_to(secret)
    listed = [{"filename": name.format(secret=secret)}]
    (folder / "state.json").write_text(json.dumps({"_data_files": listed}))
    with pytest.raises(InputError, match="lies outside of"):
        data_files(folder)


def test_a_padding_token_may_have_number_zero(tmp_path: Path) -> None:
    vocabulary = {"<pad>": 0, "</s>": 1, "a": 2}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a"))
    words.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert (tokenizer.pad, tokenizer.end) == (0, 1)
