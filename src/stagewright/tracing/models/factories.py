"""Models from a user's factory, `package.module:factory`: a module, its inputs and perhaps a loss."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stagewright.errors import InputError, StagewrightError, nearest
from stagewright.tracing.dependencies import LOADED
from stagewright.tracing.models.losses import FactoryModel, LanguageModel
from stagewright.tracing.models.reference import ModelReference
from stagewright.tracing.models.source import FactoryName, search_last, split_factory
from stagewright.tracing.private import storage_key

if TYPE_CHECKING:
    from stagewright.tracing.models.build import MicrobatchShape

_SHAPE = (
    "return (module, inputs) or (module, inputs, loss_fn), inputs a tuple or dict of tensors, batch first"
)


def build_from_factory(
    reference: ModelReference, microbatch: MicrobatchShape
) -> tuple[nn.Module, dict[str, Tensor], int]:
    """Return module with loss, example inputs and tokens (or samples) per microbatch of a reference to a factory.

    The factory is called with the overrides and with those of `microbatch_size`, `sequence_length` and
    `dtype` (a `torch.dtype`) that it has parameters for; meanwhile torch's default dtype is that of the microbatch. Inputs
    of another batch size are repeated or cut to size. Raises `InputError` naming the line that failed.
    """
    factory = function_of(reference.text)
    arguments = _arguments(factory, reference, microbatch)
    default = torch.get_default_dtype()
    torch.set_default_dtype(microbatch.torch_dtype)
    try:
        result = factory(**arguments)
    except StagewrightError:
        raise
    except Exception as error:
        raise InputError(f"factory '{reference.text}' failed at {failed_at(error)}") from error
    finally:
        torch.set_default_dtype(default)
    net, inputs, loss_fn = _unpack(result, reference.text)
    _keep_as_buffers(net)
    module = net if isinstance(net, LanguageModel) and loss_fn is None else None
    taken, named = _name_inputs(net, inputs, loss_fn, reference.text)
    if "microbatch_size" not in arguments:
        size = microbatch.microbatch_size
        named = {key: _resize(value, size, key, reference.text) for key, value in named.items()}
    per_sample = microbatch.sequence_length if "sequence_length" in arguments else 1
    model = module or FactoryModel(net, taken, loss_fn, reference.text)
    return model, named, microbatch.microbatch_size * per_sample


def function_of(text: str) -> Callable[..., Any]:
    """Return the function that `text` names, whose module is imported. Raises `InputError` where that fails."""
    name = split_factory(text)
    assert name is not None
    return load_function(name, text)


def failed_at(error: BaseException) -> str:
    """Return an error and its location in the user's own code."""
    return f"{_where(error)}: {_what(error)}"


def load_module(name: FactoryName, text: str) -> ModuleType:
    """Return the module of the function `name`, which `text` names. Raises `InputError` where it cannot be imported."""
    try:
        return _load_file(Path(name.module).expanduser()) if name.is_file else _load_module(name.module)
    except Exception as error:
        raise InputError(
            f"factory '{text}' cannot be imported, at {failed_at(error)}; correct it or install what it needs"
        ) from error


def load_function(name: FactoryName, text: str) -> Callable[..., Any]:
    module = load_module(name, text)
    function = getattr(module, name.function, None)
    if function is None:
        functions = [
            key for key, value in vars(module).items() if callable(value) and not key.startswith("_")
        ]
        raise InputError(
            f"module '{name.module}' has no '{name.function}'{nearest(name.function, functions)}"
        )
    if not callable(function):
        raise InputError(
            f"'{text}' is a {type(function).__name__}, not a function: name a function that can {_SHAPE}"
        )
    return function


def _load_module(name: str) -> ModuleType:
    search_last(os.getcwd())
    with LOADED.importing(name):
        return importlib.import_module(name)


def _load_file(path: Path) -> ModuleType:
    """Return the module in the file, which may import its neighbours, also later, unless a library has their names. It is
    imported again if it or one of them has changed."""
    path = path.resolve()
    search_last(str(path.parent))
    LOADED.forget_changed(path.parent)
    digest = hashlib.sha256(bytes(path) + path.read_bytes()).hexdigest()
    unique = f"stagewright_factory_{path.stem}_{digest[:8]}"
    if unique in sys.modules:
        return sys.modules[unique]
    LOADED.forget_namesakes(path.parent)
    spec = importlib.util.spec_from_file_location(unique, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with LOADED.importing(unique):
        sys.modules[unique] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[unique]
            raise
    return module


def _arguments(
    factory: Callable[..., Any], reference: ModelReference, microbatch: MicrobatchShape
) -> dict[str, Any]:
    parameters = inspect.signature(factory).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for key in reference.overrides:
        if key not in parameters and not takes_any:
            takes = ", ".join(parameters) or "nothing"
            raise InputError(
                f"factory '{reference.text}' takes no '{key}'{nearest(key, parameters)}: it takes {takes}"
            )
    offered = {
        "microbatch_size": microbatch.microbatch_size,
        "sequence_length": microbatch.sequence_length,
        "dtype": microbatch.torch_dtype,
    }
    return {key: value for key, value in offered.items() if key in parameters} | dict(reference.overrides)


def _unpack(result: Any, text: str) -> tuple[nn.Module, Any, Callable[..., Any] | None]:
    if not isinstance(result, tuple) or len(result) not in (2, 3) or not isinstance(result[0], nn.Module):
        got = f"a tuple of {len(result)}" if isinstance(result, tuple) else f"a {type(result).__name__}"
        raise InputError(f"factory '{text}' returned {got}: {_SHAPE}")
    net, inputs = result[:2]
    inputs = (inputs,) if isinstance(inputs, Tensor) else inputs
    loss_fn = result[2] if len(result) == 3 else None
    values = inputs.values() if isinstance(inputs, Mapping) else inputs
    for value in values if isinstance(inputs, Mapping | Sequence) else (None,):
        if not isinstance(value, Tensor) or value.dim() == 0:
            raise InputError(f"factory '{text}' returned a {type(value).__name__} among its inputs: {_SHAPE}")
    return net, inputs, loss_fn


def _keep_as_buffers(net: nn.Module) -> None:
    """Register tensors in plain attributes of modules, such as masks and positions, as buffers, so that every rank creates
    them like weights, and they are kept when forward reassigns them. As before, they are in no state dict. Views of
    parameters and buffers stay as they are: old hooks like `spectral_norm` set one in every forward."""
    registered = {_key(tensor) for tensor in (*net.parameters(), *net.buffers())}
    for module in net.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, Tensor) and _key(value) not in registered and not value.requires_grad:
                delattr(module, name)
                module.register_buffer(name, value, persistent=False)


def _key(tensor: Tensor) -> int:
    """Return a key that is equal for tensors that share memory; a sparse one has no storage to compare."""
    return storage_key(tensor) if tensor.layout is torch.strided else id(tensor)


def _name_inputs(
    net: nn.Module, inputs: Mapping[str, Tensor] | Sequence[Tensor], loss_fn: Any, text: str
) -> tuple[tuple[str, ...], dict[str, Tensor]]:
    """Return the names of the inputs that `net.forward` takes, and all inputs by name; the others go to the loss."""
    parameters = inspect.signature(net.forward).parameters
    names = [name for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if isinstance(inputs, Mapping):
        named = dict(inputs)
    else:
        extra = [f"target_{index}" for index in range(max(0, len(inputs) - len(names)))]
        named = dict(zip([*names, *extra], inputs, strict=False))
    taken = tuple(key for key in named if key in names or takes_any)
    extra_inputs = [key for key in named if key not in taken]
    if extra_inputs and loss_fn is None:
        takes = ", ".join(names) or "no named inputs"
        raise InputError(
            f"factory '{text}' returned inputs {', '.join(extra_inputs)} that its module's forward does not take "
            f"(it takes {takes}): name them as forward does, or return a loss_fn that takes them"
        )
    return taken, named


def _resize(value: Tensor, size: int, key: str, text: str) -> Tensor:
    """Return `value` with `size` samples, repeated or dropped."""
    if value.shape[0] == size:
        return value
    if value.shape[0] == 0:
        raise InputError(f"factory '{text}' returned input '{key}' without a sample: {_SHAPE}")
    return value[torch.arange(size) % value.shape[0]].contiguous()


def _where(error: BaseException) -> str:
    """Return file and line of the innermost frame of the user's own code."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if not _is_library(frame.filename)]
    frame = (user_frames or frames)[-1]
    return f"{frame.filename}, line {frame.lineno} ({frame.name})"


def _is_library(filename: str) -> bool:
    is_library = filename.startswith("<frozen") or "importlib" in filename or "site-packages" in filename
    return is_library or filename == __file__


def _what(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
