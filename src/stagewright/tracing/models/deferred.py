"""Deferred initialisation: tensors of a model are created on request, so that a rank creates only its own.

The model is built on fake tensors while a tape records every operator. A tensor is created by rerunning the operators that
its storage depends on. Random operators draw numbers keyed by their position in the construction, so a tensor is the same
whichever others are created, and the same as in a model that is built whole under `DrawingByPlace`. Those that draw from the
model's own generator, or from torch's after the model's code has seeded it, draw as in a plain model: the tape draws too
and records the state of the generator before.

Source: the idea of torchdistX's deferred initialisation, which replays operators in recorded order.
Ignores: tensors whose contents come from outside the recorded operators (files, numpy); the model is then built whole.
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
from stagewright.tracing.private import FakeTensor, storage_key, without_modes, written_arguments, written_by


class DrawingByPlace(TorchDispatchMode):
    """A mode in which the n-th random operator draws the numbers of `reseed(n)`, whatever was drawn before; one with an
    explicit generator, or one seeded meanwhile, draws from that."""

    def __init__(self, reseed: Callable[[int], None]) -> None:
        super().__init__()
        self.reseed = reseed
        self.num_draws = 0

    def __enter__(self) -> DrawingByPlace:
        self._unseeded = _state_of(None)
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not draws(func, args, kwargs):
            return func(*args, **kwargs)
        self.num_draws += 1
        if _own_state(args, kwargs, self._unseeded) is not None:
            return func(*args, **kwargs)
        self.reseed(self.num_draws - 1)
        result = func(*args, **kwargs)
        torch.set_rng_state(self._unseeded)
        return result


def _generator(args: Any, kwargs: Any) -> torch.Generator | None:
    """Return the generator that is given to an operator."""
    return next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Generator)), None)


def _own_state(args: Any, kwargs: Any, unseeded: Tensor) -> Tensor | None:
    """Return the state of the generator that the model's code passed to an operator or seeded; None while torch's is still
    `unseeded`."""
    given = _generator(args, kwargs)
    state = _state_of(given)
    with without_modes():
        return None if given is None and torch.equal(state, unseeded) else state


def _state_of(generator: torch.Generator | None) -> Tensor:
    """Return the state of the generator, by default of torch's own."""
    with without_modes():
        return torch.get_rng_state() if generator is None else generator.get_state()


@dataclass(frozen=True)
class _StorageLayout:
    """The layout of a fake tensor when an operator used it; `storage` identifies its storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> _StorageLayout:
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        return cls(storage_key(tensor), tensor.dtype, shape, stride, int(tensor.storage_offset()))

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True)
class _TapeCall:
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[_StorageLayout | None, ...]
    draw: int | None
    state: Tensor | None
    """State of the generator, if its draws do not follow from the position of the call."""
    default_dtype: torch.dtype
    """Type of the results of `func` if its arguments name none."""

    @property
    def met(self) -> set[int]:
        """Storages of the arguments."""
        return {
            leaf.storage for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, _StorageLayout)
        }


class NotOnTape(Exception):
    """A tensor's contents do not come from the operators on the tape."""


@dataclass
class Tape(TorchDispatchMode):
    """A mode that records operators, under a fake tensor mode."""

    reseed: Callable[[int], None]
    calls: list[_TapeCall] = field(default_factory=list)
    num_draws: int = 0

    def __post_init__(self) -> None:
        super().__init__()
        self.writers: dict[int, list[int]] = {}  # storage -> calls that made or changed it
        self.alive: dict[int, torch.UntypedStorage] = {}  # a storage's identity holds while it lives

    def __enter__(self) -> Tape:
        self._unseeded = _state_of(None)
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        draw = state = None
        if draws(func, args, kwargs):
            draw, self.num_draws = self.num_draws, self.num_draws + 1
            state = _own_state(args, kwargs, self._unseeded)
        met = tree_map(self._note, (args, kwargs))
        if state is not None:
            _advance(func, args, kwargs)
        result = func(*args, **kwargs)
        leaves = result if isinstance(result, list | tuple) else (result,)
        outputs = tuple(self._note(leaf) if isinstance(leaf, FakeTensor) else None for leaf in leaves)
        call = _TapeCall(func, met[0], met[1], outputs, draw, state, torch.get_default_dtype())
        for storage in {layout.storage for layout in outputs if layout} | _changed(func, *met):
            self.writers.setdefault(storage, []).append(len(self.calls))
        self.calls.append(call)
        return result

    def _note(self, leaf: Any) -> Any:
        """Return a fake tensor as its layout, a real one as a copy, anything else unchanged."""
        if isinstance(leaf, FakeTensor):
            layout = _StorageLayout.of(leaf)
            self.alive[layout.storage] = leaf.untyped_storage()
            return layout
        if not isinstance(leaf, Tensor):
            return leaf
        with without_modes():
            return leaf.detach().clone()

    def tensors(self, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return real tensors for the fake ones of `wanted`, by name; shared storages stay shared.

        Raises:
            NotOnTape: one of them cannot be made from what was noted.
        """
        tensors: dict[str, Tensor] = {}
        storages: dict[int, torch.UntypedStorage] = {}
        for name, tensor in wanted.items():
            layout = _StorageLayout.of(tensor.detach())
            if layout.storage not in storages:
                storages[layout.storage] = self._make(layout.storage)
            tensors[name] = layout.on(storages[layout.storage])
        return tensors

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
        """Return the calls that `storage` depends on, in order."""
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

    def _run(self, call: _TapeCall, storages: dict[int, torch.UntypedStorage]) -> None:
        def real(leaf: Any) -> Any:
            if isinstance(leaf, _StorageLayout):
                if leaf.storage not in storages:
                    raise NotOnTape
                return leaf.on(storages[leaf.storage])
            return leaf.clone() if isinstance(leaf, Tensor) else leaf

        args, kwargs = tree_map(
            real, (call.args, call.kwargs), is_leaf=lambda leaf: isinstance(leaf, _StorageLayout)
        )
        if call.state is not None:
            args, kwargs = _with_state(args, kwargs, call.state)
        elif call.draw is not None:
            self.reseed(call.draw)
        result = call.func(*args, **kwargs)
        results = result if isinstance(result, list | tuple) else (result,)
        for layout, tensor in zip(call.outputs, results, strict=True):
            if layout is not None:
                if tensor.is_meta:  # what torch.load makes under a fake tensor mode
                    raise NotOnTape
                storages.setdefault(layout.storage, tensor.untyped_storage())


class NotDeferred(Exception):
    """Raised when the draws of an operator depend on the contents of tensors, which fake ones lack."""


def _advance(func: Any, args: Any, kwargs: Any) -> None:
    """Advance a generator as in a real model; the drawn numbers are discarded."""
    written = {id(leaf) for leaf in written_by(func, args, kwargs)}
    fakes = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor)]
    if not func.name().endswith("_like") and any(id(leaf) not in written for leaf in fakes):
        raise NotDeferred
    layouts = {id(leaf): (tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype) for leaf in fakes}
    with without_modes(), torch.no_grad():

        def real(leaf: Any) -> Any:
            if id(leaf) not in layouts or not isinstance(leaf, FakeTensor):
                return leaf
            shape, stride, dtype = layouts[id(leaf)]
            return torch.empty_strided(shape, stride, dtype=dtype)

        real_args, real_kwargs = tree_map(real, (args, kwargs))
        func(*real_args, **real_kwargs)


def _with_state(args: Any, kwargs: Any, state: Tensor) -> tuple[Any, Any]:
    """Return the arguments with their generator set to this state; without one, torch's is set."""
    if _generator(args, kwargs) is None:
        torch.set_rng_state(state)
        return args, kwargs
    generator = torch.Generator()
    generator.set_state(state)
    return tree_map(lambda leaf: generator if isinstance(leaf, torch.Generator) else leaf, (args, kwargs))


def _changed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    """Return the storages that an operator writes to."""
    return {
        leaf.storage for leaf in written_arguments(func, args, kwargs) if isinstance(leaf, _StorageLayout)
    }
