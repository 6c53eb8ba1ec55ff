"""Context parallelism: each rank has a part of the sequence, and attention sees the keys and values of all parts.

Everything but attention treats tokens independently, so the graph of one rank is that of a shorter sequence in which keys
and values are gathered before attention; their gradients are reduced and scattered. Parts are assigned so that under a
causal mask all ranks compute equally many scores.

Source: ring attention (Liu et al. 2023, arXiv 2310.01889), with the gathers of Llama 3 (arXiv 2407.21783, section 3.3.2) in
place of its ring, and the balance of Brandon et al. 2023, "Striped Attention" (arXiv 2311.09431). Such a graph is costed,
not run.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from stagewright.errors import InputError, RunError
from stagewright.graph import OperatorGraph, Part
from stagewright.graph.tensor_parallel import ALL_GATHER, CONTEXT_GROUP, group_of
from stagewright.tracing.models.from_config import check_positions
from stagewright.tracing.tensor_parallel.operators import all_gather, define

_TOKENS = 2
"""The dimension of queries, keys and values (batch, head, token, width) that is split."""


def check_context_parallel(model: nn.Module, size: int, sequence_length: int) -> None:
    """Check that every layer but attention treats tokens independently.

    Raises:
        InputError: names the module that does not, or the length that cannot be split.
    """
    if sequence_length % (2 * size):
        raise InputError(
            f"context parallelism of {size} needs {2 * size} equal parts of a sequence, but {sequence_length} tokens cannot "
            "be divided so: choose a multiple"
        )
    check_positions(model, sequence_length)
    for path, module in model.named_modules():
        window = getattr(module, "sliding_window", None)
        if isinstance(window, int) and window < sequence_length:
            raise InputError(
                f"'{path}' attends to a window of {window} of the {sequence_length} tokens, which context parallelism does "
                "not divide: leave out --cp"
            )
        if isinstance(module, nn.modules.conv._ConvNd) or "Mamba" in type(module).__name__:
            raise InputError(
                f"'{path}' ({type(module).__name__}) mixes tokens outside of attention, so that its sequence cannot be "
                "split: leave out --cp"
            )


def check_divided(graph: OperatorGraph, num_tokens: int) -> None:
    """Check that the attention of a traced model sees other ranks' tokens; each rank has `num_tokens` of a sample.

    Raises:
        InputError: there is no attention, or some that sees only this rank's tokens.
    """
    forward = [node for node in graph.nodes if node.part is Part.FORWARD]
    if not any(node.op == ALL_GATHER and group_of(node)[0] == CONTEXT_GROUP for node in forward):
        raise InputError("no attention was found that context parallelism could divide: leave out --cp")
    for node in forward:
        is_apart = (
            "scaled_dot_product" in node.op
            or node.op == "stagewright.attention.default"
            or (
                "softmax" in node.op
                and graph.values[node.inputs[0]].meta.shape[-2:] == (num_tokens, num_tokens)
            )
        )
        if is_apart:
            raise InputError(
                f"attention that context parallelism cannot divide: {graph.describe(node)} sees only this rank's tokens; "
                "leave out --cp"
            )


def over_all_parts(
    size: int, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None
) -> Tensor:
    """Return the attention of this rank's queries to the keys and values of `size` ranks, in one kernel."""
    if size > 1:
        key, value = (all_gather(tensor, _TOKENS, CONTEXT_GROUP, size, sums=True) for tensor in (key, value))
    used = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    return torch.ops.stagewright.shared_attention(query, key, value, is_causal, used)[0]


def _not_run(*_: Any) -> Any:
    raise RunError(
        "attention of a graph that was traced for another device is predicted, not run: trace on the device"
    )


def like_queries(query: Tensor, width: int) -> Tensor:
    """Return a tensor (batch, head, token, width) laid out as (batch, token, head, width), as fused kernels do."""
    batch, heads, tokens, _ = query.shape
    return query.new_empty((batch, tokens, heads, width)).transpose(1, 2)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.arguments = inputs[3:]


def _backward(ctx: Any, cotangent: Tensor, _: Tensor) -> tuple[Any, ...]:
    gradients = torch.ops.stagewright.shared_attention_backward(cotangent, *ctx.saved_tensors, *ctx.arguments)
    return (*gradients, None, None)


define(
    "shared_attention(Tensor query, Tensor key, Tensor value, bool is_causal, float scale) -> (Tensor, Tensor)",
    run=_not_run,
    lay_out=lambda query, key, value, is_causal, scale: (
        like_queries(query, value.shape[-1]), query.new_empty(query.shape[:-1], dtype=torch.float32),
    ),
    backward=_backward,
    keep=_keep,
)  # fmt: skip
define(
    "shared_attention_backward(Tensor cotangent, Tensor query, Tensor key, Tensor value, Tensor out, Tensor sums, "
    "bool is_causal, float scale) -> (Tensor, Tensor, Tensor)",
    run=_not_run,
    lay_out=lambda cotangent, *given: tuple(like_queries(tensor, tensor.shape[-1]) for tensor in given[:3]),
)
