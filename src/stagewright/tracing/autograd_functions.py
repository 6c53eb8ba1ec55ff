"""Calls of custom ``torch.autograd.Function``: one opaque operator each in the exported program, which stands for the
operators of the function's own forward and backward.

Export runs a function's forward and drops its backward. So while a model is exported, a call leaves the operator
``stagewright::function``; the operators of both are recorded afterwards, when the joint graph is built, by calling the
function again on fake tensors and differentiating it with autograd, which handles the function's context.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from stagewright.graph import TensorMeta
from stagewright.tracing.arguments import empty, meta_of
from stagewright.tracing.model_errors import CannotTrace
from stagewright.tracing.private import FakeTensorMode, replaced_function_calls, without_modes

FUNCTION = "stagewright.function.default"


@dataclass(frozen=True, eq=False)
class FunctionCall:
    """A call of a custom function, to be repeated on other tensors.

    Attributes:
        apply: the `apply` of the function.
        leaves: leaves of the arguments, None in place of a tensor.
        spec: pytree of the arguments.
        tensors: indices of the leaves that are tensors.
        autocast: device, element type and whether it is on.
    """

    function: Any
    apply: Any
    leaves: tuple[Any, ...]
    spec: Any
    tensors: tuple[int, ...]
    autocast: tuple[str, torch.dtype, bool]

    @property
    def name(self) -> str:
        return self.function.__qualname__

    def __call__(self, tensors: list[torch.Tensor]) -> Any:
        """Return the results of the function, with its own derivative."""
        leaves = list(self.leaves)
        for index, tensor in zip(self.tensors, tensors, strict=True):
            leaves[index] = tensor
        device, dtype, is_on = self.autocast
        with torch.autocast(device, dtype=dtype, enabled=is_on):
            return self.apply(*pytree.tree_unflatten(leaves, self.spec))


class FunctionCalls:
    """The calls of custom functions while a model is exported; operators name them by their number."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._calls: dict[int, FunctionCall] = {}

    def __getitem__(self, number: int) -> FunctionCall:
        return self._calls[number]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Make each call of a custom function that may pass a gradient one operator inside."""
        try:
            with replaced_function_calls(self._call):
                yield
        finally:
            for number in self._calls:
                _LAYOUTS.pop(number, None)

    def _call(self, function: Any, apply: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, spec = pytree.tree_flatten(args)
        tensors = tuple(index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
        if kwargs or not tensors or not torch.is_grad_enabled():
            return apply(*args, **kwargs)
        given = [leaves[index] for index in tensors]
        device = given[0].device.type
        call = FunctionCall(
            function,
            apply,
            tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves),
            spec,
            tensors,
            (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)),
        )
        results, result_spec = pytree.tree_flatten(self._dry_run(call, given))
        places = [index for index, leaf in enumerate(results) if isinstance(leaf, torch.Tensor)]
        if not places:
            return apply(*args)
        number = next(_NUMBERS)
        self._calls[number] = call
        _LAYOUTS[number] = tuple(meta_of(results[index]) for index in places)
        passes = [results[index].requires_grad for index in places]
        for index, tensor, passes_gradient in zip(
            places, torch.ops.stagewright.function(number, given), passes, strict=True
        ):
            results[index] = tensor if passes_gradient else tensor.detach()
        return pytree.tree_unflatten(results, result_spec)

    def _dry_run(self, call: FunctionCall, given: list[torch.Tensor]) -> Any:
        """Return the results of the call on fresh fake tensors that no exporter sees."""
        layouts = [(meta_of(tensor), tensor.device, tensor.requires_grad) for tensor in given]
        with without_modes(), self._mode:
            tensors = [empty(meta, device).requires_grad_(needs) for meta, device, needs in layouts]
            versions = [tensor._version for tensor in tensors]
            result = None
            try:
                result = call(tensors)
                is_written = [tensor._version for tensor in tensors] != versions
            except RuntimeError as error:
                if "in-place operation" not in str(error):
                    raise
                is_written = True
        if is_written:
            raise CannotTrace(
                f"the autograd.Function '{call.name}' writes to its arguments (mark_dirty): return a new tensor instead"
            )
        return result


_NUMBERS = itertools.count()
_LAYOUTS: dict[int, tuple[TensorMeta, ...]] = {}
"""Layouts of the results of calls during export."""

_LIBRARY = torch.library.Library("stagewright", "FRAGMENT")
_LIBRARY.define("function(int number, Tensor[] tensors) -> Tensor[]")


@torch.library.register_fake("stagewright::function", lib=_LIBRARY)
def _fake_function(number: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [empty(meta, tensors[0].device) for meta in _LAYOUTS[number]]
