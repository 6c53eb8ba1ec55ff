"""Quantised weights, stored in fewer bits than they are trained in: supported methods, and rejection of all others.

Supported are ``fp8``, with a scale for each block of a weight, as DeepSeek-V3 and Qwen3 are published, ``mxfp4``, as GPT-OSS
is, and the 4-bit numbers ``nf4`` of bitsandbytes. Nothing here imports torch.

Source: ``integrations/finegrained_fp8.py`` and ``integrations/mxfp4.py`` of transformers; `QuantState` of bitsandbytes.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from itertools import islice, takewhile
from typing import Any

from stagewright.errors import InputError

FP8, MXFP4, BITSANDBYTES = "fp8", "mxfp4", "bitsandbytes"
FP8_BLOCK = 128
"""Rows, and columns, that share a scale in a base of fp8."""
SCALE = "_scale_inv"
BLOCKS, SCALES = "_blocks", "_scales"
STATE = ".quant_state.bitsandbytes__nf4"
_OF_4_BITS = (STATE, ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
_OF_ACTIVATIONS = re.compile(r"\.(activation|input)_scale(_inv)?$")
# Companions of quantised weights: names that no other tensor has, suffixes of the weight's name, and names in its module.
_LEFTOVER = re.compile(
    r"\.(SCB|weight_format|qweight|qzeros|g_idx|qscale_weight|codebooks)$|weight\.(absmax|quant_map|nested_|quant_state)"
    r"|weight_(scale|packed|zero_point|global_scale|g_idx)(_\w+)?$|_proj_(blocks|scales)$"
)
_SUFFIXES = re.compile(
    r"(_scales?|_scale_\w+|_blocks|_packed|_shape|_zero_point|_global_scale|_g_idx|[.](absmax|quant_\w+|SCB))$"
)
_SIBLINGS = (
    "SCB", "weight_format", "qweight", "qzeros", "g_idx", "scales", "zeros", "codes", "codebooks", "qscale_weight", "scale",
    "zero_point",
)  # fmt: skip
_SMALL_FLOATS = ("F4", "F6_", "F8_")
_KEYS = ("quantization_config", "compression_config")
_DEQUANTISE = (
    "dequantise them once with transformers (from_pretrained with dequantize=True in its quantization config, or "
    "model.dequantize(), then save_pretrained)"
)
NEEDS_BITSANDBYTES = (
    "weights in nf4 need bitsandbytes, which is not installed: pip install 'stagewright[qlora]'"
)
FIX = f"{_DEQUANTISE}, or run with --random-weights to start from the seed"


def scheme(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the quantisation settings in `config`; empty for plain numbers."""
    parts = [config, *(part for part in config.values() if isinstance(part, Mapping))]
    sections = [part[key] for part in parts for key in _KEYS if part.get(key)]
    settings = sections[0] if sections else {}
    return settings if isinstance(settings, Mapping) else {"quant_method": settings}


def method_of(config: Mapping[str, Any]) -> str | None:
    """Return the quantisation method that `config` names, as transformers reads it; None for plain numbers.

    >>> method_of({"quantization_config": {"load_in_4bit": True}})
    'bitsandbytes'
    """
    settings = scheme(config)
    is_of_bitsandbytes = any(settings.get(key) for key in ("load_in_4bit", "load_in_8bit"))
    return settings.get("quant_method") or (BITSANDBYTES if is_of_bitsandbytes else None)


def refuse_method(config: Mapping[str, Any], model: str) -> None:
    """Raise `InputError` if `config` says that the weights of `model` are quantised by a method that is not supported."""
    settings, method = scheme(config), method_of(config)
    is_nf4 = settings.get("load_in_4bit") and settings.get("bnb_4bit_quant_type") == "nf4"
    if settings and method not in (FP8, MXFP4) and not (method == BITSANDBYTES and is_nf4):
        how = f"by the method '{method}'" if method else "by a method it does not name"
        raise InputError(
            f"the weights of '{model}' are quantised {how} (quantization_config in its config.json), and only {FP8}, "
            f"{MXFP4} and nf4 of {BITSANDBYTES} are supported: {_DEQUANTISE} and quantise them again with --lora-base, or "
            "plan for weights from the seed with --set quantization_config=null"
        )


def keeps_fp8(config: Mapping[str, Any]) -> bool:
    """Return whether the weights are stored as a base of fp8 keeps them."""
    return method_of(config) == FP8 and _fault_of_fp8(config) is None


def refuse_fp8(config: Mapping[str, Any], model: str) -> None:
    """Raise `InputError` if the weights of `model` are stored in fp8, but not as a base of fp8 keeps them."""
    if method_of(config) == FP8 and (fault := _fault_of_fp8(config)) is not None:
        key, wanted = fault
        raise InputError(
            f"'{model}' has {key} = {scheme(config).get(key)!r} in the quantization_config of its config.json, and a base "
            f"of fp8 keeps weights with {wanted!r} there: hold them as the numbers they stand for (without --lora-base), or "
            "quantise these with --lora-base int8 or nf4"
        )


def _fault_of_fp8(config: Mapping[str, Any]) -> tuple[str, Any] | None:
    """Return the first setting with another value than a base of fp8 supports, and that value; None if there is none."""
    supported = {
        "weight_block_size": [FP8_BLOCK] * 2, "activation_scheme": "dynamic", "fmt": "e4m3", "expert_dtype": "fp8",
    }  # fmt: skip
    settings = scheme(config)
    return next(((key, value) for key, value in supported.items() if settings.get(key, value) != value), None)


def unconverted(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return patterns of the modules whose weights `config` says are stored as plain numbers."""
    settings = scheme(config)
    patterns = settings.get("modules_to_not_convert") or settings.get("ignored_layers")
    return tuple(map(str, patterns)) if isinstance(patterns, list) else ()


def refuse_quantised(types: Mapping[str, str], method: str | None, source: str) -> None:
    """Check the names and `types` of stored tensors, without the model. Raises `InputError` where tensors are quantised by
    another method than `method`."""
    for name, stored in types.items():
        if _belongs(name, types, method):
            continue
        if _LEFTOVER.search(name):
            raise InputError(
                f"'{source}' has tensor '{name}', which belongs to quantised weights, but its config.json names no method "
                f"that reads it: {FIX}"
            )
        if stored.startswith(_SMALL_FLOATS) or (stored in ("I8", "U8") and name.endswith("weight")):
            raise InputError(
                f"'{source}' has tensor '{name}' as {stored}, without the scales that such weights need: {FIX}"
            )


def parts_of(key: str, stored: Collection[str], method: str | None) -> tuple[str, ...]:
    """Return the names of the stored tensors that make tensor `key` of the model: itself, with its scales; or none.

    >>> parts_of("a.weight", {"a.weight", "a.weight_scale_inv"}, "fp8")
    ('a.weight', 'a.weight_scale_inv')
    """
    if method == BITSANDBYTES and f"{key}{STATE}" in stored:
        return (key, *(f"{key}{part}" for part in _OF_4_BITS if f"{key}{part}" in stored))
    if key in stored:
        return (key, f"{key}{SCALE}") if method == FP8 and f"{key}{SCALE}" in stored else (key,)
    packed = (f"{key}{BLOCKS}", f"{key}{SCALES}")
    return packed if method == MXFP4 and all(part in stored for part in packed) else ()


def leftovers_of(key: str, stored: Sequence[str], model_names: Collection[str]) -> list[str]:
    """Return the stored tensors that accompany a quantised `key` and are not in `model_names`; `stored` is sorted.

    >>> leftovers_of("a.weight", ["a.SCB", "a.bias", "a.weight", "a.weight_scale"], {"a.weight", "a.bias"})
    ['a.SCB', 'a.weight_scale']
    """
    module, dot, _ = key.rpartition(".")
    siblings = (f"{module}{dot}{name}" for name in _SIBLINGS)
    suffixed = takewhile(lambda name: name.startswith(key), islice(stored, bisect_left(stored, key), None))
    related = [name for name in siblings if _is_in(name, stored)]
    related += [name for name in suffixed if _SUFFIXES.match(name, len(key))]
    return [name for name in related if name not in model_names]


def is_of_activations(name: str) -> bool:
    """Return whether a tensor is a scale of activations, which training in full precision does not need."""
    return _OF_ACTIVATIONS.search(name) is not None


def _is_in(name: str, names: Sequence[str]) -> bool:
    place = bisect_left(names, name)
    return place < len(names) and names[place] == name


def _belongs(name: str, stored: Collection[str], method: str | None) -> bool:
    """Return whether `method` reads a tensor, or training does not need it."""
    if method == FP8:
        whole = name.removesuffix(SCALE)
        return (f"{whole}{SCALE}" in stored and whole in stored) or is_of_activations(name)
    if method == BITSANDBYTES:
        whole = next((name.removesuffix(part) for part in _OF_4_BITS if name.endswith(part)), name)
        return f"{whole}{STATE}" in stored and whole in stored
    if method == MXFP4:
        whole = name.removesuffix(BLOCKS).removesuffix(SCALES)
        return whole != name and all(f"{whole}{part}" in stored for part in (BLOCKS, SCALES))
    return False
