"""What is said of a cut is what splitting there does."""

from __future__ import annotations

import pytest

from nasty import NASTY
from stagewright.errors import PlanError
from stagewright.graph import OperatorGraph
from stagewright.graph.cuts import find_cuts
from stagewright.graph.split import split_graph
from stagewright.tracing.cache import trace
from stagewright.tracing.trace import trace_module


def _changing_buffer() -> OperatorGraph:
    model = NASTY["BufferReadTwice"]
    return trace_module(model.model(), model.batch())


def _mixtral() -> OperatorGraph:
    return trace("tiny-mixtral", 1, 16, "float32")


@pytest.mark.parametrize("make", [_changing_buffer, _mixtral])
def test_a_cut_is_what_splitting_makes_of_it(make: object) -> None:
    graph = make()  # type: ignore[operator]
    cuts = find_cuts(graph)
    size = len(graph.forward_ids)
    assert len(cuts.legal) == len(cuts.value_bytes) == size + 1
    assert not cuts.legal[0] and not cuts.legal[size]
    for position in range(1, size, 1 if size < 50 else 7):
        try:
            stages = split_graph(graph, [position])
        except PlanError:
            assert not cuts.legal[position]
            continue
        assert cuts.legal[position]
        low, high = stages
        sent = [low.value(value) for transfer in low.sends for value in transfer.values]
        returned = [high.value(value) for transfer in high.grad_sends for value in transfer.values]
        assert cuts.num_values[position] == len(sent)
        assert cuts.value_bytes[position] == sum(value.meta.payload_bytes for value in sent)
        assert cuts.cotangent_bytes[position] == sum(value.meta.payload_bytes for value in returned)


def test_a_buffer_that_changes_bars_the_cuts_between_its_users() -> None:
    graph = _changing_buffer()
    (mean,) = [made for buffer, made in graph.mutations if buffer == graph.buffers["mean"]]
    reader = graph.position[graph.consumers[graph.buffers["mean"]][0]]
    maker = graph.position[graph.values[mean].node]
    legal = find_cuts(graph).legal
    low, high = sorted((reader, maker))
    assert low < high and not legal[low + 1 : high + 1].any()
    assert legal[1 : len(graph.forward_ids)].any()
