"""Families of models whose configurations or layers differ from the common: each is traced from its config alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from stagewright.errors import InputError
from stagewright.graph import OperatorGraph
from stagewright.tracing.cache import trace
from stagewright.tracing.models.reference import resolve

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
PARTS = {
    "text_config": {"model_type": "llama", **TEXT},
    "vision_config": {"model_type": "clip_vision_model", **VISION},
}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
QWEN_VISION = {
    "depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 32,
}  # fmt: skip
HYBRID = {
    "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1,
    "time_step_limit": [0.0, float("inf")],
}  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "bart", **BART},
        {"model_type": "bart", "architectures": ["BartForCausalLM"], **BART, "decoder_layers": 4},
        {"model_type": "mbart", **BART},
        {"model_type": "marian", **BART},
        {"model_type": "blenderbot", **BART},
        {"model_type": "llama", **TEXT},
        {
            "model_type": "llama",
            "architectures": ["LlamaForSequenceClassification"],
            "pad_token_id": 0,
            **TEXT,
        },
        {"model_type": "gemma3", "text_config": TEXT, "vision_config": VISION},
        {"model_type": "falcon_h1", **TEXT, **HYBRID},
        {"model_type": "llava", **PARTS, "architectures": ["LlavaForConditionalGeneration"]},
        {"model_type": "mistral3", **PARTS, "vision_config": {"model_type": "pixtral", **VISION}},
        {"model_type": "qwen2_5_vl", "text_config": {**TEXT, **ROPE}, "vision_config": QWEN_VISION},
    ],
    ids=lambda config: config["model_type"],
)
def test_a_family_is_traced_from_its_config(config: dict, tmp_path: Path) -> None:
    """Layers called with None or a list, no padding token, settings of the text alone, a range without an end."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    graph = trace(str(tmp_path), 1, 32, "float32", use_cache=False)
    assert graph.forward_ids and any("layers.1" in node.module for node in graph.nodes)


def graph_of(config: dict, folder: Path, **overrides: Any) -> OperatorGraph:
    (folder / "config.json").write_text(json.dumps(config))
    return trace(resolve(str(folder), overrides), 1, 32, "float32", use_cache=False)


def test_settings_of_a_nested_text_are_changed_where_they_are(tmp_path: Path) -> None:
    config = {"model_type": "llava", **PARTS}
    graph = graph_of(config, tmp_path, num_hidden_layers=1, vocab_size=64, dropout=0.25)
    assert not any("language_model.layers.1" in node.module for node in graph.nodes)
    assert any(node.draw >= 0 for node in graph.nodes)
    changed = resolve(str(tmp_path), {"num_hidden_layers": 1, "image_token_index": 5}).config or {}
    assert changed["text_config"]["num_hidden_layers"] == 1 and "num_hidden_layers" not in changed
    assert changed["vision_config"] == VISION | {"model_type": "clip_vision_model"}
    assert changed["image_token_index"] == 5


def test_the_part_for_images_counts_and_is_not_trained(tmp_path: Path) -> None:
    graph = graph_of({"model_type": "llava", **PARTS}, tmp_path)
    of_images = {value for name, value in graph.parameters.items() if "vision_tower" in name}
    assert of_images and graph.gradients and not of_images & graph.gradients.keys()


def test_a_model_that_reads_no_text_without_images_is_refused(tmp_path: Path) -> None:
    text = {
        "model_type": "opt",
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "ffn_dim": 64,
    }
    with pytest.raises(
        InputError, match=r"accepts no text without images .pixel_values.*package.module:factory"
    ):
        graph_of({"model_type": "blip-2", "text_config": text, "vision_config": VISION}, tmp_path)


def test_images_of_a_classifier_have_the_size_of_its_vision_part(tmp_path: Path) -> None:
    architecture = {"model_type": "clip", "architectures": ["CLIPForImageClassification"]}
    graph = graph_of({**architecture, "vision_config": {**VISION, "num_channels": 1}}, tmp_path)
    assert any(node.op.endswith("convolution.default") for node in graph.nodes)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "bert", **TEXT, "problem_type": "regression"}, "one class per sample.*package.module:factory"),
        ({"model_type": "bert", **TEXT, "num_labels": 1}, "num_labels=1.*package.module:factory"),
        ({"model_type": "resnet", "architectures": ["ResNetForImageClassification"]}, "image_size=224"),
        ({"model_type": "canine", "architectures": ["CanineForSequenceClassification"]}, "no vocab_size"),
    ],
)  # fmt: skip
def test_a_classifier_without_what_its_loss_needs_is_refused(
    config: dict, message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        graph_of({"architectures": ["BertForSequenceClassification"], **config}, tmp_path)
