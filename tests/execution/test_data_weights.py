"""Tokens that are not learnt: gradients are those of the mean over all learnt tokens of a batch, however it is cut."""

from __future__ import annotations

import pytest
import torch
from cells import SMALL_LLAMA
from programs import even_cuts

from in_turn import SEED, STEP, Pipeline
from stagewright.execution.data.batches import counted
from stagewright.execution.random import keyed
from stagewright.tracing.cache import trace
from stagewright.tracing.models.build import build
from stagewright.tracing.models.losses import IGNORED
from stagewright.tracing.models.reference import resolve

LLAMA = ("tiny-llama", dict(SMALL_LLAMA) | {"num_hidden_layers": 2}, "float64", 1e-12)
MIXTRAL = (
    "tiny-mixtral",
    {
        "hidden_size": 32,
        "intermediate_size": 64,
        "vocab_size": 96,
        "num_hidden_layers": 2,
        "output_router_logits": True,
    },
    "float32",
    2e-5,
)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("model", "pieces"), [(LLAMA, 1), (LLAMA, 3), (MIXTRAL, 1)])
def test_gradients_are_those_of_the_mean_over_all_learnt_tokens(
    model: tuple[str, dict[str, object], str, float], pieces: int, split: bool
) -> None:
    """Also where a microbatch has none, and where the loss is in pieces or has a part that is no mean over tokens."""
    name, overrides, dtype, tolerance = model
    reference, further = resolve(name, overrides), ("labels",)
    built = build(reference, 2, 12, dtype, seed=3, further_inputs=further)
    graph = trace(reference, 2, 12, dtype, loss_pieces=pieces, further_inputs=further, use_cache=False)
    batches = []
    for learnt in (24, 5, 0, 13):
        ids = torch.randint(0, 96, (2, 12), generator=torch.Generator().manual_seed(learnt))
        labels = torch.where(torch.arange(24).view(2, 12) < learnt, ids, IGNORED)
        batches.append({"input_ids": ids, "labels": labels})
    counts = [int(counted(batch["labels"], is_next=True)) for batch in batches]
    assert counts == [22, 4, 0, 12 - 1]
    shares = [count / sum(counts) for count in counts]

    pipeline = Pipeline(graph, built.module, even_cuts(graph, 2), len(batches))
    for runner in pipeline.runners:
        runner.begin_step(STEP, shares)
    outcome = pipeline.step(batches, split)
    plain = 0.0
    for number, (batch, share) in enumerate(zip(batches, shares, strict=True)):
        if not share:
            continue
        with keyed(SEED, STEP, number):
            loss = built.module(**batch) * share
        loss.backward()
        plain += float(loss)
    run = sum(loss * share for loss, share in zip(outcome.losses, shares, strict=True) if share)
    assert run == pytest.approx(plain, rel=tolerance)
    gradients = dict(built.module.named_parameters())
    assert outcome.gradients.keys() == gradients.keys()
    for key, gradient in outcome.gradients.items():
        expected = gradients[key].grad
        assert expected is not None and gradient.isfinite().all(), key
        torch.testing.assert_close(gradient, expected, rtol=tolerance, atol=tolerance)


def test_labels_that_are_all_there_change_nothing() -> None:
    """A causal model whose labels are its tokens computes what it computes without them, to the last bit."""
    name, overrides, dtype, _ = LLAMA
    built = build(resolve(name, overrides), 2, 12, dtype, seed=3)
    ids = built.inputs["input_ids"]
    assert torch.equal(built.module(input_ids=ids), built.module(input_ids=ids, labels=ids))
