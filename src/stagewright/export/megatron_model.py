"""Translation of a model's config.json to options of Megatron-LM.

Source: Megatron-LM core_v0.19.0, megatron/training/arguments.py and megatron/core/transformer/transformer_config.py; the
configuration classes of transformers for the defaults of a config.json. Ignores: the scale of initial weights beyond
`initializer_range`, and multi-token prediction, which transformers does not train.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from typing import Any

from stagewright.errors import InputError

Config = Mapping[str, Any]

_NOT_NUMBERS = {
    "model_type", "hidden_act", "activation_function", "rope_type", "type", "rope_parameters", "rope_scaling",
    "mlp_only_layers",
}  # fmt: skip


class _Checked(dict[str, Any]):
    """A config that checks that values of numeric options are numbers, since they become words of a shell."""

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        if key not in _NOT_NUMBERS and not isinstance(value, int | float | None):
            raise InputError(
                f"megatron: {key} of this model's config is {value!r}, which is not a number: correct it"
            )
        return value

    def get(self, key: str, default: Any = None) -> Any:
        return super().get(key, default) if key not in self else self[key]


def model_options(config: Config, sequence_length: int, tp: int = 1) -> tuple[str, ...]:
    """Return options that describe a model, one with its value each.

    Raises:
        InputError: Megatron-LM's `pretrain_gpt.py` has no such model; says why.

    >>> from stagewright.tracing.models.reference import resolve
    >>> model_options(resolve("llama-3-8b").config, 8192)[:3]
    ('--num-layers 32', '--hidden-size 4096', '--ffn-hidden-size 14336')
    """
    config = _Checked(config)
    family = str(config.get("model_type"))
    if family not in _FAMILIES:
        raise InputError(
            f"megatron: pretrain_gpt.py has no counterpart of a '{family}' model; known are "
            f"{', '.join(_FAMILIES)}"
        )
    if family == "gpt2":
        return tuple(_gpt2(config, tp))
    _check_llama_like(config, sequence_length)
    return tuple(
        option for part in (_sizes, _attention, _FAMILIES[family], _ends) for option in part(config)
    ) + tuple(_vocabulary(config, tp))


def _sizes(config: Config) -> Iterator[str]:
    yield f"--num-layers {config['num_hidden_layers']}"
    yield f"--hidden-size {config['hidden_size']}"
    yield f"--ffn-hidden-size {config['intermediate_size']}"
    yield f"--num-attention-heads {config['num_attention_heads']}"


def _attention(config: Config) -> Iterator[str]:
    """Yield heads and position embeddings."""
    if "kv_lora_rank" in config:
        yield from _latent_attention(config)
    else:
        heads = config["num_attention_heads"]
        groups = config.get("num_key_value_heads") or heads
        if groups != heads:
            yield f"--group-query-attention --num-query-groups {groups}"
        yield f"--kv-channels {config.get('head_dim') or config['hidden_size'] // heads}"
    yield f"--max-position-embeddings {config['max_position_embeddings']}"
    yield "--position-embedding-type rope"
    yield f"--rotary-base {int(_rope(config).get('rope_theta', 10000))}"
    yield from _rope_scaling(config)
    yield f"--attention-dropout {float(config.get('attention_dropout', 0.0))} --hidden-dropout 0.0"


def _latent_attention(config: Config) -> Iterator[str]:
    yield "--multi-latent-attention"
    if config.get("q_lora_rank"):
        yield f"--q-lora-rank {config['q_lora_rank']}"
    yield f"--kv-lora-rank {config['kv_lora_rank']}"
    yield f"--qk-head-dim {config['qk_nope_head_dim']}"
    yield f"--qk-pos-emb-head-dim {config['qk_rope_head_dim']}"
    yield f"--v-head-dim {config['v_head_dim']}"
    yield f"--kv-channels {config['v_head_dim']}"
    yield "--qk-layernorm"


def _rope(config: Config) -> Config:
    """Return the keys of the rotary embedding, which newer configs have in a separate table."""
    table = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return _Checked({**table, "rope_theta": table.get("rope_theta", config.get("rope_theta", 10000.0))})


_LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Factors that `--use-rope-scaling` assumes."""


def _rope_scaling(config: Config) -> Iterator[str]:
    rope = _rope(config)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "yarn" and "kv_lora_rank" in config:
        yield f"--rotary-scaling-factor {float(rope['factor'])}"
        yield f"--mscale {float(rope.get('mscale') or 1.0)} --mscale-all-dim {float(rope.get('mscale_all_dim') or 0.0)}"
    elif kind == "llama3" and all(rope.get(key, value) == value for key, value in _LLAMA_3.items()):
        yield f"--use-rope-scaling --rope-scaling-factor {float(rope['factor'])}"
    elif kind == "linear" and float(rope["factor"]).is_integer():
        yield f"--rotary-seq-len-interpolation-factor {int(rope['factor'])}"
    elif kind == "default" and "kv_lora_rank" in config:
        yield "--rope-type rope"
    elif kind != "default":
        raise InputError(
            f"megatron: rotary embeddings scaled by '{kind}' with these factors have no options: set rope_scaling to null"
        )


def _dense(config: Config) -> Iterator[str]:
    if config["model_type"] == "qwen2":
        yield "--add-qkv-bias"
    if config["model_type"] == "qwen3":
        yield "--qk-layernorm"


def _mixtral(config: Config) -> Iterator[str]:
    yield f"--num-experts {config['num_local_experts']}"
    yield f"--moe-router-topk {config['num_experts_per_tok']}"
    yield f"--moe-ffn-hidden-size {config['intermediate_size']}"
    yield from _balance(config)


def _qwen3_moe(config: Config) -> Iterator[str]:
    yield "--qk-layernorm"
    yield f"--num-experts {config['num_experts']}"
    yield f"--moe-router-topk {config['num_experts_per_tok']}"
    yield f"--moe-ffn-hidden-size {config['moe_intermediate_size']}"
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    layers = range(config["num_hidden_layers"])
    yield from _which_layers([layer not in dense and (layer + 1) % step == 0 for layer in layers])
    if not config.get("norm_topk_prob", False):
        yield "--moe-router-pre-softmax"
    yield from _balance(config)


def _deepseek_v3(config: Config) -> Iterator[str]:
    yield f"--num-experts {config['n_routed_experts']}"
    yield f"--moe-router-topk {config['num_experts_per_tok']}"
    yield f"--moe-ffn-hidden-size {config['moe_intermediate_size']}"
    if config.get("n_shared_experts"):
        shared = config["n_shared_experts"] * config["moe_intermediate_size"]
        yield f"--moe-shared-expert-intermediate-size {shared}"
    first = config.get("first_k_dense_replace", 0)
    yield from _which_layers([layer >= first for layer in range(config["num_hidden_layers"])])
    yield "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-dtype fp32"
    if config.get("n_group", 1) > 1:
        yield f"--moe-router-num-groups {config['n_group']} --moe-router-group-topk {config['topk_group']}"
    yield f"--moe-router-topk-scaling-factor {config.get('routed_scaling_factor', 1.0)}"
    yield from _balance(config)


def load_balancing(config: Config) -> tuple[str, float]:
    """Return the type of the loss that balances experts, in Megatron's words, and its coefficient: that with which
    transformers trains the model."""
    if config.get("output_router_logits") and config.get("model_type") in ("mixtral", "qwen3_moe"):
        return "aux_loss", config.get("router_aux_loss_coef", 0.001)
    return "none", 0.0


def _balance(config: Config) -> Iterator[str]:
    kind, coefficient = load_balancing(config)
    yield f"--moe-router-load-balancing-type {kind}"
    if kind != "none":
        yield f"--moe-aux-loss-coeff {coefficient}"


def _which_layers(is_sparse: list[bool]) -> Iterator[str]:
    """
    >>> list(_which_layers([False] * 3 + [True] * 58))
    ['--moe-layer-freq "([0]*3+[1]*58)"']
    """
    if not all(is_sparse):
        runs = [f"[{int(sparse)}]*{len(list(group))}" for sparse, group in groupby(is_sparse)]
        yield f'--moe-layer-freq "({"+".join(runs)})"'


_FAMILIES: dict[str, Callable[[Config], Iterator[str]]] = {
    "llama": _dense, "mistral": _dense, "qwen2": _dense, "qwen3": _dense, "mixtral": _mixtral, "qwen3_moe": _qwen3_moe,
    "deepseek_v3": _deepseek_v3, "gpt2": _dense,
}  # fmt: skip


def _ends(config: Config) -> Iterator[str]:
    """Yield norms, activation, biases and the head."""
    yield f"--normalization RMSNorm --norm-epsilon {config.get('rms_norm_eps', 1e-6)}"
    yield "--swiglu --disable-bias-linear"
    if not config.get("tie_word_embeddings", False):
        yield "--untie-embeddings-and-output-weights"
    yield f"--init-method-std {config.get('initializer_range', 0.02)}"


def _vocabulary(config: Config, tp: int) -> Iterator[str]:
    """Yield the vocabulary, padded no more than tensor parallelism needs."""
    size = config["vocab_size"]
    multiple = next((power for power in (128, 64, 32, 16, 8, 4, 2) if size % (power * tp) == 0), 1)
    yield f"--vocab-size {size} --make-vocab-size-divisible-by {multiple}"


def _gpt2(config: Config, tp: int) -> Iterator[str]:
    hidden, heads = config["n_embd"], config["n_head"]
    if config.get("activation_function", "gelu_new") not in ("gelu_new", "gelu_pytorch_tanh"):
        raise InputError(
            f"megatron: activation '{config['activation_function']}' of a gpt2 model has no option: use gelu_new"
        )
    yield f"--num-layers {config['n_layer']}"
    yield f"--hidden-size {hidden}"
    yield f"--ffn-hidden-size {config.get('n_inner') or 4 * hidden}"
    yield f"--num-attention-heads {heads}"
    yield f"--max-position-embeddings {config['n_positions']}"
    yield "--position-embedding-type learned_absolute"
    yield f"--attention-dropout {config.get('attn_pdrop', 0.1)} --hidden-dropout {config.get('resid_pdrop', 0.1)}"
    yield f"--normalization LayerNorm --norm-epsilon {config.get('layer_norm_epsilon', 1e-5)}"
    if not config.get("tie_word_embeddings", True):
        yield "--untie-embeddings-and-output-weights"
    yield f"--init-method-std {config.get('initializer_range', 0.02)}"
    yield from _vocabulary(config, tp)


def _check_llama_like(config: Config, sequence_length: int) -> None:
    """Raise `InputError` for features of a decoder that have no option."""
    uses_window = config.get("use_sliding_window", config["model_type"] != "qwen2")
    window = (config.get("sliding_window") if uses_window else None) or sequence_length
    refused = {
        f"hidden_act '{config.get('hidden_act', 'silu')}'": config.get("hidden_act", "silu") != "silu",
        "attention_bias": config.get("attention_bias", False) and config["model_type"] != "qwen2",
        "mlp_bias": config.get("mlp_bias", False),
        f"sliding_window {window}, less than the {sequence_length} tokens of a sample,": window
        < sequence_length,
        "expert weights that are not made to sum to 1 (norm_topk_prob)": config["model_type"] == "deepseek_v3"
        and not config.get("norm_topk_prob", True),
    }
    for what, is_refused in refused.items():
        if is_refused:
            raise InputError(
                f"megatron: {what} of this model is not among Megatron-LM's options: export to torch-pipelining, or train "
                "with `stagewright run`"
            )
