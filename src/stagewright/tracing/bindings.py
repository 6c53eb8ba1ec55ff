"""The cheapest call of an operator from Python.

An overload object such as ``torch.ops.aten.mm.default`` boxes its arguments and takes 1.5 to 2 times the host's time of the
binding that torch generates for the same operator, such as ``torch.mm`` or ``torch.Tensor.view``. A binding stands for an
overload only where the dispatcher is seen to get the same operator with the same arguments from both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stagewright.graph import Node, Ref, Symbol
from stagewright.graph.views import Lookup
from stagewright.tracing.arguments import decode, empty, operator
from stagewright.tracing.private import generated_bindings, without_modes

Args = tuple[Any, ...]


@dataclass(frozen=True)
class Binding:
    """A Python function that calls an operator.

    * `label`: tells the bindings of one operator apart;
    * `is_spread`: whether the elements of the list after the tensor are arguments of their own.
    """

    function: Callable[..., Any]
    label: str = ""
    is_spread: bool = False

    def arranged(self, args: Args) -> Args:
        """Return positional arguments of the operator as this function takes them."""
        return (args[0], *args[1]) if self.is_spread else args


def binding_of(node: Node, value: Lookup) -> Binding:
    """Return the cheapest function that does exactly what `node` says; `value` describes a value by its id."""
    kind = node.op, _kind(node.args, value), tuple((key, _kind(item, value)) for key, item in node.kwargs)
    if kind not in _BINDINGS:
        overload = Binding(operator(node.op))
        same = (binding for binding in _candidates(node) if _does_the_same(binding, overload, node, value))
        binding = next(same, overload)
        _BINDINGS[kind] = _copying(binding) if node.op in _VIEWS else binding
    return _BINDINGS[kind]


_VIEWS = ("aten.view.default", "aten._unsafe_view.default")


def _copying(binding: Binding) -> Binding:
    """Return a view that copies if a kernel laid out its argument differently from its shape function, as batch norm does
    with a transposed input."""
    view = binding.function

    def view_or_copy(tensor: torch.Tensor, *shape: Any) -> torch.Tensor:
        try:
            return view(tensor, *shape)
        except RuntimeError:
            return tensor.reshape(*shape)

    return replace(binding, function=view_or_copy)


_BINDINGS: dict[Any, Binding] = {}
"""Bindings by operator and kinds of arguments; the dispatcher ignores sizes."""


def _kind(argument: Any, value: Lookup) -> Any:
    if isinstance(argument, Ref):
        meta = value(argument.value).meta
        return "tensor", meta.dtype, len(meta.shape)
    if isinstance(argument, tuple) and not isinstance(argument, Symbol):
        return tuple(_kind(item, value) for item in argument)
    return type(argument).__name__ if type(argument) in (int, float, complex) else argument


def _candidates(node: Node) -> Iterator[Binding]:
    """Yield bindings of an operator's name, the cheapest first: lists of integers take longer than integers."""
    space, name, _ = node.op.split(".")
    if space != "aten":
        return
    functions, method = generated_bindings(name)
    is_list_last = len(node.args) == 2 and not node.kwargs and isinstance(node.args[1], tuple)
    if method is not None and is_list_last and node.args[1] and all(type(n) is int for n in node.args[1]):
        yield Binding(method, "spread", is_spread=True)
    for number, function in enumerate(functions):
        yield Binding(function, f"function{number}")
    if method is not None:
        yield Binding(method, "method")


def _does_the_same(binding: Binding, overload: Binding, node: Node, value: Lookup) -> bool:
    tensors: dict[int, torch.Tensor] = {}

    def tensor(number: int) -> torch.Tensor:
        if number not in tensors:
            tensors[number] = empty(value(number).meta, _META)
        return tensors[number]

    args = tuple(decode(argument, tensor, _META) for argument in node.args)
    kwargs = {key: decode(argument, tensor, _META) for key, argument in node.kwargs}
    try:
        (expected,) = _dispatched(overload, args, kwargs)
        (actual,) = _dispatched(binding, args, kwargs)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return False
    return (
        expected.op is actual.op
        and _equal(expected.arguments, actual.arguments)
        and expected.layouts == actual.layouts
    )


_META = torch.device("meta")


@dataclass(frozen=True)
class _Dispatched:
    """A call that reached the dispatcher, and the layouts of what its caller got."""

    op: Any
    arguments: Any
    layouts: Any = None


def _dispatched(binding: Binding, args: Args, kwargs: dict[str, Any]) -> list[_Dispatched]:
    with without_modes(), torch.no_grad(), _DispatchRecorder() as recorder:
        result = binding.function(*binding.arranged(args), **kwargs)
    layouts = [(t.shape, t.stride(), t.dtype, t.storage_offset()) for t in tree_leaves(result)]
    is_single = isinstance(result, torch.Tensor)
    return [_Dispatched(call.op, call.arguments, (is_single, layouts)) for call in recorder.calls]


class _DispatchRecorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Dispatched] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(_Dispatched(func, (args, kwargs or {})))
        return func(*args, **(kwargs or {}))


def _equal(first: Any, second: Any) -> bool:
    """Return whether arguments are the same tensors, or equal numbers of the same types."""
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor):
        return first is second
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(_equal, first, second))
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_equal(first[key], second[key]) for key in first)
    return repr(first) == repr(second)
