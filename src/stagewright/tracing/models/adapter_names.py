"""Names of the tensors of a model with adapters: in it, in the plain model, and in peft's files."""

from __future__ import annotations

ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""Peft's files."""
NAME = "default"
"""Name of the adapter in the model."""
BASE, INTO, OUT_OF = "base_layer", f"lora_A.{NAME}", f"lora_B.{NAME}"
"""Parts of an adapted layer: the original layer, and the layers into the low rank and out of it."""
OF_PEFT = "base_model.model."
"""Prefix of names in peft's files."""


def base_name(name: str) -> str:
    """Return the name of a tensor in the model without adapters.

    >>> base_name("net.model.layers.0.self_attn.q_proj.base_layer.weight")
    'net.model.layers.0.self_attn.q_proj.weight'
    """
    return name.replace(f".{BASE}.", ".")


def adapter_names_of(name: str) -> tuple[str, str] | None:
    """Return the layers of the adapter of a weight, the one into the low rank first; None if the tensor can have none.

    >>> adapter_names_of("net.model.layers.0.self_attn.q_proj.base_layer.weight")[1]
    'net.model.layers.0.self_attn.q_proj.lora_B.default'
    """
    layer, separator, parameter = name.partition(f".{BASE}.")
    return (f"{layer}.{INTO}", f"{layer}.{OUT_OF}") if separator and parameter == "weight" else None


def is_adapter(name: str) -> bool:
    """Return whether a tensor belongs to an adapter.

    >>> is_adapter("net.model.layers.0.self_attn.q_proj.lora_A.default.weight")
    True
    """
    return f".{INTO}." in name or f".{OUT_OF}." in name


def peft_name(name: str) -> str:
    """Return the name of an adapter's tensor in peft's files.

    >>> peft_name("net.model.layers.0.self_attn.q_proj.lora_A.default.weight")
    'base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight'
    """
    return OF_PEFT + name.removeprefix("net.").replace(f".{NAME}.", ".")
