"""Overrides of config keys by their common names; a new depth also cuts lists with one entry per layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stagewright.errors import InputError

DROPOUT = "dropout"
"""An override of this name sets every dropout probability of the model."""

# One idea, several spellings: the first is the common name, the others are those of single families.
_SYNONYMS = (
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"),
    ("hidden_size", "n_embd", "d_model"),
    ("num_attention_heads", "n_head", "num_heads"),
    ("max_position_embeddings", "n_positions"),
    ("intermediate_size", "n_inner", "d_ff"),
)
_DEPTH = _SYNONYMS[0]
_PER_LAYER = ("layer_types", "layers_block_type", "hybrid_override_pattern", "mlp_layer_types")


def apply_overrides(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with `overrides` in place, each under the spelling that the config itself uses.

    Whether a key exists at all is known to the model class only and is checked when the model is built.

    >>> apply_overrides({"n_layer": 12}, {"num_hidden_layers": 2})
    {'n_layer': 2}
    """
    result = dict(config)
    for key, value in overrides.items():
        if key == DROPOUT:
            continue
        spellings = _spellings(key, result)
        if key in _DEPTH:
            result |= _cut_per_layer(result, value)
        result |= dict.fromkeys(spellings, value)
    return result


def _spellings(key: str, config: Mapping[str, Any]) -> list[str]:
    """The keys of `config` that mean `key`, or `key` itself where the config has no spelling of it."""
    if key in config:
        return [key]
    group = next((names for names in _SYNONYMS if key in names), (key,))
    return [name for name in group if name in config] or [key]


def _cut_per_layer(config: Mapping[str, Any], depth: Any) -> dict[str, Any]:
    """The first `depth` entries of every key that holds one entry per layer."""
    if not isinstance(depth, int) or isinstance(depth, bool) or depth < 1:
        raise InputError(f"the number of layers is {depth!r}: give a whole number of at least 1")
    cut = {key: config[key] for key in _PER_LAYER if isinstance(config.get(key), list | str)}
    for key, entries in cut.items():
        if len(entries) < depth:
            raise InputError(
                f"{depth} layers were asked for, but '{key}' describes {len(entries)}: "
                f"override '{key}' with one entry per layer instead"
            )
    return {key: entries[:depth] for key, entries in cut.items()}
