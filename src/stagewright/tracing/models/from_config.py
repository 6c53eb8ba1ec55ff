"""Transformers models from their configs, wrapped with the loss that their kind is trained with."""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig
from transformers.initialization import no_init_weights
from transformers.models.auto import modeling_auto as auto

from stagewright.errors import InputError, nearest
from stagewright.tracing.models import losses
from stagewright.tracing.models.overrides import DROPOUT
from stagewright.tracing.models.reference import ModelReference

if TYPE_CHECKING:
    from stagewright.tracing.models.build import MicrobatchShape

# In the order in which they are tried when a config names no architecture: BERT has both language models.
_KINDS = {
    "seq2seq": (auto.AutoModelForSeq2SeqLM, auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
    "masked": (auto.AutoModelForMaskedLM, auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    "causal": (auto.AutoModelForCausalLM, auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    "image": (auto.AutoModelForImageClassification, auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES),
    "classification": (
        auto.AutoModelForSequenceClassification,
        auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    ),
    "image-text": (auto.AutoModelForImageTextToText, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
}
# Keys that describe how a checkpoint is stored or run, not the model that is trained; at any depth, as some of them name
# code to be loaded.
_DROPPED = (
    "quantization_config", "auto_map", "torch_dtype", "dtype", "attn_implementation", "_attn_implementation",
    "_attn_implementation_internal",
)  # fmt: skip
# Keys that config classes take and store under another name, or models take from them.
_ACCEPTED = (
    "rope_theta", "rope_scaling", "num_labels", "sliding_window_pattern", "hybrid_override_pattern",
    "gradient_checkpointing", "image_size",
)  # fmt: skip
_DROPOUT_KEY = re.compile(r"(^|_)(dropout|pdrop)(_|$)")
_LEARNED_POSITIONS = re.compile(r"(^|\.)(wpe|position_embeddings|embed_positions)$")


def build_from_config(
    reference: ModelReference, microbatch: MicrobatchShape, initialise: bool
) -> tuple[nn.Module, dict[str, Tensor], int]:
    """Return module with loss, example inputs and tokens per microbatch of a reference of kind "config".

    Weights stay unset without `initialise`, which is meant for fake tensors. Raises `InputError`.
    """
    config = _config(reference)
    kind, auto_class = _kind(reference, config)
    with contextlib.nullcontext() if initialise else no_init_weights():
        try:
            net = auto_class.from_config(config, dtype=microbatch.torch_dtype)
        except Exception as error:  # models also raise many types for bad values
            raise InputError(
                f"transformers cannot build '{reference.name}' from its config ({_one_line(error)}): "
                "correct the value or the override that it names"
            ) from error
    if not initialise:
        net.tie_weights()  # skipped together with the initialisation
    _check(reference, config, net, microbatch)
    _check_needs_no_images(reference, kind, net)
    if kind == "image":
        return (
            losses.Classifier(net),
            _image_inputs(reference, config, microbatch),
            microbatch.microbatch_size,
        )
    num_tokens = microbatch.microbatch_size * microbatch.sequence_length
    tokens = _tokens(reference, config, microbatch)
    if microbatch.further_inputs and kind in ("masked", "seq2seq", "classification"):
        raise InputError(
            f"'{reference.name}' takes no further {', '.join(microbatch.further_inputs)}: it has its own labels"
        )
    if kind == "classification":
        return (
            losses.Classifier(net),
            {"input_ids": tokens, "labels": _classes(reference, config, microbatch)},
            num_tokens,
        )
    if kind == "masked":
        return losses.MaskedLanguageModel(net), {"input_ids": tokens, "labels": _hidden(tokens)}, num_tokens
    if kind == "seq2seq":
        start = getattr(config, "decoder_start_token_id", None)
        module = losses.SequenceToSequence(
            net, start if start is not None else getattr(config, "pad_token_id", None) or 0
        )
        return module, {"input_ids": tokens, "labels": _tokens(reference, config, microbatch)}, 2 * num_tokens
    further = {name: _tokens(reference, config, microbatch) for name in microbatch.further_inputs}
    if "position_ids" in further:
        _check_keeps_apart(reference, net)
        further["position_ids"] = torch.arange(microbatch.sequence_length).repeat(
            microbatch.microbatch_size, 1
        )
    return losses.CausalLanguageModel(net), {"input_ids": tokens, **further}, num_tokens


def _config(reference: ModelReference) -> PretrainedConfig:
    assert reference.config is not None
    values = _structure(reference.config)
    model_type = values.pop("model_type")
    if model_type not in CONFIG_MAPPING:
        raise InputError(
            f"transformers knows no model_type '{model_type}'{nearest(model_type, CONFIG_MAPPING)}: "
            "correct it in the config, update transformers, or pass the model as package.module:factory"
        )
    _refuse_unknown(reference, CONFIG_MAPPING[model_type])
    try:
        config = AutoConfig.for_model(model_type, **values)
    except Exception as error:  # validators of config classes raise many types, all for bad values
        raise InputError(
            f"the config of '{reference.name}' is refused by transformers: {_one_line(error)}"
        ) from error
    if DROPOUT in reference.overrides:
        _set_dropout(config, reference.overrides[DROPOUT])
    return config


def _structure(value: Any) -> Any:
    """Return a config, or a part of one, without the dropped keys."""
    if isinstance(value, Mapping):
        return {key: _structure(item) for key, item in value.items() if key not in _DROPPED}
    return [_structure(item) for item in value] if isinstance(value, list) else value


def _refuse_unknown(reference: ModelReference, config_class: type[PretrainedConfig]) -> None:
    """Raise `InputError` for overrides of keys that neither the config file nor the config class has: they are misspelt."""
    if not reference.unconfirmed:
        return
    mentioned = set(reference.config or ()) - reference.unconfirmed
    keys = {*config_class().to_dict(), *config_class.attribute_map, *_ACCEPTED, *mentioned, DROPOUT}
    for key in sorted(reference.unconfirmed - keys):
        raise InputError(
            f"a {config_class.model_type} config has no key '{key}'{nearest(key, keys)}: "
            "an override replaces a key of the model's config"
        )


def _set_dropout(config: PretrainedConfig, probability: Any) -> None:
    if isinstance(probability, bool) or not isinstance(probability, int | float) or not 0 <= probability < 1:
        raise InputError(f"dropout is {probability!r}: give a probability from 0 to below 1")
    for key, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            _set_dropout(value, probability)
        if _DROPOUT_KEY.search(key) and isinstance(value, int | float) and not isinstance(value, bool):
            setattr(config, key, float(probability))


def _kind(reference: ModelReference, config: PretrainedConfig) -> tuple[str, Any]:
    named = [str(name) for name in (reference.config or {}).get("architectures") or ()]
    for kind, (auto_class, mapping) in _KINDS.items():
        if any(name in _class_names(mapping, config) for name in named):
            return kind, auto_class
    if not named or not any("For" in name or "Head" in name for name in named):
        for kind, (auto_class, mapping) in _KINDS.items():
            if config.model_type in mapping and (kind != "seq2seq" or config.is_encoder_decoder):
                return kind, auto_class
    what = f"architecture {', '.join(named)}" if named else f"model_type '{config.model_type}'"
    raise InputError(
        f"no loss is known for {what}: use a causal, masked or sequence-to-sequence language model, a model of images and "
        "text, or a classifier of text or images, or pass the model as package.module:factory with its own loss"
    )


def _class_names(mapping: Mapping[str, Any], config: PretrainedConfig) -> tuple[str, ...]:
    names = mapping.get(config.model_type, ())
    return (names,) if isinstance(names, str) else tuple(names)


def _check(
    reference: ModelReference, config: PretrainedConfig, net: nn.Module, microbatch: MicrobatchShape
) -> None:
    if microbatch.dtype == "float64" and any(hasattr(module, "is_transposed") for module in net.modules()):
        raise InputError(
            f"'{reference.name}' has experts, whose grouped matmul has no float64 kernel: "
            "use dtype float32 or bfloat16"
        )
    if hasattr(config, "vocab_size"):
        check_positions(net, microbatch.sequence_length)


def _check_needs_no_images(reference: ModelReference, kind: str, net: nn.Module) -> None:
    """Raise `InputError` for a model of images and text that cannot train on text only."""
    given = inspect.signature(net.forward).parameters.get("pixel_values")
    if kind == "image-text" and given is not None and given.default is inspect.Parameter.empty:
        raise InputError(
            f"'{reference.name}' ({type(net).__name__}) accepts no text without images (pixel_values), and models of both "
            "are trained on text only here: pass it as package.module:factory with its inputs and loss"
        )


def _check_keeps_apart(reference: ModelReference, net: nn.Module) -> None:
    """Raise `InputError` if documents in one sample would see each other despite their position ids: if the model builds no
    mask from these, or has a convolution over time or a recurrence that passes from one document to the next."""
    makes_mask = hasattr(sys.modules[type(net).__module__], "create_causal_mask")
    takes_positions = "position_ids" in inspect.signature(net.forward).parameters
    crosses = next((path for path, module in net.named_modules() if isinstance(module, nn.Conv1d)), None)
    if makes_mask and takes_positions and crosses is None:
        return
    why = f"'{crosses}' looks back over them" if crosses else "it makes no mask of position_ids"
    raise InputError(
        f"'{reference.name}' cannot keep documents of a sample apart ({why}): plan without documents_apart, or give a "
        "document per sample as package.module:factory"
    )


def check_positions(net: nn.Module, sequence_length: int) -> None:
    """Raise `InputError` for samples longer than a model's learned positions."""
    for path, module in net.named_modules():
        if not (_LEARNED_POSITIONS.search(path) and isinstance(module, nn.Embedding)):
            continue
        if module.num_embeddings < sequence_length:
            raise InputError(
                f"sequence length {sequence_length} exceeds the {module.num_embeddings} learned positions of '{path}': "
                "shorten it or override max_position_embeddings"
            )


def _tokens(reference: ModelReference, config: PretrainedConfig, microbatch: MicrobatchShape) -> Tensor:
    vocabulary = getattr(config.get_text_config(), "vocab_size", None)
    if vocabulary is None:
        raise InputError(
            f"the config of '{reference.name}' has no vocab_size, so its tokens are unknown: pass the model as "
            "package.module:factory with its own inputs"
        )
    return torch.randint(0, vocabulary, (microbatch.microbatch_size, microbatch.sequence_length))


def _hidden(tokens: Tensor) -> Tensor:
    """Return the tokens to predict: 15 % of the positions, as in BERT's pre-training."""
    return torch.where(torch.rand(tokens.shape) < 0.15, tokens, losses.IGNORED)


def _image_inputs(
    reference: ModelReference, config: PretrainedConfig, microbatch: MicrobatchShape
) -> dict[str, Tensor]:
    vision = getattr(config, "vision_config", config)  # of models of images and texts, as CLIP
    size, channels = getattr(vision, "image_size", None), getattr(vision, "num_channels", 3)
    if size is None:
        raise InputError(
            f"the config of '{reference.name}' has no image_size: add the size of its images, e.g. image_size=224"
        )
    height, width = (size, size) if isinstance(size, int) else size
    shape = (microbatch.microbatch_size, channels, height, width)
    images = torch.randn(shape, dtype=microbatch.torch_dtype)
    return {"pixel_values": images, "labels": _classes(reference, config, microbatch)}


def _classes(reference: ModelReference, config: PretrainedConfig, microbatch: MicrobatchShape) -> Tensor:
    """Return a class for each sample."""
    num_labels = config.num_labels or 0
    if num_labels < 2 or getattr(config, "problem_type", None) in _NO_CLASSES:
        raise InputError(
            f"'{reference.name}' is trained on numbers or on several labels at once (num_labels={num_labels}), but "
            "only one class per sample is supported: pass it as package.module:factory with its own loss"
        )
    return torch.randint(0, num_labels, (microbatch.microbatch_size,))


_NO_CLASSES = ("regression", "multi_label_classification")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
