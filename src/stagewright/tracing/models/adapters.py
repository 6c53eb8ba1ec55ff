"""Puts low-rank adapters into a model by `peft`, which is imported only here; and what its tensors are called."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from stagewright.errors import InputError
from stagewright.tracing.models.lora import Lora

_BASE = ".base_layer."
"""In names of what an adapted layer was before."""
_OWN = (".lora_A.default.", ".lora_B.default.")
_OF_PEFT = "base_model.model."
"""In front of names in peft's files."""


def add_adapters(net: nn.Module, lora: Lora, name: str) -> None:
    """Change `net`, the transformers model of `name`: some layers get adapters, and nothing else is trained any more.

    A is drawn and B is zero, so that the model computes what it did. Raises `InputError` where peft is missing, or `net` has
    no layers with such names.
    """
    config = _peft().LoraConfig(**arguments(lora, net, name))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of layers kept the other way round, and of models without a config
            _peft().inject_adapter_in_model(config, net)
    except Exception as error:  # peft raises many types over the names and layers given
        raise InputError(
            f"peft cannot add adapters to '{name}' ({' '.join(str(error).split())}): name linear layers of this model with "
            "--lora-targets, or all of them as all-linear"
        ) from error


def arguments(lora: Lora, net: nn.Module, name: str) -> dict[str, Any]:
    """Keywords of `peft.LoraConfig` for the transformers model `net`. Raises `InputError` where nothing says which layers
    of such a model get adapters."""
    kind = net.config.model_type  # type: ignore[union-attr]
    targets = lora.targets or _peft().utils.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(kind)
    if targets is None:
        raise InputError(
            f"peft has no layers of its own choice for a model of type '{kind}' as '{name}' is: name them with "
            "--lora-targets, or all linear ones as all-linear"
        )
    return {
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": targets if isinstance(targets, str) else list(targets),
        "lora_dropout": lora.dropout,
        "fan_in_fan_out": any(type(module).__name__ == "Conv1D" for module in net.modules()),
    }


def base_name(name: str) -> str:
    """How the model without adapters calls a tensor.

    >>> base_name("net.model.layers.0.self_attn.q_proj.base_layer.weight")
    'net.model.layers.0.self_attn.q_proj.weight'
    """
    return name.replace(_BASE, ".")


def is_adapter(name: str) -> bool:
    """Whether a tensor belongs to an adapter.

    >>> is_adapter("net.model.layers.0.self_attn.q_proj.lora_A.default.weight")
    True
    """
    return any(part in name for part in _OWN)


def peft_name(name: str) -> str:
    """How peft's files call a tensor of an adapter.

    >>> peft_name("net.model.layers.0.self_attn.q_proj.lora_A.default.weight")
    'base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight'
    """
    return _OF_PEFT + name.removeprefix("net.").replace(".default.", ".")


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise InputError(
            f"--lora needs peft, which cannot be imported ({error}): pip install peft, or 'stagewright[lora]'"
        ) from None
    return peft
