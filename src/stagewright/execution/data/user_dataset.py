"""User datasets from a factory ``package.module:factory``: map-style or iterable, with samples of the model's inputs."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stagewright.errors import InputError, StagewrightError
from stagewright.execution.data.samples import Samples
from stagewright.graph.tensor import TensorMeta
from stagewright.tracing.arguments import DTYPES
from stagewright.tracing.models.factories import failed_at, function_of

_ITEM = "give dicts of tensors by the names of the model's inputs, or tuples in their order, without a batch dimension"


@dataclass(frozen=True)
class UserSample:
    """An item of a user's dataset, called `what` in messages."""

    item: Any
    what: str

    def has(self, name: str) -> bool:
        """Return whether it has an input that the model may not need."""
        return isinstance(self.item, Mapping) and name in self.item

    def row(self, name: str, names: Sequence[str], meta: TensorMeta) -> torch.Tensor:
        """Return its row of the model's input `name`, one of `names`; `meta` is the layout of a microbatch. Raises
        `InputError` where it has no suitable value."""
        if isinstance(self.item, Mapping):
            if name not in self.item:
                has = ", ".join(map(str, self.item)) or "nothing"
                raise InputError(f"{self.what} has no '{name}', which the model takes: it has {has}")
            value = self.item[name]
        elif isinstance(self.item, tuple | list) and len(self.item) == len(names):
            value = self.item[names.index(name)]
        else:
            raise InputError(
                f"{self.what} is a {_describe(self.item)}, and the model takes {', '.join(names)}: {_ITEM}"
            )
        try:
            tensor = torch.as_tensor(np.asarray(value) if isinstance(value, list) else value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(
                f"{self.what} has a {_describe(value)} for '{name}' ({error}): {_ITEM}"
            ) from None
        if tuple(tensor.shape) != meta.shape[1:]:
            raise InputError(
                f"{self.what} has '{name}' of shape {tuple(tensor.shape)}, but the model takes {meta.shape[1:]} per sample: "
                "let the dataset give that shape, or plan for the shape that it gives"
            )
        dtype = DTYPES[meta.dtype]
        if (tensor.is_floating_point() or tensor.is_complex()) and not dtype.is_floating_point:
            raise InputError(
                f"{self.what} has '{name}' of type {tensor.dtype}, but the model takes {dtype}: convert it"
            )
        return tensor.to(dtype)


class MapStyle(Samples):
    """A dataset with a length, whose items are taken by number in an order that depends on the seed."""

    def __init__(self, dataset: Any, name: str) -> None:
        self._dataset, self._name = dataset, name
        self.size: int | None = len(dataset)

    def __getitem__(self, index: int) -> UserSample:
        what = f"sample {index} of '{self._name}'"
        try:
            return UserSample(self._dataset[index], what)
        except StagewrightError:
            raise
        except Exception as error:
            raise InputError(f"{what} failed at {failed_at(error)}") from error


class InOrder(Samples):
    """A dataset that can only be read from its beginning: sample `n` is its n-th, earlier ones are read and dropped, and
    after the last it begins again, after a call of ``set_epoch`` if it has that."""

    def __init__(self, dataset: Iterable[Any], name: str) -> None:
        self._dataset, self._name = dataset, name
        self.size: int | None = None
        self._next, self._items = 0, self._read()

    def __getitem__(self, index: int) -> UserSample:
        if index < self._next:
            self._next, self._items = 0, self._read()
        item: Any = None
        while self._next <= index:
            try:
                item = next(self._items)
            except StagewrightError:
                self._next, self._items = 0, self._read()  # an iterator that has raised is exhausted
                raise
            self._next += 1
        return UserSample(item, f"sample {index} of '{self._name}'")

    def _read(self) -> Iterator[Any]:
        epoch = 0
        while True:
            set_epoch, count = getattr(self._dataset, "set_epoch", None), 0
            try:
                if callable(set_epoch):
                    set_epoch(epoch)
                for item in self._dataset:
                    yield item
                    count += 1
            except StagewrightError:
                raise
            except Exception as error:
                what = f"'{self._name}' failed after sample {count} of epoch {epoch}"
                raise InputError(f"{what} at {failed_at(error)}") from error
            if not count:
                raise InputError(f"'{self._name}' gives no samples in epoch {epoch}: give at least one")
            epoch += 1


def user_samples(text: str, sequence_length: int, seed: int) -> Samples:
    """Return the samples of the dataset that a factory makes; it is called with `sequence_length` and `seed`, as far as it
    has parameters for them. Raises `InputError` where it fails or does not return a dataset."""
    function = function_of(text)
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        parameters = {}
    offered = {"sequence_length": sequence_length, "seed": seed}
    try:
        dataset = function(**{name: value for name, value in offered.items() if name in parameters})
    except StagewrightError:
        raise
    except Exception as error:
        raise InputError(f"data factory '{text}' failed at {failed_at(error)}") from error
    if callable(getattr(dataset, "__getitem__", None)) and callable(getattr(dataset, "__len__", None)):
        if not len(dataset):
            raise InputError(f"the dataset of '{text}' is empty: give at least one sample")
        return MapStyle(dataset, text)
    # A dataset that is its own iterator could be read only once.
    if callable(getattr(dataset, "__iter__", None)) and not callable(getattr(dataset, "__next__", None)):
        return InOrder(dataset, text)
    raise InputError(
        f"data factory '{text}' returned a {_describe(dataset)}: return a dataset with __len__ and __getitem__, or one with "
        "__iter__ that can be read again from its beginning"
    )


def _describe(value: Any) -> str:
    return type(value).__name__ + (f" of {len(value)}" if isinstance(value, tuple | list) else "")
