"""Attention as one logical operator: it equals PyTorch's, and is the same on whatever device a graph for GPUs is traced."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from attending import ATTENDING, microbatch
from in_turn import Pipeline, assert_equal, run_plain
from stagewright.execution.random import keyed
from stagewright.graph import OperatorGraph
from stagewright.graph.document import graph_digest
from stagewright.graph.policy import KEEP, RECOMPUTE_ALL
from stagewright.planning.job import Job
from stagewright.tracing.attention import ATTENTION, attention
from stagewright.tracing.cache import trace
from stagewright.tracing.evaluation import evaluated
from stagewright.tracing.models.reference import resolve
from stagewright.tracing.trace import trace_module

HEADS, TOKENS, WIDTH = 4, 10, 8

Given = dict[str, Any]


def tensors(
    dtype: torch.dtype, heads: int = HEADS, value_width: int = WIDTH, num_keys: int = TOKENS
) -> list[Tensor]:
    shapes = [(2, HEADS, TOKENS, WIDTH), (2, heads, num_keys, WIDTH), (2, heads, num_keys, value_width)]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def outcome(function: Any, given: list[Tensor], settings: Given) -> list[Tensor]:
    """The result and the gradients of all that needs one, dropout keyed."""
    with keyed(1, 2, 3):
        out = function(*given, **settings)
    wanted = [
        tensor
        for tensor in (*given, settings.get("attn_mask"))
        if tensor is not None and tensor.requires_grad
    ]
    return [
        out,
        *torch.autograd.grad(out, wanted, torch.linspace(-1, 1, out.numel()).view(out.shape).to(out)),
    ]


def bias(dtype: torch.dtype, is_trained: bool = False) -> Tensor:
    return torch.randn(1, HEADS, TOKENS, TOKENS, dtype=dtype, requires_grad=is_trained)


MASK = torch.rand(2, 1, TOKENS, TOKENS, generator=torch.Generator().manual_seed(0)) > 0.3
MASK |= torch.eye(TOKENS, dtype=torch.bool)

SETTINGS: dict[str, tuple[Given, Given]] = {
    "plain": ({}, {}),
    "causal": ({}, {"is_causal": True}),
    "scaled": ({}, {"is_causal": True, "scale": 0.3}),
    "grouped heads": ({"heads": 2}, {"is_causal": True, "enable_gqa": True}),
    "narrow values": ({"value_width": 6}, {"is_causal": True}),
    "more keys": ({"num_keys": 15}, {}),
    "masked": ({}, {"attn_mask": MASK}),
    "biased": ({}, {"attn_mask": bias}),
    "trained bias": ({}, {"attn_mask": lambda dtype: bias(dtype, True)}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_logical_operator_is_pytorchs_attention_to_the_last_bit(
    name: str, dropout: float, dtype: torch.dtype
) -> None:
    shape, settings = SETTINGS[name]
    torch.manual_seed(0)
    given = tensors(dtype, **shape)
    mask = settings.get("attn_mask")
    settings = {**settings, "dropout_p": dropout, **({"attn_mask": mask(dtype)} if callable(mask) else {})}
    plain = outcome(functional.scaled_dot_product_attention, given, settings)
    for logical, wanted in zip(outcome(attention, given, settings), plain, strict=True):
        assert torch.equal(logical, wanted)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("name", SETTINGS)
def test_results_are_laid_out_as_declared(name: str, dropout: float) -> None:
    """As a compiler that takes the operator whole relies on."""
    sizes, settings = SETTINGS[name]
    mask = settings.get("attn_mask")
    query, key, value = (tensor.detach() for tensor in tensors(torch.float32, **sizes))
    bias_of_all = None if mask is None else mask(torch.float32).detach() if callable(mask) else mask.float()
    given = (query, key, value, bias_of_all, dropout, settings.get("is_causal", False), 0.3, False)
    real = torch.ops.stagewright.attention(*given)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(part) if isinstance(part, Tensor) else part for part in given]
        declared = torch.ops.stagewright.attention(*fake)
    for result, layout in zip(real, declared, strict=True):
        assert (result.dtype, result.shape, result.stride()) == (layout.dtype, layout.shape, layout.stride())


@pytest.mark.parametrize("dims", [2, 3, 5])
def test_other_numbers_of_dimensions_are_taken(dims: int) -> None:
    torch.manual_seed(0)
    shape = (*(3, 2, 2)[: dims - 2], TOKENS, WIDTH)
    given = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    plain = outcome(functional.scaled_dot_product_attention, given, {"is_causal": True})
    for logical, wanted in zip(outcome(attention, given, {"is_causal": True}), plain, strict=True):
        assert torch.allclose(logical, wanted, rtol=1e-12, atol=1e-14)


# In models


def graph_of(name: str, model: nn.Module, target: str = "cuda") -> OperatorGraph:
    return trace_module(model, microbatch(), name, {"target": target})


@pytest.mark.parametrize("name", ATTENDING)
def test_training_through_the_logical_operator_is_plain_autograd(name: str) -> None:
    """Cut at every fourth place; what is recomputed, and the backward, draw what the forward drew."""
    torch.manual_seed(0)
    model = ATTENDING[name]().double()
    graph = graph_of(name, model)
    batches = [microbatch() for _ in range(2)]
    plain = run_plain(copy.deepcopy(model), batches)
    for cut in range(1, len(graph.forward_ids), 4):
        for policies in ([KEEP, KEEP], [RECOMPUTE_ALL, RECOMPUTE_ALL]):
            stages = Pipeline(graph, model, [cut], len(batches), policies)
            assert_equal(plain, stages.step(batches, split=policies[0] is KEEP), 1e-12)


@pytest.mark.parametrize("name", ATTENDING)
def test_attention_is_one_operator_whatever_kernels_the_device_has_that_traces(name: str) -> None:
    model = ATTENDING[name]().double()
    graph = graph_of(name, model)
    with sdpa_kernel(SDPBackend.MATH):
        without = graph_of(name, model)
        for_cpu = graph_of(name, model, "cpu")
    assert without.nodes == graph.nodes and without.values == graph.values
    assert [node.op for node in graph.nodes if "scaled_dot" in node.op or "softmax" in node.op] == []
    assert [graph.nodes[node].op for node in graph.forward_ids].count(ATTENTION) == 2
    assert [node.op for node in for_cpu.nodes if "softmax" in node.op]


def test_what_a_cpu_run_draws_is_what_a_gpus_would_be_accounted_with() -> None:
    """Of a layer with dropout a GPU keeps the result, the sums of every row, and 16 bytes of random state: no scores."""
    graph = graph_of("dropout", ATTENDING["dropout"]())
    node = next(node for node in graph.nodes if node.op == ATTENTION)
    out, sums, state = (graph.values[value].meta for value in node.outputs if value is not None)
    assert (out.shape, out.stride) == ((2, 4, 6, 8), (192, 8, 32, 1))
    assert (sums.shape, sums.dtype) == ((2, 4, 6), "float64")
    assert state.payload_bytes == 16 and node.draw >= 0


def test_a_graph_for_gpus_is_evaluated_without_dropout() -> None:
    graph = evaluated(graph_of("dropout", ATTENDING["dropout"]()))
    assert {node.args[4] for node in graph.nodes if node.op == ATTENTION} == {0.0}


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-t5"])
def test_a_plans_trace_and_that_of_a_run_agree(name: str) -> None:
    """As planned, and as a session asks for it on a device with other kernels."""
    asked = Job(global_batch=4, sequence_length=32, dtype="bf16").traced("cuda")
    planned = trace(resolve(name), 1, use_cache=False, **asked)
    with sdpa_kernel(SDPBackend.MATH):
        run = trace(resolve(name), 1, device="cpu", use_cache=False, **asked)
    assert graph_digest(planned, (value.meta for value in planned.values)) == graph_digest(
        run, (value.meta for value in run.values)
    )


def test_a_process_that_runs_a_graph_out_of_the_cache_has_the_operator() -> None:
    """Which nothing has traced there."""
    code = "import stagewright.tracing.runnable, torch; print(torch.ops.stagewright.attention.default)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == ATTENTION
