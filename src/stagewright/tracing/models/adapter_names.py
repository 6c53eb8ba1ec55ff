"""Names of the tensors of a model with adapters: in it, in the plain model, and in peft's files."""

from __future__ import annotations

ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""Peft's files."""
NAME = "default"
"""Of the adapter in the model."""
BASE, INTO, OUT_OF = "base_layer", f"lora_A.{NAME}", f"lora_B.{NAME}"
"""Of an adapted layer: what it was before, and the layers into the low rank and out of it."""
OF_PEFT = "base_model.model."
"""In front of names in peft's files."""


def base_name(name: str) -> str:
    """How the model without adapters calls a tensor.

    >>> base_name("net.model.layers.0.self_attn.q_proj.base_layer.weight")
    'net.model.layers.0.self_attn.q_proj.weight'
    """
    return name.replace(f".{BASE}.", ".")


def adapter_names_of(name: str) -> tuple[str, str] | None:
    """The layers of the adapter beside a weight, that into the low rank first; None where the tensor can have none.

    >>> adapter_names_of("net.model.layers.0.self_attn.q_proj.base_layer.weight")[1]
    'net.model.layers.0.self_attn.q_proj.lora_B.default'
    """
    layer, separator, rest = name.partition(f".{BASE}.")
    return (f"{layer}.{INTO}", f"{layer}.{OUT_OF}") if separator and rest == "weight" else None


def is_adapter(name: str) -> bool:
    """Whether a tensor belongs to an adapter.

    >>> is_adapter("net.model.layers.0.self_attn.q_proj.lora_A.default.weight")
    True
    """
    return f".{INTO}." in name or f".{OUT_OF}." in name


def peft_name(name: str) -> str:
    """How peft's files call a tensor of an adapter.

    >>> peft_name("net.model.layers.0.self_attn.q_proj.lora_A.default.weight")
    'base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight'
    """
    return OF_PEFT + name.removeprefix("net.").replace(f".{NAME}.", ".")
