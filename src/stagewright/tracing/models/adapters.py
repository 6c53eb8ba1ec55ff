"""Puts low-rank adapters into a model by `peft`, which is imported only here."""

from __future__ import annotations

import dataclasses
import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

from torch import nn

from stagewright.errors import InputError
from stagewright.tracing.models.adapter_names import ADAPTER_CONFIG, NAME, OF_PEFT
from stagewright.tracing.models.lora import Lora

_TASKS = {"CausalLanguageModel": "CAUSAL_LM", "SequenceToSequence": "SEQ_2_SEQ_LM"}

_USUAL = ("q_proj", "v_proj")
"""What peft takes of most decoders, for those that it has no choice for."""


def add_adapters(net: nn.Module, lora: Lora, name: str) -> None:
    """Change `net`, the transformers model of `name`: some layers get adapters, and nothing else is trained any more.

    A is drawn and B is zero, so that the model computes what it did. Raises `InputError` where peft is missing, or `net` has
    no layers that are so called, or they can have no adapters.
    """
    peft = _peft()
    config = peft.LoraConfig(**_arguments(lora, net, name))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is tied is refused below
            peft.inject_adapter_in_model(config, net, NAME)
    except Exception as error:  # peft raises many types over the names and layers given
        raise InputError(
            f"peft cannot add adapters to '{name}' ({' '.join(str(error).split())}): name linear layers of this model with "
            "--lora-targets, or all of them as all-linear"
        ) from error
    _check(net, peft.tuners.tuners_utils.BaseTunerLayer)


def peft_names(module: nn.Module) -> dict[str, str]:
    """The tensors of the adapters in `module`, a loss around a ``net``, by their names in it, and what peft's files call
    them; none where it has none, or several, of which none is the model's own."""
    net: Any = module.net
    if list(getattr(net, "peft_config", ())) != [NAME]:
        return {}
    state = net.state_dict(keep_vars=True)
    own = {id(tensor): name for name, tensor in state.items()}
    is_wrapped = isinstance(net, _peft().PeftModel)
    saved = _peft().get_peft_model_state_dict(
        net, state_dict=state, adapter_name=NAME, save_embedding_layers=False
    )
    return {
        f"net.{own[id(tensor)]}": name if is_wrapped else OF_PEFT + name for name, tensor in saved.items()
    }


def adapter_config(module: nn.Module, base: str) -> dict[str, Any]:
    """Content of the ``adapter_config.json`` of `module`, a loss around a ``net`` with adapters, for the model `base`,
    unless the config of the adapters names one."""
    own: Any = module.net.peft_config[NAME]  # type: ignore[union-attr,index]
    config = dataclasses.replace(
        own,
        inference_mode=True,
        base_model_name_or_path=own.base_model_name_or_path or base,
        task_type=own.task_type or _TASKS.get(type(module).__name__),
    )
    with tempfile.TemporaryDirectory() as scratch:
        config.save_pretrained(scratch)
        return json.loads((Path(scratch) / ADAPTER_CONFIG).read_text(encoding="utf-8"))


def _arguments(lora: Lora, net: nn.Module, name: str) -> dict[str, Any]:
    """Keywords of `peft.LoraConfig` for the transformers model `net`."""
    kind = net.config.model_type  # type: ignore[union-attr]
    targets = lora.targets or _peft().utils.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(kind)
    if targets is None and {path.rpartition(".")[2] for path, _ in net.named_modules()} >= {*_USUAL}:
        targets = _USUAL
    if targets is None:
        raise InputError(
            f"peft has no layers of its own choice for models of type '{kind}', as '{name}' is: name them with "
            "--lora-targets, or all linear ones as all-linear"
        )
    return {
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": targets if isinstance(targets, str) else list(targets),
        "lora_dropout": lora.dropout,
        "init_lora_weights": not lora.is_drawn,
        "fan_in_fan_out": any(map(is_transposed, net.modules())),
    }


def is_transposed(layer: nn.Module) -> bool:
    """Whether a linear layer keeps (inputs, features), as GPT-2's do."""
    return type(layer).__name__ == "Conv1D"


def _check(net: nn.Module, kind: type[Any]) -> None:
    """Raises `InputError` where a layer is none that an adapter's product can be added to."""
    uses: dict[int, int] = {}
    for module in net.modules():
        for parameter in module._parameters.values():
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    for path, module in net.named_modules():
        if not isinstance(module, kind):
            continue
        layer: Any = module.base_layer
        if not isinstance(layer, nn.Linear) and not is_transposed(layer):
            raise InputError(
                f"'{path}' is a {type(layer).__name__}, and adapters are beside linear layers: name others with "
                "--lora-targets"
            )
        if uses[id(layer.weight)] > 1:
            raise InputError(
                f"'{path}' has a weight that another layer uses too, which an adapter of one of them would part: leave it "
                "out of --lora-targets"
            )


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise InputError(
            f"--lora needs peft, which cannot be imported ({error}): pip install peft, or 'stagewright[lora]'"
        ) from None
    return peft
