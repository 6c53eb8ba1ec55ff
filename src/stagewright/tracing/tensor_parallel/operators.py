"""Collectives as operators: functional, with layouts known while tracing and derivatives that are operators too.

Each names its group of ranks. Under fake tensors nothing is sent; to run them, `use_group` says which processes the
group is. A value is either *alike* (the same on every rank of the group) or *local*; derivatives follow from which of
the two an argument and a result are, as in Megatron-LM's f and g.

Source: "Megatron-LM" (arXiv 1909.08053), section 3; for sequence parallelism "Reducing Activation Recomputation in
Large Transformer Models" (arXiv 2205.05198), section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stagewright.errors import RunError

# torch 2.13 renamed both; the old names stay, with a warning.
_all_gather_into = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter_into = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

_LIBRARY = torch.library.Library("stagewright", "FRAGMENT")
_GROUPS: dict[str, dist.ProcessGroup] = {}


def rank_in(name: str) -> int:
    """Return this process's rank in the group called `name`."""
    return dist.get_rank(group_of(name))


def use_group(name: str, group: dist.ProcessGroup) -> None:
    """Run collectives of the group called `name` among the processes of `group` from now on."""
    _GROUPS[name] = group


def group_of(name: str) -> dist.ProcessGroup:
    if name not in _GROUPS:
        raise RunError(
            f"a collective of the group '{name}' runs, but this process belongs to no such group: "
            "run the plan with `stagewright run`, which makes its groups"
        )
    return _GROUPS[name]


def define(
    schema: str,
    run: Callable[..., Any],
    lay_out: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    keep: Callable[..., None] | None = None,
    draws: bool = False,
) -> None:
    """Register an operator of ours: what runs it, the layout of what it returns, and its derivative, for which `keep` sets
    aside what it needs; by default all arguments but the first. `draws` says whether it may draw random numbers."""
    name = f"stagewright::{schema.partition('(')[0]}"
    _LIBRARY.define(schema, tags=(torch.Tag.nondeterministic_seeded,) if draws else ())
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(name, lay_out, lib=_LIBRARY)
    if backward is not None:
        torch.library.register_autograd(name, backward, setup_context=keep or _keep_arguments, lib=_LIBRARY)


def _keep_arguments(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.arguments = inputs[1:]


def _resized(x: Tensor, dim: int, size: int) -> Tensor:
    return x.new_empty((*x.shape[:dim], size, *x.shape[dim + 1 :]))


def _lay_out_part(x: Tensor, dim: int, group: str, size: int) -> Tensor:
    if x.shape[dim] % size:
        raise ValueError(f"a dimension of {x.shape[dim]} cannot be split evenly over {size} ranks")
    return _resized(x, dim, x.shape[dim] // size)


# -- the operators ------------------------------------------------------------------------------------------------------


def enter(x: Tensor, group: str, size: int) -> Tensor:
    """Return a replicated value unchanged where local work on it begins; its cotangents are summed over the group."""
    return torch.ops.stagewright.enter(x, group, size)


define(
    "enter(Tensor x, str group, int size) -> Tensor",
    run=lambda x, group, size: x,
    lay_out=lambda x, group, size: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device),
    backward=lambda ctx, cotangent: (all_reduce(cotangent, *ctx.arguments), None, None),
)


def all_reduce(x: Tensor, group: str, size: int) -> Tensor:
    """Return the sum of a local value over the group, replicated on every rank."""
    return torch.ops.stagewright.all_reduce(x, group, size)


def _run_all_reduce(x: Tensor, group: str, size: int) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group_of(group))
    return total


define(
    "all_reduce(Tensor x, str group, int size) -> Tensor",
    run=_run_all_reduce,
    lay_out=lambda x, group, size: x.new_empty(x.shape),
    backward=lambda ctx, cotangent: (cotangent, None, None),
)


def all_gather(x: Tensor, dim: int, group: str, size: int, sums: bool) -> Tensor:
    """Return the local values of the group concatenated along `dim`.

    With `sums` local work begins on the result, so its cotangents are summed; otherwise they are replicated.
    """
    return torch.ops.stagewright.all_gather(x, dim, group, size, sums)


def _run_all_gather(x: Tensor, dim: int, group: str, size: int, sums: bool) -> Tensor:
    local = x.contiguous()
    parts = local.new_empty((size, *local.shape))
    _all_gather_into(parts.view(-1), local.view(-1), group=group_of(group))
    return parts.flatten(0, 1) if dim == 0 else torch.cat(parts.unbind(), dim)


def _all_gather_backward(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:
    *place, sums = ctx.arguments
    gradient = reduce_scatter(cotangent, *place) if sums else shard(cotangent, *place)
    return gradient, None, None, None, None


define(
    "all_gather(Tensor x, int dim, str group, int size, bool sums) -> Tensor",
    run=_run_all_gather,
    lay_out=lambda x, dim, group, size, sums: _resized(x, dim, x.shape[dim] * size),
    backward=_all_gather_backward,
)


def reduce_scatter(x: Tensor, dim: int, group: str, size: int) -> Tensor:
    """Return this rank's part along `dim` of the sum of a local value over the group."""
    return torch.ops.stagewright.reduce_scatter(x, dim, group, size)


def _run_reduce_scatter(x: Tensor, dim: int, group: str, size: int) -> Tensor:
    parts = torch.stack(x.chunk(size, dim))
    local = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
    _reduce_scatter_into(local.view(-1), parts.view(-1), group=group_of(group))
    return local


def _gather_backward(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:
    return all_gather(cotangent, *ctx.arguments, sums=False), None, None, None


_SCHEMA = "(Tensor x, int dim, str group, int size) -> Tensor"
define(f"reduce_scatter{_SCHEMA}", _run_reduce_scatter, _lay_out_part, _gather_backward)


def shard(x: Tensor, dim: int, group: str, size: int) -> Tensor:
    """Return this rank's part along `dim` of a replicated value."""
    return torch.ops.stagewright.shard(x, dim, group, size)


def _run_shard(x: Tensor, dim: int, group: str, size: int) -> Tensor:
    return x.chunk(size, dim)[rank_in(group)].clone(memory_format=torch.contiguous_format)


define(f"shard{_SCHEMA}", _run_shard, _lay_out_part, _gather_backward)


def group_rank(group: str, device: torch.device) -> Tensor:
    """Return this process's rank in the group, as a scalar integer tensor."""
    return torch.ops.stagewright.group_rank(group, device=device)


define(
    "group_rank(str group, *, Device device) -> Tensor",
    run=lambda group, *, device: torch.tensor(rank_in(group), dtype=torch.int64, device=device),
    lay_out=lambda group, *, device: torch.empty((), dtype=torch.int64, device=device),
)
