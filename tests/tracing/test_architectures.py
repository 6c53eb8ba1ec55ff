"""Families of models whose configurations or layers differ from the common: each is traced from its config alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from stagewright.tracing.cache import trace

BART = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 128, "max_position_embeddings": 64, "pad_token_id": 1,
}  # fmt: skip
TEXT = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 64,
    "vocab_size": 128, "head_dim": 16,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
HYBRID = {
    "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1,
    "time_step_limit": [0.0, float("inf")],
}  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "bart", **BART},
        {"model_type": "mbart", **BART},
        {"model_type": "marian", **BART},
        {"model_type": "blenderbot", **BART},
        {"model_type": "llama", **TEXT},
        {"model_type": "gemma3", "text_config": TEXT, "vision_config": VISION},
        {"model_type": "falcon_h1", **TEXT, **HYBRID},
    ],
    ids=lambda config: config["model_type"],
)
def test_a_family_is_traced_from_its_config(config: dict, tmp_path: Path) -> None:
    """Layers called with None or a list, no padding token, settings of the text alone, a range without an end."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    graph = trace(str(tmp_path), 1, 32, "float32", use_cache=False)
    assert graph.body and any("layers.1" in node.module for node in graph.nodes)
