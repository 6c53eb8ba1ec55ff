"""Attention as one logical operator: it equals PyTorch's, and is the same on whatever device a graph for GPUs is traced."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from stagewright.execution.random import keyed
from stagewright.tracing.attention import attention

HEADS, TOKENS, WIDTH = 4, 10, 8

Given = dict[str, Any]


def tensors(dtype: torch.dtype, heads: int = HEADS, value_width: int = WIDTH, num_keys: int = TOKENS) -> list[Tensor]:
    shapes = [(2, HEADS, TOKENS, WIDTH), (2, heads, num_keys, WIDTH), (2, heads, num_keys, value_width)]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def outcome(function: Any, given: list[Tensor], settings: Given) -> list[Tensor]:
    """The result and the gradients of all that needs one, dropout keyed."""
    with keyed(1, 2, 3):
        out = function(*given, **settings)
    wanted = [tensor for tensor in (*given, settings.get("attn_mask")) if tensor is not None and tensor.requires_grad]
    return [out, *torch.autograd.grad(out, wanted, torch.linspace(-1, 1, out.numel()).view(out.shape).to(out))]


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


@pytest.mark.parametrize("dims", [2, 3, 5])
def test_other_numbers_of_dimensions_are_taken(dims: int) -> None:
    torch.manual_seed(0)
    shape = (3, 2, 2)[: dims - 2] + (TOKENS, WIDTH)
    given = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    plain = outcome(functional.scaled_dot_product_attention, given, {"is_causal": True})
    for logical, wanted in zip(outcome(attention, given, {"is_causal": True}), plain, strict=True):
        assert torch.allclose(logical, wanted, rtol=1e-12, atol=1e-14)
