"""Every private torch name Stagewright relies on, in one place.

Tested on torch 2.11, 2.12 and 2.13. `tests/tracing/test_private.py` fails when torch changes one of them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses import fake_tensor as _fake
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.export import exported_program as _exported
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import checkpoint as _checkpoint
from torch.utils._python_dispatch import _disable_current_modes

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "StorageWeakRef",
    "argument_place",
    "checkpoints_recomputed_by",
    "checkpoints_run_within",
    "converting_in_place",
    "depends_on_data",
    "functions_behind",
    "generated_bindings",
    "has_autocast_kernel",
    "hooks_of",
    "inference_as_no_grad",
    "is_composite",
    "is_mutable",
    "is_seen_by_modes",
    "kept_by",
    "light_exports",
    "num_holders",
    "num_holders_of_storage",
    "operator_names",
    "replaced_function_calls",
    "returns_list",
    "run_parts",
    "selective_policy",
    "storage_key",
    "with_autograd",
    "without_cpu_autocast",
    "without_modes",
    "written_arguments",
    "written_by",
]


class FakeTensorMode(_fake.FakeTensorMode):
    """Torch's, which stays the same where a model's code copies a module, and with it the mode of its fake tensors: a
    copied mode would free storages a second time, which ends the process later."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if self.avoid_device_init:
            _start_autograd()

    def __deepcopy__(self, memo: dict[int, Any]) -> FakeTensorMode:
        return self


@functools.cache
def _start_autograd() -> None:
    """Run the first backward, which starts a thread for every GPU, before a mode pretends that there is one: child processes
    of a process with such threads can run no backward."""
    torch.ones((), requires_grad=True).backward()


def is_composite(op: torch._ops.OpOverload) -> bool:
    """Return whether `op` has no own derivative: it is defined by other operators and must be lowered to them."""
    return op._can_decompose() and torch._C._dispatch_has_kernel_for_dispatch_key(
        op.name(), "CompositeImplicitAutograd"
    )


@contextlib.contextmanager
def converting_in_place() -> Iterator[None]:
    """Make ``module.to(...)`` inside replace the fake parameters of a module, except those that already match.

    PyTorch would swap their contents, which it refuses if there are weak references to them.
    """
    convert = torch.nn.Module._apply
    done: dict[tuple[int, int], tuple[Any, ...]] = {}  # with the identified objects, so that they stay alive

    def converted(
        fn: Callable[[torch.Tensor], torch.Tensor], whole: torch.nn.Parameter
    ) -> torch.nn.Parameter:
        if (id(fn), id(whole)) not in done:  # tied tensors stay tied
            with torch.no_grad():
                result = fn(whole)
            parameter = whole if result is whole else torch.nn.Parameter(result, whole.requires_grad)
            done[id(fn), id(whole)] = (parameter, fn, whole)
        return done[id(fn), id(whole)][0]

    def apply(
        self: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> torch.nn.Module:
        held = {
            name: parameter
            for name, parameter in self._parameters.items()
            if isinstance(parameter, FakeTensor)
        }
        for name in held:
            self._parameters[name] = None
        convert(self, fn, recurse)
        for name, whole in held.items():
            self._parameters[name] = converted(fn, whole)
        return self

    torch.nn.Module._apply = apply
    try:
        yield
    finally:
        torch.nn.Module._apply = convert


def storage_key(tensor: torch.Tensor) -> int:
    """Return the identity of the storage of a (possibly fake) tensor, valid while the storage is alive."""
    return tensor.untyped_storage()._cdata


def argument_place(op: torch._ops.OpOverload, name: str) -> int | None:
    """Return the position of an argument in the schema of `op`; None where it has no such argument."""
    names = [argument.name for argument in op._schema.arguments]
    return names.index(name) if name in names else None


@contextlib.contextmanager
def inference_as_no_grad() -> Iterator[None]:
    """Make ``torch.inference_mode`` inside ``torch.no_grad``, which an exporter understands."""
    mode = torch.inference_mode
    enter, leave = mode.__enter__, mode.__exit__

    def entered(self: Any) -> None:
        self._grad = torch.set_grad_enabled(torch.is_grad_enabled() and not self.mode)

    def exited(self: Any, *raised: Any) -> None:
        self._grad.__exit__(*raised)

    mode.__enter__, mode.__exit__ = entered, exited  # type: ignore[method-assign]
    try:
        yield
    finally:
        mode.__enter__, mode.__exit__ = enter, leave  # type: ignore[method-assign]


def depends_on_data(error: BaseException | None) -> bool:
    """Return whether code failed because it reads the values of fake tensors."""
    return isinstance(error, DataDependentOutputException | DynamicOutputShapeException)


def returns_list(op: torch._ops.OpOverload) -> bool:
    """Return whether an operator returns a list of any number of tensors."""
    returns = op._schema.returns
    return len(returns) == 1 and isinstance(returns[0].type, torch.ListType)


def is_mutable(op: Any) -> bool:
    """Return whether an operator writes to one of its arguments."""
    return isinstance(op, torch._ops.OpOverload) and op._schema.is_mutable


def written_arguments(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """Yield the arguments of a call that `op` writes to, for lists their items."""
    if not is_mutable(op):
        return
    for place, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from value if isinstance(value, list | tuple) else (value,)


def written_by(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that a call of `op` writes to."""
    yield from (item for item in written_arguments(op, args, kwargs) if isinstance(item, torch.Tensor))


@functools.cache
def operator_names() -> tuple[str, ...]:
    """Return every operator of the ``aten`` namespace, with its overload: ``softmax.int``, ``linear``."""
    names = torch._C._dispatch_get_all_op_names()
    return tuple(sorted(name.removeprefix("aten::") for name in names if name.startswith("aten::")))


@functools.cache
def generated_bindings(
    name: str,
) -> tuple[tuple[Callable[..., Any], ...], Callable[..., Any] | None]:
    """Return torch's generated Python bindings of an ``aten`` operator: functions, and the tensor method, if any."""
    spaces = [getattr(torch._C, space) for space in ("_VariableFunctions", "_nn")]
    functions = tuple(getattr(space, name) for space in spaces if hasattr(space, name))
    return functions, getattr(torch._C.TensorBase, name, None)


def has_autocast_kernel(name: str, device: str) -> bool:
    """Return whether autocast of a device ("CPU", "CUDA") has a rule for an operator."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", f"Autocast{device}")


def run_parts(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Call what a composite operator is defined by, also where an exporter wants to keep it whole."""
    return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def without_cpu_autocast() -> contextlib.AbstractContextManager[None]:
    """Keep the CPU's autocast from casting operators inside."""
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))


@contextlib.contextmanager
def with_autograd() -> Iterator[None]:
    """Make operators differentiable inside, also in the kernel of another and under dispatch modes."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView):
        excluded = excluded.remove(key)
    guard = torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)
    with guard, torch.enable_grad():
        yield


def without_modes() -> contextlib.AbstractContextManager[Any]:
    """Run operators inside without dispatch modes: neither fake tensors nor a tape."""
    return _disable_current_modes()


def is_seen_by_modes() -> bool:
    """Return whether a dispatch mode is active; torch 2.13 compiles nothing under one."""
    return torch._C._len_torch_dispatch_stack() > 0


def num_holders(tensor: torch.Tensor) -> int:
    """Return the number of references to `tensor`, counting all of Python as one; its views count too."""
    return tensor._use_count()  # type: ignore[attr-defined]


def num_holders_of_storage(tensor: torch.Tensor) -> int:
    """Return the number of tensors and other holders of the storage of `tensor`."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


@contextlib.contextmanager
def light_exports() -> Iterator[None]:
    """Make `torch.export` inside search for composite operators only if new ones were registered, and compile no Python code
    of graphs that nobody runs. Together these take an eighth of a trace."""
    original = _exported._collect_all_valid_cia_ops

    def cached_operators() -> set[Any]:
        num_registered = len(
            torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
        )
        if num_registered not in _COMPOSITES:
            _COMPOSITES.clear()
            _COMPOSITES[num_registered] = original()
        return _COMPOSITES[num_registered]

    _exported._collect_all_valid_cia_ops = cached_operators
    try:
        with _use_lazy_graph_module(True):
            yield
    finally:
        _exported._collect_all_valid_cia_ops = original


_COMPOSITES: dict[int, set[Any]] = {}
"""All composite operators, by how many were registered when they were looked for."""


@contextlib.contextmanager
def replaced_function_calls(call: Callable[..., Any]) -> Iterator[None]:
    """Replace ``F.apply(*args, **kwargs)`` inside by ``call(F, apply, args, kwargs)``, for each `torch.autograd.Function`
    outside torch."""
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        original_apply = original.__get__(None, cls)
        is_torch = cls.__module__.partition(".")[0] == "torch"
        return original_apply(*args, **kwargs) if is_torch else call(cls, original_apply, args, kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[assignment]


Recomputed = Callable[..., Any]


@contextlib.contextmanager
def checkpoints_run_within(
    region: Callable[[Any, tuple[Any, ...], bool], contextlib.AbstractContextManager[None]],
) -> Iterator[None]:
    """Make `torch.utils.checkpoint` inside call its function as plain code, within
    ``region(context_fn or None, arguments, use_reentrant)``."""

    def without_reentrant(
        function: Any, preserve: bool, context_fn: Any, *args: Any, **kwargs: Any
    ) -> Iterator[None]:
        context = None if context_fn is _checkpoint.noop_context_fn else context_fn
        with region(context, (*args, kwargs), False):
            yield

    def reentrant(function: Any, preserve: bool, *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*args)
        with region(None, args, True):
            # Autograd accumulates the gradients of each argument separately, then goes from the first to the last.
            separate = [arg.view_as(arg) if isinstance(arg, torch.Tensor) else arg for arg in reversed(args)]
            return function(*reversed(separate))

    with _replaced_checkpoint(without_reentrant, reentrant):
        yield


@contextlib.contextmanager
def checkpoints_recomputed_by(wrap: Callable[[Recomputed], Recomputed]) -> Iterator[None]:
    """Make functions under `torch.utils.checkpoint` inside recompute as ``wrap(function)``, which is called on their first
    run."""
    generator, original = _checkpoint._checkpoint_without_reentrant_generator, _checkpoint.CheckpointFunction

    def without_reentrant(function: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        return generator(wrap(function), *args, **kwargs)

    def reentrant(function: Any, preserve: bool, *args: Any) -> Any:
        runs = iter([function])
        again = wrap(function)
        return original.apply(lambda *given: next(runs, again)(*given), preserve, *args)

    with _replaced_checkpoint(without_reentrant, reentrant):
        yield


@contextlib.contextmanager
def _replaced_checkpoint(without_reentrant: Any, reentrant: Any) -> Iterator[None]:
    names = "_checkpoint_without_reentrant_generator", "CheckpointFunction"
    originals = [getattr(_checkpoint, name) for name in names]
    _checkpoint._checkpoint_without_reentrant_generator = without_reentrant
    _checkpoint.CheckpointFunction = type("CheckpointFunction", (), {"apply": staticmethod(reentrant)})
    try:
        yield
    finally:
        for name, original in zip(names, originals, strict=True):
            setattr(_checkpoint, name, original)


def selective_policy(contexts: Any) -> Callable[..., Any] | None:
    """Return the policy in the result of a ``context_fn``; None unless `create_selective_checkpoint_contexts` made it."""
    first = contexts[0] if isinstance(contexts, tuple) and len(contexts) == 2 else None
    return first.policy_fn if type(first) is _checkpoint._CachingTorchDispatchMode else None


def kept_by(policy: Any, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
    """Return whether a policy of selective checkpointing keeps the result of `op`; PyTorch recomputes what it offloads."""
    if op in _checkpoint.SAC_IGNORED_OPS:
        return False
    context = _checkpoint.SelectiveCheckpointContext(is_recompute=False)
    context.op_output = result  # torch 2.11 does not have it
    answer = policy(context, op, *args, **kwargs)
    if isinstance(answer, bool):
        return answer
    return answer in (_checkpoint.CheckpointPolicy.MUST_SAVE, _checkpoint.CheckpointPolicy.PREFER_SAVE)


@dataclass(frozen=True)
class Hook:
    """Code that a model has PyTorch call at a parameter or a module."""

    owner: str
    function: str
    method: str
    """Method that registered it."""
    parameter: str | None = None
    """Name of the parameter that it hangs on."""

    def __str__(self) -> str:
        kind = "module" if self.parameter is None else "parameter"
        return f"the hook {self.function} on {kind} '{self.owner}'"


_METHODS = {
    "_backward_hooks": "register_full_backward_hook",
    "_backward_pre_hooks": "register_full_backward_pre_hook",
    "_forward_hooks": "register_forward_hook",
    "_forward_pre_hooks": "register_forward_pre_hook",
}
_METHODS_OF_PARAMETERS = {
    "_backward_hooks": "register_hook",
    "_post_accumulate_grad_hooks": "register_post_accumulate_grad_hook",
}


def hooks_of(module: torch.nn.Module) -> Iterator[Hook]:
    """Return the hooks on a model's parameters and modules."""
    for name, parameter in module.named_parameters():
        for attribute, method in _METHODS_OF_PARAMETERS.items():
            for hook in (getattr(parameter, attribute, None) or {}).values():
                yield Hook(name, _called(hook), method, name)
    for path, child in module.named_modules():
        for attribute, method in _METHODS.items():
            for hook in getattr(child, attribute, {}).values():
                yield Hook(path or type(child).__name__, _called(hook), method)


def functions_behind(loss: torch.Tensor) -> list[str]:
    """Return the names of the Python `torch.autograd.Function`s that `loss` was computed with."""
    waiting, seen, names = [loss.grad_fn], set[Any](), dict[str, None]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            names[type(node)._forward_cls.__qualname__] = None  # type: ignore[attr-defined]
        waiting += [following for following, _ in node.next_functions]
    return list(names)


def _called(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)
