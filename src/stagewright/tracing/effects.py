"""Side effects of a model's code: they work as in PyTorch, or are refused by name before the model is exported."""

from __future__ import annotations

import functools
import itertools
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any, NoReturn
from unittest import mock

import numpy
import torch
from torch.fx.node import has_side_effect
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from stagewright.errors import TraceError
from stagewright.tracing.model_errors import CannotTrace, code_line, is_own_code
from stagewright.tracing.private import hooks_of, inference_as_no_grad, storage_key

HOOK = "stagewright.hook.default"


def check_hooks(model: torch.nn.Module) -> None:
    """Refuse hooks that autograd would call and a graph cannot.

    Raises:
        TraceError: names the parameter or module.
    """
    for hook in hooks_of(model):
        if hook.parameter is not None:
            raise TraceError(
                f"parameter '{hook.parameter}' has a hook ({hook.method}), which is not called while a graph is trained: "
                "change its gradient by a torch.autograd.Function around the parameter in forward (its backward is kept), "
                "or use requires_grad_(False) for what is not to be trained"
            )
        if "backward" in hook.method:
            raise TraceError(
                f"module '{hook.owner}' has a backward hook, which is not called while a graph is trained: give a tensor "
                "of its forward a hook (tensor.register_hook), or use a torch.autograd.Function"
            )


@dataclass(frozen=True, eq=False)
class TensorHook:
    """A hook on a tensor of the forward."""

    function: Callable[[torch.Tensor], torch.Tensor | None]
    where: str


class TensorHooks:
    """The hooks that a model's code puts on tensors while it is exported; marks name them by their number."""

    def __init__(self) -> None:
        self._hooks: list[TensorHook] = []

    def __getitem__(self, number: int) -> TensorHook:
        return self._hooks[number]

    @contextmanager
    def marked(self) -> Iterator[None]:
        """Make hooks leave marks inside."""
        with _Replaced(self._register):
            yield

    def _register(self, tensor: torch.Tensor, hook: Callable[..., Any]) -> _Handle:
        torch.ops.stagewright.hook(len(self._hooks), tensor)
        self._hooks.append(TensorHook(hook, code_line()))
        return _Handle()


class _Handle:
    """The handle of a hook that stays until the backward."""

    def remove(self) -> NoReturn:
        raise CannotTrace(
            "a tensor's hook is removed in forward, before any backward: do not register it in the first place"
        )


class _Replaced(TorchFunctionMode):
    """Attributes and methods of tensors that export does not understand, as what it does."""

    def __init__(self, register: Callable[[torch.Tensor, Callable[..., Any]], Any] | None = None) -> None:
        super().__init__()
        self._register = register

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _GET_DATA:  # created by every look-up
            return args[0].detach()
        if func == _SET_DATA:
            raise CannotTrace(
                "a tensor's .data is set in forward: keep what changes in a buffer, and change it in place under "
                "torch.no_grad()"
            )
        if func is torch.Tensor.register_post_accumulate_grad_hook:
            raise CannotTrace(
                "a parameter gets a post-accumulate hook in forward: a graph does not call it, so change gradients by a "
                "torch.autograd.Function"
            )
        if func is torch.Tensor.register_hook and self._register is not None:
            return self._register(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


_GET_DATA, _SET_DATA = torch.Tensor.data.__get__, torch.Tensor.data.__set__  # type: ignore[attr-defined]

_LIBRARY = torch.library.Library("stagewright", "FRAGMENT")
_LIBRARY.define("hook(int number, Tensor tensor) -> ()")
_LIBRARY.impl("hook", lambda number, tensor: None, "CompositeExplicitAutograd")
has_side_effect(torch.ops.stagewright.hook.default)


@contextmanager
def plain_execution() -> Iterator[None]:
    """Run compiled functions and modules uncompiled inside, and inference mode as no_grad."""
    with torch.compiler.set_stance("force_eager"), inference_as_no_grad():
        yield


@contextmanager
def written_buffers(model: torch.nn.Module) -> Iterator[None]:
    """Make a forward inside that reassigns buffers end by writing the new values to the original buffers: `torch.export` of
    torch 2.13 loses such assignments in inner modules."""
    forward = model.forward
    modules = list(model.named_modules())  # here, as a dry run watches iterations over the modules

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        given = [
            (module, path, name, buffer)
            for path, module in modules
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        result = forward(*args, **kwargs)
        for module, path, name, buffer in given:
            assigned = module._buffers.get(name)
            if assigned is buffer:
                continue
            if assigned is None or (assigned.shape, assigned.dtype) != (buffer.shape, buffer.dtype):
                raise CannotTrace(
                    f"forward assigns buffer '{name}' of module '{path or '(model)'}' a value of another shape or type: "
                    "keep its shape and type"
                )
            with torch.no_grad():
                buffer.copy_(assigned.detach())
            module._buffers[name] = buffer
        return result

    had = model.__dict__.get("forward")
    model.forward = run  # type: ignore[method-assign]
    try:
        yield
    finally:
        if had is None:
            del model.__dict__["forward"]
        else:
            model.forward = had  # type: ignore[method-assign]


@contextmanager
def restored_attributes(model: torch.nn.Module) -> Iterator[Callable[[], None]]:
    """Restore attributes and hooks of modules at the end, or when the yielded function is called, so that a first forward is
    traced: one that fills its caches."""
    held = {module: dict(vars(module)) for module in model.modules()}
    hooks = [
        (value, dict(value))
        for attributes in held.values()
        for name, value in attributes.items()
        if isinstance(value, dict) and "_hooks" in name
    ]

    def restore() -> None:
        for module, attributes in held.items():
            vars(module).clear()
            vars(module).update(attributes)
        for registered, at_first in hooks:
            registered.clear()
            registered.update(at_first)

    try:
        yield restore
    finally:
        restore()


# -- what a forward leaves behind -------------------------------------------------------------------------------------


@contextmanager
def without_effects(model: torch.nn.Module, run: Callable[[], Any]) -> Iterator[None]:
    """Watch a dry run of the model inside, and reject side effects that a graph would freeze: random numbers that are not
    torch's, the clock, counters, and writes to parameters. ``run()`` runs all of it, layer by layer, to find the line.

    Raises:
        TraceError: names the module and the line, and says what to do instead.
    """
    with restored_attributes(model) as restore:
        state = _State(model)
        random_before, attributes_before = state.random(), state.attributes()
        parameters_before = state.parameters()
        with _Replaced(), _without_clock():
            yield
        for name, parameter in state.parameters().items():
            if parameter != parameters_before[name]:
                state.refuse_parameter(name)
        if state.random() != random_before:
            with _Watched(state.random, _RANDOM_RULE):
                run()
            raise TraceError(f"the model cannot be traced: {_RANDOM_RULE}")
        if state.attributes() == attributes_before:
            return
        restore()
        first = _operators_of(run)
        attributes = state.attributes()
        later = _operators_of(run)
        for (owner, name), value in state.attributes().items():
            if value == attributes.get((owner, name), value):
                continue
            rule = _COUNTER_RULE.format(name=name)
            with _Watched(lambda key=(owner, name): state.attributes()[key], rule):
                run()
            raise _refused(owner, rule)
        if first != later:
            changed = (key for key, value in attributes.items() if value != attributes_before.get(key))
            owner, name = next(changed)
            raise _refused(owner, _FIRST_RULE.format(name=name))


def _refused(owner: str, rule: str) -> TraceError:
    return TraceError(f"the model cannot be traced: module '{owner or '(model)'}': {rule}")


def _operators_of(run: Callable[[], Any]) -> list[str]:
    with _Replaced(), _Operators() as log:
        run()
    return log.names


class _Operators(TorchFunctionMode):
    """A mode that notes calls that pass gradients or write, unlike those that fill a cache of constants."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        is_write = name.endswith("_") and not name.endswith("__")
        if name != "__get__" and (is_write or any(tensor.requires_grad for tensor in tensors)):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


_RANDOM_RULE = (
    "its forward draws from Python's or numpy's random numbers, or from its own generator, which a graph would freeze: "
    "draw with torch.rand and the like without a generator, and choose with torch.where"
)
_COUNTER_RULE = (
    "forward changes '{name}' with every call, which a graph would freeze: keep it as a tensor in a buffer "
    "(register_buffer), and change it in place"
)
_FIRST_RULE = (
    "its first forward runs other operators than later ones (and changes '{name}'), but a graph would have only one kind: "
    "do one-time work in the constructor, or before training"
)
_CLOCK_RULE = (
    "its forward reads the clock, which a graph would freeze: pass the time to the model as an input"
)


def states_outside() -> list[Any]:
    """Return the states of Python's and numpy's generators, in a form that can be compared."""
    return [random.getstate(), repr(numpy.random.get_state())]


class _State:
    """Comparable state that a model's code can change besides buffers."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self._model = model
        self._codes = _codes_of(self._modules.values())

    def parameters(self) -> dict[str, tuple[int, int]]:
        """Return the storage of every parameter and the number of writes to it."""
        named = self._model.named_parameters()
        return {name: (storage_key(parameter), parameter._version) for name, parameter in named}

    def refuse_parameter(self, name: str) -> NoReturn:
        parameter = dict(self._model.named_parameters())[name]
        remedy = (
            "change it after the step, by the optimizer or a callback"
            if parameter.requires_grad
            else "register it as a buffer (register_buffer), which may be written to"
        )
        raise TraceError(
            f"the model cannot be traced: its forward writes to parameter '{name}', which a graph does not: {remedy}"
        )

    def random(self) -> list[Any]:
        """Return the states of all generators of random numbers but torch's own."""
        return [*states_outside(), *map(_generator_state, self._generators())]

    def _generators(self) -> Iterator[Any]:
        for module in self._modules.values():
            yield from (value for value in vars(module).values() if _generator_state(value) is not None)
        for code, names in self._codes.items():
            for name in code.co_names:
                if _generator_state(names.get(name)) is not None:
                    yield names[name]

    def attributes(self) -> dict[tuple[str, str], Any]:
        """Return plain values by module and name: attributes of modules and their classes, and globals in their code."""
        values: dict[tuple[str, str], Any] = {}
        for path, module in self._modules.items():
            for name, value in vars(module).items():
                if name not in _OF_MODULES:
                    values[path, name] = _plain(value)
            for name, value in vars(type(module)).items():
                if type(value) in _COUNTED:
                    values[path, f"{type(module).__name__}.{name}"] = _plain(value)
        for code, names in self._codes.items():
            for name in code.co_names:
                if type(names.get(name)) in _COUNTED:
                    values["", name] = _plain(names[name])
        return values


_OF_MODULES = frozenset(torch.nn.Module().__dict__)
_COUNTED = (int, float, list, dict, set)


def _codes_of(modules: Iterable[torch.nn.Module]) -> dict[Any, dict[str, Any]]:
    """Return the code of the modules' functions and of those that it names, with the globals of each; none of libraries."""
    waiting: list[Any] = []
    for module in dict.fromkeys(modules):
        waiting += [value for value in vars(module).values() if callable(value)]
        waiting += [value for base in type(module).__mro__[:-1] for value in vars(base).values()]
    codes: dict[Any, dict[str, Any]] = {}
    while waiting:
        function = waiting.pop()
        function = getattr(function, "__wrapped__", getattr(function, "__func__", function))
        code, names = getattr(function, "__code__", None), getattr(function, "__globals__", None)
        if code is None or names is None or code in codes or not is_own_code(code.co_filename):
            continue
        codes[code] = names
        waiting += [names[name] for name in code.co_names if name in names]
    return codes


def _generator_state(value: Any) -> Any:
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return bytes(value.get_state().tolist())
    if type(value).__module__.partition(".")[0] == "numpy":
        if hasattr(value, "bit_generator"):
            return repr(value.bit_generator.state)
        if type(value).__name__ == "RandomState":
            return repr(value.get_state())
    return None


def _plain(value: Any, depth: int = 4) -> Any:
    """Return a comparable form of an attribute: numbers by value, tensors and others by their kind."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor) or depth == 0:
        return type(value).__name__
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item, depth - 1) for item in itertools.islice(value, 1000)], len(value)
    if isinstance(value, dict):
        return [(repr(key), _plain(item, depth - 1)) for key, item in value.items()]
    if isinstance(value, itertools.count):
        return repr(value)
    if isinstance(value, torch.nn.Module | type) or type(value).__module__.partition(".")[0] == "torch":
        return type(value).__name__
    return [(name, _plain(item, depth - 1)) for name, item in getattr(value, "__dict__", {}).items()]


class _Watched:
    """A watch that rejects, by `rule`, the first line of a model's code after which ``state()`` has changed."""

    def __init__(self, state: Callable[[], Any], rule: str) -> None:
        self._state = state
        self._rule = rule
        self._before: Any = None
        self._line = ""

    def __enter__(self) -> None:
        self._before = self._state()
        self._previous = sys.gettrace()
        sys.settrace(self._enter)

    def __exit__(self, *raised: Any) -> None:
        sys.settrace(self._previous)

    def _enter(self, frame: Any, event: str, argument: Any) -> Any:
        if not code_line(frame):
            return None
        return self._after_line

    def _after_line(self, frame: Any, event: str, argument: Any) -> Any:
        if self._line and self._state() != self._before:
            raise CannotTrace(self._rule, self._line)
        self._line = code_line(frame)
        return self._after_line


@contextmanager
def _without_clock() -> Iterator[None]:
    """Reject user code that reads the clock in this thread inside."""
    thread = get_ident()

    def refusing(function: Callable[[], Any]) -> Callable[[], Any]:
        def read(*args: Any) -> Any:
            if get_ident() == thread and is_own_code(sys._getframe(1).f_code.co_filename):
                raise CannotTrace(_CLOCK_RULE)
            return function(*args)

        return read

    with ExitStack() as stack:
        for name in ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns"):
            stack.enter_context(mock.patch.object(time, name, refusing(getattr(time, name))))
        yield
