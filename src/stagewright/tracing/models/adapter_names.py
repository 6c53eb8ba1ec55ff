"""What the tensors of a model with adapters are called: in it, in the model without, and in peft's files."""

from __future__ import annotations

ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""Peft's files."""
NAME = "default"
"""Of the adapter in the model."""
_BASE = ".base_layer."
"""In names of what an adapted layer was before."""
_OWN = (f".lora_A.{NAME}.", f".lora_B.{NAME}.")
OF_PEFT = "base_model.model."
"""In front of names in peft's files."""


def base_name(name: str) -> str:
    """How the model without adapters calls a tensor.

    >>> base_name("net.model.layers.0.self_attn.q_proj.base_layer.weight")
    'net.model.layers.0.self_attn.q_proj.weight'
    """
    return name.replace(_BASE, ".")


def adapter_names_of(name: str) -> tuple[str, str] | None:
    """The layers of the adapter beside a weight, that into the low rank first; None where the tensor can have none.

    >>> adapter_names_of("net.model.layers.0.self_attn.q_proj.base_layer.weight")[1]
    'net.model.layers.0.self_attn.q_proj.lora_B.default'
    """
    layer, found, rest = name.partition(_BASE)
    return (f"{layer}.lora_A.{NAME}", f"{layer}.lora_B.{NAME}") if found and rest == "weight" else None


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
    return OF_PEFT + name.removeprefix("net.").replace(f".{NAME}.", ".")
