"""Reports on graphs: boundaries agree with what splitting sends, layers and shared parameters are found."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

from stagewright.errors import PlanError
from stagewright.graph import OperatorGraph
from stagewright.graph.cuts import find_cuts
from stagewright.graph.split import split_graph
from stagewright.report.graphs import find_layers, graph_document, graph_summary, listing
from stagewright.tracing.trace import trace_module


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(8, width)
        self.back = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.back(torch.relu(self.linear(x)))


class Skipping(nn.Module):
    """Blocks of two widths, a batch norm, a skip connection to the end, and a shared weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)
        self.blocks = nn.ModuleList([Block(16), Block(16), Block(32)])
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 8, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        start = h = self.first(x)
        for block in self.blocks:
            h = block(h)
        return self.last(self.norm(h) * start).square().mean()


@pytest.fixture(scope="module")
def graph() -> OperatorGraph:
    return trace_module(Skipping(), {"x": torch.randn(4, 8)}, "skipping")


def test_boundaries_are_what_splitting_sends(graph: OperatorGraph) -> None:
    cuts = find_cuts(graph)
    positions = set(cuts.positions.tolist())
    for position in range(1, len(graph.forward_ids)):
        try:
            stages = split_graph(graph, [position])
        except PlanError:
            assert position not in positions
            continue
        sent = [value for transfer in stages[0].sends for value in transfer.values]
        assert position in positions and cuts.num_values[position] == len(sent)
        assert cuts.value_bytes[position] == sum(graph.values[v].meta.payload_bytes for v in sent)


def test_layers_are_told_apart_by_their_operators(graph: OperatorGraph) -> None:
    (layers,) = find_layers(graph)
    assert layers.pattern.endswith("blocks.*")
    assert layers.kinds == (2, 1)


def test_the_document_is_plain_data_and_the_summary_names_what_is_in_it(graph: OperatorGraph) -> None:
    document = graph_document(graph, seconds=1.5)
    assert json.loads(json.dumps(document)) == document
    assert document["tied_parameters"] == [["first.weight", "last.weight"]]
    assert document["num_parameters"] == sum(p.numel() for p in Skipping().parameters())
    assert sum(document["nodes_by_part"].values()) == document["num_nodes"] == len(listing(graph)["nodes"])
    from rich.console import Console

    console = Console(width=160)
    with console.capture() as shown:
        console.print(graph_summary(document))
    text = shown.get()
    assert "first.weight = last.weight" in text
    assert "3 x" in text and "of 2 kinds (2, 1)" in text
