"""Between tensors as published files have them and as a transformers model does: under another name, without the prefix of
the base model, or experts one by one that the model has in one tensor.

Source: ``core_model_loading.py`` and ``conversion_mapping.py`` of transformers (5.x), which say so for every kind of model;
their functions are called here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from stagewright.errors import InputError


class Conversions:
    """From the tensors that files have, `stored`, to those of the model `net`, whose names are `known`."""

    def __init__(self, net: Any, stored: Collection[str], known: Collection[str]) -> None:
        self._net, self._stored, self._known = net, stored, dict.fromkeys(known, True)

    def sources(self, key: str) -> list[str]:
        """The stored tensors that tensor `key` of the model is made of; none where there are none."""
        return [name for name, _ in self._sources.get(key, ())]

    def made(self, key: str, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Tensor `key` of the model, of what `read` gives of the stored ones. Raises `InputError` where they do not fit."""
        pairs = self._sources[key]
        if pairs[0][1] is None:
            return read(pairs[0][0])
        converter = deepcopy(self._by_pattern[pairs[0][1]])
        for name, pattern in pairs:
            converter.add_tensor(key, name, pattern, read(name))
        try:
            made = converter.convert(key, model=self._net, config=self._net.config)[key]
        except Exception as error:  # operations of transformers raise many types
            raise InputError(
                f"tensor '{key}' cannot be made of {len(pairs)} stored ones such as '{pairs[0][0]}' ({error}): the files "
                "belong to another model"
            ) from error
        return made[0] if isinstance(made, list) else made

    @cached_property
    def _transforms(self) -> list[Any]:
        return get_model_conversion_mapping(self._net) if isinstance(self._net, PreTrainedModel) else []

    @cached_property
    def _by_pattern(self) -> dict[str, Any]:
        converters = [one for one in self._transforms if isinstance(one, WeightConverter)]
        return {pattern: one for one in converters for pattern in one.source_patterns}

    @cached_property
    def _sources(self) -> Mapping[str, list[tuple[str, str | None]]]:
        """Stored tensors and, where several make one, the pattern that they follow."""
        if not isinstance(self._net, PreTrainedModel):
            return {}
        renamings = [one for one in self._transforms if isinstance(one, WeightRenaming)]
        converters = [one for one in self._transforms if isinstance(one, WeightConverter)]
        found: dict[str, list[tuple[str, str | None]]] = {}
        for name in sorted(self._stored, key=dot_natural_key):
            key, pattern = rename_source_key(
                name, renamings, converters, self._net.base_model_prefix, self._known
            )
            if key in self._known:
                found.setdefault(key, []).append((name, pattern))
        return found


def as_published(net: Any, key: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Tensor `key` of the model `net` as transformers saves it: under the published name, or as several."""
    if not isinstance(net, PreTrainedModel):
        return {key: tensor}
    return revert_weight_conversion(net, {key: tensor})
