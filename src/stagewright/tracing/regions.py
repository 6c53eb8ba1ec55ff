"""Regions of `torch.utils.checkpoint` in a traced model: where they begin and end, and what they keep.

A region becomes two marks in the exported program, which stay in place through its passes: operators between them are in
the region. Its results are those of the same code without it; `graph.policy` has its effect on memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.fx.node import has_side_effect
from torch.utils import _pytree as pytree

from stagewright.tracing.model_errors import CannotTrace
from stagewright.tracing.private import checkpoints_run_within, kept_by, selective_policy

BEGIN = "stagewright.begin_region.default"
END = "stagewright.end_region.default"

Keeps = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], bool]
"""Whether selective checkpointing keeps a result, by operator, arguments, keyword arguments and result."""

Context = Callable[[], tuple[Any, Any]] | None
"""The ``context_fn`` of a region, or None."""


class Regions:
    """The regions that a model's code enters while it is exported; marks name them by their number."""

    def __init__(self) -> None:
        self._contexts: list[Context] = []

    def marked(self) -> AbstractContextManager[None]:
        """Make regions inside leave marks and run as plain code."""
        return checkpoints_run_within(self._region)

    @contextmanager
    def _region(self, context: Context, args: tuple[Any, ...], is_reentrant: bool) -> Iterator[None]:
        if not torch.is_grad_enabled():
            yield
            return
        _check(context, args, is_reentrant)
        torch.ops.stagewright.begin_region(len(self._contexts))
        self._contexts.append(context)
        yield
        torch.ops.stagewright.end_region()

    def keeps(self, number: int) -> Keeps | None:
        """Return what a region entered now keeps; None for nothing. Policies may count calls, so each region has its own."""
        context = self._contexts[number]
        if context is None:
            return None
        policy = selective_policy(context())
        return lambda op, args, kwargs, result: kept_by(policy, op, args, kwargs, result)


@contextmanager
def without_regions() -> Iterator[None]:
    """Run regions inside as plain code."""
    with checkpoints_run_within(lambda *region: nullcontext()):
        yield


def _check(context: Context, args: tuple[Any, ...], is_reentrant: bool) -> None:
    """Reject regions that autograd would treat differently from the graph.

    Raises:
        CannotTrace: names the problem and what to do instead.
    """
    if context is not None and selective_policy(context()) is None:
        raise CannotTrace(
            "torch.utils.checkpoint has a context_fn that does not reveal what it keeps: use "
            "create_selective_checkpoint_contexts with a policy, or leave it out"
        )
    if not is_reentrant:
        return
    direct = [arg for arg in args if isinstance(arg, torch.Tensor)]
    nested = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    if not any(tensor.requires_grad for tensor in direct):
        raise CannotTrace(
            "torch.utils.checkpoint with use_reentrant=True has no argument that requires a gradient, so autograd would "
            "give none to the parameters inside: use use_reentrant=False"
        )
    if sum(tensor.requires_grad for tensor in nested) > sum(tensor.requires_grad for tensor in direct):
        raise CannotTrace(
            "torch.utils.checkpoint with use_reentrant=True has an argument with tensors inside, to which autograd would "
            "give no gradients: pass them one by one, or use use_reentrant=False"
        )


_LIBRARY = torch.library.Library("stagewright", "FRAGMENT")
_LIBRARY.define("begin_region(int number) -> ()")
_LIBRARY.define("end_region() -> ()")


def _do_nothing(*args: int) -> None:
    return None


for _name in ("begin_region", "end_region"):
    _LIBRARY.impl(_name, _do_nothing, "CompositeExplicitAutograd")
    has_side_effect(getattr(torch.ops.stagewright, _name).default)
