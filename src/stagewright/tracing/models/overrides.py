"""Overrides of config keys by their common names; a new depth also cuts lists with one entry per layer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from stagewright.errors import InputError
from stagewright.limits import MOST_ENTRIES, MOST_LAYERS, MOST_SIZE

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
_ENTRIES = ("vocab_size", "max_position_embeddings", "n_positions")
"""Keys of sizes of tables, whose limit is larger than that of other sizes."""
_NEEDED = frozenset({
    "num_key_value_heads", "num_channels", "patch_size", "image_size", "conv_kernel", "state_size", "d_kv", *_ENTRIES,
    *(name for names in _SYNONYMS for name in names),
})  # fmt: skip
"""Sizes and counts without which there is no model; of others, such as shared experts, there may be 0."""
_SIZE = re.compile(r"(?!mscale)((num|n|d)_.+|.+_(size|dim|heads|layers|rank|experts)|expand)")
"""Keys of the configurations of all families that say how many of something there are, or how large it is; not the factor
`mscale_all_dim` of scaled positions."""
_NO_LIMIT = -1
"""Value for a size without limit in several families."""
_PER_LAYER = ("layer_types", "layers_block_type", "hybrid_override_pattern", "mlp_layer_types")


_TEXT = "text_config"
"""Key of the text part in configurations of several parts, such as text and images."""


def of_text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of a model, or of its part that reads and writes text.

    >>> of_text({"vocab_size": 9, "text_config": {"vocab_size": 5}})["vocab_size"]
    5
    """
    text = config.get(_TEXT)
    return {**config, **text} if isinstance(text, Mapping) else config


def check_sizes(config: Mapping[str, Any], model: str) -> None:
    """Raise `InputError`, which names the key, for an impossible size or count in the configuration of `model`.

    A list gives one size per layer or dimension, null leaves a size to the family.

    >>> check_sizes({"hidden_size": 64, "num_key_value_heads": None, "pad_token_id": -1, "n_shared_experts": 0}, "ours")
    >>> check_sizes({"text_config": {"vocab_size": 0}}, "ours")
    Traceback (most recent call last):
    stagewright.errors.InputError: the config of 'ours' has vocab_size = 0: give a whole number from 1 to 67,108,864
    """
    for key, value in _sizes(config):
        least = 1 if key in _NEEDED else 0
        most = MOST_SIZE if key in _NEEDED and key not in _ENTRIES else MOST_ENTRIES
        most = MOST_LAYERS if key in _DEPTH else most
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if key not in _NEEDED and (not is_number or value == _NO_LIMIT):
            continue  # a switch or a name, which the family judges
        if not is_number or value % 1 != 0 or not least <= value <= most:
            raise InputError(
                f"the config of '{model}' has {key} = {_shown(value)}: give a whole number from {least} to {most:,}"
            )


def _sizes(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield name and value of every size, including those in nested configurations and lists."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _sizes(value)
        elif value is not None and (key in _NEEDED or _SIZE.fullmatch(key)):
            yield from ((key, item) for item in (value if isinstance(value, list) else [value]))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def apply_overrides(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config` with `overrides` applied, each under the spelling that the config uses, or else that of its text part.

    Only the model class knows whether a key exists; this is checked when the model is built.

    >>> apply_overrides({"n_layer": 12}, {"num_hidden_layers": 2})
    {'n_layer': 2}
    >>> apply_overrides({"text_config": {"num_layers": 12}}, {"num_hidden_layers": 2})
    {'text_config': {'num_layers': 2}}
    """
    result = dict(config)
    for key, value in overrides.items():
        if key == DROPOUT:
            continue
        text = result.get(_TEXT)
        if isinstance(text, Mapping) and not _has(result, key) and _has(text, key):
            result[_TEXT] = _with(text, key, value)
        else:
            result = _with(result, key, value)
    return result


def _has(config: Mapping[str, Any], key: str) -> bool:
    return any(name in config for name in _spellings(key, config))


def _with(config: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    cut = _cut_per_layer(config, value) if key in _DEPTH else {}
    return {**config, **cut, **dict.fromkeys(_spellings(key, config), value)}


_HEADS = ("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads", "decoder_attention_heads")
_INTERMEDIATE = re.compile(r"(.*_)?(intermediate_size|ffn_dim|ffn_hidden_size)|n_inner|d_ff")
_NARROW_HEAD, _NARROW_INTERMEDIATE, _NARROW_VOCABULARY, _MOST_HEADS = 16, 64, 512, 16
_NARROW_LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
"""Sizes of attention with compressed keys and values."""


def narrow(config: Mapping[str, Any], keeps_heads: bool = False) -> dict[str, Any]:
    """Return overrides that make heads, intermediate layers and vocabulary narrow, and keep every layer and switch; with
    `keeps_heads` also the hidden size.

    >>> narrow({"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 99, "n_layer": 9})
    {'num_key_value_heads': 2, 'num_attention_heads': 8, 'hidden_size': 128}
    """
    text = of_text(config)
    reduced: dict[str, Any] = {}
    heads = next((text[key] for key in _HEADS if isinstance(text.get(key), int)), None)
    hidden = next((key for key in _SYNONYMS[1] if isinstance(text.get(key), int)), None)
    if heads and hidden and not keeps_heads:
        shared = text.get("num_key_value_heads")
        shared = shared if isinstance(shared, int) and heads % shared == 0 else heads
        pairs = 2 if shared > 1 and 2 * heads // shared <= _MOST_HEADS else 1
        fewer = pairs * (heads // shared) if shared != heads else min(heads, 4)
        if isinstance(text.get("num_key_value_heads"), int):
            reduced["num_key_value_heads"] = min(shared, pairs) if shared != heads else fewer
        reduced |= {key: fewer for key in _HEADS if isinstance(text.get(key), int)}
        width = fewer * _NARROW_HEAD
        reduced |= {key: width for key in (hidden, "word_embed_proj_dim") if text.get(key) == text[hidden]}
        reduced |= {key: _NARROW_HEAD for key in ("head_dim", "d_kv") if isinstance(text.get(key), int)}
        reduced |= {key: least for key, least in _NARROW_LATENT.items() if isinstance(text.get(key), int)}
    for key, value in text.items():
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        if _INTERMEDIATE.fullmatch(key):
            reduced[key] = min(value, _NARROW_INTERMEDIATE)
        elif key == "vocab_size":
            reduced[key] = min(value, _NARROW_VOCABULARY)
        elif key.endswith("token_id"):
            reduced[key] = min(value, _NARROW_VOCABULARY - 1)
    return {key: value for key, value in reduced.items() if text.get(key) != value}


def _spellings(key: str, config: Mapping[str, Any]) -> list[str]:
    """Return the keys of `config` that mean `key`, or `key` itself where the config has no spelling of it."""
    if key in config:
        return [key]
    group = next((names for names in _SYNONYMS if key in names), (key,))
    return [name for name in group if name in config] or [key]


def _cut_per_layer(config: Mapping[str, Any], depth: Any) -> dict[str, Any]:
    """Return the first `depth` entries of every key that holds one entry per layer."""
    if not isinstance(depth, int) or isinstance(depth, bool) or depth < 1:
        raise InputError(f"the number of layers is {depth!r}: give a whole number of at least 1")
    cut = {key: config[key] for key in _PER_LAYER if isinstance(config.get(key), list | str)}
    for key, entries in cut.items():
        if len(entries) < depth:
            raise InputError(
                f"{depth} layers were requested, but '{key}' describes {len(entries)}: "
                f"override '{key}' with one entry per layer instead"
            )
    return {key: entries[:depth] for key, entries in cut.items()}
