"""What a graph of a factory depends on: a kept one is used only where all of it is as it was."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stagewright.errors import InputError
from stagewright.graph import OperatorGraph
from stagewright.planning.plan import ModelSection
from stagewright.tracing import cache
from stagewright.tracing.cache import trace
from stagewright.tracing.dependencies import FACT, Dependencies
from stagewright.tracing.models.reference import resolve

MODEL = """
import json, os
from pathlib import Path
import torch
from torch import nn
from {package}layers import Layer

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        config = json.loads((Path(__file__).parent / "config.json").read_text())
        config["factor"] *= len(list(Path(__file__).parent.glob("shard-*")))
        self.layer = Layer(config["factor"] * float(os.environ.get("FACTOR", "1")))

    def forward(self, x):
        return self.layer(x).sum()

def build(microbatch_size):
    return Net(), {{"x": torch.zeros(microbatch_size, 4)}}
"""
LAYERS = """
import importlib
import torch
from torch import nn
from {package}numbers_of_layers import OFFSET

FACTOR = importlib.import_module("{package}late_" + "factor").FACTOR
try:
    from faster_layers import apply
except ImportError:
    apply = torch.relu

class Layer(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.factor = factor * FACTOR

    def forward(self, x):
        return apply(self.lin(x)) * self.factor + OFFSET
"""


def write(folder: Path, package: str = "") -> None:
    folder.mkdir(exist_ok=True)
    (folder / "model.py").write_text(MODEL.format(package=package))
    (folder / "layers.py").write_text(LAYERS.format(package=package))
    (folder / "numbers_of_layers.py").write_text("OFFSET = 0.25\n")
    (folder / "late_factor.py").write_text("FACTOR = 2.0\n")
    (folder / "config.json").write_text('{"factor": 3.0}')
    (folder / "shard-0").touch()


def factors(graph: OperatorGraph) -> set[float]:
    """The numbers that operators of the forward are called with."""
    arguments = (argument for node in graph.forward_ids for argument in graph.nodes[node].args)
    return {argument for argument in arguments if type(argument) is float}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STAGEWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FACTOR", raising=False)
    write(tmp_path / "code")
    return tmp_path / "code"


CHANGES: dict[str, tuple[Callable[[Path], object], set[float]]] = {
    "an import of an import": (lambda at: (at / "numbers_of_layers.py").write_text("OFFSET = 1.25"), {6.0, 1.25}),
    "an import by a name put together": (
        lambda at: (at / "late_factor.py").write_text("FACTOR = 4.0"), {12.0, 0.25},
    ),
    "a file that is read": (lambda at: (at / "config.json").write_text('{"factor": 5.0}'), {10.0, 0.25}),
    "a file that is looked for": (lambda at: (at / "shard-1").touch(), {12.0, 0.25}),
    "an environment variable": (lambda _: os.environ.update(FACTOR="7"), {42.0, 0.25}),
    "a module that was not there": (
        lambda at: (at / "faster_layers.py").write_text("from torch import tanh as apply"), {6.0, 0.25},
    ),
}  # fmt: skip
"""What is changed, and the numbers in the graph afterwards."""


@pytest.fixture
def num_traced(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many graphs were traced so far."""
    from stagewright.tracing.trace import trace_reference

    traced: list[OperatorGraph] = []

    def counted(*request: Any) -> OperatorGraph:
        traced.append(trace_reference(*request))
        return traced[-1]

    monkeypatch.setattr("stagewright.tracing.trace.trace_reference", counted)
    return lambda: len(traced)


def test_a_kept_graph_is_used_until_something_that_its_code_uses_changes(
    folder: Path, num_traced: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"{folder / 'model.py'}:build"
    first = trace(text, 2, 1)
    assert factors(first) == {6.0, 0.25}
    section = ModelSection.of(resolve(text), first)
    (folder / "numbers_of_layers.py").touch()
    assert trace(text, 2, 1) == first
    assert num_traced() == 1
    for number, (case, (change, expected)) in enumerate(CHANGES.items(), 2):
        assert section.change(resolve(text)) == "", case
        change(folder)
        assert (factors(trace(text, 2, 1)), num_traced()) == (expected, number), case
        if case.startswith(("an import", "a file that is read")):
            with pytest.raises(InputError, match=r"has changed since the plan was made .*: plan again"):
                section.resolved()
        monkeypatch.delenv("FACTOR", raising=False)
        (folder / "shard-1").unlink(missing_ok=True)
        write(folder)


def test_a_module_that_this_process_has_as_it_was_before_is_not_kept_as_it_is_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_traced: Callable[[], int]
) -> None:
    monkeypatch.setenv("STAGEWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    write(tmp_path / "changing_code", "changing_code.")
    (tmp_path / "changing_code" / "__init__.py").touch()
    text = "changing_code.model:build"
    section = ModelSection.of(resolve(text), trace(text, 2, 1))
    assert {"layers.py", "config.json", "__init__.py"} <= section.files.keys()
    (tmp_path / "changing_code" / "numbers_of_layers.py").write_text("OFFSET = 1.25")
    assert "numbers_of_layers.py" in section.change(resolve(text))
    for number in (2, 3):
        assert Dependencies.of_facts(trace(text, 2, 1).facts).change(tmp_path)
        assert num_traced() == number


def test_factories_with_namesakes_beside_them_have_their_own(folder: Path) -> None:
    other = folder.with_name("other")
    write(other)
    (other / "numbers_of_layers.py").write_text("OFFSET = 8.5")
    for at, offset in ((folder, 0.25), (other, 8.5), (folder, 0.25)):
        assert factors(trace(f"{at / 'model.py'}:build", 2, 1, use_cache=False)) == {6.0, offset}


OUTSIDE = """
import subprocess
import torch

def build():
    subprocess.run(["true"], check=True)
    return torch.nn.Linear(2, 1), (torch.zeros(1, 2),), lambda out: out.sum()
"""


def test_what_cannot_be_compared_later_is_traced_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_traced: Callable[[], int]
) -> None:
    monkeypatch.setenv("STAGEWRIGHT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "starts.py").write_text(OUTSIDE)
    for number in (1, 2):
        graph = trace(f"{tmp_path / 'starts.py'}:build", 1, 1)
        assert (num_traced(), graph.facts[FACT]["unchecked"]) == (number, "it starts a process")


def test_what_changes_the_kernels_of_torch_or_the_code_of_transformers_has_graphs_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cache, "cache_folder", lambda _: tmp_path)
    facts = cache._facts_of(resolve("tiny-llama"), {"microbatch_size": 1, "sequence_length": 8})
    before = cache._entry(facts, cache._stamp())
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "7")
    assert cache._entry(facts, cache._stamp()) == before
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    assert cache._entry(facts, cache._stamp()) != before
    llama, mixtral = (cache._code_of(frozenset({kind})) for kind in ("llama", "mixtral"))
    assert llama != mixtral
    assert facts["code"] == llama
