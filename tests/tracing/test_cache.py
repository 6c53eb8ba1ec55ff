"""Traces that are kept: equal to what was traced, and read as data that this user alone can have written."""

from __future__ import annotations

import enum
import json
import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import torture
from stagewright import files
from stagewright.errors import InputError
from stagewright.graph import OperatorGraph, Ref, Symbol
from stagewright.graph.document import FORMAT, DamagedGraph, graph_from_bytes, graph_to_bytes
from stagewright.tracing import cache
from stagewright.tracing.arguments import encode
from stagewright.tracing.cache import trace
from stagewright.tracing.models.reference import resolve

FACTORY = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        masked = torch.where(torch.tensor([True, False] * 4), self.layer(x), float("-inf"))
        return nn.functional.dropout(masked.softmax(-1), 0.25, self.training).square().mean()

def build():
    return Net(), (torch.randn(2, 8),)
"""
TRACED: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny-llama": ("tiny-llama", {}),
    "with tensor parallelism": ("tiny-llama", {"tp": 2, "splits_sequence": True}),
    "with autocast": ("tiny-gpt2", {"autocast": "bfloat16", "target": "cuda"}),
    "mixture": ("tiny-mixtral", {}),
    "in half precision": ("tiny-gpt2", {"dtype": "bfloat16"}),
    "encoder and decoder": ("tiny-t5", {}),
    "in evaluation": ("tiny-gpt2", {"training": False}),
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGEWRIGHT_CACHE", str(tmp_path))
    cache._warn.cache_clear()


@pytest.fixture(scope="module")
def graph() -> OperatorGraph:
    return trace("tiny-llama", 1, 16, use_cache=False)


@pytest.fixture
def entry(graph: OperatorGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a model that is traced quickly."""
    monkeypatch.setattr("stagewright.tracing.trace.trace_reference", lambda *_: graph)
    trace("tiny-llama", 1, 16)
    (found,) = tmp_path.rglob("*.graph")
    return found


def same(one: Any, other: Any) -> bool:
    """Whether two things are equal and of the same types throughout."""
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return same(tuple(one.items()), tuple(other.items()))
    if is_dataclass(one):
        return all(same(getattr(one, field.name), getattr(other, field.name)) for field in fields(one))
    return repr(one) == repr(other)


@pytest.mark.parametrize("case", TRACED)
def test_a_graph_of_the_cache_is_the_one_that_was_traced(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = TRACED[case]
    traced = trace(model, 1, 16, **asked)

    def again(*_: object) -> None:
        raise AssertionError("traced again")

    monkeypatch.setattr("stagewright.tracing.trace.trace_reference", again)
    assert same(trace(model, 1, 16, **asked), traced)


def test_a_graph_of_a_factory_keeps_constants_and_buffers(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(FACTORY)
    traced = trace(f"{tmp_path / 'net.py'}:build", 1, 16)
    assert traced.constants and traced.mutations and traced.num_draws == 1
    assert same(graph_from_bytes(graph_to_bytes(traced)), traced)


def test_every_kind_of_argument_comes_back_as_it_was(graph: OperatorGraph) -> None:
    odd = (
        1,
        1.0,
        True,
        0,
        False,
        0.0,
        -0.0,
        None,
        "1",
        "ü\ud800",
        float("inf"),
        float("-inf"),
        1e-320,
        1j,
        2**70,
        complex(-0.0, 2),
    )
    arguments = (*odd, (), ((1,), (True,), (1.0,)), Ref(1), (1,), Symbol("dtype", "1"), ("dtype", "1"), odd)
    node = replace(graph.nodes[0], args=arguments, kwargs=(("dim", (Ref(0), None)),))
    odd_graph = replace(graph, nodes=(node,), constants={"": b"", "all": bytes(range(256))})
    assert same(graph_from_bytes(graph_to_bytes(odd_graph)), odd_graph)


def test_an_argument_is_plain_before_it_is_kept() -> None:
    class Way(str, enum.Enum):  # noqa: UP042
        UP = "up"

    found = encode(
        (np.float64(2.5), enum.IntEnum("Size", {"TWO": 2})(2), Way.UP, np.complex128(1j), True), Ref
    )
    assert same(found, (2.5, 2, "up", 1j, True))


@pytest.mark.torture
def test_bits_that_flip_are_noticed(
    graph: OperatorGraph,
    entry: Path,
    capsys: pytest.CaptureFixture[str],
    record_property: Callable[[str, object], None],
) -> None:
    whole, dice = entry.read_bytes(), torture.chance("traced models")
    for _ in range(torture.FLIPS):
        # Half of them in the heading, which is a thousandth of the file.
        bit = dice.randrange(8 * (100 if dice.random() < 0.5 else len(whole)))
        entry.write_bytes(torture.flipped(whole, bit))
        cache._warn.cache_clear()
        assert cache._load(entry) is None
        assert capsys.readouterr().err.count("\n") == 1
    assert same(trace("tiny-llama", 1, 16), graph)
    assert entry.read_bytes() == whole
    record_property("damage", ("bits flipped in traced models", torture.FLIPS))


@pytest.mark.parametrize("damage", ["cut short", "empty", "a pickle", "a folder"])
def test_a_damaged_entry_is_made_again_with_one_line_of_warning(
    damage: str, entry: Path, graph: OperatorGraph, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = entry.read_bytes()
    entry.unlink()
    if damage == "a folder":
        entry.mkdir()
    else:
        entry.write_bytes({"cut short": whole[:-9], "empty": b"", "a pickle": pickle.dumps(graph)}[damage])
    assert same(trace("tiny-llama", 1, 16), graph)
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and str(entry) in error and "traced again" in error
    if damage != "a folder":
        assert entry.read_bytes() == whole
        trace("tiny-llama", 1, 16)
        assert capsys.readouterr().err == ""


class Mark:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_pickle_is_not_executed(entry: Path, graph: OperatorGraph, tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    heading, _, _ = entry.read_bytes().partition(b"\n")
    for start in (b"", heading + b"\n"):
        entry.write_bytes(start + pickle.dumps(Mark(mark)))
        assert same(trace("tiny-llama", 1, 16), graph)
    assert not mark.exists()


def forged(document: object) -> bytes:
    """A document of no graph under the right digest."""
    from stagewright.graph import document as module

    payload = json.dumps(document).encode()
    return module._heading(payload) + payload


def forgeries(graph: OperatorGraph) -> Iterator[object]:
    yield from ([], None, {}, {"things": []}, "text", [[[[[]]]]] * 3)
    _, _, payload = graph_to_bytes(graph).partition(b"\n")
    for entry in (
        [],
        ["exec", 0],
        ["Ref"],
        ["Part", 0],
        ["tuple", 10**9],
        [[], 0],
        {},
        ["complex", 0, 0],
        ["bytes", 0],
    ):
        document = json.loads(payload)
        document["things"][5:5] = [entry]
        document["things"][0] = 10**400
        yield document
    for key, value in (("values", {}), ("nodes", 3), ("rest", {"name": 0}), ("things", 1)):
        yield json.loads(payload) | {key: value}
    yield json.loads(payload) | {"nodes": json.loads(payload)["nodes"] | {"id": [0]}}


def test_what_is_forged_is_a_bad_entry(graph: OperatorGraph) -> None:
    for document in forgeries(graph):
        with pytest.raises(DamagedGraph):
            graph_from_bytes(forged(document))
    with pytest.raises(DamagedGraph):
        graph_from_bytes(forged(0).partition(b"\n")[0] + b"\n" + b"[" * 100_000)


def test_entries_that_others_can_write_are_not_read(
    entry: Path, graph: OperatorGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert entry.parent.stat().st_mode & 0o777 == 0o700
    entry.chmod(0o666)
    assert cache._load(entry) is None
    assert "others may write to it" in capsys.readouterr().err
    entry.chmod(0o644)
    assert same(cache._load(entry), graph)
    cache._warn.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: entry.stat().st_uid + 1)
        assert cache._load(entry) is None
    assert "belongs to another user" in capsys.readouterr().err
    link = tmp_path / "link.graph"
    link.symlink_to(entry)
    assert cache._load(link) is None
    os.mkfifo(tmp_path / "pipe.graph")
    assert cache._load(tmp_path / "pipe.graph") is None


def test_without_a_private_folder_graphs_are_not_kept(
    graph: OperatorGraph, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "stagewright").mkdir()
    (tmp_path / "stagewright" / "traces").symlink_to(tmp_path)
    monkeypatch.setattr("stagewright.tracing.trace.trace_reference", lambda *_: graph)
    for _ in range(2):
        assert trace("tiny-llama", 1, 16) is graph
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "graphs are not cached" in error
    assert not list(tmp_path.rglob("*.graph"))


def test_a_full_disk_leaves_nothing_behind(
    graph: OperatorGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("stagewright.tracing.trace.trace_reference", lambda *_: graph)
    monkeypatch.setattr(files.os, "fdopen", full)
    assert trace("tiny-llama", 1, 16) is graph
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["locks"]
    assert capsys.readouterr().err == ""


def test_what_graphs_do_not_have_is_not_kept(graph: OperatorGraph, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="graphs have no set"):
        graph_to_bytes(replace(graph, facts={"names": {1}}))


def test_the_heading_says_what_it_is(graph: OperatorGraph) -> None:
    assert graph_to_bytes(graph).startswith(b"stagewright graph %d " % FORMAT)
    assert issubclass(DamagedGraph, InputError)


def test_graphs_that_a_gpu_traces_are_kept_by_what_decides_its_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def entry(device: str, kernels: str) -> Path | None:
        monkeypatch.setattr(cache, "_kernels_of", lambda _: kernels)
        asked = {"microbatch_size": 1, "sequence_length": 32, "device": device, "target": "cuda"}
        return cache._entry(cache._facts_of(resolve("tiny-llama"), asked), "stamp")

    assert entry("cuda", "(8, 0) flash") != entry("cuda", "(7, 5) flash")
    assert entry("cuda", "(8, 0) flash") != entry("cuda", "(8, 0) math")
    assert entry("cpu", "(8, 0) flash") == entry("cpu", "(7, 5) flash")
