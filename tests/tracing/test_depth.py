"""Deep models are traced with a few of their equal layers; what follows is what tracing all of them gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stagewright.cluster import load_cluster
from stagewright.estimation.runtime import load_runtime, runtime_names
from stagewright.estimation.stages import RangeCosts
from stagewright.estimation.time import Costing
from stagewright.graph import OperatorGraph
from stagewright.graph.document import graph_from_bytes, graph_to_bytes
from stagewright.graph.repeat import REPEATS, IrregularLayers, Repeat, copies_of, expanded, is_pattern
from stagewright.planning.partition.ranges import ranges_of
from stagewright.tracing import capture
from stagewright.tracing.cache import trace
from stagewright.tracing.trace import trace_module

CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("gpt2", {}, {}),
    ("gpt2", {}, {"attention": "explicit", "tp": 2, "splits_sequence": True}),
    ("llama-3-8b", {"num_hidden_layers": 10}, {"loss_pieces": 2}),
    ("llama-3-8b", {"num_hidden_layers": 11}, {"tp": 2, "splits_sequence": True, "cp": 2}),
    ("gemma-2b", {"num_hidden_layers": 9}, {}),
    ("bert-large", {"num_hidden_layers": 9}, {"tp": 2, "splits_sequence": True}),
    ("mixtral-8x7b", {"num_hidden_layers": 9}, {}),
    ("qwen3-30b-a3b", {"num_hidden_layers": 11}, {"ep": 4, "tp": 2, "splits_sequence": True}),
    ("deepseek-v3", {"num_hidden_layers": 11}, {"ep": 4}),
    ("t5-large", {"num_layers": 9, "num_decoder_layers": 9}, {}),
    ("vit-huge", {"num_hidden_layers": 10}, {}),
    ("mamba2-2.7b", {"num_hidden_layers": 9}, {}),
]


@contextmanager
def whole(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setattr(capture, "left_out", lambda *args: ((), {}))
        yield


def differing(one: OperatorGraph, other: OperatorGraph) -> list[str]:
    """Names of the fields in which two graphs are not the same, the order of names and gradients included."""
    found = (
        (each.name, getattr(one, each.name), getattr(other, each.name)) for each in fields(OperatorGraph)
    )
    return [
        name
        for name, mine, theirs in found
        if mine != theirs or (isinstance(mine, dict) and name != "facts" and list(mine) != list(theirs))
    ]


@pytest.mark.parametrize(("model", "sizes", "options"), CASES)
def test_all_layers_follow_from_a_few(
    model: str, sizes: dict[str, Any], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def traced(expand: bool) -> OperatorGraph:
        return trace(
            model, 1, 64, "bfloat16", sizes, target="cuda", use_cache=False, expand=expand, **options
        )

    few = traced(expand=False)
    assert few.facts[REPEATS] and is_pattern(few)
    again = graph_from_bytes(graph_to_bytes(few))
    with whole(monkeypatch):
        expected = traced(expand=True)
    assert len(few.nodes) < len(expected.nodes)
    assert differing(expanded(few), expected) == []
    assert differing(expanded(again), expected) == []
    assert_ranges_cost_as_much(few, expected)


RANGES = (
    "seconds", "forward_seconds", "weight_grad_seconds", "state_bytes", "parameter_bytes", "saved_bytes",
    "boundary_bytes", "legal_cuts",
)  # fmt: skip


def assert_ranges_cost_as_much(few: OperatorGraph, every: OperatorGraph) -> None:
    """Costs of all ranges follow from a few layers, too, without the graph of all."""
    cluster = load_cluster("2x8x-h100")
    short = RangeCosts(few, Costing(few, cluster.device, cluster), copies_of(few))
    whole = RangeCosts(every, Costing(every, cluster.device, cluster))
    for name in RANGES:
        np.testing.assert_allclose(getattr(short, name), getattr(whole, name), rtol=1e-12, err_msg=name)
    transients = ranges_of(short).transient_bytes, ranges_of(whole).transient_bytes
    np.testing.assert_array_equal(*transients)
    assert "graph" not in vars(short)


@pytest.mark.parametrize("model", ["gpt2", "llama-3-8b", "mixtral-8x7b"])
def test_runtimes_rewrite_a_few_layers_as_they_rewrite_all(model: str) -> None:
    sizes = {} if model == "gpt2" else {"num_hidden_layers": 9}
    for name in runtime_names():
        runtime = load_runtime(name)
        few = trace(model, 1, 64, "bfloat16", sizes, target="cuda", expand=False, **runtime.traced)
        assert REPEATS in few.facts
        assert differing(expanded(runtime.rewrite(few)), runtime.rewrite(expanded(few))) == []


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.linear(x).relu())


class Stack(nn.Module):
    """Ten equal blocks; `way` says what the model does with them."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.blocks = nn.ModuleList(Block() for _ in range(10))

    def forward(self, x: Tensor) -> Tensor:
        every = []
        blocks = [self.blocks[index] for index in range(10)] if self.way == "by number" else self.blocks
        for block in blocks:
            x = block(x)
            every.append(x)
        return (torch.stack(every).sum() if self.way == "all outputs" else x.sum()) / 2


@pytest.mark.parametrize(
    ("way", "is_short"), [("in a row", True), ("all outputs", False), ("by number", True)]
)
def test_layers_are_left_out_only_where_they_are_a_pattern(
    way: str, is_short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[bool] = []

    def watched(*args: Any, original: Callable[..., Any] = capture.left_out) -> Any:
        repeats, skipped = original(*args)
        made.append(bool(repeats))
        return repeats, skipped

    monkeypatch.setattr(capture, "left_out", watched)
    model, inputs = Stack(way), {"x": torch.randn(4, 8)}
    found = trace_module(model, inputs)
    assert made == [is_short]
    with whole(monkeypatch):
        assert differing(found, trace_module(model, inputs)) == []
    assert found.num_draws == 10 and len(model.blocks) == 10


def test_layers_that_differ_are_no_pattern() -> None:
    few = trace("gpt2", 1, 64, "bfloat16", target="cuda", expand=False)
    (repeat,) = few.facts[REPEATS]
    wrong = Repeat(repeat.path, ("0", "0", "1", "3"), repeat.missing, repeat.after)
    few.facts[REPEATS] = (wrong,)
    assert not is_pattern(few)
    with pytest.raises(IrregularLayers, match="not alike"):
        expanded(few)
