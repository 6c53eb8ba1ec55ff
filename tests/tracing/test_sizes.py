"""Graphs at other sizes follow from two, and are the graphs that would have been traced."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stagewright.graph import OperatorGraph
from stagewright.graph.resize import SizeChange, Unlike, on_line, with_changes
from stagewright.tracing import trace as tracing
from stagewright.tracing.cache import trace
from stagewright.tracing.settings import TraceSettings

SHARED = {"target": "cuda", "attention": "fused", "dtype": "bfloat16"}
MODELS = [
    "tiny-llama", "tiny-mixtral", "tiny-vit",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("tiny-gpt2", "tiny-bert", "tiny-gemma", "tiny-t5", "tiny-nemotron-h", "tiny-deepseek-v3")
    ),
]  # fmt: skip


_once: dict[str, OperatorGraph] = {}


def _traced(model: str, size: int, **options: Any) -> OperatorGraph:
    """Traced, that is: in the cache are graphs that follow from others."""
    key = repr((model, size, options))
    if key not in _once:
        _once[key] = trace(model, size, 64, use_cache=False, **options)
    return _once[key]


def _alike(one: OperatorGraph, other: OperatorGraph) -> bool:
    """Equal, but that calls which are alike by chance of their sizes may count as different ones."""
    classes: dict[int, set[int]] = {}
    for mine, theirs in zip(one.nodes, other.nodes, strict=True):
        classes.setdefault(mine.signature, set()).add(theirs.signature)
    bare = [
        replace(graph, nodes=tuple(replace(node, signature=0) for node in graph.nodes))
        for graph in (one, other)
    ]
    return bare[0] == bare[1] and all(len(others) == 1 for others in classes.values())


@pytest.mark.parametrize("model", MODELS)
def test_larger_microbatches_follow_from_two(model: str) -> None:
    two, three, five = (_traced(model, size) for size in (2, 3, 5))
    assert _alike(on_line(two, three, (2, 3), 5, is_degree=False), five)


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-mixtral"])
def test_where_one_sample_is_computed_as_two_they_tell_all(model: str) -> None:
    one, two, four = (_traced(model, size) for size in (1, 2, 4))
    assert _alike(on_line(one, two, (1, 2), 4, is_degree=False), four)


def test_what_computes_one_sample_in_another_way_tells_nothing_of_more() -> None:
    with pytest.raises(Unlike, match="other operators"):
        on_line(_traced("tiny-gpt2", 1), _traced("tiny-gpt2", 2), (1, 2), 4, is_degree=False)


@pytest.mark.parametrize(
    ("model", "axis", "options"),
    [
        ("tiny-llama", "cp", {}),
        ("tiny-llama", "cp", {"tp": 2, "splits_sequence": True}),
        ("tiny-deepseek-v3", "ep", {"experts": "grouped", "overrides": {"n_routed_experts": 16}}),
        ("tiny-gpt2", "tp", {"overrides": {"n_head": 16}}),
        ("tiny-gpt2", "tp", {"overrides": {"n_head": 16}, "splits_sequence": True}),
    ],
)
def test_more_ranks_follow_from_two_and_four(model: str, axis: str, options: dict[str, Any]) -> None:
    two, four, eight = (_traced(model, 2, **{axis: width}, **options, **SHARED) for width in (2, 4, 8))
    assert _alike(on_line(two, four, (2, 4), 8, is_degree=True), eight)


EXPERTS = {"experts": "grouped", "overrides": {"n_routed_experts": 16}}


@pytest.mark.parametrize(
    ("model", "options", "axes"),
    [
        ("tiny-llama", {}, {"microbatch_size": (1, 3), "cp": (2, 4)}),
        ("tiny-llama", {"tp": 2, "splits_sequence": True}, {"microbatch_size": (1, 2), "cp": (2, 8)}),
        ("tiny-gpt2", {"overrides": {"n_head": 16}}, {"microbatch_size": (2, 3), "tp": (2, 4)}),
        ("tiny-mixtral", {}, {"microbatch_size": (1, 2), "cp": (2, 4)}),
        pytest.param("tiny-nemotron-h", {}, {"microbatch_size": (2, 4), "tp": (2, 4)}, marks=pytest.mark.slow),
        pytest.param(
            "tiny-deepseek-v3", EXPERTS, {"microbatch_size": (1, 2), "cp": (2, 4), "ep": (2, 4)},
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_several_sizes_at_once_follow_from_each(
    model: str, options: dict[str, Any], axes: dict[str, tuple[int, int]]
) -> None:
    def graph(sizes: dict[str, int]) -> OperatorGraph:
        degrees = {axis: size for axis, size in sizes.items() if axis != "microbatch_size"}
        return _traced(model, sizes["microbatch_size"], **degrees, **options, **SHARED)

    base = {axis: before for axis, (before, _) in axes.items()}
    changed = [graph({**base, axis: after}) for axis, (_, after) in axes.items()]
    changes = [SizeChange(axis != "microbatch_size", *sizes) for axis, sizes in axes.items()]
    whole = graph({axis: after for axis, (_, after) in axes.items()})
    assert _alike(with_changes(changes, graph(base), *changed), whole)


def test_what_two_sizes_change_together_must_be_in_proportion_to_each() -> None:
    def graph(size: int, length: int) -> OperatorGraph:
        return trace("tiny-llama", size, length, use_cache=False, **SHARED)

    changes = [SizeChange(False, 1, 2), SizeChange(False, 64, 96)]
    whole = with_changes(changes, graph(1, 64), graph(2, 64), graph(1, 96))
    assert _alike(whole, graph(2, 96))
    with pytest.raises(Unlike, match="not in proportion"):  # 96 tokens are not a half more than 65
        with_changes([changes[0], SizeChange(False, 65, 96)], graph(1, 64), graph(2, 64), graph(1, 96))


def test_a_rank_with_one_head_does_not_follow_from_ranks_with_several() -> None:
    options = {"overrides": {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8}, **SHARED}
    two, four = (_traced("tiny-llama", 1, tp=width, **options) for width in (2, 4))
    with pytest.raises(Unlike, match="at another size"):
        on_line(two, four, (2, 4), 8, is_degree=True)
    with pytest.raises(Unlike, match="would be"):
        on_line(two, four, (2, 4), 16, is_degree=True)


def test_larger_sizes_are_not_traced_where_smaller_ones_are_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STAGEWRIGHT_CACHE", str(tmp_path))
    traced: list[tuple[int, int]] = []
    real = tracing.trace_reference

    def counted(reference: Any, settings: TraceSettings, facts: Any, report: Any) -> Any:
        traced.append((settings.microbatch_size, settings.cp))
        return real(reference, settings, facts, report)

    monkeypatch.setattr(tracing, "trace_reference", counted)
    for cp in (2, 4, 8):
        for size in (1, 2, 4, 8):
            graph = trace("tiny-llama", size, 128, cp=cp, expand=False, **SHARED)
            assert (graph.facts["microbatch_size"], graph.facts["cp"]) == (size, cp)
            assert graph.facts["num_tokens"] == size * 128 // cp
    assert traced == [(1, 2), (2, 2), (1, 4)]
