"""Puts low-rank adapters into a model by `peft`, which is imported only here."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from stagewright.errors import InputError
from stagewright.tracing.models.adapter_names import ADAPTER_CONFIG, NAME, OF_PEFT
from stagewright.tracing.models.lora import ALL_LINEAR, Lora

_TASKS = {"CausalLanguageModel": "CAUSAL_LM", "SequenceToSequence": "SEQ_2_SEQ_LM"}

_OF_EXPERTS = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Names that mean experts to peft in models that have some, shared or dense layers of these names too."""
_USUAL = ("q_proj", "v_proj")
"""The layers that peft adapts in most decoders, for models without a default of peft."""


def add_adapters(net: nn.Module, lora: Lora, name: str) -> None:
    """Change `net`, the transformers model of `name`: some layers get adapters, and nothing else is trained any more.

    A is drawn and B is zero, so that the model computes what it did. Raises `InputError` where peft is missing, or `net` has
    no layers that are so called, or they can have no adapters.
    """
    peft = _peft()
    config = peft.LoraConfig(**_arguments(lora, net, name))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # tied weights are rejected below
            peft.inject_adapter_in_model(config, net, NAME)
    except Exception as error:  # peft raises many types for bad names and layers
        raise InputError(
            f"peft cannot add adapters to '{name}' ({' '.join(str(error).split())}): name linear layers of this model with "
            "--lora-targets, or all of them as all-linear"
        ) from error
    for path, layer in net.named_modules():
        if _is_adapted(layer):  # without its path, layers are alike and traced once
            layer.kwargs["target_name"] = path.rpartition(".")[2]  # type: ignore[index]
    _check(net)


def peft_names(module: nn.Module) -> dict[str, str]:
    """Return the names in peft's files of the adapters' tensors in `module`, a loss around a ``net``, by their names in it;
    empty if there are none, or several without one of the model itself."""
    net: Any = module.net
    if list(getattr(net, "peft_config", ())) != [NAME]:
        return {}
    state = net.state_dict(keep_vars=True)
    names = {id(tensor): name for name, tensor in state.items()}
    is_wrapped = isinstance(net, _peft().PeftModel)
    saved = _peft().get_peft_model_state_dict(
        net, state_dict=state, adapter_name=NAME, save_embedding_layers=False
    )
    return {
        f"net.{names[id(tensor)]}": name if is_wrapped else OF_PEFT + name for name, tensor in saved.items()
    }


def adapter_config(module: nn.Module, base: str) -> dict[str, Any]:
    """Return the content of ``adapter_config.json`` for `module`, a loss around a ``net`` with adapters of the model `base`,
    unless the adapters' config names one."""
    net: Any = module.net
    peft_config: Any = net.peft_config[NAME]
    config = dataclasses.replace(
        peft_config,
        inference_mode=True,
        base_model_name_or_path=peft_config.base_model_name_or_path or base,
        task_type=peft_config.task_type or _TASKS.get(type(module).__name__),
    )
    if _has_experts(net):
        config.target_modules = [path for path, layer in net.named_modules() if _is_adapted(layer)]
    with tempfile.TemporaryDirectory() as scratch:
        config.save_pretrained(scratch)
        return json.loads((Path(scratch) / ADAPTER_CONFIG).read_text(encoding="utf-8"))


def _arguments(lora: Lora, net: nn.Module, name: str) -> dict[str, Any]:
    """Return keyword arguments of `peft.LoraConfig` for the transformers model `net`."""
    kind = net.config.model_type  # type: ignore[union-attr]
    targets = lora.targets or _peft().utils.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(kind)
    if targets is None and {path.rpartition(".")[2] for path, _ in net.named_modules()} >= {*_USUAL}:
        targets = _USUAL
    if targets is None:
        raise InputError(
            f"peft has no default layers for models of type '{kind}', such as '{name}': name them with "
            "--lora-targets, or all linear ones as all-linear"
        )
    return {
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": _linear_layers(net) if targets == ALL_LINEAR else list(targets),
        "lora_dropout": lora.dropout,
        "init_lora_weights": not lora.is_drawn,
        "fan_in_fan_out": any(map(is_transposed, net.modules())),
    }


def _linear_layers(net: Any) -> list[str]:
    """Return the paths of all linear layers but the head, and with experts those that peft takes for their parts."""
    head, left_out = net.get_output_embeddings(), _OF_EXPERTS if _has_experts(net) else ()
    return [
        path
        for path, layer in net.named_modules()
        if layer is not head
        and (isinstance(layer, nn.Linear) or is_transposed(layer))
        and path.rpartition(".")[2] not in left_out
    ]


def _has_experts(net: nn.Module) -> bool:
    """Return whether weights of several experts are in one tensor."""
    return any(parameter.dim() == 3 for parameter in net.parameters())


def is_transposed(layer: nn.Module) -> bool:
    """Return whether a linear layer stores (inputs, features), as GPT-2's do."""
    return type(layer).__name__ == "Conv1D"


def _is_adapted(layer: nn.Module) -> bool:
    return isinstance(layer, _peft().tuners.tuners_utils.BaseTunerLayer)


def _check(net: nn.Module) -> None:
    """Raise `InputError` for a layer that cannot have an adapter."""
    uses: dict[int, int] = {}
    for module in net.modules():
        for parameter in module._parameters.values():
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    for path, module in net.named_modules():
        if not _is_adapted(module):
            continue
        layer: Any = module.base_layer
        if not isinstance(layer, nn.Linear) and not is_transposed(layer):
            raise InputError(
                f"'{path}' is a {type(layer).__name__}, but only linear layers can have adapters: name others with "
                "--lora-targets"
            )
        if uses[id(layer.weight)] > 1:
            raise InputError(
                f"'{path}' shares its weight with another layer, and an adapter of one would separate them: leave it "
                "out of --lora-targets"
            )


@contextlib.contextmanager
def quiet_bitsandbytes() -> Iterator[None]:
    """Silence the warning of bitsandbytes, when it is imported, that a kernel is missing which nothing here uses."""
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@functools.cache
def _peft() -> Any:
    try:
        with quiet_bitsandbytes():
            import peft
    except ImportError as error:
        raise InputError(
            f"--lora needs peft, which cannot be imported ({error}): pip install peft, or 'stagewright[lora]'"
        ) from None
    return peft
