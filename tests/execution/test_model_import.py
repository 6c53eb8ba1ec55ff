"""Weights from elsewhere become a checkpoint that a run goes on from, and a checkpoint a state dict that torch loads."""

from __future__ import annotations

import os
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from plans import make_plan
from test_evaluation import NET
from test_finetuning import saved
from typer.testing import CliRunner

from stagewright.cli.app import app
from stagewright.errors import InputError
from stagewright.execution.model_export import export
from stagewright.execution.model_import import import_weights
from stagewright.execution.trainer import Trainer
from stagewright.planning.plan import Plan
from stagewright.tracing.models.build import build
from stagewright.tracing.models.lora import Lora

small = partial(make_plan, pp=1, num_microbatches=2, num_steps=4, overrides={}, sequence_length=16)


@pytest.fixture(autouse=True)
def _shared_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGEWRIGHT_CACHE", str(tmp_path_factory.getbasetemp().parent / "traces"))


def losses(plan: Plan, folder: Path, steps: int | None = None, **options: Any) -> tuple[float | None, ...]:
    record = Trainer(plan, steps=steps, out=folder, device="cpu", **options).fit()
    assert record is not None
    return record.losses


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_a_folder_of_hugging_face_is_resumed_from(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a run that starts from these weights; also where published files have experts one by one, and of large models."""
    monkeypatch.setattr("stagewright.execution.tensor_files._FILE_BYTES", 2**14)
    saved(kind, tmp_path / "model")
    plan = small(tmp_path / "plan.json", str(tmp_path / "model"), options={"lr_schedule": "linear"})
    wanted = losses(plan, tmp_path / "run")
    words = ["checkpoint", "import", str(tmp_path / "plan.json"), str(tmp_path / "model")]
    done = CliRunner().invoke(app, [*words, str(tmp_path / "checkpoints")])
    assert done.exit_code == 0 and "a checkpoint of weights only after step 0" in done.output, done.output
    written = [path.name for path in (tmp_path / "checkpoints" / "step-000000").glob("*-0*.safetensors")]
    assert {name[:5] for name in written} == {"model", "rank-"} and len(written) > 4
    other = {"checkpoint": tmp_path / "checkpoints", "resume": True}
    assert losses(plan, tmp_path / "again", **other) == wanted
    late = import_weights(plan, tmp_path / "model", tmp_path / "late", step=3)
    with Trainer(
        plan, out=tmp_path / "late-run", device="cpu", checkpoint=tmp_path / "late", resume=True
    ) as trainer:
        assert late.step == 3 and trainer.step().learning_rate == plan.job.rate_of(3)


@pytest.mark.parametrize(
    ("kind", "dtype", "optimizer"),
    [
        ("llama", "bf16", "adamw"),
        ("gpt2", "fp32", "adamw"),
        ("qwen2", "fp32", "sgd"),
        ("mixtral", "fp16", "adamw"),
    ],
)
def test_a_state_dict_goes_there_and_back(kind: str, dtype: str, optimizer: str, tmp_path: Path) -> None:
    """Torch loads the export in a plain model; imported again the run goes on as if it had never stopped."""
    from transformers import AutoModelForCausalLM

    saved(kind, tmp_path / "model")
    options = {"optimizer": optimizer, "optimizer_options": {"momentum": 0.9} if optimizer == "sgd" else {}}
    plan = small(tmp_path / "plan.json", str(tmp_path / "model"), dtype=dtype, options=options)
    wanted = losses(plan, tmp_path / "run")
    losses(plan, tmp_path / "run", 2, checkpoint=tmp_path / "checkpoints")
    out = tmp_path / "state-dict"
    words = ["checkpoint", "export", str(tmp_path / "checkpoints"), str(out), "--state-dict"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output

    trained: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoints" / "step-000002")
    plain: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=trained.dtype)
    state = plain.state_dict()
    dcp.load(state, checkpoint_id=out, no_dist=True)
    tokens = torch.arange(32).view(2, 16) % 61
    assert torch.equal(plain.eval()(input_ids=tokens).logits, trained.eval()(input_ids=tokens).logits)

    again = import_weights(plan, out, tmp_path / "again")
    assert again.step == (2 if optimizer == "adamw" else 0) and again.has_optimizer_state
    if optimizer == "sgd":
        import_weights(plan, out, tmp_path / "counted", step=2)
    folder = tmp_path / ("counted" if optimizer == "sgd" else "again")
    assert losses(plan, tmp_path / "on", checkpoint=folder, resume=True) == wanted[2:]
    muon = small(tmp_path / "other.json", str(tmp_path / "model"), dtype=dtype, options={"optimizer": "muon"})
    if optimizer == "adamw":
        with pytest.raises(
            InputError, match=r"optimizer 'muon' keeps momentum_buffer of .*: plan with the optimizer"
        ):
            import_weights(muon, out, tmp_path / "wrong")
    assert not import_weights(muon, out, tmp_path / "weights", weights_only=True).has_optimizer_state


def test_training_in_plain_torch_is_gone_on_with(tmp_path: Path) -> None:
    """From a state dict of a module and its AdamW, as torch gives them; weights alone start the optimizer anew."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    config = saved("llama", tmp_path / "model").config
    config.save_pretrained(tmp_path / "config")
    options = {"weight_decay": 0.0, "betas": (0.9, 0.999), "clip_norm": None}
    plan = small(tmp_path / "plan.json", str(tmp_path / "config"), dtype="fp64", options=options)
    module = build(plan.model.reference(), 2, 16, "float64", seed=3).module
    adamw = torch.optim.AdamW(module.parameters(), lr=plan.job.learning_rate, weight_decay=0.0)
    batches = [torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(step)) for step in range(5)]

    def plain_step(step: int) -> float:
        adamw.zero_grad()
        loss = module(input_ids=batches[step])
        loss.backward()
        adamw.step()
        return loss.item()

    for step in range(2):
        plain_step(step)
    weights, state = get_state_dict(module.net, adamw)  # type: ignore[arg-type]
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path / "both", no_dist=True)
    dcp.save(weights, checkpoint_id=tmp_path / "weights", no_dist=True)
    expected = [plain_step(step) for step in range(2, 5)]
    found = {}
    for name in ("both", "weights"):
        done = import_weights(plan, tmp_path / name, tmp_path / f"from-{name}")
        assert (done.step, done.has_optimizer_state) == ((2, True) if name == "both" else (0, False))
        given = {"checkpoint": tmp_path / f"from-{name}", "resume": True, "steps": 5}
        with Trainer(plan, out=tmp_path / "run", device="cpu", **given) as trainer:
            found[name] = [trainer.step({"input_ids": batch}).loss for batch in batches[2:]]
    assert found["both"] == pytest.approx(expected, rel=1e-12)
    assert found["weights"][0] == pytest.approx(expected[0], rel=1e-12)
    assert found["weights"][2] != pytest.approx(expected[2], rel=1e-4)


def test_a_module_of_ones_own_is_imported_with_its_statistics(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET)
    plan = small(tmp_path / "plan.json", f"{tmp_path / 'net.py'}:make", microbatch_size=4)
    plain: Any = build(plan.model.reference(), 4, 16, "float32", seed=5).module.net
    for _ in range(3):
        plain(torch.randn(4, 8))
    wanted = plain.state_dict()
    dcp.save(
        {"model": wanted, "more": {"state": torch.ones(2)}}, checkpoint_id=tmp_path / "saved", no_dist=True
    )
    import_weights(plan, tmp_path / "saved", tmp_path / "checkpoints")
    given = {"checkpoint": tmp_path / "checkpoints", "resume": True}
    with Trainer(plan, out=tmp_path / "run", device="cpu", **given) as trainer:
        found = trainer.weights()
        trainer.step()
        trainer.save()
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    export(tmp_path / "checkpoints", tmp_path / "dict", is_state_dict=True)
    dcp.load(wanted, checkpoint_id=tmp_path / "dict", no_dist=True)
    assert wanted["body.1.num_batches_tracked"] == 5 and not torch.equal(
        wanted["body.0.bias"], found["body.0.bias"]
    )


class _Harmful:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_what_cannot_be_imported_is_named(tmp_path: Path) -> None:
    saved("llama", tmp_path / "model")
    plan = small(tmp_path / "plan.json", str(tmp_path / "model"))
    folder = tmp_path / "out"
    dcp.save({"weight": torch.ones(2)}, checkpoint_id=tmp_path / "other", no_dist=True)
    with pytest.raises(InputError, match=r"has no tensor '.*': it is of another model than the plan"):
        import_weights(plan, tmp_path / "other", folder)
    saved("qwen2", tmp_path / "qwen2")
    with pytest.raises(InputError, match="is of another model than the plan, which is for"):
        import_weights(plan, tmp_path / "qwen2", folder)
    (tmp_path / "other" / ".metadata").write_bytes(pickle.dumps(_Harmful(tmp_path / "harm")))
    with pytest.raises(InputError, match=r"names 'posix\.mkdir', which no description has"):
        import_weights(plan, tmp_path / "other", folder)
    assert not (tmp_path / "harm").exists()
    with pytest.raises(InputError, match=r"has neither weights nor the '\.metadata'"):
        import_weights(plan, tmp_path / "none", folder)
    adapters = small(tmp_path / "lora.json", str(tmp_path / "model"), lora=Lora.of(2))
    with pytest.raises(InputError, match="the plan trains adapters"):
        import_weights(adapters, tmp_path / "model", folder)
    losses(adapters, tmp_path / "run", 1, checkpoint=tmp_path / "adapters")
    with pytest.raises(InputError, match="has only adapters, which are not a model's state dict"):
        export(tmp_path / "adapters", tmp_path / "dict", is_state_dict=True)
    import_weights(plan, tmp_path / "model", folder)
    with pytest.raises(InputError, match=r"holds checkpoints .*: name a new folder"):
        import_weights(plan, tmp_path / "model", folder)
    assert sorted(path.name for path in folder.iterdir() if path.name != ".in-use") == ["step-000000"]
