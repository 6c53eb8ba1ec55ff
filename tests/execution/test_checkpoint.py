"""Checkpoints: a run that goes on from one is the run that never stopped, and anyone can load the model."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cells import SMALL_GPT2, SMALL_LLAMA
from plans import make_plan
from typer.testing import CliRunner

from multiprocess import run_ranks, watch_ranks
from stagewright.cli.app import app
from stagewright.errors import InputError, StagewrightWarning
from stagewright.execution.checkpoint_folder import check_start, identity, newest
from stagewright.execution.data_identity import identity_of
from stagewright.execution.manifest import FileRecord, Manifest, write_manifest
from stagewright.execution.options import RunOptions
from stagewright.planning.plan import Plan, load_plan

pytestmark = pytest.mark.multiprocess

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 8))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.unused = nn.Linear(3, 3)

    def forward(self, x):
        return self.frozen(self.body(x))

def make():
    return Net(), (torch.randn(4, 8),), lambda out: (out - 1).square().mean()
"""

small = partial(make_plan, overrides=dict(SMALL_LLAMA), num_microbatches=2, sequence_length=16)
small_gpt2 = partial(small, model="tiny-gpt2", overrides=dict(SMALL_GPT2))


# -- a run that goes on -------------------------------------------------------------------------------------------------


def test_going_on_equals_never_having_stopped(tmp_path: Path) -> None:
    """Dropout, batch statistics of each replica, frozen weights, loss scales and every level of sharing out."""
    (tmp_path / "net.py").write_text(NET)
    net = {"model": f"{tmp_path / 'net.py'}:make", "overrides": {}, "microbatch_size": 4, "pp": 1, "dp": 2}
    plans = {
        "tied": small_gpt2(tmp_path / "tied.json", schedule="zb-h1", num_microbatches=3),
        "replicas": small(tmp_path / "replicas.json", pp=1, dp=2, sharding=0, dtype="bf16"),
        "net": small(tmp_path / "net.json", sharding=0, **net),
        "net-3": small(tmp_path / "net-3.json", schedule="breadth-first", num_chunks=2, sharding=3, **net),
        "zero-1": small(
            tmp_path / "zero-1.json", pp=1, dp=2, sharding=1, dtype="fp16", loss_scale=2.0**20, host_optimizer=(0,)
        ),
        "zero-2": small(tmp_path / "zero-2.json", pp=1, dp=2, sharding=2, dtype="bf16"),
        "zero-3": small(
            tmp_path / "zero-3.json", "tiny-llama", "breadth-first", 1, 2, num_chunks=2, sharding=3, dtype="fp16"
        ),
        "tp": small(tmp_path / "tp.json", pp=1, tp=2),
    }  # fmt: skip
    found = run_ranks(differences, 2, str(tmp_path), list(plans), timeout=150)
    assert found == [{name: [] for name in plans}] * 2
    for name, plan in plans.items():
        check_model_files(plan, tmp_path / f"{name}-checkpoints")


def differences(rank: int, num_ranks: int, folder: str, names: list[str]) -> dict[str, list[str]]:
    """For each plan, what of a run that went on from its second step differs from one that never stopped."""
    import torch.distributed as dist

    from stagewright.execution.checkpoint import Saver, restore

    dist.init_process_group("gloo")
    found = {}
    for name in names:
        plan, checkpoints = load_plan(f"{folder}/{name}.json"), Path(folder) / f"{name}-checkpoints"
        whole, resumed = session(plan), session(plan)
        for step in range(2):
            whole.train_step(step)
        saver = Saver(whole, checkpoints)
        saver.start(2)
        wanted = outcome(whole)  # while the files are written, or have to wait
        saver.finish()
        assert restore(resumed, checkpoints) == 2
        got = outcome(resumed)
        found[name] = [key for key in wanted.keys() | got.keys() if not same(wanted.get(key), got.get(key))]
        if rank == 0:
            (checkpoints / "next-loss").write_text(repr(wanted["loss of step 2"]))
        dist.barrier()
    dist.destroy_process_group()
    return found


def session(plan: Plan) -> Any:
    import torch

    from stagewright.execution.session import Session

    return Session(plan, torch.device("cpu"), None, random_weights=True)


def outcome(run: Any) -> dict[str, Any]:
    """Of two more steps: losses, norms, the loss scale, and every tensor afterwards; and of a batch after these."""
    found: dict[str, Any] = {}
    for step in (2, 3):
        result = run.train_step(step)
        found |= {f"loss of step {step}": result.loss, f"norm of step {step}": result.gradient_norm}
        found[f"scale of step {step}"] = run.cotangent
    lasting = (*run.shards.tensors(), *run.optimizer.updater.state(), *run.optimizer.updater.host_state())
    found |= {f"lasting {index}": tensor.clone() for index, tensor in enumerate(lasting)}
    found |= {run.weights.names[value]: tensor.clone() for value, tensor in run.weights.tensors.items()}
    found["last loss"] = run.accumulate(4)
    found |= {f"gradient of {name}": gradient for name, gradient in run.gradients().items()}
    return found


def same(one: Any, other: Any) -> bool:
    import torch

    if not isinstance(one, torch.Tensor):
        return repr(one) == repr(other)  # also of what is no number
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


# -- the model's own files ----------------------------------------------------------------------------------------------


def check_model_files(plan: Plan, checkpoints: Path) -> None:
    """They hold the whole model, whose loss in plain torch is that of the run's next step."""
    import torch
    from safetensors.torch import load_file

    from stagewright.execution.data.synthetic import SyntheticBatches
    from stagewright.execution.random import keyed
    from stagewright.tracing.cache import trace
    from stagewright.tracing.models.build import build
    from stagewright.tracing.models.reference import resolve

    folder = checkpoints / "step-000002"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    stored: dict[str, torch.Tensor] = {}
    for file in sorted(set(index["weight_map"].values())):
        stored |= load_file(folder / file)
    assert stored.keys() == index["weight_map"].keys()
    assert sum(tensor.nbytes for tensor in stored.values()) == index["metadata"]["total_size"]
    assert len(set(index["weight_map"].values())) == plan.pp
    job, reference = plan.job, resolve(plan.model.text, plan.model.overrides)
    built = build(reference, plan.microbatch_size, job.sequence_length, job.torch_name, seed=job.seed)
    net: Any = built.module.net
    for tensor in net.state_dict().values():
        tensor.zero_()  # those of the seed must not pass for those of the file
    missing, unexpected = net.load_state_dict(stored, strict=False)
    tied = set(net.state_dict()) - {name for name, _ in (*net.named_parameters(), *net.named_buffers())}
    assert not unexpected and set(missing) <= tied
    graph = trace(reference, plan.microbatch_size, **job.traced(plan.cluster.kind))
    batches, count = SyntheticBatches(built.inputs, job.seed), plan.num_microbatches * plan.dp
    total = 0.0
    for index_of in range(count):
        inputs = batches.microbatch(2, index_of * plan.microbatch_size, graph)
        with torch.no_grad(), keyed(job.seed, 2, index_of):
            total += float(built.module(**inputs)) / count
    tolerance = 1e-6 if job.dtype == "fp32" else 1e-3
    assert total == pytest.approx(float((checkpoints / "next-loss").read_text()), rel=tolerance)


# -- as a user starts it ------------------------------------------------------------------------------------------------


def test_a_run_that_is_killed_goes_on_from_the_checkpoint_before(tmp_path: Path) -> None:
    """Killed while the files of step 3 are written, and gone on from: the files at the end are those of one run."""
    path = tmp_path / "plan.json"
    small(path, num_steps=4)
    run_ranks(train, 2, str(path), str(tmp_path / "whole"), {}, timeout=60)
    ends = watch_ranks(
        train, 2, str(path), str(tmp_path / "killed"), {"checkpoint_every": 1, "dies": True}, timeout=60
    )
    assert not any(hasattr(end, "result") for end in ends)
    checkpoints = tmp_path / "killed" / "checkpoints"
    (checkpoints / "step-000004").mkdir()  # as a copy that was broken off leaves it
    with pytest.raises(InputError, match=r"step-000004' is damaged: .* resume from step-000002"):
        newest(checkpoints)
    (checkpoints / "step-000004").rmdir()
    found = newest(checkpoints)
    assert found is not None and found.manifest.step == 2
    again = {"is_restarted": True, "checkpoint_every": 1, "keep_last": 1, "keep_every": 3}
    record = run_ranks(train, 2, str(path), str(tmp_path / "killed"), again, timeout=60)[0]
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-000003", "step-000004"]
    assert record.first_step == 2 and len(record.losses) == 2
    one, other = (tmp_path / name / "checkpoints" / "step-000004" for name in ("whole", "killed"))
    assert sorted(file.name for file in one.iterdir()) == sorted(file.name for file in other.iterdir())
    for file in one.iterdir():
        assert file.read_bytes() == (other / file.name).read_bytes(), file.name


def train(rank: int, num_ranks: int, plan: str, folder: str, options: dict[str, Any]) -> Any:
    """`run` as a launcher starts it on this rank."""
    from stagewright.execution import checkpoint
    from stagewright.execution.launch import run

    if options.pop("is_restarted", False):  # as torchrun does after a failure
        os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    if options.pop("dies", False):
        write = checkpoint.write_tensors

        def write_and_die(path: Path, tensors: Any) -> Any:
            written = write(path, tensors)
            if path.parent.name == ".step-000003.writing":
                os._exit(9)
            return written

        checkpoint.write_tensors = write_and_die
    os.environ["LOCAL_RANK"] = str(rank)
    return run(plan, out=folder, device="cpu", timeout=30, checkpoint=f"{folder}/checkpoints", **options)


def test_what_is_refused_before_processes_start(tmp_path: Path) -> None:
    plan = small(tmp_path / "plan.json")
    used = tmp_path / "used"
    pretend(used / "step-000002", plan)
    resumed = RunOptions(checkpoint=used, resume=True)
    check_start(resumed, plan)
    more = plan.model_copy(
        update={
            "job": plan.job.model_copy(
                update={"num_steps": 90, "memory_limit": 2**30, "memory_to_spare": 0.1}
            )
        }
    )
    check_start(resumed, more)
    with pytest.raises(InputError, match=r"no checkpoint in .* without --resume"):
        check_start(RunOptions(checkpoint=tmp_path / "fresh", resume=True), plan)
    with pytest.raises(InputError, match=r"newest is step-000002.*with --resume, or give another folder"):
        check_start(RunOptions(checkpoint=used), plan)
    with pytest.raises(InputError, match="give --steps more than 2"):
        check_start(resumed, small(tmp_path / "other.json", num_steps=2))
    check_start(resumed, small(tmp_path / "other.json", dp=2, num_microbatches=1, sharding=1))
    with pytest.raises(InputError, match=r'another model or type \(job.dtype was "fp32", is "bf16"'):
        check_start(resumed, small(tmp_path / "other.json", dtype="bf16"))
    other = small(tmp_path / "other.json", num_microbatches=3)
    with pytest.raises(
        InputError, match=r"other samples in each step \(job.global_batch was 2, is 3\).*--other-data"
    ):
        check_start(resumed, other)
    with pytest.warns(
        StagewrightWarning, match="another job: job.global_batch was 2, is 3; job.clip_norm was 1.0, is null"
    ):
        check_start(
            RunOptions(checkpoint=used, resume=True, other_data=True),
            small(tmp_path / "other.json", num_microbatches=3, clip_norm=None),
        )
    other = small_gpt2(tmp_path / "other.json")
    with pytest.raises(InputError, match=r'model.name was "tiny-llama", is "tiny-gpt2"'):
        check_start(resumed, other)
    (used / "step-000002" / "rank-00000.safetensors").write_bytes(b"cut o")
    with pytest.raises(
        InputError,
        match=r"'rank-00000.safetensors' has 5 bytes, and 7 were .*no checkpoint before it is complete",
    ):
        check_start(resumed, plan)
    for options, fault in ((["--resume"], "--resume"), (["--checkpoint-every", "2"], "--checkpoint-every")):
        done = CliRunner().invoke(app, ["run", str(tmp_path / "plan.json"), *options])
        assert done.exit_code == 2 and f"{fault} needs --checkpoint" in " ".join(done.stderr.split())


def pretend(folder: Path, plan: Plan) -> None:
    """A whole checkpoint of `plan` with one file."""
    folder.mkdir(parents=True)
    (folder / "rank-00000.safetensors").write_bytes(b"cut off")
    described = identity(plan)
    manifest = Manifest(
        stagewright="0",
        step=2,
        plan=described,
        data=identity_of(None),
        files={"rank-00000.safetensors": FileRecord.of(folder / "rank-00000.safetensors")},
    )
    write_manifest(folder, manifest)
