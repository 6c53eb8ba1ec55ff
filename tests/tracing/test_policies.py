"""Stages that recompute: values, gradients, buffers and live bytes are those of a plain run, whatever is recomputed."""

from __future__ import annotations

import copy
import functools
import random

import pytest
import test_nasty
from torch import nn

from in_turn import Batch, Outcome, Pipeline, assert_equal
from nasty import NASTY
from stagewright.graph import OperatorGraph
from stagewright.graph.carving import Carving, carve
from stagewright.graph.policy import KEEP, RECOMPUTE_ALL, Policy


@functools.cache
def prepared(name: str) -> tuple[nn.Module, OperatorGraph, list[Batch], Outcome, list[int]]:
    model, graph, batches, plain = test_nasty.prepared(name)
    legal = test_nasty.legal_cuts(graph)
    return model, graph, batches, plain, legal[len(legal) // 2 :][:1]


def check(name: str, policies: list[Policy], split: bool) -> Pipeline:
    model, graph, batches, plain, cuts = prepared(name)
    pipeline = Pipeline(graph, copy.deepcopy(model), cuts, len(batches), policies)
    try:
        outcome = pipeline.step(batches, split)
        assert_equal(plain, outcome, test_nasty.SHARED_TOLERANCE[NASTY[name].dtype])
    except AssertionError as error:
        raise AssertionError(f"{name} cut at {cuts}, {policies}: {error}") from None
    return pipeline


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("name", NASTY)
def test_recomputing_everything_equals_plain_autograd(name: str, split: bool) -> None:
    check(name, [RECOMPUTE_ALL] * (len(prepared(name)[-1]) + 1), split)


@pytest.mark.parametrize("name", NASTY)
def test_recomputing_some_values_equals_plain_autograd(name: str) -> None:
    _, graph, _, _, cuts = prepared(name)
    draw = random.Random(name)
    for split in (False, True):
        policies = [
            Policy(recompute=frozenset(value for value in stage.saved if draw.random() < 0.5))
            for stage in carve(graph, cuts)
        ]
        check(name, policies, split)


@pytest.mark.parametrize("name", NASTY)
def test_offloading_and_recomputing_equal_plain_autograd(name: str) -> None:
    """A third of the values stays, a third is recomputed, a third goes to the host; also all of them to the host."""
    _, graph, _, _, cuts = prepared(name)
    stages = carve(graph, cuts)
    for split in (False, True):
        mixed = [Policy(frozenset(stage.saved[::3]), frozenset(stage.saved[1::3])) for stage in stages]
        check(name, mixed, split)
    check(name, [Policy(offload=frozenset(stage.saved)) for stage in stages], split=False)


def test_named_values_are_made_again_where_they_are_used() -> None:
    """What a policy names is alive from its first use in the backward; all at once from the backward's beginning."""
    _, graph, *_ = prepared("Convolution")
    (plain,) = carve(graph, [])
    (stage,) = carve(graph, [], [Policy(recompute=frozenset(plain.saved[::2]))])
    assert stage.rebuild.nodes == () and stage.remade.nodes
    again = {node.id for node in stage.remade.nodes}
    places = [place for place, node in enumerate(stage.backward.nodes) if node.id in again]
    assert len(places) == len(again) and places != list(range(len(places)))
    for place in places:
        made = {value for value in stage.backward.nodes[place].outputs if value is not None}
        following = stage.backward.nodes[place + 1 :]
        assert any(made & {*node.inputs} for node in following)


def test_what_is_rebuilt_is_not_kept() -> None:
    _, graph, *_ = prepared("Convolution")
    (plain,), (stage,) = carve(graph, []), carve(graph, [], [RECOMPUTE_ALL])
    assert stage.rebuild.nodes and set(stage.saved) <= set(stage.inputs)
    assert set(stage.rebuild.outputs) <= set(plain.saved)
    (kept,) = carve(graph, [], [KEEP])
    assert kept.rebuild.nodes == () and kept.saved == plain.saved


@pytest.mark.parametrize("name", NASTY)
def test_a_stage_carved_alone_is_that_of_a_whole_carving(name: str) -> None:
    """Where values lie depends on the cuts alone, whatever policy a stage was carved under first."""
    _, graph, _, _, cuts = prepared(name)
    draw = random.Random(name)
    some = [
        Policy(frozenset(value for value in stage.saved if draw.random() < 0.5))
        for stage in carve(graph, cuts)
    ]
    asked = [KEEP] * len(some), [RECOMPUTE_ALL] * len(some), some
    for first in asked:
        carving = Carving(graph, cuts)
        carving.stages(first)
        for policies in asked:
            alone = [carving.stage(index, policy) for index, policy in enumerate(policies)]
            assert alone == carve(graph, cuts, policies)
