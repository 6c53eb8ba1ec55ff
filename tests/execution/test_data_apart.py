"""Documents that share a sample and do not see each other: the loss is what each would have alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from cells import SMALL_LLAMA
from programs import even_cuts

from in_turn import Pipeline, run_plain
from multiprocess import run_ranks
from stagewright.errors import InputError
from stagewright.execution.data.encoding import Encoded
from stagewright.execution.data.samples import Windows
from stagewright.execution.data.store import write_store
from stagewright.execution.data.tokenizers import load_tokenizer
from stagewright.planning.job import APART, Job
from stagewright.tracing.cache import trace
from stagewright.tracing.models.build import build
from stagewright.tracing.models.reference import resolve

GPT2 = {"num_hidden_layers": 2, "n_embd": 32, "vocab_size": 96, "dropout": 0}
MODELS = [
    ("tiny-llama", dict(SMALL_LLAMA) | {"num_hidden_layers": 2}),
    ("tiny-gpt2", GPT2),
    ("tiny-gemma", dict(SMALL_LLAMA) | {"num_hidden_layers": 2, "num_key_value_heads": 1}),
]


@pytest.mark.multiprocess
@pytest.mark.parametrize(("model", "overrides"), MODELS)
def test_a_packed_sample_has_the_loss_of_its_documents_alone(
    model: str, overrides: dict[str, object]
) -> None:
    """In a process of its own, in which no other test has traced a model."""
    run_ranks(check_packed, 1, model, overrides, timeout=60)


def check_packed(rank: int, num_ranks: int, model: str, overrides: dict[str, object]) -> None:
    """The loss of a packed sample, and its gradients in a pipeline, beside plain PyTorch."""
    reference = resolve(model, overrides)
    built = build(reference, 1, 24, "float64", seed=3, further_inputs=APART)
    ids, sizes = built.inputs["input_ids"], (10, 3, 11)
    positions = torch.cat([torch.arange(size) for size in sizes])[None]
    labels = torch.where(positions == 0, -100, ids)
    batch = {"input_ids": ids, "labels": labels, "position_ids": positions}

    total = 0.0
    for size, document in zip(sizes, ids.split(sizes, 1), strict=True):
        alone = build(reference, 1, size, "float64", seed=3).module
        total += float(alone(input_ids=document).detach()) * (size - 1)
    assert float(built.module(**batch).detach()) == pytest.approx(total / (sum(sizes) - 3), rel=1e-9)
    assert float(built.module(input_ids=ids).detach()) != pytest.approx(total / (sum(sizes) - 3), rel=1e-4)

    graph = trace(reference, 1, 24, "float64", further_inputs=APART, use_cache=False)
    outcome = Pipeline(graph, built.module, even_cuts(graph, 2), 1).step([batch], split=True)
    plain = run_plain(built.module, [batch])
    assert outcome.losses == pytest.approx(plain.losses, rel=1e-12)
    for name, gradient in outcome.gradients.items():
        torch.testing.assert_close(gradient, plain.gradients[name], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("model", ["mamba2-2.7b", "tiny-nemotron-h", "tiny-t5"])
def test_models_that_cannot_keep_documents_apart_are_refused(model: str) -> None:
    overrides = {"num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 96, "num_heads": 8, "head_dim": 16}
    with pytest.raises(InputError, match=r"cannot keep documents of a sample apart|takes no further"):
        build(
            resolve(model, overrides if model.startswith("mamba") else {}),
            1,
            8,
            fake=True,
            further_inputs=APART,
        )


def test_windows_begin_anew_with_every_document(tmp_path: Path) -> None:
    documents = [Encoded(np.full(size, size), None) for size in (5, 11, 1, 7)]
    store = write_store(tmp_path / "store", documents, load_tokenizer(None), "made")
    windows = Windows(store.tokens, 8, store.ends)
    assert windows.size == 3
    seen = [windows[index] for index in range(3)]
    assert [sample.positions.tolist() for sample in seen] == [  # type: ignore[union-attr]
        [0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 7], [0, 0, 1, 2, 3, 4, 5, 6],
    ]  # fmt: skip
    assert [np.flatnonzero(~sample.learnt).tolist() for sample in seen] == [[5], [], [1]]  # type: ignore[operator]


def test_a_job_says_that_documents_are_kept_apart() -> None:
    job = Job(global_batch=2, sequence_length=8, documents_apart=True)
    assert job.traced("cpu")["further_inputs"] == APART
    assert "further_inputs" not in Job(global_batch=2, sequence_length=8).traced("cpu")
