"""Models as options of Megatron-LM: what published scripts say, and as many parameters as the traced model."""

from __future__ import annotations

import re
from typing import Any

import pytest
from option_table import table

from stagewright.errors import InputError
from stagewright.export.megatron import argv
from stagewright.export.megatron_model import model_options
from stagewright.export.read_megatron import known_options
from stagewright.tracing.cache import trace
from stagewright.tracing.models.reference import resolve

# Megatron-LM core_v0.19.0, examples/llama/train_llama3_8b_h100_fp8.sh; but the rotary base is that of the published config,
# 500,000, and not the script's.
LLAMA_3_8B = """
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention
    --num-query-groups 8 --kv-channels 128 --max-position-embeddings 8192 --position-embedding-type rope --rotary-base 500000
    --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu --normalization RMSNorm --untie-embeddings-and-output-weights
    --disable-bias-linear --vocab-size 128256
"""
# examples/mixtral/train_mixtral_8x7b_distributed.sh
MIXTRAL_8X7B = """
    --disable-bias-linear --max-position-embeddings 32768 --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
    --num-attention-heads 32 --attention-dropout 0.0 --hidden-dropout 0.0 --normalization RMSNorm
    --position-embedding-type rope --swiglu --untie-embeddings-and-output-weights --group-query-attention
    --num-query-groups 8 --rotary-base 1000000 --num-experts 8 --moe-router-topk 2
"""
# DeepSeek-V3's technical report (arXiv 2412.19437), section 4.2.
DEEPSEEK_V3 = """
    --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --multi-latent-attention
    --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --num-experts 256
    --moe-router-topk 8 --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048
    --moe-layer-freq "([0]*3+[1]*58)" --moe-router-score-function sigmoid --moe-router-enable-expert-bias
    --moe-router-num-groups 8 --moe-router-group-topk 4 --moe-router-topk-scaling-factor 2.5 --rotary-base 10000
    --rotary-scaling-factor 40.0 --mscale 1.0 --mscale-all-dim 1.0 --qk-layernorm --vocab-size 129280
"""
GOLDEN = {"llama-3-8b": LLAMA_3_8B, "mixtral-8x7b": MIXTRAL_8X7B, "deepseek-v3": DEEPSEEK_V3}


def options(name: str, **changes: Any) -> dict[str, str]:
    config = resolve(name, changes).config
    assert config is not None
    return table(argv(model_options(config, 512)))


@pytest.mark.parametrize("name", GOLDEN)
def test_published_scripts_say_the_same(name: str) -> None:
    found = options(name)
    assert {key: found.get(key) for key in table(argv([GOLDEN[name]]))} == table(argv([GOLDEN[name]]))


def parameters(given: dict[str, str]) -> int:
    """Of Megatron-Core's GPT model with these options, without padding of the vocabulary."""

    def number(name: str, default: int = 0) -> int:
        return int(given.get(f"--{name}", default))

    hidden, heads = number("hidden-size"), number("num-attention-heads")
    has_bias, is_rms = "--disable-bias-linear" not in given, given["--normalization"] == "RMSNorm"
    norm = hidden * (1 if is_rms else 2)
    if "--multi-latent-attention" in given:
        q, kv, rope = number("q-lora-rank"), number("kv-lora-rank"), number("qk-pos-emb-head-dim")
        head, value = number("qk-head-dim"), number("v-head-dim")
        attention = hidden * q + q + q * heads * (head + rope) + hidden * (kv + rope) + kv
        attention += kv * heads * (head + value) + heads * value * hidden
    else:
        width = number("kv-channels", hidden // heads)
        groups = number("num-query-groups", heads)
        columns = width * (heads + 2 * groups)
        attention = hidden * columns + heads * width * hidden + (columns + hidden) * has_bias
        attention += columns * ("--add-qkv-bias" in given) + 2 * width * ("--qk-layernorm" in given)

    def feed_forward(ffn: int) -> int:
        up = ffn * (2 if "--swiglu" in given else 1)
        return hidden * (up + ffn) + (up + hidden) * has_bias

    layers = number("num-layers")
    frequency = given.get("--moe-layer-freq", f"([{int('--num-experts' in given)}]*{layers})")
    sparse = sum(int(bit) * int(times) for bit, times in re.findall(r"\[(\d)\]\*(\d+)", frequency))
    experts = number("num-experts") * (feed_forward(number("moe-ffn-hidden-size")) + hidden)
    experts += feed_forward(number("moe-shared-expert-intermediate-size"))
    body = (
        layers * (attention + 2 * norm)
        + (layers - sparse) * feed_forward(number("ffn-hidden-size"))
        + sparse * experts
    )
    tables = 2 if "--untie-embeddings-and-output-weights" in given else 1
    positions = number("max-position-embeddings") * (
        given.get("--position-embedding-type", "learned_absolute") == "learned_absolute"
    )
    return body + hidden * (tables * number("vocab-size") + positions) + norm


SMALL = {
    "llama-3-8b": {}, "gpt2": {}, "qwen3-8b": {}, "tiny-mixtral": {}, "qwen3-30b-a3b": {"num_experts": 8},
    "tiny-deepseek-v3": {},
}  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
def test_options_make_as_many_parameters_as_the_traced_model(name: str) -> None:
    changes = {"num_hidden_layers": 2, **SMALL[name]}
    graph = trace(
        resolve(name, changes), 1, sequence_length=64, dtype="bfloat16", expand=False, target="cuda"
    )
    assert parameters(options(name, **changes)) == graph.num_parameters


def test_every_option_is_one_of_megatron_s() -> None:
    known = known_options()
    for name in [*GOLDEN, "gpt2", "qwen3-8b", "qwen3-30b-a3b"]:
        assert {key[2:] for key in options(name)} <= known.model.keys()


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("gemma-2b", {}, "no counterpart of a 'gemma' model"),
        ("bert-large", {}, "no counterpart of a 'bert' model"),
        ("llama-3-8b", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("llama-3-8b", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "scaled by 'dynamic'"),
        ("mixtral-8x7b", {"sliding_window": 256}, "sliding_window 256"),
    ],
)
def test_models_without_a_counterpart_are_refused_with_the_reason(
    name: str, changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(InputError, match=why):
        options(name, **changes)


def test_scaled_rotary_embeddings_are_llama_3_s() -> None:
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    assert options("llama-3-8b", rope_scaling=scaling)["--rope-scaling-factor"] == "8.0"
    with pytest.raises(InputError, match="llama3"):
        options("llama-3-8b", rope_scaling={**scaling, "low_freq_factor": 2.0})
