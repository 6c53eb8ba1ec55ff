"""Evaluation under the pipeline: the loss and the log-probabilities that the model has in `eval` mode in plain torch."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cells import SMALL_GPT2, SMALL_LLAMA
from plans import make_plan
from typer.testing import CliRunner

from multiprocess import run_ranks
from stagewright.cli.app import app
from stagewright.execution.launch import run
from stagewright.planning.plan import load_plan
from stagewright.tracing.cache import trace
from stagewright.tracing.evaluation import evaluated, is_by_token

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 8))

    def forward(self, x):
        return self.body(x)

def make():
    return Net(), (torch.randn(4, 8),), lambda out: (out - 1).square().mean()
"""

llama = partial(make_plan, overrides=dict(SMALL_LLAMA), sequence_length=16, dtype="fp64", microbatch_size=2)
gpt2 = partial(llama, model="tiny-gpt2", overrides=dict(SMALL_GPT2))


@pytest.mark.multiprocess
def test_losses_are_those_of_the_model_in_eval_mode(tmp_path: Path) -> None:
    """With dropout and batch statistics, replicas, gathered parameters, layers that ranks share, and a loss in pieces."""
    (tmp_path / "net.py").write_text(NET)
    net = {"model": f"{tmp_path / 'net.py'}:make", "overrides": {}, "microbatch_size": 4}
    plans = {
        "gpt2": gpt2(tmp_path / "gpt2.json", num_microbatches=2, policy="recompute"),
        "replicas": llama(tmp_path / "replicas.json", pp=1, dp=2, num_microbatches=2, sharding=1),
        "zero3": llama(
            tmp_path / "zero3.json", "tiny-llama", "breadth-first", 1, 2, num_chunks=2, num_microbatches=2, sharding=3
        ),
        "tp": llama(tmp_path / "tp.json", pp=1, tp=2, num_microbatches=2),
        "net": llama(tmp_path / "net.json", pp=2, num_microbatches=2, **net),
    }  # fmt: skip
    pieces = plans["tp"].model_copy(update={"loss_pieces": 2})
    pieces.save(tmp_path / "tp-pieces.json")
    whole = llama(tmp_path / "pieces.json", pp=2, num_microbatches=2).model_copy(update={"loss_pieces": 3})
    whole.save(tmp_path / "pieces.json")
    names = [*plans, "tp-pieces", "pieces"]
    for told in run_ranks(differences, 2, str(tmp_path), names, timeout=200):
        assert set(told) == set(names)
        for name, found in told.items():
            assert found["loss"] < 1e-12, name
            assert found["tokens"] == (0 if name == "net" else found["expected tokens"]), name
            assert found["log-probabilities"] < 1e-12, name
            assert found["going on"] == 0, name


def differences(rank: int, num_ranks: int, folder: str, names: list[str]) -> dict[str, dict[str, float]]:
    """By plan: how far loss and log-probabilities after a step are from plain torch's, and the next step from that of a
    session that was not evaluated in between."""
    import torch
    import torch.distributed as dist

    from stagewright.execution.checkpoint import save
    from stagewright.execution.evaluation import Evaluator
    from stagewright.execution.session import Session

    dist.init_process_group("gloo")
    found = {}
    for name in names:
        plan = load_plan(f"{folder}/{name}.json")
        session, other = (Session(plan, torch.device("cpu"), None, random_weights=True) for _ in range(2))
        session.train_step(0)
        other.train_step(0)
        path = save(session, Path(folder) / f"{name}-checkpoints", 1)
        evaluator = Evaluator(session)
        batches = [session.microbatches(7, session.graph), session.microbatches(8, session.graph)]
        result = evaluator.run(batches, wants_tokens=evaluator.is_by_token)
        again = evaluator.run(batches)
        assert again.loss == result.loss
        loss, rows = plain(plan, path, session)
        largest = 0.0
        for sample, row in enumerate(rows):
            got = result.log_probabilities[sample]
            assert got[-1] is None  # nothing follows the last token
            largest = max(largest, *(abs((one or 0) - two) for one, two in zip(got[:-1], row, strict=True)))
        found[name] = {
            "loss": abs(result.loss - loss) / abs(loss),
            "tokens": result.num_tokens,
            "expected tokens": sum(map(len, rows)),
            "log-probabilities": largest,
            "going on": abs(session.train_step(1).loss - other.train_step(1).loss),
        }
        dist.barrier()
    dist.destroy_process_group()
    return found


def plain(plan: Any, path: Path, session: Any) -> tuple[float, list[list[float]]]:
    """The mean loss and the log-probabilities of steps 7 and 8 in plain torch, in `eval` mode, from a checkpoint's model."""
    import torch
    from safetensors.torch import load_file

    from stagewright.execution.data.synthetic import SyntheticBatches
    from stagewright.tracing.models.build import build
    from stagewright.tracing.models.reference import resolve

    reference, job = resolve(plan.model.text, plan.model.overrides), plan.job
    built = build(reference, plan.microbatch_size, job.sequence_length, job.torch_name, seed=job.seed)
    net: Any = built.module.net
    stored: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("model-*.safetensors")):
        stored |= load_file(file)
    assert not net.load_state_dict(stored, strict=False).unexpected_keys
    built.module.eval()
    losses, rows, batches = [], [], SyntheticBatches(built.inputs, job.seed)
    with torch.no_grad():
        for step in (7, 8):
            for number in range(plan.num_microbatches * plan.dp):
                graph = session.graph
                inputs = batches.microbatch(step, number * plan.microbatch_size, graph)
                losses.append(float(built.module(**inputs)))
                if "input_ids" in inputs:
                    logits = net(input_ids=inputs["input_ids"]).logits.log_softmax(-1)
                    following = inputs["input_ids"][:, 1:, None]
                    rows += logits[:, :-1].gather(-1, following)[..., 0].tolist()
    return sum(losses) / len(losses), rows


@pytest.mark.parametrize(
    ("loss", "is_token"),
    [("ce(out, y())", True), ("ce(out, y()) / 2", False), ("ce(out, y()) + ce(-out, y())", False)],
)
def test_only_a_plain_cross_entropy_is_one_of_tokens(loss: str, is_token: bool, tmp_path: Path) -> None:
    """What a model scales or adds to it is its own loss, and reported as that."""
    (tmp_path / "net.py").write_text(
        "import torch\nfrom torch import nn\nfrom torch.nn.functional import cross_entropy as ce\n"
        "def y():\n    return torch.tensor([1, 0, 2, 1])\n"
        f"def make():\n    return nn.Linear(8, 3), (torch.randn(4, 8),), lambda out: {loss}\n"
    )
    graph = trace(f"{tmp_path / 'net.py'}:make", 4, 1, use_cache=False)
    assert is_by_token(evaluated(graph)) is is_token


@pytest.mark.multiprocess
def test_a_checkpoint_is_evaluated_under_any_plan(tmp_path: Path) -> None:
    """By the verb: what `run` said of held-out data at its end, under another plan, and the log-probabilities behind it."""
    text = tmp_path / "held-out.txt"
    text.write_bytes(bytes(range(96)) * 5)
    small = partial(
        make_plan, overrides=dict(SMALL_LLAMA), sequence_length=16, num_steps=2, num_microbatches=4
    )
    small(tmp_path / "run.json", pp=2)
    small(tmp_path / "other.json", pp=1, dp=2, num_microbatches=2, sharding=1)
    run(
        tmp_path / "run.json", text, out=tmp_path / "run", device="cpu", checkpoint=tmp_path / "checkpoints",
        held_out=text, evaluate_every=1,
    )  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "run" / "steps.jsonl").read_text().splitlines()]
    held_out = [line for line in lines if "held_out_loss" in line]
    assert [line["step"] for line in held_out] == [0, 1, 2] and held_out[0]["held_out_tokens"] == 30 * 15
    words = ["--data", str(text), "--checkpoint", str(tmp_path / "checkpoints"), "--json"]
    rows = tmp_path / "rows.jsonl"
    done = CliRunner().invoke(
        app, ["evaluate", str(tmp_path / "other.json"), *words, "--log-probabilities", str(rows)]
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["loss"] == pytest.approx(held_out[-1]["held_out_loss"], rel=1e-5) and found["step"] == 2
    told = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [line["sample"] for line in told] == list(range(30))
    assert found["num_tokens"] == sum(line["num_tokens"] for line in told) == 450
    assert found["loss"] == pytest.approx(-sum(line["sum"] for line in told) / 450)
    some = CliRunner().invoke(app, ["evaluate", str(tmp_path / "run.json"), *words, "--samples", "3"])
    assert json.loads(some.stdout)["loss"] == pytest.approx(
        -sum(line["sum"] for line in told[:3]) / 45, rel=1e-5
    )
    none = CliRunner().invoke(
        app, ["evaluate", str(tmp_path / "run.json"), "--data", str(text), "--checkpoint", str(tmp_path)]
    )
    assert none.exit_code == 2 and "there is no checkpoint in" in " ".join(none.stderr.split())


@pytest.mark.multiprocess
def test_a_run_of_several_lengths_evaluates_samples_of_the_longest(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(96)) * 5)
    make_plan(
        tmp_path / "plan.json", overrides=dict(SMALL_LLAMA), sequence_length=16, num_steps=2, num_microbatches=4,
        options={"sequence_lengths": [8, 16]},
    )  # fmt: skip
    run(tmp_path / "plan.json", text, out=tmp_path / "run", device="cpu", held_out=text)
    lines = [json.loads(line) for line in (tmp_path / "run" / "steps.jsonl").read_text().splitlines()]
    tokens = {line["step"]: line["held_out_tokens"] for line in lines if "held_out_loss" in line}
    assert tokens == {0: 30 * 15, 2: 30 * 15}
