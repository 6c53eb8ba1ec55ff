"""Equal layers: identified by structure, replaced by one opaque operator each, traced once per kind.

Two blocks are of one kind when their modules have the same types, attributes, parameter and buffer layouts at the time of
the call, and are called with the same layouts and constants. Integer attributes that only number the layer (``layer_idx``)
may differ: whether code reads them is watched while the first block of a kind runs, and if it does, they must be equal too.
A block that does more than return tensors is of no kind (see `block_calls`), nor is one whose tensors the rest
of the model uses: they are traced where they are called.
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
from torch.fx.node import has_side_effect
from torch.utils import _pytree as pytree

from stagewright.errors import TraceError
from stagewright.graph import TensorMeta
from stagewright.tracing.arguments import empty, meta_of
from stagewright.tracing.block_calls import BlockWatch

BLOCK = "stagewright.block.default"

_NUMBERING = re.compile(r"(^|_)(idx|index|id|number)$")
_OWN_ATTRIBUTES = frozenset(torch.nn.Module().__dict__)


@dataclass(frozen=True)
class BlockKind:
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
    output_tensors: tuple[int, ...]  # which of them are made by the block
    passed: tuple[
        tuple[int, int], ...
    ]  # leaves of the result that are the very tensors of leaves of the call

    def is_call(self, leaves: list[Any], spec: Any) -> bool:
        """Return whether a call with these leaves is of this kind, as far as they tell."""
        if str(spec) != str(self.spec):
            return False
        layouts = iter(self.inputs)
        return all(
            isinstance(leaf, torch.Tensor) and meta_of(leaf) == next(layouts)[0]
            if place in self.tensors
            else type(leaf) is type(mine) and (not isinstance(leaf, _PLAIN) or leaf == mine)
            for place, (leaf, mine) in enumerate(zip(leaves, self.leaves, strict=True))
        )


@dataclass
class RepeatedBlocks:
    """Blocks of a model by module path, and the kinds of calls seen in a dry run."""

    candidates: tuple[str, ...]
    kinds: dict[Any, BlockKind] = field(default_factory=dict)
    """Kinds by the signature of the call."""
    numbered: set[Any] = field(default_factory=set)
    """Signatures of calls that read a numbering attribute."""
    unruly: dict[str, str] = field(default_factory=dict)
    """Paths of blocks that are of no kind, and why."""
    shared: set[str] = field(default_factory=set)
    """Paths of blocks that have tensors in common with another module."""
    members: dict[str, list[str]] = field(default_factory=dict)
    """Paths in the order of calls, by the key of a kind."""
    calls: dict[str, list[BlockKind]] = field(default_factory=dict)
    """Kinds of calls in order, by path."""


def find_blocks(model: torch.nn.Module) -> RepeatedBlocks:
    """Return candidates: members of a ModuleList or Sequential of which at least three have equal fingerprints."""
    candidates: dict[str, None] = {}
    for path, container in model.named_modules():
        if not isinstance(container, torch.nn.ModuleList | torch.nn.Sequential):
            continue
        if any(path == block or path.startswith(block + ".") for block in candidates):
            continue
        groups: dict[Any, list[str]] = {}
        for name, child in container.named_children():
            if next(child.children(), None) is None:
                continue
            groups.setdefault(_fingerprint(child), []).append(f"{path}.{name}" if path else name)
        for fingerprint, members in groups.items():
            if len(members) >= 3 and fingerprint is not None:
                candidates.update(dict.fromkeys(members))
    return RepeatedBlocks(tuple(candidates))


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _fingerprint(block: torch.nn.Module, forward: Any = None) -> Any:
    """Return a comparable form of a block: types, layouts and attributes of its modules, and which tensors are identical;
    None if its modules have hooks.

    `forward` is the block's own attribute of this name, which a dry run replaces.
    """
    seen: dict[int, int] = {}
    contents: dict[int, Any] = {}

    def describe(module: torch.nn.Module) -> Any:
        members = module.__dict__
        if any(members.get(hooks) for hooks in _HOOKS):
            return None
        tensors = tuple(
            (name, tensor.shape, tensor.dtype, tensor.requires_grad, seen.setdefault(id(tensor), len(seen)))
            for group in (module._parameters, module._buffers)
            for name, tensor in group.items()
            if tensor is not None
        )
        attributes = tuple(
            (name, _plain(value, contents))
            for name, value in sorted(members.items(), key=lambda item: item[0])
            if (name == "training" or name not in _OWN_ATTRIBUTES)
            and not _is_number(name, value)
            and not (module is block and name == "forward")
        )
        children: list[tuple[str, Any]] = []
        for name, child in module._modules.items():
            description = None if child is None else describe(child)
            if child is not None and description is None:
                return None
            children.append((name, description))
        return (type(module), module.training, tensors, attributes, tuple(children))

    description = describe(block)
    return description and (description, _plain(forward, contents))


def _is_number(name: str, value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and bool(_NUMBERING.search(name))


@contextmanager
def _watched_numbers(block: torch.nn.Module) -> Iterator[list[str]]:
    """Append to the list every numbering attribute of the block that its code reads inside."""
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


_PLAIN = (bool, int, float, str, torch.dtype, torch.device, torch.Size)


def _plain(value: Any, contents: dict[int, Any] | None = None) -> Any:
    """Return a comparable form of an attribute: by value if it is plain, otherwise by identity, with its attributes.

    `contents` remembers those of objects that have been described.
    """
    contents = {} if contents is None else contents
    if value is None or isinstance(value, _PLAIN):
        return (type(value), value)
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType | types.ModuleType | type):
        return (type(value), id(value))
    if isinstance(value, torch.Tensor | torch.nn.Module):
        return (type(value), id(value))
    if id(value) not in contents:
        contents[id(value)] = (type(value), id(value))  # where it contains itself
        contents[id(value)] = _described(value, contents)
    return contents[id(value)]


def _described(value: Any, contents: dict[int, Any]) -> Any:
    if isinstance(value, list | tuple):
        return (type(value), tuple(_plain(item, contents) for item in value))
    if isinstance(value, dict):
        items = tuple((_plain(key, contents), _plain(item, contents)) for key, item in value.items())
        return (type(value), items)
    if isinstance(value, functools.partial):
        parts = (value.func, value.args, value.keywords)
        return (functools.partial, *(_plain(part, contents) for part in parts))
    if isinstance(value, types.MethodType):
        holder = value.__self__
        is_block = isinstance(holder, torch.nn.Module)  # its own method, as a rule
        return (types.MethodType, value.__func__, None if is_block else _plain(holder, contents))
    return (type(value), id(value), _plain(getattr(value, "__dict__", None), contents))


@contextmanager
def dry_running(model: torch.nn.Module, blocks: RepeatedBlocks) -> Iterator[None]:
    """Run and record the first block of each kind inside; the others return fake outputs of the same layout."""
    watch = BlockWatch(model, blocks.candidates)

    def record(path: str, block: torch.nn.Module, own_forward: Any) -> Callable[..., Any]:
        forward = block.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            with watch.unwatched():
                leaves, spec = pytree.tree_flatten((args, kwargs))
                signature = _call_signature(_fingerprint(block, own_forward), leaves, spec)
                if signature in blocks.numbered:
                    signature = (*signature, _numbers(block))
                kind = blocks.kinds.get(signature)
            if kind is None:
                with watch.inside(block, leaves) as call, _watched_numbers(block) as read:
                    result = forward(*args, **kwargs)
                with watch.unwatched():
                    again, spec_after = pytree.tree_flatten((args, kwargs))
                    after = _call_signature(_fingerprint(block, own_forward), again, spec_after)
                    if after != signature or any(a is not b for a, b in zip(leaves, again, strict=True)):
                        call.note("writes to what it is given or to its attributes")
                    if signature[0] is None:
                        call.note("has hooks")
                    if read:
                        blocks.numbered.add(signature)
                        signature = (*signature, _numbers(block))
                    kind = _record(f"block{len(blocks.kinds)}", leaves, spec, result)
                    call.returns(
                        [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
                    )
                    again.clear()
                    del result
                    effect = call.effect()
                if effect:
                    blocks.unruly[path] = effect
                    return _rebuild(kind, empty_outputs(kind, leaves), leaves)
                blocks.kinds[signature] = kind
                blocks.members[kind.key] = []
            blocks.members[kind.key].append(path)
            blocks.calls.setdefault(path, []).append(kind)
            return _rebuild(kind, empty_outputs(kind, leaves), leaves)

        return run

    with _replaced_forwards(model, blocks, record), watch.watching():
        yield
    blocks.unruly.update(watch.used)
    blocks.shared.update(watch.shared)
    hooked = (path for path in blocks.calls if _fingerprint(model.get_submodule(path)) is None)
    blocks.unruly.update((path, "has hooks") for path in hooked)


def _numbers(block: torch.nn.Module) -> tuple[int, ...]:
    members = (item for module in block.modules() for item in sorted(module.__dict__.items()))
    return tuple(value for name, value in members if _is_number(name, value))


class CalledDifferently(TraceError):
    """Code around a block asks whether it is being exported, so that stubs cannot stand in for blocks."""


class _Stub(torch.nn.Module):
    """A stand-in for a repeated block while the rest of the model is exported: one opaque operator, no parameters.

    It passes for the block, whose attributes it has; its calls are of the kinds seen in the dry run, in the same order.
    """

    def __init__(self, path: str, block: torch.nn.Module, kinds: list[BlockKind]) -> None:
        super().__init__()
        self.__dict__["_stub"] = (path, block, iter(kinds))
        self.train(block.training)

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return type(self.__dict__["_stub"][1]) if "_stub" in self.__dict__ else _Stub

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_stub"][1], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        path, _, kinds = self.__dict__["_stub"]
        leaves, spec = pytree.tree_flatten((args, kwargs))
        kind = next(kinds, None)
        if kind is None or not kind.is_call(leaves, spec):
            raise CalledDifferently(f"module '{path}' is called differently during export than in a run")
        _ACTIVE[kind.key] = kind
        tensors = [leaves[index] for index in kind.tensors]
        return _rebuild(kind, torch.ops.stagewright.block(f"{kind.key}@{path}", tensors), leaves)


@contextmanager
def stubbed(model: torch.nn.Module, blocks: RepeatedBlocks) -> Iterator[None]:
    """Make every block inside whose kind has several members one call of the operator ``stagewright::block``."""
    replaced: list[tuple[torch.nn.Module, str, torch.nn.Module]] = []
    repeated = {path for paths in blocks.members.values() if len(paths) > 1 for path in paths}
    single = {path for paths in blocks.members.values() if len(paths) == 1 for path in paths}
    try:
        for path in sorted(repeated - single - blocks.unruly.keys()):
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
def _replaced_forwards(
    model: torch.nn.Module, blocks: RepeatedBlocks, wrap: Callable[..., Any]
) -> Iterator[None]:
    changed = []
    try:
        for path in blocks.candidates:
            module = model.get_submodule(path)
            own_forward = module.__dict__.get("forward")
            changed.append((module, own_forward))
            module.forward = wrap(path, module, own_forward)
        yield
    finally:
        for module, own_forward in changed:
            if own_forward is None:
                module.__dict__.pop("forward", None)
            else:
                module.forward = own_forward


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
    """Return the autocast a call is under: type of device and element type."""
    device = next((leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)), "cpu")
    return (device, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None


def _autocast_as(
    wanted: tuple[str, torch.dtype] | None, tensors: list[torch.Tensor]
) -> AbstractContextManager[Any]:
    """Enter the autocast that a block was called under, unless it is already active."""
    around = _autocast(tensors)
    if wanted == around:
        return nullcontext()
    return torch.autocast(around[0], enabled=False) if wanted is None and around else torch.autocast(*wanted)  # type: ignore[misc]


def _record(key: str, leaves: list[Any], spec: Any, result: Any) -> BlockKind:
    output_leaves, output_spec = pytree.tree_flatten(result)
    tensors = tuple(index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
    places = {id(leaves[index]): index for index in reversed(tensors)}
    returned = [index for index, leaf in enumerate(output_leaves) if isinstance(leaf, torch.Tensor)]
    passed = tuple(
        (index, places[id(output_leaves[index])]) for index in returned if id(output_leaves[index]) in places
    )
    produced = tuple(index for index in returned if id(output_leaves[index]) not in places)
    return BlockKind(
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
        passed=passed,
    )


def _rebuild(kind: BlockKind, tensors: list[torch.Tensor], given: list[Any]) -> Any:
    """Return the result of a call with the leaves `given` that produces `tensors`."""
    leaves = list(kind.output_leaves)
    for index, tensor in zip(kind.output_tensors, tensors, strict=True):
        leaves[index] = tensor
    for index, place in kind.passed:
        leaves[index] = given[place]
    return pytree.tree_unflatten(leaves, kind.output_spec)


def empty_outputs(kind: BlockKind, given: list[Any]) -> list[torch.Tensor]:
    """Return writable tensors, not leaves of autograd, with the output layouts of a call with the leaves `given`."""
    device = next((leaf.device for leaf in given if isinstance(leaf, torch.Tensor)), torch.device("cpu"))
    tensors = [empty(meta, device) for meta in kind.outputs]
    with torch.enable_grad():
        return [
            torch.empty_like(tensor).requires_grad_().clone().as_strided(tensor.shape, tensor.stride())
            if needs_grad
            else tensor
            for tensor, needs_grad in zip(tensors, kind.needs_grad, strict=True)
        ]


class BlockBody(torch.nn.Module):
    """A block as a separate model: flat tensors in, flat tensors out."""

    def __init__(self, block: torch.nn.Module, kind: BlockKind) -> None:
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


_ACTIVE: dict[str, BlockKind] = {}
_LIBRARY = torch.library.Library("stagewright", "DEF")
_LIBRARY.define("block(str key, Tensor[] tensors) -> Tensor[]")


@torch.library.register_fake("stagewright::block", lib=_LIBRARY)
def _fake_block(key: str, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [empty(meta, tensors[0].device) for meta in _ACTIVE[key.split("@")[0]].outputs]


has_side_effect(torch.ops.stagewright.block.default)  # a block whose results nobody uses may update buffers
