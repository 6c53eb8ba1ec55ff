"""Side effects of a block, observed while a model runs on fake tensors.

One opaque operator may stand for a block only if the rest of the model sees nothing but its results. So a block may not keep
a tensor anywhere (a list of losses, an attribute, a global object, a recorded output), read one that it is not given, or
write to one that is not its buffer; and nothing outside may use its parameters.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from stagewright.tracing.private import (
    FakeTensor,
    StorageWeakRef,
    num_holders_of_storage,
    storage_key,
    written_by,
)


class BlockCall:
    """A call of a block: the tensors it may use, and the first side effect that was noticed."""

    def __init__(self, block: torch.nn.Module, leaves: Iterable[Any]) -> None:
        self._given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._effect = "" if self._given else "is given no tensors"
        self._given += [*block.parameters(), *block.buffers()]
        self._given_storages = {storage_key(tensor) for tensor in self._given}
        self._buffers = {storage_key(tensor) for tensor in block.buffers()}
        self._created: dict[int, StorageWeakRef] = {}
        self._references = self._count_references()

    def note(self, effect: str) -> None:
        self._effect = self._effect or effect

    def uses(self, tensor: torch.Tensor) -> None:
        key = storage_key(tensor)
        if isinstance(tensor, FakeTensor) and key not in self._given_storages and key not in self._created:
            self.note("uses a tensor that it is not given")

    def writes(self, tensor: torch.Tensor) -> None:
        key = storage_key(tensor)
        if key not in self._created and key not in self._buffers:
            self.note("writes to a tensor that it is given")

    def creates(self, tensor: torch.Tensor) -> None:
        key = storage_key(tensor)
        if key not in self._given_storages and key not in self._created:
            self._created[key] = StorageWeakRef(tensor.untyped_storage())

    def returns(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note results that share their storage with something else, to which writes would go too."""
        storage_keys = {id(tensor): storage_key(tensor) for tensor in tensors}
        for tensor in self._given:
            storage_keys.pop(id(tensor), None)
        storages = list(storage_keys.values())
        if len(set(storages)) < len(storages) or self._given_storages & set(storages):
            self.note("returns a view")

    def effect(self) -> str:
        """Return the side effect of the block, or an empty text. To be called after its result is freed."""
        if not self._effect and self._has_kept():
            gc.collect()  # cycles of dead objects keep nothing
            if self._has_kept():
                self._effect = "keeps a tensor"
        return self._effect

    def _has_kept(self) -> bool:
        is_alive = any(not reference.expired() for reference in self._created.values())
        return is_alive or self._count_references() != self._references

    def _count_references(self) -> list[tuple[int, int]]:
        return [(sys.getrefcount(tensor), num_holders_of_storage(tensor)) for tensor in self._given]


class BlockWatch(TorchDispatchMode):
    """Watches a model's operators while it is entered.

    * `used`: paths of blocks whose tensors the rest of the model uses, with a word on how;
    * `shared`: paths of blocks that have tensors in common with another module.
    """

    supports_higher_order_operators = True

    def __init__(self, model: torch.nn.Module, paths: Iterable[str]) -> None:
        super().__init__()
        self.used: dict[str, str] = {}
        self._call: BlockCall | None = None
        self._is_watching = True
        self._blocks = {id(module): path for path in paths for module in model.get_submodule(path).modules()}
        holders = _holders_of(model, self._blocks)
        self._owner = {key: next(iter(owners)) for key, owners in holders.items() if len(owners) == 1}
        self.shared = {path for owners in holders.values() if len(owners) > 1 for path in owners if path}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._is_watching:
            return func(*args, **kwargs)
        call = self._call
        for leaf in pytree.tree_leaves((args, kwargs)):
            if not isinstance(leaf, torch.Tensor):
                continue
            if call is not None:
                call.uses(leaf)
            elif path := self._owner.get(storage_key(leaf)):
                self.used.setdefault(path, "has tensors that the rest of the model uses")
        result = func(*args, **kwargs)
        if call is not None:
            for tensor in written_by(func, args, kwargs):
                call.writes(tensor)
            for leaf in pytree.tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    call.creates(leaf)
        return result

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch operators, and iterations over the modules of a block, inside."""
        named_modules = torch.nn.Module.named_modules

        def watched(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
            for name, member in named_modules(module, *args, **kwargs):
                path = self._blocks.get(id(member))
                if path is not None and self._is_watching and self._call is None:
                    self.used.setdefault(path, "has modules that the rest of the model goes through")
                yield name, member

        torch.nn.Module.named_modules = watched  # type: ignore[method-assign]
        try:
            with self:
                yield
        finally:
            torch.nn.Module.named_modules = named_modules  # type: ignore[method-assign]

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Ignore what happens inside, which the model does not do."""
        before, self._is_watching = self._is_watching, False
        try:
            yield
        finally:
            self._is_watching = before

    @contextmanager
    def inside(self, block: torch.nn.Module, leaves: Iterable[Any]) -> Iterator[BlockCall]:
        """Attribute what happens inside to a call of a block with these leaves."""
        with self.unwatched():
            self._call = call = BlockCall(block, leaves)
        try:
            yield call
        finally:
            self._call = None


def _holders_of(model: torch.nn.Module, blocks: dict[int, str]) -> dict[int, set[str]]:
    """Return the paths of the blocks that hold each storage of a parameter or buffer; empty for storages in no block."""
    holders: dict[int, set[str]] = {}
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                holders.setdefault(storage_key(tensor), set()).add(blocks.get(id(module), ""))
    return holders
