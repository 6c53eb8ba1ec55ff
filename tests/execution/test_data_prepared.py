"""What a run is given to train on: found, checked against the model, told apart, and read by every plan alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from texts import small_plan, tokenizer_file, write_lines

from stagewright.errors import InputError
from stagewright.execution.data.batches import open_batches
from stagewright.execution.data.prepared import PreparedData, prepared
from stagewright.execution.data.request import DataRequest, SourceRequest
from stagewright.planning.plan import Plan
from stagewright.tracing.cache import trace

TEXTS = [{"text": f"the whale number {number}"} for number in range(40)]
PAIRS = [{"prompt": f"{number} and {number} ", "completion": f"is {2 * number}"} for number in range(40)]
OWN = """
import torch

class Tokens(torch.utils.data.Dataset):
    def __init__(self, length, count=12):
        self.length, self.count = length, count
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        return {"input_ids": torch.full((self.length,), index)}

def tokens(sequence_length):
    return Tokens(sequence_length)

def longer(sequence_length):
    return Tokens(sequence_length + 1)

def labelled(sequence_length):
    made = Tokens(sequence_length)
    return [made[index] | {"labels": torch.full((sequence_length,), -100)} for index in range(3)]

class Stream(torch.utils.data.IterableDataset):
    reads = 0
    def __iter__(self):
        Stream.reads += 1
        return ({"input_ids": [index] * 16} for index in range(10))

def stream():
    return Stream()

def images():
    return [(torch.full((3, 32, 32), float(index)), index) for index in range(9)]

def nothing():
    return []

def number():
    return 3

def broken():
    raise OSError("the share is not mounted")
"""


@pytest.fixture(autouse=True)
def _shared_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGEWRIGHT_CACHE", str(tmp_path_factory.getbasetemp().parent / "traces"))


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return small_plan(tmp_path_factory.mktemp("plan"))


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return str(tmp_path / "own.py")


def ready(plan: Plan, *data: str | Path, **options: Any) -> PreparedData:
    made = prepared(DataRequest.of([str(one) for one in data], **options), plan)
    assert made is not None
    return made


def batches_of(plan: Plan, data: PreparedData, steps: range, **options: Any) -> list[dict[str, torch.Tensor]]:
    """The microbatches of steps, in the order of their samples."""
    options = {"further_inputs": data.further_inputs, **plan.traced(), **options}
    graph = trace(plan.model.resolved(), plan.microbatch_size, **options)
    batches, size = open_batches(data, plan.job), plan.microbatch_size
    return [
        batches.microbatch(step, first, graph)
        for step in steps
        for first in range(0, plan.job.global_batch, size)
    ]


# -- what is asked for --------------------------------------------------------------------------------------------------


def test_sources_have_weights_unless_a_file_is_called_so(tmp_path: Path) -> None:
    assert SourceRequest.parse("a=b.jsonl=2") == SourceRequest(path="a=b.jsonl", weight=2)
    assert SourceRequest.parse("a=b") == SourceRequest(path="a=b")
    (tmp_path / "run=3").write_text("x")
    assert SourceRequest.parse(str(tmp_path / "run=3")).weight == 1
    for text in ("a=0", "a=-1", "a=nan", "a=inf"):
        with pytest.raises(InputError, match="a weight is a number"):
            SourceRequest.parse(text)
    with pytest.raises(InputError, match="--tokenizer needs --data"):
        DataRequest.of(None, "tokenizer.json")


def test_the_bundled_text_has_a_name_that_a_file_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bundled = SourceRequest.parse("moby-dick=0.5")
    assert Path(bundled.path).read_text(encoding="ascii").startswith("CHAPTER 1")
    assert bundled.weight == 0.5
    (tmp_path / "moby-dick").write_text("x")
    assert SourceRequest.parse("moby-dick").path == "moby-dick"


# -- what is refused ----------------------------------------------------------------------------------------------------


def test_data_that_a_model_cannot_use_is_refused(plan: Plan, own: str, tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "a.jsonl", TEXTS)
    pairs = write_lines(tmp_path / "pairs.jsonl", PAIRS)
    small = small_plan(tmp_path, vocabulary=200)
    image = small_plan(tmp_path, "tiny-vit")
    tokenizer = tokenizer_file(tmp_path)
    with pytest.raises(InputError, match=r"vocabulary has 200: give the model's tokenizer"):
        ready(small, lines, tokenizer=tokenizer)
    with pytest.raises(
        InputError, match=r"input 'pixel_values' .* is not made of tokens: give your own dataset"
    ):
        ready(image, lines)
    with pytest.raises(InputError, match="fewer than one sample of 16"):
        ready(plan, write_lines(tmp_path / "short.jsonl", [{"text": "x"}]))
    with pytest.raises(InputError, match="no token that counts in the loss"):
        ready(plan, write_lines(tmp_path / "none.jsonl", [{"prompt": "x", "completion": ""}]))
    with pytest.raises(InputError, match="holds no documents"):
        ready(plan, write_lines(tmp_path / "empty.jsonl", []))
    with pytest.raises(InputError, match="cannot be read"):
        ready(plan, tmp_path / "missing.jsonl")
    with pytest.raises(InputError, match="takes labels that differ from its input_ids"):
        ready(small_plan(tmp_path, "tiny-bert"), lines)
    factory = small_plan(tmp_path, f"{Path(__file__).parent / 'networks.py'}:skip_net")
    with pytest.raises(InputError, match="is not made of tokens"):
        ready(factory, pairs)
    for name, match in (
        ("longer", r"sample 0 of .* has 'input_ids' of shape \(17,\), but the model takes \(16,\)"),
        ("images", "is a tuple of 2, and the model takes input_ids"),
        ("nothing", "is empty"),
        ("number", "returned a int"),
        ("broken", r"own\.py, line \d+ \(broken\): OSError: the share is not mounted"),
        ("tokenss", r"has no 'tokenss'; did you mean 'tokens'\?|has no 'tokenss'"),
    ):
        with pytest.raises(InputError, match=match):
            ready(plan, f"{own}:{name}")


# -- what is told apart -------------------------------------------------------------------------------------------------


def test_other_data_tokenizers_fields_and_weights_are_other_data(
    plan: Plan, own: str, tmp_path: Path
) -> None:
    both = [{"text": f"the sea {number}" * 3, "body": f"a ship {number}" * 3} for number in range(20)]
    one = write_lines(tmp_path / "one.jsonl", both)
    two = write_lines(tmp_path / "two.jsonl", TEXTS)
    tokenizer = tokenizer_file(tmp_path)
    found = [
        ready(plan, one), ready(plan, one, tokenizer=tokenizer), ready(plan, one, text_field="body"), ready(plan, two),
        ready(plan, one, two), ready(plan, f"{one}=2", two), ready(plan, two, one), ready(plan, f"{own}:tokens"),
        ready(plan, f"{own}:stream"),
    ]  # fmt: skip
    identities = [data.identity for data in found]
    for place, identity in enumerate(identities):
        assert not any(identity.is_same(other) for other in identities[:place]), str(identity)
        assert type(identity)(**identity.model_dump(mode="json")) == identity
    renamed = one.rename(tmp_path / "renamed.jsonl")
    assert ready(plan, renamed).identity.is_same(identities[0])
    assert ready(plan, f"{renamed}=4", f"{two}=2").identity.is_same(identities[5])


def test_what_was_tokenised_is_found_again(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from stagewright.execution.data import prepared as module

    monkeypatch.setenv("STAGEWRIGHT_CACHE", str(tmp_path / "cache"))
    lines = write_lines(tmp_path / "a.jsonl", TEXTS)
    first = ready(plan, lines)
    assert "tokenising" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(module, "write_store", lambda *arguments: pytest.fail("tokenised again"))
        assert ready(plan, lines) == first
    tokens = Path(first.sources[0].path) / "tokens.bin"
    content = bytearray(tokens.read_bytes())
    content[0] ^= 1
    tokens.write_bytes(content)
    monkeypatch.setenv("LOCAL_RANK", "1")  # the first rank of a machine reads them for the others
    assert ready(plan, lines) == first and "again" not in capsys.readouterr().err
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert ready(plan, lines) == first and "tokenising again: " in capsys.readouterr().err
    assert tokens.read_bytes() != content
    with pytest.raises(InputError, match="is damaged"):
        tokens.write_bytes(content)
        ready(plan, tokens.parent)


# -- what is read -------------------------------------------------------------------------------------------------------


def test_every_plan_and_every_start_sees_the_same_batches(tmp_path: Path) -> None:
    """Whatever the size of microbatches, and from whatever step on; an epoch has every sample once."""
    lines = write_lines(tmp_path / "a.jsonl", PAIRS)
    plan = small_plan(tmp_path, num_microbatches=4)
    data = ready(plan, lines)
    assert data.is_masked and data.further_inputs == ("labels",)
    whole = batches_of(plan, data, range(6))
    other = small_plan(tmp_path, num_microbatches=2, microbatch_size=2)
    pairs = batches_of(other, data, range(6))
    for name in ("input_ids", "labels"):
        ids = torch.cat([batch[name] for batch in whole])
        assert torch.equal(ids, torch.cat([batch[name] for batch in pairs]))
        assert torch.equal(
            ids[16:], torch.cat([batch[name] for batch in batches_of(plan, data, range(4, 6))])
        )
    learnt = torch.cat([batch["labels"] for batch in whole])
    ids = torch.cat([batch["input_ids"] for batch in whole])
    assert ((learnt == ids) | (learnt == -100)).all() and (learnt[:, 0] == -100).all()


def test_a_text_is_gone_through_without_repetition(plan: Plan, tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(16 * 8) % 300)
    data = ready(plan, tmp_path / "ids.npy")
    steps = 8 // plan.job.global_batch
    first = torch.cat([batch["input_ids"] for batch in batches_of(plan, data, range(steps))])
    assert sorted(first.flatten().tolist()) == sorted((np.arange(16 * 8) % 300).tolist())


def test_only_inputs_that_are_needed_are_read(plan: Plan, own: str) -> None:
    data = ready(plan, f"{own}:tokens")
    batches = open_batches(data, plan.job)
    graph = trace(plan.model.resolved(), 1, **plan.traced())
    assert batches.microbatch(0, 0, graph, ()) == {}
    assert not batches._of_length, "the dataset was made though no input is needed"


def test_datasets_of_ones_own(plan: Plan, own: str) -> None:
    """A map-style one is permuted, an iterable one read in order, and again from its beginning; both from any step on."""
    mapped = [
        int(batch["input_ids"][0, 0]) for batch in batches_of(plan, ready(plan, f"{own}:tokens"), range(6))
    ]
    assert sorted(mapped) == list(range(12)) and mapped != list(range(12))
    stream = ready(plan, f"{own}:stream")
    read = [int(batch["input_ids"][0, 0]) for batch in batches_of(plan, stream, range(8))]
    assert read == [number % 10 for number in range(16)]
    assert [int(batch["input_ids"][0, 0]) for batch in batches_of(plan, stream, range(3, 8))] == read[6:]
    labelled = ready(plan, f"{own}:labelled")
    assert labelled.further_inputs == ("labels",) and labelled.is_masked


def test_images_come_from_a_factory(own: str, tmp_path: Path) -> None:
    plan = small_plan(tmp_path, "tiny-vit")
    data = ready(plan, f"{own}:images")
    assert not data.is_masked
    (batch, *_) = batches_of(plan, data, range(1))
    assert batch["pixel_values"].shape == (1, 3, 32, 32) and batch["pixel_values"].dtype == torch.float32
    assert batch["pixel_values"].mean() == batch["labels"]


def test_steps_of_several_lengths(tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "a.jsonl", TEXTS)
    plan = small_plan(tmp_path)
    job = plan.job.model_copy(update={"sequence_lengths": (8, 16)})
    data = ready(plan.model_copy(update={"job": job}), lines)
    batches = open_batches(data, job)
    seen = []
    for step, length in enumerate((8, 16, 8, 16)):
        graph = trace(plan.model.resolved(), 1, length)
        seen.append(batches.microbatch(step, 0, graph)["input_ids"])
        assert seen[-1].shape == (1, length)
    assert not torch.equal(seen[0], seen[2])
