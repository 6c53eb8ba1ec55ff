"""Conversions between tensors of published files and of transformers models: other names, no prefix of the base model, or
separate experts that the model has in one tensor.

Source: ``core_model_loading.py`` and ``conversion_mapping.py`` of transformers (5.x), which define them for every kind of
model; their functions are called only here.
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
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from stagewright.errors import InputError


class Conversions:
    """Conversions from the tensors of files, named `stored`, to those of the model `net`, named `expected`."""

    def __init__(self, net: Any, stored: Collection[str], expected: Collection[str]) -> None:
        self._net, self._stored, self._expected = net, stored, dict.fromkeys(expected, True)

    def sources(self, key: str) -> list[str]:
        """Return the stored tensors that tensor `key` of the model is made of; may be empty."""
        return [name for name, _ in self._sources.get(key, ())]

    def only_joins(self, key: str) -> bool:
        """Return whether tensor `key` of the model is a stored one, or several in a row."""
        pattern = self._sources[key][0][1]
        operations = () if pattern is None else self._by_pattern[pattern].operations
        return all(isinstance(operation, (MergeModulelist, Concatenate)) for operation in operations)

    def converted(self, key: str, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Return tensor `key` of the model from the stored tensors that `read` returns. Raises `InputError` where they do
        not fit."""
        pairs = self._sources[key]
        if pairs[0][1] is None:
            return read(pairs[0][0])
        converter = deepcopy(self._by_pattern[pairs[0][1]])
        for name, pattern in pairs:
            converter.add_tensor(key, name, pattern, read(name))
        try:
            converted = converter.convert(key, model=self._net, config=self._net.config)[key]
        except Exception as error:  # operations of transformers raise many types
            raise InputError(
                f"tensor '{key}' cannot be made of {len(pairs)} stored ones such as '{pairs[0][0]}' ({error}): the files "
                "belong to another model"
            ) from error
        return converted[0] if isinstance(converted, list) else converted

    @cached_property
    def _transforms(self) -> list[Any]:
        return get_model_conversion_mapping(self._net) if isinstance(self._net, PreTrainedModel) else []

    @cached_property
    def _by_pattern(self) -> dict[str, Any]:
        converters = [transform for transform in self._transforms if isinstance(transform, WeightConverter)]
        return {pattern: converter for converter in converters for pattern in converter.source_patterns}

    @cached_property
    def _sources(self) -> Mapping[str, list[tuple[str, str | None]]]:
        """Stored tensors by the model's names, each with the pattern that it follows where several make one."""
        if not isinstance(self._net, PreTrainedModel):
            return {}
        renamings = [transform for transform in self._transforms if isinstance(transform, WeightRenaming)]
        converters = [transform for transform in self._transforms if isinstance(transform, WeightConverter)]
        sources: dict[str, list[tuple[str, str | None]]] = {}
        for name in sorted(self._stored, key=dot_natural_key):
            key, pattern = rename_source_key(
                name, renamings, converters, self._net.base_model_prefix, self._expected
            )
            if key in self._expected:
                sources.setdefault(key, []).append((name, pattern))
        return sources


def as_published(net: Any, key: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Convert tensor `key` of the model `net` to the form that transformers saves: a published name, or several tensors."""
    if not isinstance(net, PreTrainedModel):
        return {key: tensor}
    return revert_weight_conversion(net, {key: tensor})
