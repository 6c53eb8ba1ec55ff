"""Grouped experts, as in runtimes with special kernels, and expert parallelism.

Copies of tokens, one for each expert that a token was routed to, are permuted so that those of one expert are contiguous,
and their weights are applied between the experts' matmuls, so that the result of the last need not be saved. With expert
parallelism, copies are sent to the rank that holds their expert, and back: the graph is that of a rank that receives as many
as it sends. Gates and shared experts are replicated on every rank.

Source: "GShard" (arXiv 2006.16668) for expert parallelism; the all-to-all dispatcher of Megatron-Core for the order of its
steps. Ignores: routing that favours some experts. Such a graph is costed, not run.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from stagewright.errors import InputError, RunError
from stagewright.graph.expert_parallel import EXPERT_GROUP, ExpertParallel
from stagewright.tracing.tensor_parallel.operators import define


def group_experts(model: nn.Module, size: int = 1, stride: int = 1) -> ExpertParallel | None:
    """Change the experts of `model` into grouped ones, sharded equally over `size` ranks, `stride` apart.

    Return the sharded parameters; None if there are none.

    Raises:
        InputError: they are to be sharded, but no experts are stored in one tensor per matmul, or their number is not
            divisible.
    """
    shared: list[str] = []
    for path, module in model.named_modules():
        if not _holds_experts(module):
            continue
        count = int(module.num_experts)  # type: ignore[arg-type]
        if count % size:
            raise InputError(
                f"expert parallelism of {size} does not divide the {count} experts of '{path}': choose a degree that does"
            )
        module.__class__ = around(_Grouped, type(module))
        module.num_parts, module.num_experts = size, count // size  # type: ignore[assignment]
        for name, whole in list(module.named_parameters(recurse=False)) if size > 1 else ():
            part = whole.new_empty((count // size, *whole.shape[1:]))
            module._parameters[name] = nn.Parameter(part, requires_grad=whole.requires_grad)
            shared.append(f"{path}.{name}")
    if size > 1 and not shared:
        raise InputError(
            "no layer stores its experts in one tensor per matmul, so they cannot be sharded: leave out --ep"
        )
    return ExpertParallel(size, stride, tuple(shared)) if shared else None


def are_sharded(module: object) -> bool:
    """Return whether a module has experts that are sharded over ranks."""
    return isinstance(module, _Grouped) and module.num_parts > 1


def _holds_experts(module: nn.Module) -> bool:
    """Return whether a module's own parameters stack those of its experts, as in transformers."""
    count, held = getattr(module, "num_experts", None), list(module.parameters(recurse=False))
    return (
        hasattr(module, "has_gate")
        and not getattr(module, "has_post_expert_norm", False)
        and isinstance(count, int)
        and len(held) > 1
        and all(parameter.dim() > 1 and parameter.shape[0] == count for parameter in held)
    )


class _Grouped:
    """Grouped experts; inputs are (tokens, width), and experts and weights of tokens, both (tokens, experts per token)."""

    num_parts: int
    num_experts: int
    has_gate: bool
    has_bias: bool
    is_transposed: bool

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        copies = top_k_index.shape[-1]
        expert, order = torch.sort(top_k_index.reshape(-1))
        rows, weights = permute_rows(hidden_states, order, copies), top_k_weights.reshape(-1)[order]
        if self.num_parts == 1:
            return unpermute_rows(self._computed(rows, weights, expert), order, copies)
        local = expert % self.num_experts
        rows, weights, expert = (self._sent(tensor, copies) for tensor in (rows, weights, local))
        expert, inner = torch.sort(expert)
        results = self._computed(permute_rows(rows, inner, 1), weights[inner], expert)
        return unpermute_rows(self._sent(unpermute_rows(results, inner, 1), copies), order, copies)

    def _sent(self, x: Tensor, copies: int) -> Tensor:
        """Exchange rows so that every rank receives an equal part from each, as many as it sends, `copies` per token."""
        return torch.ops.stagewright.all_to_all(x, EXPERT_GROUP, self.num_parts, copies)

    def _computed(self, rows: Tensor, weights: Tensor, expert: Tensor) -> Tensor:
        """Return the experts' results times `weights`, for rows (copies, width) sorted by `expert`."""
        bins = expert.float() if expert.device.type == "cpu" else expert.int()  # as kernels count them
        ends = torch.histc(bins, self.num_experts, 0, self.num_experts - 1).cumsum(0, dtype=torch.int32)
        weights = weights.unsqueeze(-1)
        up = self._matmul("gate_up_proj" if self.has_gate else "up_proj", rows, ends, expert)
        inner = self._apply_gate(up) if self.has_gate else self.act_fn(up)  # type: ignore[attr-defined]
        return self._matmul("down_proj", (inner * weights).to(rows.dtype), ends, expert, weights)

    def _matmul(
        self, name: str, rows: Tensor, ends: Tensor, expert: Tensor, weights: Tensor | None = None
    ) -> Tensor:
        """Return every expert's matmul plus its bias, times `weights` if given."""
        matrix = getattr(self, name)
        product = functional.grouped_mm(
            rows, matrix if self.is_transposed else matrix.transpose(-2, -1), offs=ends
        )
        if not self.has_bias:
            return product
        bias = getattr(self, f"{name}_bias")[expert]
        return product + (bias if weights is None else (bias * weights).to(product.dtype))


def permute_rows(x: Tensor, order: Tensor, copies: int) -> Tensor:
    """Return every row of (rows, width) `copies` times, in `order`: copy j is of row ``order[j] // copies``."""
    return torch.ops.stagewright.permute_rows(x, order, copies)


def unpermute_rows(x: Tensor, order: Tensor, copies: int) -> Tensor:
    """Return the sum of the copies of every row, which `permute_rows` has put in `order`."""
    return torch.ops.stagewright.unpermute_rows(x, order, copies)


def _keep_order(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.copies = inputs[2]


define(
    "permute_rows(Tensor x, Tensor order, int copies) -> Tensor",
    run=lambda x, order, copies: x[order // copies],
    lay_out=lambda x, order, copies: x.new_empty((x.shape[0] * copies, *x.shape[1:])),
    backward=lambda ctx, cotangent: (unpermute_rows(cotangent, ctx.saved_tensors[0], ctx.copies), None, None),
    keep=_keep_order,
)
define(
    "unpermute_rows(Tensor x, Tensor order, int copies) -> Tensor",
    run=lambda x, order, copies: (
        torch.empty_like(x).index_copy_(0, order, x).unflatten(0, (-1, copies)).sum(1)
    ),
    lay_out=lambda x, order, copies: x.new_empty((x.shape[0] // copies, *x.shape[1:])),
    backward=lambda ctx, cotangent: (permute_rows(cotangent, ctx.saved_tensors[0], ctx.copies), None, None),
    keep=_keep_order,
)


def _not_run(*_: Any) -> Any:
    raise RunError("a graph with expert parallelism is predicted, not run: leave out --ep")


def _send_back(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:
    return torch.ops.stagewright.all_to_all(cotangent, *ctx.arguments), None, None, None


define(
    "all_to_all(Tensor x, str group, int size, int copies) -> Tensor",
    run=_not_run,
    lay_out=lambda x, group, size, copies: x.new_empty(x.shape),
    backward=_send_back,
)


@functools.cache
def around(outer: type, inner: type) -> type:
    """Return a class in which `outer` wraps `inner`."""
    return type(f"{outer.__name__.strip('_')}{inner.__name__}", (outer, inner), {})
