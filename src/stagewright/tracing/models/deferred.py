"""A model whose tensors are made only when they are asked for, so that a rank makes no more than its own.

The model is built on fake tensors while a tape notes every operator. A tensor is made by running again the operators
its storage depends on. Random operators draw numbers keyed by their place in the building, so a tensor is the same
whichever others are made, and the same as in a model that is built whole under `drawing_by_place`.

Source: the idea of torchdistX's deferred initialisation, which replays operators in the order they were noted.
Ignores: tensors whose contents come from outside the noted operators (files, numpy); the model is then built whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from stagewright.tracing.arguments import draws
from stagewright.tracing.private import FakeTensor, storage_key, without_modes


class DrawingByPlace(TorchDispatchMode):
    """While it is open, the n-th random operator draws the numbers `reseed(n)` readies, whatever was drawn before."""

    def __init__(self, reseed: Callable[[int], None]) -> None:
        super().__init__()
        self.reseed = reseed
        self.num_draws = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if draws(func, args, kwargs or {}):
            self.reseed(self.num_draws)
            self.num_draws += 1
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class _Layout:
    """Where a fake tensor lay when an operator met it; `storage` identifies its storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Layout:
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        return cls(storage_key(tensor), tensor.dtype, shape, stride, int(tensor.storage_offset()))

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True)
class _Call:
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: tuple[_Layout | None, ...]
    draw: int | None
    default_dtype: torch.dtype
    """Of what `func` makes where its arguments name no type."""

    @property
    def met(self) -> set[int]:
        """Storages of the arguments."""
        return {leaf.storage for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, _Layout)}


class NotOnTape(Exception):
    """A tensor's contents do not come from the operators on the tape."""


@dataclass
class Tape(TorchDispatchMode):
    """Notes the operators run while it is open, under a fake tensor mode."""

    reseed: Callable[[int], None]
    calls: list[_Call] = field(default_factory=list)
    num_draws: int = 0

    def __post_init__(self) -> None:
        super().__init__()
        self.writers: dict[int, list[int]] = {}  # storage -> calls that made or changed it
        self.alive: dict[int, torch.UntypedStorage] = {}  # a storage's identity holds while it lives

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        draw = None
        if draws(func, args, kwargs):
            draw, self.num_draws = self.num_draws, self.num_draws + 1
        met = tree_map(self._note, (args, kwargs))
        result = func(*args, **kwargs)
        leaves = result if isinstance(result, list | tuple) else (result,)
        made = tuple(self._note(leaf) if isinstance(leaf, FakeTensor) else None for leaf in leaves)
        call = _Call(func, met[0], met[1], made, draw, torch.get_default_dtype())
        for storage in {layout.storage for layout in made if layout} | _changed(func, *met):
            self.writers.setdefault(storage, []).append(len(self.calls))
        self.calls.append(call)
        return result

    def _note(self, leaf: Any) -> Any:
        """A fake tensor as its layout, a real one as a copy, anything else as it is."""
        if isinstance(leaf, FakeTensor):
            layout = _Layout.of(leaf)
            self.alive[layout.storage] = leaf.untyped_storage()
            return layout
        if not isinstance(leaf, Tensor):
            return leaf
        with without_modes():
            return leaf.detach().clone()

    def tensors(self, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Real tensors for the fake ones of `wanted`, by name; those that share a storage share it again.

        Raises:
            NotOnTape: one of them cannot be made from what was noted.
        """
        found: dict[str, Tensor] = {}
        storages: dict[int, torch.UntypedStorage] = {}
        for name, tensor in wanted.items():
            layout = _Layout.of(tensor.detach())
            if layout.storage not in storages:
                storages[layout.storage] = self._make(layout.storage)
            found[name] = layout.on(storages[layout.storage])
        return found

    def _make(self, storage: int) -> torch.UntypedStorage:
        storages: dict[int, torch.UntypedStorage] = {}
        before = torch.get_default_dtype()
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                for index in self._needed(storage):
                    torch.set_default_dtype(self.calls[index].default_dtype)
                    self._run(self.calls[index], storages)
        finally:
            torch.set_default_dtype(before)
        if storage not in storages:
            raise NotOnTape
        return storages[storage]

    def _needed(self, storage: int) -> list[int]:
        """The calls that `storage` depends on, in order."""
        waiting, seen, calls = [storage], {storage}, set()
        while waiting:
            for index in self.writers.get(waiting.pop(), ()):
                if index in calls:
                    continue
                calls.add(index)
                fresh = self.calls[index].met - seen
                seen |= fresh
                waiting += fresh
        return sorted(calls)

    def _run(self, call: _Call, storages: dict[int, torch.UntypedStorage]) -> None:
        def real(leaf: Any) -> Any:
            if isinstance(leaf, _Layout):
                if leaf.storage not in storages:
                    raise NotOnTape
                return leaf.on(storages[leaf.storage])
            return leaf.clone() if isinstance(leaf, Tensor) else leaf

        args, kwargs = tree_map(
            real, (call.args, call.kwargs), is_leaf=lambda leaf: isinstance(leaf, _Layout)
        )
        if call.draw is not None:
            self.reseed(call.draw)
        result = call.func(*args, **kwargs)
        results = result if isinstance(result, list | tuple) else (result,)
        for layout, tensor in zip(call.made, results, strict=True):
            if layout is not None:
                if tensor.is_meta:  # what torch.load makes under a fake tensor mode
                    raise NotOnTape
                storages.setdefault(layout.storage, tensor.untyped_storage())


def _changed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    """Storages an operator writes to."""
    if not isinstance(func, torch._ops.OpOverload) or not func._schema.is_mutable:
        return set()
    written: list[Any] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(args[position] if position < len(args) else kwargs.get(argument.name))
    return {leaf.storage for leaf in tree_leaves(written) if isinstance(leaf, _Layout)}
