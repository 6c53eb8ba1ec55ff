"""Which views a function issues, and that what it computes and when it frees a storage stay the same."""

from __future__ import annotations

from typing import Any

import pytest

from stagewright.graph import Node, Origin, Part, Ref, TensorMeta, Value
from stagewright.graph.split import split_graph
from stagewright.graph.stage import Function
from stagewright.graph.tensor import contiguous
from stagewright.graph.views import issued, not_issued
from stagewright.tracing.cache import trace

VALUES = (
    contiguous((8, 32), "float32"),  # 0, an input
    contiguous((1, 8, 32), "float32"),  # 1
    contiguous((1, 8, 4, 8), "float32"),  # 2
    TensorMeta((1, 4, 8, 8), (256, 8, 32, 1), "float32"),  # 3
    TensorMeta((32, 8), (1, 32), "float32"),  # 4
    contiguous((8, 32), "float32"),  # 5
    contiguous((8, 32), "float32"),  # 6
)


def value(number: int) -> Value:
    return Value(number, VALUES[number], 0, Origin.NODE)


def node(op: str, source: int, output: int, *args: Any) -> Node:
    return Node(
        output, f"aten.{op}", (Ref(source), *args), (), (source,), (output,), Part.FORWARD, output, "", 0, 0
    )


UNSAFE = node("_unsafe_view.default", 0, 1, (1, 8, 32))
HEADS = node("view.default", 1, 2, (1, 8, -1, 8))
SWAPPED = node("transpose.int", 2, 3, 1, 2)
TURNED = node("t.default", 0, 4)
BACK = node("t.default", 4, 5)


def test_a_view_of_a_view_is_one() -> None:
    calls = issued(Function((UNSAFE, HEADS, SWAPPED), (0,), (3,)), value)
    first, heads, swapped = calls.nodes
    assert first is None and swapped == SWAPPED
    assert heads is not None and (heads.op, heads.args) == ("aten.view.default", (Ref(0), (1, 8, 4, 8)))


def test_a_view_that_something_else_uses_stays() -> None:
    for outputs, more in (((1, 3), ()), ((3,), (node("relu.default", 1, 6),))):
        calls = issued(Function((UNSAFE, HEADS, SWAPPED, *more), (0,), outputs), value)
        assert None not in calls.nodes


def test_a_pair_of_transpositions_is_what_it_began_with() -> None:
    calls = issued(Function((TURNED, BACK, node("relu.default", 5, 6)), (0,), (6,)), value)
    assert calls.nodes[:2] == (None, None)
    assert calls.nodes[2] is not None and calls.nodes[2].inputs == (0,)
    assert issued(Function((TURNED, BACK), (0,), (5,)), value).of((5,)) == [0]


def test_a_view_that_nothing_uses_stays_so_that_its_storage_goes_no_sooner() -> None:
    assert issued(Function((UNSAFE,), (0,), ()), value).nodes == (UNSAFE,)


def test_views_that_show_other_elements_are_none_of_them() -> None:
    """A conjugate has the layout of what it is of; a slice begins elsewhere."""
    for op in ("_conj.default", "view.dtype", "slice.Tensor"):
        other = node(op, 0, 5)
        assert issued(Function((other,), (0,), (5,)), value).nodes == (other,)


def test_rows_with_gaps_between_them_are_viewed_step_by_step() -> None:
    """Nothing says that one call could make the second view, so both stay."""
    layouts = {0: TensorMeta((8, 32), (64, 1), "float32"), 1: TensorMeta((8, 4, 8), (64, 8, 1), "float32"),
               2: TensorMeta((1, 8, 4, 8), (512, 64, 8, 1), "float32")}  # fmt: skip
    views = (node("view.default", 0, 1, (8, 4, 8)), node("view.default", 1, 2, (1, 8, 4, 8)))
    calls = issued(Function(views, (0,), (2,)), lambda number: Value(number, layouts[number], 0, Origin.NODE))
    assert calls.nodes == views


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-gpt2"])
def test_what_is_predicted_is_what_a_stage_leaves_out(model: str) -> None:
    graph = trace(model, 1, 16, "float32")
    (stage,) = split_graph(graph, [])
    functions = (stage.forward, stage.backward)
    calls = [call for function in functions for call in issued(function, stage.value).nodes]
    assert len(not_issued(graph)) == calls.count(None) > 0
