"""The graph of one tensor-parallel rank: its collectives, its shards, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from stagewright.errors import ContractError, InputError, UnevenDegreeError
from stagewright.execution.loading import part_of
from stagewright.graph import OperatorGraph, Part
from stagewright.graph.graph import short_name
from stagewright.graph.tensor_parallel import (
    ALL_GATHER,
    ALL_REDUCE,
    COLLECTIVES,
    TensorShard,
    local_draws,
    parallelism,
)
from stagewright.tracing.cache import trace
from stagewright.tracing.tensor_parallel.parallelise import plan_of

NUM_LAYERS = 2
NARROW = {
    "num_hidden_layers": NUM_LAYERS, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


def graph_of(model: str, tp: int, **more: Any) -> OperatorGraph:
    return trace(model, 1, 8, "float32", {"num_hidden_layers": NUM_LAYERS, **more}, tp=tp)


def test_a_layer_has_two_sums_forward_and_two_backward() -> None:
    found = graph_of("tiny-llama", 2)
    counts = Counter((node.op, node.part) for node in found.nodes if node.op in COLLECTIVES)
    assert counts == {
        (ALL_REDUCE, Part.FORWARD): 2 * NUM_LAYERS + 2,  # the embedding, and the logits of the labels
        (ALL_REDUCE, Part.INPUT_GRAD): 2 * NUM_LAYERS + 1,  # the head
        (ALL_GATHER, Part.FORWARD): 1,  # sums of exponentials
    }


def test_shards_have_a_part_of_every_product_and_of_the_vocabulary() -> None:
    whole, found = graph_of("tiny-llama", 1), graph_of("tiny-llama", 2)
    shared = parallelism(found)
    assert shared is not None and parallelism(whole) is None
    for name in whole.parameters:
        sizes = [graph.values[graph.parameters[name]].meta.num_elements for graph in (whole, found)]
        assert sizes[0] == sizes[1] * (2 if name in shared.shards else 1)
        assert (name in shared.shards) == ("norm" not in name)


def test_a_parameter_that_is_read_through_a_sum_has_its_gradient_summed(tmp_path: Path) -> None:
    """Nemotron's norms scale by their weight plus one: one gradient is that of the sum and that of the weight."""
    config = {
        "model_type": "nemotron", "architectures": ["NemotronForCausalLM"], "hidden_act": "relu2",
        "max_position_embeddings": 64, **NARROW,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    found = trace(str(path), 1, 8, "float32", tp=2, splits_sequence=True)
    summed = [node for node in found.nodes if node.op == ALL_REDUCE and node.part is Part.WEIGHT_GRAD]
    assert len(summed) == 2 * 2 * NUM_LAYERS  # weight and bias of two norms


@pytest.mark.parametrize(
    "shard", [TensorShard(0, (12,)), TensorShard(1, (4, 4, 2)), TensorShard(0, (12,), 2)], ids=str
)
def test_parts_hold_every_element_once(shard: TensorShard) -> None:
    whole = torch.arange(1.0, 121.0).reshape(12, 10)
    parts = [part_of(whole, shard, 2, rank) for rank in range(2)]
    assert parts[0].shape == parts[1].shape
    assert sorted(torch.cat([part.flatten() for part in parts]).tolist()) == sorted(
        whole.flatten().tolist() + [0.0] * (10 * shard.padding)
    )


def test_dropout_of_shards_differs_between_ranks_and_other_dropout_does_not() -> None:
    found = graph_of("tiny-gpt2", 2)
    draws = {node.draw: node.module for node in found.nodes if node.draw >= 0}
    inside = {draws[draw] for draw in local_draws(found)}
    assert inside == {f"net.transformer.h.{layer}.attn" for layer in range(NUM_LAYERS)}
    assert len(draws) == 1 + 3 * NUM_LAYERS


@pytest.mark.parametrize(
    ("model", "tp", "named"),
    [
        ("tiny-llama", 8, "key-value heads (4)"),
        ("tiny-gpt2", 3, "attention heads (4)"),
        ("tiny-t5", 2, "no tensor-parallel plan is known for 't5'"),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(model: str, tp: int, named: str) -> None:
    with pytest.raises(InputError) as error:
        graph_of(model, tp)
    assert named in str(error.value)


def test_degrees_that_do_not_divide_a_model_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def again() -> None:
        trace("tiny-gpt2", 1, 12, tp=3)

    with pytest.raises(UnevenDegreeError) as first:
        again()
    monkeypatch.setattr("stagewright.tracing.cache._traced", None)
    with pytest.raises(UnevenDegreeError) as second:
        again()
    assert str(first.value) == str(second.value)


def test_a_plan_that_leaves_out_a_layer_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm between split products whose gradient nobody sums would be another one on every rank."""

    def careless(net: torch.nn.Module) -> dict[str, str]:
        return {path: style for path, style in plan_of(net).items() if "q_norm" not in path}

    monkeypatch.setattr("stagewright.tracing.tensor_parallel.parallelise.plan_of", careless)
    with pytest.raises(ContractError, match="q_norm"):
        trace("qwen3-8b", 1, 8, "float32", NARROW, tp=2, use_cache=False)


def short(graph: OperatorGraph, part: Part) -> Counter[str]:
    return Counter(short_name(node.op) for node in graph.nodes if node.part is part)


def test_a_whole_embedding_needs_no_sum_and_a_gathered_head_gives_whole_logits() -> None:
    split = graph_of("tiny-llama", 2)
    found = trace(
        "tiny-llama",
        1,
        8,
        "float32",
        {"num_hidden_layers": NUM_LAYERS},
        tp=2,
        embedding="whole",
        head="gathered",
    )
    counts = Counter((node.op, node.part) for node in found.nodes if node.op in COLLECTIVES)
    assert counts == {
        (ALL_REDUCE, Part.FORWARD): 2 * NUM_LAYERS,
        (ALL_REDUCE, Part.INPUT_GRAD): 2 * NUM_LAYERS + 1,
        (ALL_GATHER, Part.FORWARD): 1,  # the logits
    }
    shared, others = parallelism(found), parallelism(split)
    assert shared is not None and others is not None
    assert set(others.shards) - set(shared.shards) == {"net.model.embed_tokens.weight"}
    (loss,) = (node for node in found.nodes if short_name(node.op) == "_log_softmax")
    classes = found.values[loss.inputs[0]].meta.shape[-1]
    assert classes == found.values[found.parameters["net.model.embed_tokens.weight"]].meta.shape[0]
    assert short(split, Part.FORWARD)["_log_softmax"] == 0


def test_a_whole_head_is_computed_by_every_rank() -> None:
    plain = graph_of("tiny-llama", 1)
    found = trace("tiny-llama", 1, 8, "float32", {"num_hidden_layers": NUM_LAYERS}, tp=2, head="whole")
    shared = parallelism(found)
    assert shared is not None and "net.lm_head.weight" not in shared.shards
    shapes = [
        [graph.values[node.outputs[0]].meta.shape for node in graph.nodes if node.module == "net.lm_head"
         and short_name(node.op) == "mm" and node.part is Part.FORWARD and node.outputs[0] is not None]
        for graph in (plain, found)
    ]  # fmt: skip
    assert shapes[0] == shapes[1] != []
    assert not any(node.op in COLLECTIVES and node.module == "net.lm_head" for node in found.nodes)


def test_gathered_logits_of_a_padded_vocabulary_are_as_many_as_there_are_tokens() -> None:
    changes = {**NARROW, "vocab_size": 97, "tie_word_embeddings": False}
    found = trace("tiny-llama", 1, 8, "float32", changes, tp=2, embedding="whole", head="gathered")
    (loss,) = (node for node in found.nodes if short_name(node.op) == "_log_softmax")
    assert found.values[loss.inputs[0]].meta.shape[-1] == 97


@pytest.mark.parametrize("asked", [("whole", "split"), ("split", "whole"), ("whole", "gathered")], ids=str)
def test_a_parameter_that_is_embedding_and_head_is_whole_if_either_is(asked: tuple[Any, Any]) -> None:
    changes = {**NARROW, "tie_word_embeddings": True}
    found = trace("tiny-llama", 1, 8, "float32", changes, tp=2, embedding=asked[0], head=asked[1])
    shared = parallelism(found)
    assert shared is not None and not any("embed" in name or "head" in name for name in shared.shards)


@pytest.mark.parametrize(("tp", "head"), [(1, "split"), (2, "split"), (2, "gathered")])
def test_a_loss_in_the_type_of_its_logits_casts_none(tp: int, head: Any) -> None:
    def types(loss: Any) -> set[str]:
        found = trace("tiny-llama", 1, 8, "bfloat16", {"num_hidden_layers": 1}, tp=tp, head=head, loss=loss)
        behind = [node for node in found.nodes if node.module in ("net.lm_head", "cross_entropy")]
        made = [found.values[value].meta for node in behind for value in node.outputs if value is not None]
        return {meta.dtype for meta in made if len(meta.shape) > 1} & {"bfloat16", "float32"}

    assert types("float32") == {"bfloat16", "float32"}
    assert types("as logits") == {"bfloat16"}
