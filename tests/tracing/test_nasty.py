"""Nasty models cut at every legal position: values, gradients, buffers and live bytes are those of the plain run."""

from __future__ import annotations

import copy
import functools
import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

from in_turn import Batch, Outcome, Pipeline, assert_equal, bytes_kept_by_autograd, run_plain
from nasty import NASTY
from stagewright.errors import PlanError
from stagewright.graph import OperatorGraph
from stagewright.graph.split import split_graph
from stagewright.tracing.trace import trace_module

NUM_MICROBATCHES = 2

# A weight that autocast cast once is cast once per stage here; gradients are then added in full precision instead of half.
SHARED_TOLERANCE = {torch.float64: 1e-12, torch.float32: 2.0**-6}


@functools.cache
def prepared(name: str) -> tuple[nn.Module, OperatorGraph, list[Batch], Outcome]:
    torch.manual_seed(0)
    model = NASTY[name].model()
    batches = [NASTY[name].batch() for _ in range(NUM_MICROBATCHES)]
    graph = trace_module(model, batches[0], name)
    return model, graph, batches, run_plain(copy.deepcopy(model), batches)


def legal_cuts(graph: OperatorGraph) -> list[int]:
    found = []
    for cut in range(1, len(graph.forward_ids)):
        try:
            split_graph(graph, [cut])
        except PlanError:
            continue
        found.append(cut)
    return found


def check(name: str, cuts: list[int], split: bool) -> None:
    model, graph, batches, plain = prepared(name)
    try:
        outcome = Pipeline(graph, model, cuts, len(batches)).step(batches, split)
        assert_equal(plain, outcome, SHARED_TOLERANCE[NASTY[name].dtype])
    except AssertionError as error:
        raise AssertionError(f"{name} cut at {cuts}: {error}") from None


@pytest.mark.parametrize("name", NASTY)
def test_every_cut_equals_plain_autograd(name: str) -> None:
    for cut in legal_cuts(prepared(name)[1]):
        check(name, [cut], split=True)


@pytest.mark.parametrize("name", NASTY)
def test_fused_backward_and_several_cuts_equal_plain_autograd(name: str) -> None:
    cuts = legal_cuts(prepared(name)[1])
    check(name, [], split=False)
    for first, second in itertools.pairwise(cuts[:: max(len(cuts) // 4, 1)]):
        check(name, [first, second], split=False)
    check(name, cuts[:: max(len(cuts) // 5, 1)], split=True)


@pytest.mark.parametrize("name", NASTY)
def test_no_more_is_held_than_autograd_holds(name: str) -> None:
    model, graph, batches, _ = prepared(name)
    (stage,) = split_graph(graph, [])
    changing = sum(graph.values[buffer].meta.storage_bytes for buffer, _ in graph.mutations)
    assert (
        stage.held_bytes(stage.saved) <= bytes_kept_by_autograd(copy.deepcopy(model), batches[0]) + changing
    )


@pytest.mark.parametrize("name", NASTY)
def test_running_the_forward_again_changes_nothing(name: str) -> None:
    """What recomputation relies on: F is a function, and buffers change only when its outputs are applied."""
    model, graph, batches, _ = prepared(name)
    (runner,) = Pipeline(graph, model, [], 1).runners
    before = {value: tensor.clone() for value, tensor in runner.resident.items()}
    inputs = [batches[0][runner.stage.value(value).name] for value in runner.stage.inputs]
    copies = [tensor.clone() for tensor in inputs]
    first, again = (
        runner.functions["forward"].call(
            list(inputs), runner.resident, runner.weights.accumulate, runner._reseed
        )
        for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(inputs, copies, strict=True))
    assert all(torch.equal(tensor, before[value]) for value, tensor in runner.resident.items())


def test_a_cut_between_the_users_of_a_changing_buffer_is_refused() -> None:
    graph = prepared("BufferReadTwice")[1]
    assert set(legal_cuts(graph)) < set(range(1, len(graph.forward_ids)))
    first_use = graph.consumers[graph.buffers["mean"]][0]
    with pytest.raises(PlanError, match="separates the users of buffer 'mean'"):
        split_graph(graph, [graph.position[first_use] + 1])


def test_a_counter_that_several_stages_read_is_kept_by_each() -> None:
    graph = prepared("BufferReadTwice")[1]
    counter = graph.buffers["calls"]
    updating = [stage.index for stage in split_graph(graph, [1, 2]) if counter in dict(stage.mutations)]
    assert updating == [2]
    last = legal_cuts(graph)[-1]
    assert [stage.index for stage in split_graph(graph, [last]) if counter in dict(stage.mutations)] == [1]


def leak_one(outputs: list[torch.Tensor], kept: list[torch.Tensor]) -> list[torch.Tensor]:
    kept.append(outputs[0])
    return outputs


@pytest.mark.parametrize(
    ("function", "said"),
    [("forward", "after F"), ("input_grad", "after I"), ("backward", "after the backward")],
)
def test_a_leaked_tensor_is_noticed(function: str, said: str) -> None:
    """Keeps one output of a function alive on purpose: the check of live bytes must say so."""
    model, graph, batches, _ = prepared("ThreeConsumers")
    cut = graph.position[graph.values[graph.loss].node] - 1
    pipeline = Pipeline(graph, model, [6, cut], len(batches))
    runner = pipeline.runners[1]
    kept: list[torch.Tensor] = []
    original = runner.functions[function]
    leaking = replace(original, call=lambda *given: leak_one(original.call(*given), kept))
    runner.functions[function] = leaking
    with pytest.raises(AssertionError, match=f"{said} stage 1 holds .* the graph says"):
        pipeline.step(batches, split=function == "input_grad")


def test_a_value_used_after_the_next_forward_is_not_overwritten() -> None:
    """Two microbatches in flight: what the first kept of a changing buffer is a copy."""
    graph = prepared("ViewsOfBuffers")[1]
    (stage,) = split_graph(graph, [])
    changing = {buffer for buffer, _ in graph.mutations}
    assert not changing & {stage.value(value).storage for value in stage.saved}


@pytest.mark.parametrize("name", ["EqualBlocks", "BatchNormBlocks", "KeywordBlocks"])
def test_equal_layers_are_traced_once(name: str) -> None:
    """The first of the four differs: what it is given needs no gradient."""
    assert layers_traced(name) == ["tracing blocks.1 (3 layers of its kind)"]


@pytest.mark.parametrize("name", ["NumberedBlocks", "OddOneOut", "WritingBlocks"])
def test_layers_that_differ_in_what_they_do_are_not_shared(name: str) -> None:
    assert layers_traced(name) == []


def layers_traced(name: str) -> list[str]:
    phases: list[str] = []
    trace_module(NASTY[name].model(), NASTY[name].batch(), name, report=phases.append)
    return [phase for phase in phases if phase.startswith("tracing ")]
