"""A loss in pieces: its gradients are those of the whole one, its pieces run in the backward, and one is alive at a time."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from in_turn import Batch, Outcome, Pipeline, run_plain
from stagewright.errors import InputError, PlanError
from stagewright.graph import OperatorGraph
from stagewright.graph.cuts import find_cuts
from stagewright.graph.policy import KEEP, RECOMPUTE_ALL, Policy
from stagewright.graph.split import split_graph
from stagewright.tracing.cache import trace
from stagewright.tracing.models.build import BuiltModel, build
from stagewright.tracing.models.pieces import evaluate_in_pieces
from stagewright.tracing.models.reference import resolve
from stagewright.tracing.trace import trace_module

TOLERANCE = 1e-12
MODELS = {
    "tiny-llama": {"vocab_size": 1024},
    "tiny-gpt2": {"dropout": 0.0},  # whose embedding and head are one parameter
    "tiny-bert": {
        "dropout": 0.0
    },  # whose head is several operators, with a bias, and whose labels are mostly ignored
    "tiny-gemma": {},
}
ODD_PIECES = 3
"""Of 2 x 16 tokens: 10, 11 and 11."""


def built(name: str, dtype: str = "float64", **overrides: object) -> BuiltModel:
    return build(resolve(name, {**MODELS.get(name, {}), **overrides}), 2, 16, dtype, seed=0)


@functools.cache
def prepared(
    name: str, num_pieces: int = ODD_PIECES
) -> tuple[nn.Module, OperatorGraph, Sequence[Batch], Outcome]:
    """The model and the graph in pieces, and what the model without pieces does under plain autograd."""
    model = built(name)
    batches = [{key: tensor.flip(0) for key, tensor in model.inputs.items()}, model.inputs]
    plain = run_plain(copy.deepcopy(model.module), batches)
    evaluate_in_pieces(model.module, num_pieces, 32)
    return model.module, trace_module(model.module, model.inputs, name), batches, plain


def assert_close(plain: Outcome, found: Outcome) -> None:
    for wanted, loss in zip(plain.losses, found.losses, strict=True):
        assert abs(loss - wanted) <= TOLERANCE * abs(wanted)
    assert found.gradients.keys() == plain.gradients.keys()
    largest = max(wanted.abs().max().item() for wanted in plain.gradients.values())
    for name, wanted in plain.gradients.items():
        difference = (found.gradients[name] - wanted).abs().max().item()
        # Keys' biases have no gradient but rounding's, because a softmax cancels them.
        scale = max(wanted.abs().max().item(), 1e-6 * largest)
        assert difference <= TOLERANCE * scale, f"gradient of {name}"


def check(name: str, cuts: list[int], split: bool, policies: list[Policy] | None = None) -> None:
    model, graph, batches, plain = prepared(name)
    found = Pipeline(graph, copy.deepcopy(model), cuts, len(batches), policies or []).step(batches, split)
    assert_close(plain, found)


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("name", MODELS)
def test_pieces_equal_the_whole(name: str, split: bool) -> None:
    """On one stage, on two, and with nothing but the loss on the last, whose F has no operator then."""
    graph = prepared(name)[1]
    check(name, [], split)
    check(name, [graph.late // 2], split)
    check(name, [graph.late // 3, graph.late], split)


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2"])
def test_pieces_with_recomputation_equal_the_whole(name: str, split: bool) -> None:
    graph, draw = prepared(name)[1], random.Random(name)
    cuts = [graph.late // 2]
    some = [
        Policy(
            frozenset(v for v in stage.saved if draw.random() < 0.5),
            frozenset(v for v in stage.saved if draw.random() < 0.3),
        )
        for stage in split_graph(graph, cuts)
    ]
    for policies in ([RECOMPUTE_ALL] * 2, some):
        check(name, cuts, split, policies)


@pytest.mark.slow
def test_pieces_equal_the_whole_under_autocast() -> None:
    """The head is cast once, and the backward of the cast runs for every piece."""
    model = built("tiny-llama", "float32")
    facts = {"autocast": "bfloat16", "target": "cpu"}
    whole = trace_module(model.module, model.inputs, "whole", facts)
    plain = Pipeline(whole, model.module, [], 1).step([model.inputs], split=False)
    cut = copy.deepcopy(model.module)
    evaluate_in_pieces(cut, ODD_PIECES, 32)
    graph = trace_module(cut, model.inputs, "pieces", facts)
    found = Pipeline(graph, cut, [], 1).step([model.inputs], split=False)
    for name, wanted in plain.gradients.items():
        difference = (found.gradients[name] - wanted).abs().max().item()
        assert difference <= 2.0**-6 * wanted.abs().max().item(), f"gradient of {name}"
    (stage,) = split_graph(graph, [])
    head = graph.parameters["net.lm_head.weight"]
    finished = [node for node in stage.backward.nodes if node.kwargs == (("parameter", head),)]
    assert len(finished) == ODD_PIECES


def test_soft_capped_and_scaled_logits_are_the_models_own() -> None:
    """What a model does to its logits is done by its own code."""
    config = {
        "model_type": "gemma2", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "final_logit_softcapping": 0.05,
        "attn_logit_softcapping": None, "query_pre_attn_scalar": 16,
    }  # fmt: skip
    for changes in (
        {},
        {"model_type": "cohere", "logit_scale": 0.01},
        {"model_type": "granite", "logits_scaling": 7.0},
    ):
        model, net = _of_config({**config, **changes})
        whole = model(**net)
        evaluate_in_pieces(model, ODD_PIECES, 32)
        assert torch.allclose(model(**net), whole, rtol=TOLERANCE, atol=0.0)
        graph = trace_module(model, net)
        assert any(
            graph.nodes[node].op.startswith(("aten.tanh", "aten.mul", "aten.div"))
            for node in graph.forward_ids[graph.late : -2]
        )


def _of_config(config: dict[str, object]) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import AutoConfig, AutoModelForCausalLM

    from stagewright.tracing.models.losses import CausalLanguageModel

    torch.manual_seed(0)
    kind = str(config.pop("model_type"))
    net = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config), dtype=torch.float64)
    return CausalLanguageModel(net), {"input_ids": torch.randint(0, 64, (2, 16))}


def test_nothing_of_the_logits_is_saved() -> None:
    graph = prepared("tiny-llama")[1]
    (stage,) = split_graph(graph, [])
    assert graph.loss not in stage.forward.outputs
    assert graph.loss in stage.backward.outputs and graph.loss in stage.input_grad.outputs
    shapes = [stage.value(value).meta.shape for value in stage.saved]
    assert not any(1024 in shape for shape in shapes)
    assert not any(
        1024 in stage.value(v).meta.shape for node in stage.forward.nodes for v in node.outputs if v
    )


def test_a_cut_among_the_pieces_is_refused() -> None:
    graph = prepared("tiny-llama")[1]
    legal = find_cuts(graph).legal
    assert legal[graph.late] and not legal[graph.late + 1 :].any()
    with pytest.raises(PlanError, match="separates the pieces of the loss"):
        split_graph(graph, [graph.late + 1])
    assert len(split_graph(graph, [graph.late], [KEEP, KEEP])) == 2


@pytest.mark.parametrize(
    ("model", "num_pieces", "problem"),
    [
        ("tiny-vit", 2, "only the loss of a language model"),
        ("tiny-t5", 2, "no base model separate from its head"),
        ("tiny-llama", 33, "more than the 32 tokens"),
    ],
)
def test_what_has_no_pieces_is_refused_by_name(model: str, num_pieces: int, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        trace(model, 2, 16, loss_pieces=num_pieces, use_cache=False)


def test_a_factory_is_refused_by_name(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("factory") / "own.py"
    path.write_text(
        "import torch\n"
        "def make():\n"
        "    inputs = torch.randn(2, 4), torch.zeros(2)\n"
        "    return torch.nn.Linear(4, 3), inputs, lambda y, t: (y.sum(1) - t).square().mean()\n"
    )
    with pytest.raises(InputError, match="a factory with its own loss"):
        trace(f"{path}:make", 2, 16, loss_pieces=2, use_cache=False)
