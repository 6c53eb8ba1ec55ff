"""Equal layers: found by structure, replaced by one opaque operator each, traced once per kind.

Two blocks are of one kind when their modules have the same types, attributes, parameter and buffer layouts, and are
called with the same layouts and constants. Integer attributes that only number the layer (``layer_idx``) may differ:
whether code reads them is watched while the first block of a kind runs, and if it does, they must be equal too. A block
that does more than return values (writes to its arguments, leaves tensors on modules) is of no kind.
"""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from stagewright.errors import TraceError
from stagewright.graph import TensorMeta
from stagewright.tracing.arguments import empty, meta_of

_NUMBERING = re.compile(r"(^|_)(idx|index|id|number)$")
_OWN_ATTRIBUTES = frozenset(torch.nn.Module().__dict__)


@dataclass(frozen=True)
class Kind:
    """A kind of block: how its blocks are called and what they return."""

    key: str
    spec: Any  # pytree of (args, kwargs)
    leaves: tuple[Any, ...]  # leaves of the first call, None where a tensor goes
    tensors: tuple[int, ...]  # which leaves are tensors
    inputs: tuple[tuple[TensorMeta, bool], ...]  # layout of each of them and whether it needs a gradient
    autocast: tuple[str, torch.dtype] | None  # device and element type of the autocast that the call is under
    outputs: tuple[TensorMeta, ...]
    needs_grad: tuple[bool, ...]
    output_spec: Any
    output_leaves: tuple[Any, ...]  # None where a tensor goes
    output_tensors: tuple[int, ...]


@dataclass
class Blocks:
    """Blocks of a model by module path, and what is known of each kind after a rehearsal."""

    candidates: dict[str, Any]  # path -> fingerprint
    kinds: dict[Any, Kind] = field(default_factory=dict)  # by signature of the call
    numbered: set[Any] = field(default_factory=set)  # signatures of calls that read a numbering attribute
    unruly: set[str] = field(default_factory=set)  # paths of blocks that do more than return values
    members: dict[str, list[str]] = field(default_factory=dict)  # kind key -> paths in order of call
    calls: dict[str, list[Kind]] = field(default_factory=dict)  # path -> the kinds of its calls, in order


def find_blocks(model: torch.nn.Module) -> Blocks:
    """Candidates: members of a ModuleList or Sequential of which at least three have an equal fingerprint."""
    candidates: dict[str, Any] = {}
    for path, container in model.named_modules():
        if not isinstance(container, torch.nn.ModuleList | torch.nn.Sequential):
            continue
        if any(path == found or path.startswith(found + ".") for found in candidates):
            continue
        groups: dict[Any, list[str]] = {}
        for name, child in container.named_children():
            if next(child.children(), None) is None:
                continue
            groups.setdefault(_fingerprint(child), []).append(f"{path}.{name}" if path else name)
        for fingerprint, found in groups.items():
            if len(found) < 3 or fingerprint is None:
                continue
            candidates.update((member, fingerprint) for member in found)
    return Blocks(candidates)


def _fingerprint(module: torch.nn.Module) -> Any:
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        return None
    tensors = tuple(
        (name, tensor.shape, tensor.dtype, getattr(tensor, "requires_grad", False))
        for group in (module._parameters, module._buffers)
        for name, tensor in group.items()
        if tensor is not None
    )
    attributes = tuple(
        (name, _plain(value))
        for name, value in sorted(module.__dict__.items(), key=lambda item: item[0])
        if (name == "training" or name not in _OWN_ATTRIBUTES) and not _is_number(name, value)
    )
    children: list[tuple[str, Any]] = []
    for name, child in module._modules.items():
        found = None if child is None else _fingerprint(child)
        if child is not None and found is None:
            return None
        children.append((name, found))
    return (type(module), module.training, tensors, attributes, tuple(children))


def _is_number(name: str, value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and bool(_NUMBERING.search(name))


@contextmanager
def _watched_numbers(block: torch.nn.Module) -> Iterator[list[str]]:
    """Inside, the list grows by every numbering attribute of the block that its code reads."""
    hidden: dict[tuple[int, str], int] = {}
    owners: list[tuple[torch.nn.Module, str, int]] = []
    read: list[str] = []
    inherited = torch.nn.Module.__getattr__

    def look_up(module: torch.nn.Module, name: str) -> Any:
        number = hidden.get((id(module), name))
        if number is None:
            return inherited(module, name)
        read.append(name)
        return number

    for module in block.modules():
        for name, value in list(module.__dict__.items()):
            if _is_number(name, value):
                hidden[id(module), name] = module.__dict__.pop(name)
                owners.append((module, name, value))
    torch.nn.Module.__getattr__ = look_up  # type: ignore[method-assign]
    try:
        yield read
    finally:
        torch.nn.Module.__getattr__ = inherited  # type: ignore[method-assign]
        for module, name, value in owners:
            module.__dict__[name] = value


def _plain(value: Any) -> Any:
    """A comparable form of an attribute: by value where it is plain, by identity where it is not."""
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device | torch.Size):
        return (type(value), value)
    if isinstance(value, list | tuple):
        return (type(value), tuple(_plain(item) for item in value))
    if isinstance(value, dict):
        return (dict, tuple((key, _plain(item)) for key, item in value.items()))
    if isinstance(value, functools.partial):
        return (functools.partial, value.func, _plain(value.args), _plain(value.keywords))
    if isinstance(value, types.MethodType):
        return (types.MethodType, value.__func__)
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType | type):
        return value
    return (type(value), id(value))


@contextmanager
def rehearsing(model: torch.nn.Module, blocks: Blocks) -> Iterator[None]:
    """Inside, the first block of each kind runs and is recorded; the others return fake outputs of the same layout."""

    def rehearse(path: str, fingerprint: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
        block = model.get_submodule(path)

        def run(*args: Any, **kwargs: Any) -> Any:
            leaves, spec = pytree.tree_flatten((args, kwargs))
            signature = _call_signature(fingerprint, leaves, spec)
            if signature in blocks.numbered:
                signature = (*signature, _numbers(block))
            kind = blocks.kinds.get(signature)
            if kind is None:
                before = _state(block, leaves)
                with _watched_numbers(block) as read:
                    result = forward(*args, **kwargs)
                if _state(block, leaves) != before:
                    blocks.unruly.add(path)
                    return result
                if read:
                    blocks.numbered.add(signature)
                    signature = (*signature, _numbers(block))
                kind = blocks.kinds[signature] = _record(f"block{len(blocks.kinds)}", leaves, spec, result)
                blocks.members[kind.key] = []
            else:
                device = next(leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor))
                result = _rebuild(kind, empty_outputs(kind, device))
            blocks.members[kind.key].append(path)
            blocks.calls.setdefault(path, []).append(kind)
            return result

        return run

    with _replaced_forwards(model, blocks, rehearse):
        yield


def _numbers(block: torch.nn.Module) -> tuple[int, ...]:
    members = (item for module in block.modules() for item in sorted(module.__dict__.items()))
    return tuple(value for name, value in members if _is_number(name, value))


def _state(block: torch.nn.Module, leaves: list[Any]) -> list[Any]:
    """What a call must leave as it was: its arguments and the tensors on its modules, buffers excepted."""
    versions = [leaf._version for leaf in leaves if isinstance(leaf, torch.Tensor)]
    attached = [
        (id(module), name, id(value))
        for module in block.modules()
        for name, value in module.__dict__.items()
        if any(isinstance(item, torch.Tensor) for item in pytree.tree_leaves(value))
        and name not in _OWN_ATTRIBUTES
    ]
    return [versions, attached]


class _Stub(torch.nn.Module):
    """Stands in for a repeated block while the rest of the model is exported: one opaque operator, no parameters.

    Attributes are those of the block; its calls are of the kinds that were rehearsed, in the same order.
    """

    def __init__(self, path: str, block: torch.nn.Module, kinds: list[Kind]) -> None:
        super().__init__()
        self.__dict__["_stub"] = (path, block, iter(kinds))
        self.train(block.training)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_stub"][1], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        path, _, kinds = self.__dict__["_stub"]
        leaves, spec = pytree.tree_flatten((args, kwargs))
        kind = next(kinds, None)
        if kind is None or str(spec) != str(kind.spec):
            raise TraceError(f"module '{path}' is called differently when it is exported than when it is run")
        _ACTIVE[kind.key] = kind
        tensors = [leaves[index] for index in kind.tensors]
        return _rebuild(kind, torch.ops.stagewright.block(f"{kind.key}@{path}", tensors))


@contextmanager
def stubbed(model: torch.nn.Module, blocks: Blocks) -> Iterator[None]:
    """Inside, every block whose kind has several members is one call of the operator ``stagewright::block``."""
    replaced: list[tuple[torch.nn.Module, str, torch.nn.Module]] = []
    repeated = {path for paths in blocks.members.values() if len(paths) > 1 for path in paths}
    single = {path for paths in blocks.members.values() if len(paths) == 1 for path in paths}
    try:
        for path in sorted(repeated - single - blocks.unruly):
            parent = model.get_submodule(path.rpartition(".")[0])
            name = path.rpartition(".")[2]
            block = parent._modules[name]
            assert block is not None
            replaced.append((parent, name, block))
            parent._modules[name] = _Stub(path, block, blocks.calls[path])
        yield
    finally:
        for parent, name, block in replaced:
            parent._modules[name] = block


@contextmanager
def _replaced_forwards(model: torch.nn.Module, blocks: Blocks, wrap: Callable[..., Any]) -> Iterator[None]:
    changed = []
    try:
        for path, fingerprint in blocks.candidates.items():
            module = model.get_submodule(path)
            had = module.__dict__.get("forward")
            changed.append((module, had))
            module.forward = wrap(path, fingerprint, module.forward)
        yield
    finally:
        for module, had in changed:
            if had is None:
                module.__dict__.pop("forward", None)
            else:
                module.forward = had


def _call_signature(fingerprint: Any, leaves: list[Any], spec: Any) -> Any:
    seen: dict[int, int] = {}
    described = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            same = seen.setdefault(id(leaf), len(seen))
            described.append(("tensor", meta_of(leaf), leaf.requires_grad, same))
        else:
            described.append(_plain(leaf))
    return (fingerprint, str(spec), torch.is_grad_enabled(), _autocast(leaves), tuple(described))


def _autocast(leaves: list[Any]) -> tuple[str, torch.dtype] | None:
    """The autocast a call is under: type of device and element type."""
    device = next((leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)), "cpu")
    return (device, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None


def _autocast_as(
    wanted: tuple[str, torch.dtype] | None, tensors: list[torch.Tensor]
) -> AbstractContextManager[Any]:
    """Enters the autocast a block was called under; nothing where it holds already."""
    around = _autocast(tensors)
    if wanted == around:
        return nullcontext()
    return torch.autocast(around[0], enabled=False) if wanted is None and around else torch.autocast(*wanted)  # type: ignore[misc]


def _record(key: str, leaves: list[Any], spec: Any, result: Any) -> Kind:
    output_leaves, output_spec = pytree.tree_flatten(result)
    tensors = tuple(index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
    produced = tuple(index for index, leaf in enumerate(output_leaves) if isinstance(leaf, torch.Tensor))
    return Kind(
        key=key,
        spec=spec,
        leaves=tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves),
        tensors=tensors,
        inputs=tuple((meta_of(leaves[index]), leaves[index].requires_grad) for index in tensors),
        autocast=_autocast(leaves),
        outputs=tuple(meta_of(output_leaves[index]) for index in produced),
        needs_grad=tuple(output_leaves[index].requires_grad for index in produced),
        output_spec=output_spec,
        output_leaves=tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in output_leaves),
        output_tensors=produced,
    )


def _rebuild(kind: Kind, tensors: list[torch.Tensor]) -> Any:
    leaves = list(kind.output_leaves)
    for index, tensor in zip(kind.output_tensors, tensors, strict=True):
        leaves[index] = tensor
    return pytree.tree_unflatten(leaves, kind.output_spec)


def empty_outputs(kind: Kind, device: torch.device) -> list[torch.Tensor]:
    pairs = zip(kind.outputs, kind.needs_grad, strict=True)
    return [empty(meta, device).requires_grad_(needs_grad) for meta, needs_grad in pairs]


class BlockBody(torch.nn.Module):
    """One block as a model of its own: flat tensors in, flat tensors out."""

    def __init__(self, block: torch.nn.Module, kind: Kind) -> None:
        super().__init__()
        self.block = block
        self._kind = kind

    def forward(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        leaves = list(self._kind.leaves)
        for index, tensor in zip(self._kind.tensors, tensors, strict=True):
            leaves[index] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self._kind.spec)
        with _autocast_as(self._kind.autocast, tensors):
            result, _ = pytree.tree_flatten(self.block(*args, **kwargs))
        return [result[index] for index in self._kind.output_tensors]


_ACTIVE: dict[str, Kind] = {}
_LIBRARY = torch.library.Library("stagewright", "DEF")
_LIBRARY.define("block(str key, Tensor[] tensors) -> Tensor[]")


@torch.library.register_fake("stagewright::block", lib=_LIBRARY)
def _fake_block(key: str, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [empty(meta, tensors[0].device) for meta in _ACTIVE[key.split("@")[0]].outputs]
