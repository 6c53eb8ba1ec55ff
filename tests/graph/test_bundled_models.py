"""Families of models cut between any two operators: their stages, run in turn, equal plain autograd bit for bit."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from in_turn import Batch, Outcome, Pipeline, assert_equal, bytes_kept_by_autograd, run_plain
from stagewright.graph import OperatorGraph
from stagewright.graph.split import split_graph
from stagewright.tracing.models.build import build
from stagewright.tracing.models.reference import resolve
from stagewright.tracing.trace import trace_module

# Name -> (bundled model, element type, what is overridden). Grouped products of experts have no float64 kernel.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("tiny-llama", "float64", {"num_hidden_layers": 3}),
    "gpt2": ("tiny-gpt2", "float64", {"num_hidden_layers": 2}),
    "gpt2-without-dropout": (
        "tiny-gpt2",
        "float64",
        {"num_hidden_layers": 2, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    ),
    "gemma": ("tiny-gemma", "float64", {"num_hidden_layers": 2}),
    "t5": ("tiny-t5", "float64", {"num_hidden_layers": 2}),
    "bert": ("tiny-bert", "float64", {"num_hidden_layers": 2}),
    "vit": ("tiny-vit", "float64", {"num_hidden_layers": 2}),
    "nemotron-h": ("tiny-nemotron-h", "float64", {"num_hidden_layers": 4}),
    "mixtral": ("tiny-mixtral", "float32", {"num_hidden_layers": 2}),
    "deepseek-v3": ("tiny-deepseek-v3", "float32", {"num_hidden_layers": 2}),
}
NUM_MICROBATCHES = 2

# Sums of two stages' shares of one gradient, in the precision of the model.
SHARED_TOLERANCE = {"float64": 1e-12, "float32": 1e-5}


@functools.cache
def prepared(family: str) -> tuple[nn.Module, OperatorGraph, list[Batch], Outcome]:
    name, dtype, overrides = FAMILIES[family]
    built = build(resolve(name, overrides), 2, 16, dtype, seed=0)
    graph = trace_module(built.module, built.inputs, family)
    generator = torch.Generator().manual_seed(5)
    batches = [
        {name: example(tensor, generator) for name, tensor in built.inputs.items()}
        for _ in range(NUM_MICROBATCHES)
    ]
    return built.module, graph, batches, run_plain(copy.deepcopy(built.module), batches)


def example(like: Tensor, generator: torch.Generator) -> Tensor:
    """Random input of the layout of `like`: small integers name tokens and classes of every tiny model."""
    if like.is_floating_point():
        return torch.randn(like.shape, dtype=like.dtype, generator=generator)
    return torch.randint(0, 2 if like.dim() == 1 else 100, like.shape, generator=generator)


@pytest.mark.parametrize("split", [True, False], ids=["split", "fused"])
@pytest.mark.parametrize("family", FAMILIES)
def test_three_stages_equal_plain_autograd(family: str, split: bool) -> None:
    model, graph, batches, plain = prepared(family)
    size = len(graph.forward_ids)
    # Odd places, different ones for the two ways to run the backward: nothing but the graph says where layers end.
    cuts = [size // 3 + 1, 2 * size // 3 + 2] if split else [size // 7, size - size // 11]
    outcome = Pipeline(graph, model, cuts, NUM_MICROBATCHES).step(batches, split)
    assert_equal(plain, outcome, SHARED_TOLERANCE[FAMILIES[family][1]])


@pytest.mark.parametrize("family", FAMILIES)
def test_no_more_is_held_than_autograd_holds(family: str) -> None:
    model, graph, batches, _ = prepared(family)
    (stage,) = split_graph(graph, [])
    assert stage.held_bytes(stage.saved) <= bytes_kept_by_autograd(copy.deepcopy(model), batches[0])


def test_tied_embeddings_are_one_parameter_with_one_gradient() -> None:
    _, graph, _, plain = prepared("gpt2")
    names = [
        name for name, value in graph.parameters.items() if value == graph.parameters["net.lm_head.weight"]
    ]
    assert len(names) == 2
    assert len(set(names) & set(plain.gradients)) == 1


def test_without_dropout_nothing_draws() -> None:
    drawing = {node.op for node in prepared("gpt2")[1] if node.draw >= 0}
    assert "aten.native_dropout.default" in drawing
    assert not any(
        node.draw >= 0 for node in prepared("gpt2-without-dropout")[1]
    )  # attention could, but does not
