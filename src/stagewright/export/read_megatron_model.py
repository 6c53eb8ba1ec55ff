"""The model that options of Megatron-LM describe, as one that is known here with other sizes.

Source: Megatron-LM core_v0.19.0, megatron/training/arguments.py, defaults included. Ignores: the rows that
`--make-vocab-size-divisible-by` adds to the vocabulary, initial weights, and where positions end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from stagewright.errors import InputError
from stagewright.export.reading import ModelRead
from stagewright.tracing.models.reference import bundled_names, resolve

Config = dict[str, Any]

_FAMILIES = "Llama, Qwen2, Qwen3, Mixtral, Qwen3-MoE, DeepSeek-V3 and GPT-2"
_DENSE_FIRST = re.compile(r"\(?\[0\]\*(\d+)\+\[1\]\*\d+\)?")
_SHARE = re.compile(r"0|0?\.\d{1,12}|0\.")
_VOCABULARIES = {"GPT2BPETokenizer": 50257}
"""Of tokenizers that come with one."""


def read_model(options: Mapping[str, str], tokenizer: str | None, origin: str) -> ModelRead:
    """The nearest bundled model of the family, and what of its configuration is otherwise.

    Raises:
        InputError: the options do not say enough, or describe no family that is known; says what to do.
    """
    said = _Described(options, tokenizer, origin)
    family = _family(said)
    wanted = _CONFIGS[family](said)
    bundled = [resolve(name) for name in bundled_names()]
    changes = {
        one.text: {key: value for key, value in wanted.items() if _value(one.config or {}, key) != value}
        for one in bundled
        if (one.config or {}).get("model_type") == family
    }
    text = min(changes, key=lambda name: len(changes[name]))
    return ModelRead(text, changes[text], tuple(_notes(said, family)))


def _value(config: Mapping[str, Any], key: str) -> Any:
    """Of a key that may be left out."""
    if (found := config.get(key)) is not None:
        return found
    if key == "num_key_value_heads":
        return config["num_attention_heads"]
    if key == "head_dim":
        return config["hidden_size"] // config["num_attention_heads"]
    return {
        "n_inner": 4 * config.get("n_embd", 0),
        "tie_word_embeddings": config["model_type"] == "gpt2",
    }.get(key)


@dataclass(frozen=True)
class _Described:
    options: Mapping[str, str]
    tokenizer: str | None
    origin: str

    def has(self, name: str) -> bool:
        return name in self.options

    def number(self, name: str, default: int | None = None) -> int:
        """Raises `InputError` where the file does not say it."""
        value = self.options.get(name)
        if value is None and default is None:
            raise self.lacks(f"--{name}")
        if value is None:
            return default or 0
        if not value.isdecimal() or int(value[:12]) < 1:
            raise self.lacks(f"--{name} as a number of at least 1 (it is '{value}')")
        return int(value[:12])

    def share(self, name: str) -> float:
        """A probability, which is 0.1 where the file does not say it."""
        value = self.options.get(name, "0.1")
        if not _SHARE.fullmatch(value):
            raise self.lacks(f"--{name} as a number from 0 to below 1 (it is '{value}')")
        return float(value)

    def lacks(self, what: str) -> InputError:
        return InputError(
            f"{self.origin} does not say {what}, so its model is not known: add it, or name MODEL"
        )

    @property
    def vocabulary(self) -> int:
        if (size := _VOCABULARIES.get(self.tokenizer or "")) and not self.has("vocab-size"):
            return size
        return self.number("vocab-size")

    @property
    def feed_forward(self) -> int:
        """By default as many parameters with a gate as four times the width has without."""
        width = self.number("hidden-size")
        return self.number(
            "ffn-hidden-size", int(4 * width * 2 / 3 / 64) * 64 if self.has("swiglu") else 4 * width
        )


def _family(said: _Described) -> str:
    norm = said.options.get("normalization", "LayerNorm")
    positions = said.options.get("position-embedding-type", "learned_absolute")
    is_rotary = positions == "rope" or said.has("use-rotary-position-embeddings")
    is_latent, has_experts, has_norms = map(
        said.has, ("multi-latent-attention", "num-experts", "qk-layernorm")
    )
    if (
        not said.has("swiglu")
        and norm == "LayerNorm"
        and positions == "learned_absolute"
        and not (is_rotary or has_experts or has_norms or is_latent or said.has("group-query-attention"))
    ):
        return "gpt2"
    if said.has("swiglu") and norm == "RMSNorm":
        has_biases = said.has("add-qkv-bias")
        if has_biases and is_rotary and not (is_latent or has_experts or has_norms):
            return "qwen2"
        if is_latent and has_experts and not has_biases:
            return "deepseek_v3"
        if is_rotary and not is_latent and not has_biases:
            return {
                (False, False): "llama", (False, True): "qwen3", (True, False): "mixtral", (True, True): "qwen3_moe",
            }[has_experts, has_norms]  # fmt: skip
    raise InputError(
        f"{said.origin}: its options describe no model of a family that is known here ({_FAMILIES}): name MODEL"
    )


def _ends(said: _Described) -> Config:
    return {
        "vocab_size": said.vocabulary,
        "tie_word_embeddings": not said.has("untie-embeddings-and-output-weights"),
    }


def _llama_like(said: _Described) -> Config:
    width, heads = said.number("hidden-size"), said.number("num-attention-heads")
    return {
        "num_hidden_layers": said.number("num-layers"),
        "hidden_size": width,
        "intermediate_size": said.feed_forward,
        "num_attention_heads": heads,
        "attention_dropout": said.share("attention-dropout"),
        **_ends(said),
    }


def _grouped(said: _Described) -> Config:
    """Heads that share keys and values, and how wide they are."""
    heads = said.number("num-attention-heads")
    groups = said.number("num-query-groups", 1) if said.has("group-query-attention") else heads
    return {
        **_llama_like(said),
        "num_key_value_heads": groups,
        "head_dim": said.number("kv-channels", said.number("hidden-size") // heads),
    }


def _llama(said: _Described) -> Config:
    biases = {} if said.has("disable-bias-linear") else {"attention_bias": True, "mlp_bias": True}
    return _grouped(said) | biases


def _mixtral(said: _Described) -> Config:
    return _grouped(said) | {
        "intermediate_size": said.number("moe-ffn-hidden-size", said.feed_forward),
        "num_local_experts": said.number("num-experts"),
        "num_experts_per_tok": said.number("moe-router-topk", 2),
    }


def _qwen3_moe(said: _Described) -> Config:
    return _grouped(said) | {
        "num_experts": said.number("num-experts"),
        "num_experts_per_tok": said.number("moe-router-topk", 2),
        "moe_intermediate_size": said.number("moe-ffn-hidden-size", said.feed_forward),
    }


def _deepseek_v3(said: _Described) -> Config:
    expert = said.number("moe-ffn-hidden-size", said.feed_forward)
    dense = _DENSE_FIRST.fullmatch(said.options.get("moe-layer-freq", ""))
    return _llama_like(said) | {
        "num_key_value_heads": said.number("num-attention-heads"),
        "moe_intermediate_size": expert,
        "n_routed_experts": said.number("num-experts"),
        "num_experts_per_tok": said.number("moe-router-topk", 2),
        "n_shared_experts": said.number("moe-shared-expert-intermediate-size", 0) // expert,
        "first_k_dense_replace": int(dense[1]) if dense else 0,
        "q_lora_rank": said.number("q-lora-rank"),
        "kv_lora_rank": said.number("kv-lora-rank", 32),
        "qk_nope_head_dim": said.number("qk-head-dim", 128),
        "qk_rope_head_dim": said.number("qk-pos-emb-head-dim", 64),
        "v_head_dim": said.number("v-head-dim", 128),
        "n_group": said.number("moe-router-num-groups", 1),
        "topk_group": said.number("moe-router-group-topk", 1),
    }


def _gpt2(said: _Described) -> Config:
    return {
        "n_layer": said.number("num-layers"),
        "n_embd": said.number("hidden-size"),
        "n_inner": said.feed_forward,
        "n_head": said.number("num-attention-heads"),
        "n_positions": said.number("max-position-embeddings"),
        "attn_pdrop": said.share("attention-dropout"),
        "resid_pdrop": said.share("hidden-dropout"),
        **_ends(said),
    }


_CONFIGS: dict[str, Callable[[_Described], Config]] = {
    "llama": _llama, "qwen2": _grouped, "qwen3": _grouped, "mixtral": _mixtral, "qwen3_moe": _qwen3_moe,
    "deepseek_v3": _deepseek_v3, "gpt2": _gpt2,
}  # fmt: skip


def _notes(said: _Described, family: str) -> Iterator[str]:
    """What the model that is read has otherwise."""
    if family != "gpt2" and (dropout := said.share("hidden-dropout")):
        default = "" if said.has("hidden-dropout") else ", the default,"
        yield f"--hidden-dropout {dropout:g}{default} is not in the model that is read"
    if family == "gpt2":
        width = said.number("hidden-size") // said.number("num-attention-heads")
        if said.number("kv-channels", width) != width:
            yield f"--kv-channels {said.options['kv-channels']} is predicted as {width}, the width over the heads"
        if said.has("disable-bias-linear"):
            yield "--disable-bias-linear is not in the model that is read, whose linear layers have biases"
    if family not in ("gpt2", "llama") and not said.has("disable-bias-linear"):
        yield "biases of linear layers, as --disable-bias-linear is missing, are not in the model that is read"
    layers = said.options.get("moe-layer-freq")
    if layers is not None and not (family == "deepseek_v3" and _DENSE_FIRST.fullmatch(layers)):
        yield f"--moe-layer-freq {layers} is predicted as experts in every layer"
