"""What the optimizer of a job does on every rank is what torch's own does on the whole model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import SMALL_LLAMA
from plans import make_plan

from multiprocess import run_ranks
from stagewright.errors import RunError
from stagewright.execution.data import SyntheticBatches
from stagewright.execution.launch import run
from stagewright.execution.record import load_record
from stagewright.planning.plan import Plan, load_plan
from stagewright.tracing.cache import trace
from stagewright.tracing.models.build import build

pytestmark = pytest.mark.multiprocess

TOLERANCE = 1e-12
NUM_STEPS = 5
SAMPLES = 4

plan_of = partial(
    make_plan, overrides=dict(SMALL_LLAMA), sequence_length=16, dtype="fp64", num_steps=NUM_STEPS
)

WAYS: dict[str, dict[str, Any]] = {
    "pp2": {"pp": 2},
    "zero0": {"pp": 1, "dp": 2, "sharding": 0},
    "zero1": {"pp": 1, "dp": 2, "sharding": 1},
    "zero3": {"pp": 1, "dp": 2, "sharding": 3},
    "host": {"pp": 1, "dp": 2, "sharding": 1, "host_optimizer": (0,)},
}
ADAMW: dict[str, dict[str, Any]] = {
    "warm-up": {"lr_schedule": "cosine", "warmup_steps": 2, "final_fraction": 0.1, "weight_decay": 0.5},
    "decay of all": {"lr_schedule": "wsd", "decay_steps": 3, "decays": "all", "weight_decay": 0.5},
}


@pytest.fixture(autouse=True)
def _shared_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGEWRIGHT_CACHE", str(tmp_path_factory.getbasetemp().parent / "traces"))


def train(rank: int, num_ranks: int, paths: list[str]) -> list[list[tuple[float, float]]]:
    """Loss and learning rate of every step of each plan."""
    import torch.distributed as dist

    from stagewright.execution.session import Session

    dist.init_process_group("gloo")
    found = []
    for path in paths:
        session = Session(load_plan(path), torch.device("cpu"), None, random_weights=True)
        steps = [session.train_step(step) for step in range(NUM_STEPS)]
        found.append([(step.loss, step.learning_rate) for step in steps])
        dist.barrier()
    dist.destroy_process_group()
    return found


def plain(plan: Plan, optimizer: Any) -> list[float]:
    """The loss of every step of the whole model in this process; `optimizer` is made of groups of parameters."""
    job, reference = plan.job, plan.model.resolved()
    built = build(reference, 1, job.sequence_length, job.torch_name, seed=job.seed)
    graph = trace(reference, 1, job.sequence_length, job.torch_name)
    module, batches = built.module, SyntheticBatches(built.inputs, job.seed)
    decayed = [one for one in module.parameters() if job.decays == "all" or one.dim() >= 2]
    others = [one for one in module.parameters() if not any(one is other for other in decayed)]
    groups = [
        {"params": decayed, "weight_decay": job.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    stepping = optimizer([group for group in groups if group["params"]])
    losses = []
    for step in range(NUM_STEPS):
        stepping.zero_grad()
        for group in stepping.param_groups:
            group["lr"] = job.rate_of(step)
        found = [module(**batches.microbatch(step, index, graph)) for index in range(job.global_batch)]
        loss = torch.stack(found).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), job.clip_norm or float("inf"))
        stepping.step()
        losses.append(float(loss))
    return losses


def check(folder: Path, cases: dict[str, dict[str, Any]], ways: list[str], optimizer: Any) -> None:
    """Every case learns under all `ways` what it learns in one process."""
    plans = {
        (case, way): plan_of(
            folder / f"{case} {way}.json",
            options=options,
            **WAYS[way],
            num_microbatches=SAMPLES // WAYS[way].get("dp", 1),
        )
        for case, options in cases.items()
        for way in ways
    }
    paths = [str(folder / f"{case} {way}.json") for case, way in plans]
    wanted = {case: plain(plans[case, ways[0]], optimizer(plans[case, ways[0]].job)) for case in cases}
    for ranks in run_ranks(train, 2, paths, timeout=60 + 10 * len(paths)):
        for (case, way), steps in zip(plans, ranks, strict=True):
            losses = [loss for loss, _ in steps]
            assert losses == pytest.approx(wanted[case], rel=TOLERANCE), f"{case}, {way}"


def test_schedules_and_groups_of_decay_equal_plain_training(tmp_path: Path) -> None:
    check(tmp_path, ADAMW, list(WAYS), lambda job: partial(torch.optim.AdamW, betas=job.betas, eps=job.eps))


# -- steps without a number -----------------------------------------------------------------------------------------------


def test_what_is_done_about_gradients_that_are_no_numbers(tmp_path: Path) -> None:
    """The first step throws the weights so far that the second has none; it then changes nothing, or ends the run."""
    make_plan(tmp_path / "plan.json", num_steps=4, options={"warmup_steps": 0})
    start = partial(
        run,
        tmp_path / "plan.json",
        device="cpu",
        timeout=60,
        rates={"learning_rate": 1e30, "warmup_steps": 2},
    )
    skipping = start(out=tmp_path / "skip", on_nan="skip")
    assert skipping is not None and skipping.skipped_steps == (1, 2, 3)
    assert skipping.learning_rates == (5e29, 1e30, 1e30, 1e30)
    assert (tmp_path / "skip" / "steps.jsonl").read_text().count('"skipped": true') == 3
    with pytest.raises(RunError, match=r"step 2 has loss .*last good checkpoint is step-000001 in"):
        start(out=tmp_path / "stop", on_nan="stop", checkpoint=tmp_path / "kept", checkpoint_every=1)
    warned = start(out=tmp_path / "warn", steps=2)
    assert warned is not None and warned.skipped_steps == ()
    assert load_record(tmp_path / "warn" / "record.json").gradient_norms[1] is None
