"""The tensors of a model as its safetensors files have them, read one by one and checked against the model."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from stagewright.errors import InputError, StagewrightWarning
from stagewright.execution.dequantise import dequantised
from stagewright.execution.quantised import FIX, leftovers_of, method_of, parts_of, scheme
from stagewright.execution.weight_files import WeightFiles, open_weights, reading


class StoredWeights:
    """Weights in `folder` for the model `module`, whose names begin with ``net.``.

    Args:
        config: content of the model's ``config.json``, which says how the weights are quantised.

    Raises:
        InputError: files are missing or lie outside the folder, or the weights are quantised in a way that is not read.
    """

    def __init__(self, folder: Path, module: torch.nn.Module, config: Mapping[str, Any]) -> None:
        self._files = WeightFiles.of(folder)
        self._method = method_of(config, str(folder))
        self._scheme = scheme(config)
        buffers = dict(module.named_buffers(remove_duplicate=False))
        self._layouts = {**dict(module.named_parameters(remove_duplicate=False)), **buffers}
        self._lasting = buffers.keys() & module.state_dict(keep_vars=True).keys()
        self._known = {_key(name) for name in self._layouts}
        self._stored = sorted(self._files.where)
        self._readers: dict[str, Any] = {}

    def has(self, name: str) -> bool:
        """Whether the files have tensor `name` of the model."""
        return bool(parts_of(_key(name), self._files.where, self._method))

    def read(self, name: str) -> torch.Tensor:
        """Tensor `name` of the model, of its shape and type.

        Raises:
            InputError: it is in no file, cannot be read, or is stored as something else.
        """
        key, layout = _key(name), self._layouts[name]
        parts = parts_of(key, self._files.where, self._method)
        if not parts:
            raise InputError(
                f"'{self._files.folder}' has no tensor '{key}': the files belong to another model, or store it under "
                "another name; run with --random-weights to start from the seed"
            )
        if left := [one for one in leftovers_of(key, self._stored, self._known) if one not in parts]:
            raise InputError(
                f"'{self._files.folder}' has '{left[0]}' beside '{key}', which is therefore quantised, in a way that its "
                f"config.json does not name: {FIX}"
            )
        whole = dequantised(key, [self._get(part) for part in parts], self._scheme, layout.dtype)
        if whole.shape != layout.shape:
            raise InputError(
                f"tensor '{key}' in '{self._files.where[parts[0]]}' has shape {list(whole.shape)}, expected "
                f"{list(layout.shape)}: the files belong to another model"
            )
        if _kind(whole) != _kind(layout):
            raise InputError(
                f"tensor '{key}' in '{self._files.where[parts[0]]}' is stored as {whole.dtype}, and the model has "
                f"{layout.dtype} there, so that its numbers are not those of the model: {FIX}"
            )
        return whole.to(layout.dtype, copy=len(parts) == 1)  # what is read plainly is memory of the file

    def lasting(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """The buffers among `names` that belong to the model's state, by name; a warning names those in no file."""
        lasting = [name for name in names if name in self._lasting]
        for name in lasting:
            if not self.has(name) and self._layouts[name].is_floating_point():
                warnings.warn(
                    f"'{self._files.folder}' has no tensor '{_key(name)}': it is as in a fresh model",
                    StagewrightWarning,
                    stacklevel=2,
                )
        return {name: self.read(name) for name in lasting if self.has(name)}

    def _get(self, key: str) -> torch.Tensor:
        """A stored tensor, in memory of the file: what is changed there changes it."""
        name = self._files.where[key]
        if name not in self._readers:
            self._readers[name] = open_weights(self._files.verified(name), "pt")
        with reading(self._files.path(name)):
            return self._readers[name].get_tensor(key)


def _key(name: str) -> str:
    return name.removeprefix("net.")


def _kind(tensor: torch.Tensor) -> str:
    """What sort of numbers a tensor has; floating ones of fewer than 16 bits are of a sort of their own."""
    if tensor.is_floating_point():
        return "float" if tensor.element_size() >= 2 else str(tensor.dtype)
    return "complex" if tensor.is_complex() else "integer"
