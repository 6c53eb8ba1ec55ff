"""Experts as runtimes with kernels of their own run them, and as several ranks share them out.

Copies of tokens, one for each expert that a token was routed to, are permuted so that those of one expert follow each other,
and their weights are applied between the experts' products, so that the last product's result need not be kept. Where ranks
share the experts out, copies are sent to the rank that holds theirs, and back: the graph is that of a rank to which as many
come as leave it. Gates, and experts that all tokens have, stay on every rank.

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
    """Change the experts of `model` into grouped ones, of which each of `size` ranks, `stride` apart, has an equal part.

    Returns which parameters are shared out; None where that is none of them.

    Raises:
        InputError: they are to be shared out, and it has no experts that are kept in one tensor per product, or their number
            does not divide.
    """
    shared: list[str] = []
    for path, module in model.named_modules():
        if not _holds_experts(module):
            continue
        count = int(module.num_experts)  # type: ignore[arg-type]
        if count % size:
            raise InputError(
                f"expert parallelism of {size} does not divide the {count} experts of '{path}': choose a width that does"
            )
        module.__class__ = around(_Grouped, type(module))
        module.num_parts, module.num_experts = size, count // size  # type: ignore[assignment]
        for name, whole in list(module.named_parameters(recurse=False)) if size > 1 else ():
            part = whole.new_empty((count // size, *whole.shape[1:]))
            module._parameters[name] = nn.Parameter(part, requires_grad=whole.requires_grad)
            shared.append(f"{path}.{name}")
    if size > 1 and not shared:
        raise InputError(
            "no layer was found whose experts are kept in one tensor per product, so that ranks could share them out: leave "
            "out --ep"
        )
    return ExpertParallel(size, stride, tuple(shared)) if shared else None


def are_shared_out(module: object) -> bool:
    """Whether a module is experts of which each rank has some."""
    return isinstance(module, _Grouped) and module.num_parts > 1


def _holds_experts(module: nn.Module) -> bool:
    """Whether a module's own parameters are those of its experts, one after the other, as transformers keeps them."""
    count, held = getattr(module, "num_experts", None), list(module.parameters(recurse=False))
    return (
        hasattr(module, "has_gate")
        and not getattr(module, "has_post_expert_norm", False)
        and isinstance(count, int)
        and len(held) > 1
        and all(parameter.dim() > 1 and parameter.shape[0] == count for parameter in held)
    )


class _Grouped:
    """Takes (tokens, width), and of every token its experts and their weights, both (tokens, experts per token)."""

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
        """Rows of which every rank of the group has sent an equal part; as many as this rank has sent, `copies` of every
        token."""
        return torch.ops.stagewright.all_to_all(x, EXPERT_GROUP, self.num_parts, copies)

    def _computed(self, rows: Tensor, weights: Tensor, expert: Tensor) -> Tensor:
        """Of (copies, width), sorted by `expert`, the experts' results times their `weights`."""
        bins = expert.float() if expert.device.type == "cpu" else expert.int()  # as kernels count them
        ends = torch.histc(bins, self.num_experts, 0, self.num_experts - 1).cumsum(0, dtype=torch.int32)
        weights = weights.unsqueeze(-1)
        up = self._product("gate_up_proj" if self.has_gate else "up_proj", rows, ends, expert)
        inner = self._apply_gate(up) if self.has_gate else self.act_fn(up)  # type: ignore[attr-defined]
        return self._product("down_proj", (inner * weights).to(rows.dtype), ends, expert, weights)

    def _product(
        self, name: str, rows: Tensor, ends: Tensor, expert: Tensor, weights: Tensor | None = None
    ) -> Tensor:
        """Every expert's product, with its bias for each of its rows, which is weighted where `weights` are given."""
        matrix = getattr(self, name)
        product = functional.grouped_mm(
            rows, matrix if self.is_transposed else matrix.transpose(-2, -1), offs=ends
        )
        if not self.has_bias:
            return product
        bias = getattr(self, f"{name}_bias")[expert]
        return product + (bias if weights is None else (bias * weights).to(product.dtype))


def permute_rows(x: Tensor, order: Tensor, copies: int) -> Tensor:
    """Of (rows, width) every row `copies` times, in `order`: copy j is one of row ``order[j] // copies``."""
    return torch.ops.stagewright.permute_rows(x, order, copies)


def unpermute_rows(x: Tensor, order: Tensor, copies: int) -> Tensor:
    """The sums of the copies of every row, that `permute_rows` has put in `order`."""
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
    raise RunError("a graph whose experts are shared out is predicted, not run: leave out --ep")


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
    """A class that does what `outer` does around what `inner` does."""
    return type(f"{outer.__name__.strip('_')}{inner.__name__}", (outer, inner), {})
