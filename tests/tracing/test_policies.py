"""Stages that recompute: values, gradients, buffers and live bytes are those of a plain run, whatever is recomputed."""

from __future__ import annotations

import copy
import functools
import random

import pytest
import test_nasty
import torch
from torch import nn

from in_turn import Batch, Outcome, Pipeline, assert_equal
from nasty import NASTY
from stagewright.execution import compiled
from stagewright.graph import Node, OperatorGraph
from stagewright.graph.added_nodes import FETCH, FETCHED
from stagewright.graph.policy import KEEP, RECOMPUTE_ALL, Policy
from stagewright.graph.split import SplitGraph, split_graph
from stagewright.graph.stage import Stage


@functools.cache
def prepared(name: str) -> tuple[nn.Module, OperatorGraph, list[Batch], Outcome, list[int]]:
    model, graph, batches, plain = test_nasty.prepared(name)
    legal = test_nasty.legal_cuts(graph)
    return model, graph, batches, plain, legal[len(legal) // 2 :][:1]


def check(name: str, policies: list[Policy], split: bool) -> Pipeline:
    model, graph, batches, plain, cuts = prepared(name)
    pipeline = Pipeline(graph, copy.deepcopy(model), cuts, len(batches), policies, is_watched=True)
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
            for stage in split_graph(graph, cuts)
        ]
        check(name, policies, split)


@pytest.mark.parametrize("name", NASTY)
def test_recomputing_between_any_checkpoints_equals_plain_autograd(name: str) -> None:
    """Any values of the forward may be checkpoints, those that no backward uses too."""
    _, graph, _, _, cuts = prepared(name)
    draw = random.Random(name)
    made = [value for node in graph.forward_ids for value in graph.nodes[node].outputs if value is not None]
    for split in (False, True):
        some = frozenset(value for value in made if draw.random() < 0.25)
        others = frozenset(value for value in made if draw.random() < 0.5)
        moved = frozenset(value for value in some if draw.random() < 0.3)
        everything = Policy(everything=True, checkpoints=some, offload=moved)
        chosen = [everything, Policy(recompute=others, checkpoints=some)]
        check(name, [chosen[index % 2] for index in range(len(cuts) + 1)], split)


@pytest.mark.parametrize("name", NASTY)
def test_offloading_and_recomputing_equal_plain_autograd(name: str) -> None:
    """A third of the values stays, a third is recomputed, a third goes to the host; also all of them to the host."""
    _, graph, _, _, cuts = prepared(name)
    stages = split_graph(graph, cuts)
    for split in (False, True):
        mixed = [Policy(frozenset(stage.saved[::3]), frozenset(stage.saved[1::3])) for stage in stages]
        check(name, mixed, split)
    check(name, [Policy(offload=frozenset(stage.saved)) for stage in stages], split=False)


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("name", NASTY)
def test_any_policy_equals_plain_autograd(name: str, split: bool) -> None:
    """What is kept, recomputed, offloaded and a checkpoint, and how far ahead values come back, is drawn at random."""
    _, graph, _, _, cuts = prepared(name)
    draw = random.Random(f"{name} {split}")
    values = range(len(graph.values))
    largest = max(graph.storage_bytes.values())
    for _ in range(4):
        policies = [
            Policy(
                *(frozenset(v for v in values if draw.random() < share) for share in (0.4, 0.5)),
                everything=draw.random() < 0.3,
                checkpoints=frozenset(v for v in values if draw.random() < 0.3),
                fetch_ahead=draw.choice([0, largest // 3, largest, 4 * largest]),
            )
            for _ in range(len(cuts) + 1)
        ]
        check(name, policies, split)


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
def test_functions_that_move_values_are_compiled_in_parts(
    split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a compiler that changes nothing, so that what is added up stays the same to the last bit."""
    calls: list[object] = []
    monkeypatch.setattr(torch, "compile", lambda call, **_: lambda *given: calls.append(call) or call(*given))
    monkeypatch.setattr(compiled, "is_seen_by_modes", lambda: False)
    model, graph, batches, plain, cuts = prepared("ThreeConsumers")
    stages = split_graph(graph, cuts)
    policies = [
        Policy(frozenset(stage.saved[::3]), frozenset(stage.saved[1::3]), fetch_ahead=10**6)
        for stage in stages
    ]
    pipeline = Pipeline(graph, copy.deepcopy(model), cuts, len(batches), policies, is_compiled=True)
    assert_equal(plain, pipeline.step(batches, split))
    assert any(node.op == FETCHED for stage in pipeline.stages for node in stage.backward.nodes)
    assert len({*calls}) > 2 * len(stages)


@pytest.mark.parametrize("policy", ["some", "all"])
def test_values_are_recomputed_where_they_are_used(policy: str) -> None:
    """Every operator that runs again is followed by those that need it; a stage that waits for nothing has no R."""
    _, graph, *_ = prepared("Convolution")
    (plain,) = split_graph(graph, [])
    chosen = Policy(recompute=frozenset(plain.saved[::2])) if policy == "some" else RECOMPUTE_ALL
    (stage,) = split_graph(graph, [], [chosen])
    assert stage.rebuild.nodes == () and stage.recomputed.nodes
    again = {node.id for node in stage.recomputed.nodes}
    places = [place for place, node in enumerate(stage.backward.nodes) if node.id in again]
    assert len(places) == len(again) and places != list(range(len(places)))
    for place in places:
        made = {value for value in stage.backward.nodes[place].outputs if value is not None}
        following = stage.backward.nodes[place + 1 :]
        assert any(made & {*node.inputs} for node in following)


def test_a_stage_that_waits_for_a_cotangent_has_something_to_recompute_meanwhile() -> None:
    _, graph, _, _, cuts = prepared("Convolution")
    first, last = split_graph(graph, cuts, [RECOMPUTE_ALL] * 2)
    assert first.rebuild.nodes and not last.rebuild.nodes
    assert {*first.rebuild.inputs} <= {*first.saved} <= {*first.inputs}
    kept, _ = split_graph(graph, cuts, [KEEP] * 2)
    partly = Policy(frozenset(kept.saved[::3]), frozenset(kept.saved[1::3]), fetch_ahead=10**6)
    moved, _ = split_graph(graph, cuts, [partly, KEEP])
    operators = [node.op for node in moved.rebuild.nodes]
    assert FETCH in operators and FETCHED not in operators  # no copy is waited for
    assert any(node.op == FETCHED for node in moved.backward.nodes) and moved.recomputed.nodes
    assert kept.rebuild.nodes == kept.recomputed.nodes == () and {*first.rebuild.outputs} <= {*kept.saved}


def test_nothing_before_a_checkpoint_is_recomputed() -> None:
    """A checkpoint is kept with nothing else, and what is computed again begins behind it."""
    _, graph, *_ = prepared("Convolution")
    (whole,) = split_graph(graph, [], [RECOMPUTE_ALL])
    user = whole.recomputed.nodes[-1]
    maker = next(
        graph.nodes[graph.values[value].node] for value in user.inputs if graph.values[value].node >= 0
    )
    checkpoints = frozenset(value for value in maker.outputs if value is not None)
    (stage,) = split_graph(graph, [], [Policy(everything=True, checkpoints=checkpoints)])
    assert {stage.value(value).storage for value in stage.saved} - {*stage.inputs} == checkpoints
    again = [node.id for node in stage.recomputed.nodes]
    assert maker.id not in again and user.id in again
    assert len(again) < len(whole.recomputed.nodes)


@pytest.mark.parametrize("name", NASTY)
def test_a_stage_split_alone_is_that_of_a_whole_split(name: str) -> None:
    """Where values lie depends on the cuts alone, whatever policy a stage was built under first."""
    _, graph, _, _, cuts = prepared(name)
    draw = random.Random(name)
    some = [
        Policy(frozenset(value for value in stage.saved if draw.random() < 0.5))
        for stage in split_graph(graph, cuts)
    ]
    asked = [KEEP] * len(some), [RECOMPUTE_ALL] * len(some), some
    for first in asked:
        split = SplitGraph(graph, cuts)
        split.stages(first)
        for policies in asked:
            alone = [split.stage(index, policy) for index, policy in enumerate(policies)]
            assert alone == split_graph(graph, cuts, policies)


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("name", NASTY)
def test_any_schedule_of_reruns_equals_plain_autograd(name: str, split: bool) -> None:
    """Operators of the forward run again in front of any of the backward, several times and without need."""
    _, graph, _, _, cuts = prepared(name)
    draw = random.Random(f"{name} {split}")
    stages = split_graph(graph, cuts)
    for share in (0.05, 0.2, 0.5):
        check(name, [Policy(reruns=drawn_reruns(stage, draw, share)) for stage in stages], split)
    moved = [frozenset(value for value in stage.saved if draw.random() < 0.4) for stage in stages]
    policies = [
        Policy(offload=one, fetch_ahead=10**5, reruns=drawn_reruns(stage, draw, 0.2))
        for stage, one in zip(stages, moved, strict=True)
    ]
    check(name, policies, split)


def drawn_reruns(stage: Stage, draw: random.Random, share: float) -> tuple[tuple[int, tuple[int, ...]], ...]:
    nodes = [node.id for node in stage.forward.nodes if node.id >= 0]
    groups = dict.fromkeys(node.forward for node in stage.backward.nodes if node.forward >= 0)
    return tuple((one, tuple(node for node in nodes if draw.random() < share)) for one in groups)


def test_what_is_made_again_later_is_kept_until_then() -> None:
    """A value that the backward uses twice is there for the first use, goes, and is made again for the second."""
    _, graph, *_ = prepared("ThreeConsumers")
    (plain,) = split_graph(graph, [])
    node, root, last = used_by_two(plain)
    (stage,) = split_graph(graph, [], [Policy(reruns=((last, (node.id,)),))])
    assert root in {stage.value(value).storage for value in stage.saved}
    (again,) = stage.recomputed.nodes
    assert again.id == node.id and root not in again.outputs
    place = stage.backward.nodes.index(again)
    before, after = stage.backward.nodes[:place], stage.backward.nodes[place + 1 :]
    assert any(stage.value(value).storage == root for one in before for value in one.inputs)
    assert after[0].forward == last
    assert not any(stage.value(value).storage == root for one in after for value in one.inputs)


def used_by_two(stage: Stage) -> tuple[Node, int, int]:
    """An operator of F, what it makes, and the last of several operators whose backwards use that."""
    for node in stage.forward.nodes:
        for root in node.outputs:
            users = [
                one.forward
                for one in stage.backward.nodes
                for value in one.inputs
                if one.forward >= 0 and stage.value(value).storage == root
            ]
            if root is not None and len({*users}) > 1:
                return node, root, users[-1]
    raise AssertionError("no value is used twice")
