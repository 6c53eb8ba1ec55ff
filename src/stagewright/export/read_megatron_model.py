"""Import of the model that options of Megatron-LM describe, as a bundled model with changed sizes.

Source: Megatron-LM core_v0.19.0, megatron/training/arguments.py, defaults included. Ignores: the padding of the
vocabulary by `--make-vocab-size-divisible-by`, initial weights, and the largest position.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stagewright.errors import InputError
from stagewright.export.reading import ModelRead
from stagewright.tracing.models.reference import ModelReference, bundled_names, resolve

Config = dict[str, Any]

_FAMILIES = "Llama, Qwen2, Qwen3, Mixtral, Qwen3-MoE, DeepSeek-V3 and GPT-2"
_DENSE_FIRST = re.compile(r"\(?\[0\]\*(\d+)\+\[1\]\*\d+\)?")
_SHARE = re.compile(r"0|0?\.\d{1,12}|0\.")
_VOCABULARIES = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000}
"""Vocabulary sizes of tokenizers with a fixed one."""


def read_model(given: Mapping[str, str], tokenizer: str | None, origin: str) -> ModelRead:
    """Return the nearest bundled model of the family, and the keys of its configuration that differ.

    Raises:
        InputError: the options are incomplete, or describe no known family; says what to do.
    """
    options = _ModelOptions(given, tokenizer, origin)
    family = _family(options)
    wanted = _CONFIGS[family](options)
    bundled = [resolve(name) for name in bundled_names()]
    changes = {
        model.text: {key: value for key, value in wanted.items() if _value(model.config or {}, key) != value}
        for model in bundled
        if (model.config or {}).get("model_type") == family
    }
    notes = list(_notes(options, family))
    if "vocab_size" not in wanted:
        like = [model for model in bundled if changes.get(model.text) == {}]
        text = _of_one_vocabulary(options, like)
        changes = {text: {}}
        notes.append(f"--vocab-size is missing: that of {text}, which has all other sizes, is taken")
    text = min(changes, key=lambda name: len(changes[name]))
    return ModelRead(text, changes[text], tuple(notes))


def _of_one_vocabulary(options: _ModelOptions, models: Sequence[ModelReference]) -> str:
    """Return the first of `models`, which differ in nothing but their vocabulary; of several vocabularies that of the models
    with the same base of the rotary embedding. Raises `InputError` if that leaves not exactly one."""
    if len({model.config["vocab_size"] for model in models if model.config}) > 1:
        base = options.number("rotary-base", 10000)
        models = [model for model in models if model.config and model.config.get("rope_theta", base) == base]
    if len({model.config["vocab_size"] for model in models if model.config}) != 1:
        names = " and ".join(model.text for model in models)
        raise options.lacks(f"--vocab-size ({names} have its other sizes)" if names else "--vocab-size")
    return models[0].text


def _value(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key, or its default if it is absent."""
    if (value := config.get(key)) is not None:
        return value
    if key == "num_key_value_heads":
        return config["num_attention_heads"]
    if key == "head_dim":
        return config["hidden_size"] // config["num_attention_heads"]
    return {
        "n_inner": 4 * config.get("n_embd", 0),
        "tie_word_embeddings": config["model_type"] == "gpt2",
    }.get(key)


@dataclass(frozen=True)
class _ModelOptions:
    given: Mapping[str, str]
    tokenizer: str | None
    origin: str

    def has(self, name: str) -> bool:
        return name in self.given

    def number(self, name: str, default: int | None = None) -> int:
        """Return a number. Raises `InputError` if the file does not give it."""
        value = self.given.get(name)
        if value is None and default is None:
            raise self.lacks(f"--{name}")
        if value is None:
            return default or 0
        if not value.isdecimal() or int(value[:12]) < 1:
            raise self.lacks(f"--{name} as a number of at least 1 (it is '{value}')")
        return int(value[:12])

    def share(self, name: str) -> float:
        """Return a probability, 0.1 by default."""
        value = self.given.get(name, "0.1")
        if not _SHARE.fullmatch(value):
            raise self.lacks(f"--{name} as a number from 0 to below 1 (it is '{value}')")
        return float(value)

    def lacks(self, what: str) -> InputError:
        return InputError(
            f"{self.origin} does not say {what}, so its model is not known: add it, or name MODEL"
        )

    @property
    def vocabulary(self) -> int | None:
        """Return the size of the vocabulary; None if neither an option nor the tokenizer says it."""
        size = _VOCABULARIES.get(self.tokenizer or "")
        return self.number("vocab-size") if self.has("vocab-size") else size

    @property
    def feed_forward(self) -> int:
        """Return its size; the default with a gate has as many parameters as four times the hidden size without."""
        width = self.number("hidden-size")
        return self.number(
            "ffn-hidden-size", int(4 * width * 2 / 3 / 64) * 64 if self.has("swiglu") else 4 * width
        )


def _family(options: _ModelOptions) -> str:
    norm = options.given.get("normalization", "LayerNorm")
    positions = options.given.get("position-embedding-type", "learned_absolute")
    is_rotary = positions == "rope" or options.has("use-rotary-position-embeddings")
    is_latent, has_experts, has_norms = map(
        options.has, ("multi-latent-attention", "num-experts", "qk-layernorm")
    )
    if (
        not options.has("swiglu")
        and norm == "LayerNorm"
        and positions == "learned_absolute"
        and not (is_rotary or has_experts or has_norms or is_latent or options.has("group-query-attention"))
    ):
        return "gpt2"
    if options.has("swiglu") and norm == "RMSNorm":
        has_biases = options.has("add-qkv-bias")
        if has_biases and is_rotary and not (is_latent or has_experts or has_norms):
            return "qwen2"
        if is_latent and has_experts and not has_biases:
            return "deepseek_v3"
        if is_rotary and not is_latent and not has_biases:
            return {
                (False, False): "llama", (False, True): "qwen3", (True, False): "mixtral", (True, True): "qwen3_moe",
            }[has_experts, has_norms]  # fmt: skip
    raise InputError(
        f"{options.origin}: its options describe no model of a family that is known here ({_FAMILIES}): name MODEL"
    )


def _ends(options: _ModelOptions) -> Config:
    vocabulary = options.vocabulary
    return {
        **({} if vocabulary is None else {"vocab_size": vocabulary}),
        "tie_word_embeddings": not options.has("untie-embeddings-and-output-weights"),
    }


def _llama_like(options: _ModelOptions) -> Config:
    width, heads = options.number("hidden-size"), options.number("num-attention-heads")
    return {
        "num_hidden_layers": options.number("num-layers"),
        "hidden_size": width,
        "intermediate_size": options.feed_forward,
        "num_attention_heads": heads,
        "attention_dropout": options.share("attention-dropout"),
        **_ends(options),
    }


def _grouped(options: _ModelOptions) -> Config:
    """Return a config with grouped-query attention and a size of heads."""
    heads = options.number("num-attention-heads")
    groups = options.number("num-query-groups", 1) if options.has("group-query-attention") else heads
    return {
        **_llama_like(options),
        "num_key_value_heads": groups,
        "head_dim": options.number("kv-channels", options.number("hidden-size") // heads),
    }


def _llama(options: _ModelOptions) -> Config:
    biases = {} if options.has("disable-bias-linear") else {"attention_bias": True, "mlp_bias": True}
    return _grouped(options) | biases


def _mixtral(options: _ModelOptions) -> Config:
    return _grouped(options) | {
        "intermediate_size": options.number("moe-ffn-hidden-size", options.feed_forward),
        "num_local_experts": options.number("num-experts"),
        "num_experts_per_tok": options.number("moe-router-topk", 2),
    }


def _qwen3_moe(options: _ModelOptions) -> Config:
    return _grouped(options) | {
        "num_experts": options.number("num-experts"),
        "num_experts_per_tok": options.number("moe-router-topk", 2),
        "moe_intermediate_size": options.number("moe-ffn-hidden-size", options.feed_forward),
    }


def _deepseek_v3(options: _ModelOptions) -> Config:
    expert = options.number("moe-ffn-hidden-size", options.feed_forward)
    dense = _DENSE_FIRST.fullmatch(options.given.get("moe-layer-freq", ""))
    return _llama_like(options) | {
        "num_key_value_heads": options.number("num-attention-heads"),
        "moe_intermediate_size": expert,
        "n_routed_experts": options.number("num-experts"),
        "num_experts_per_tok": options.number("moe-router-topk", 2),
        "n_shared_experts": options.number("moe-shared-expert-intermediate-size", 0) // expert,
        "first_k_dense_replace": int(dense[1]) if dense else 0,
        "q_lora_rank": options.number("q-lora-rank"),
        "kv_lora_rank": options.number("kv-lora-rank", 32),
        "qk_nope_head_dim": options.number("qk-head-dim", 128),
        "qk_rope_head_dim": options.number("qk-pos-emb-head-dim", 64),
        "v_head_dim": options.number("v-head-dim", 128),
        "n_group": options.number("moe-router-num-groups", 1),
        "topk_group": options.number("moe-router-group-topk", 1),
    }


def _gpt2(options: _ModelOptions) -> Config:
    return {
        "n_layer": options.number("num-layers"),
        "n_embd": options.number("hidden-size"),
        "n_inner": options.feed_forward,
        "n_head": options.number("num-attention-heads"),
        "n_positions": options.number("max-position-embeddings"),
        "attn_pdrop": options.share("attention-dropout"),
        "resid_pdrop": options.share("hidden-dropout"),
        **_ends(options),
    }


_CONFIGS: dict[str, Callable[[_ModelOptions], Config]] = {
    "llama": _llama, "qwen2": _grouped, "qwen3": _grouped, "mixtral": _mixtral, "qwen3_moe": _qwen3_moe,
    "deepseek_v3": _deepseek_v3, "gpt2": _gpt2,
}  # fmt: skip


def _notes(options: _ModelOptions, family: str) -> Iterator[str]:
    """Yield the differences of the resulting model from the options."""
    if family != "gpt2" and (dropout := options.share("hidden-dropout")):
        default = "" if options.has("hidden-dropout") else ", the default,"
        yield f"--hidden-dropout {dropout:g}{default} is not in the model that is read"
    if family == "gpt2":
        width = options.number("hidden-size") // options.number("num-attention-heads")
        if options.number("kv-channels", width) != width:
            yield f"--kv-channels {options.given['kv-channels']} is predicted as {width}, the width over the heads"
        if options.has("disable-bias-linear"):
            yield "--disable-bias-linear is not in the model that is read, whose linear layers have biases"
    if family not in ("gpt2", "llama") and not options.has("disable-bias-linear"):
        yield "biases of linear layers, as --disable-bias-linear is missing, are not in the model that is read"
    layers = options.given.get("moe-layer-freq")
    if layers is not None and not (family == "deepseek_v3" and _DENSE_FIRST.fullmatch(layers)):
        yield f"--moe-layer-freq {layers} is predicted as experts in every layer"
