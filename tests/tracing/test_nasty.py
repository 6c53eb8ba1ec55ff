"""Nasty models cut at every legal position: values, gradients, buffers and live bytes are those of the plain run."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from in_turn import Batch, Outcome, Pipeline, assert_equal, bytes_kept_by_autograd, run_plain
from nasty import NASTY
from torch import nn

from stagewright.errors import PlanError
from stagewright.graph import OperatorGraph
from stagewright.graph.stage import carve
from stagewright.tracing.trace import trace_module

NUM_MICROBATCHES = 3

# A weight that autocast cast once is cast once per stage here; gradients are then added in full precision instead of half.
SHARED_TOLERANCE = {torch.float64: 1e-12, torch.float32: 2.0**-7}


@functools.cache
def prepared(name: str) -> tuple[nn.Module, OperatorGraph, list[Batch], Outcome]:
    torch.manual_seed(0)
    model = NASTY[name].model()
    batches = [NASTY[name].batch() for _ in range(NUM_MICROBATCHES)]
    graph = trace_module(model, batches[0], name)
    return model, graph, batches, run_plain(copy.deepcopy(model), batches)


def legal_cuts(graph: OperatorGraph) -> list[int]:
    found = []
    for cut in range(1, len(graph.body)):
        try:
            carve(graph, [cut])
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
