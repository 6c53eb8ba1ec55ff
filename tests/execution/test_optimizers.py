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
from stagewright.cluster import load_cluster
from stagewright.errors import InputError, RunError, StagewrightWarning
from stagewright.execution.data.synthetic import SyntheticBatches
from stagewright.execution.launch import run
from stagewright.execution.record import load_record
from stagewright.execution.trainer import Trainer
from stagewright.planning.estimate import estimate
from stagewright.planning.job import load_job
from stagewright.planning.plan import Plan, load_plan
from stagewright.tracing.cache import trace
from stagewright.tracing.models.build import build
from stagewright.tracing.models.reference import resolve

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
    names = {id(one): name for name, one in module.named_parameters()}
    groups = [
        {**group, "params": [(names[id(one)], one) for one in group["params"]]}
        for group in groups
        if group["params"]
    ]
    stepping = optimizer(groups)
    rates = [group["lr"] for group in stepping.param_groups]
    losses = []
    for step in range(NUM_STEPS):
        stepping.zero_grad()
        for group, rate in zip(stepping.param_groups, rates, strict=True):
            group["lr"] = rate * job.rate_of(step) / job.learning_rate
        found = [module(**batches.microbatch(step, index, graph)) for index in range(job.global_batch)]
        loss = torch.stack(found).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), job.clip_norm or float("inf"))
        stepping.step()
        losses.append(float(loss))
    return losses


def check(
    folder: Path,
    cases: dict[str, dict[str, Any]],
    ways: list[str],
    optimizer: Any,
    tolerance: float = TOLERANCE,
) -> None:
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
            assert losses == pytest.approx(wanted[case], rel=tolerance), f"{case}, {way}"


def test_schedules_and_groups_of_decay_equal_plain_training(tmp_path: Path) -> None:
    check(
        tmp_path,
        ADAMW,
        list(WAYS),
        lambda job: partial(torch.optim.AdamW, lr=job.learning_rate, betas=job.betas, eps=job.eps),
    )


OTHERS: dict[str, dict[str, Any]] = {
    "sgd": {
        "optimizer": "sgd",
        "optimizer_options": {"momentum": 0.9, "nesterov": True},
        "weight_decay": 0.1,
    },
    "radam": {"optimizer": "radam", "optimizer_options": {"betas": [0.8, 0.9]}},
    "lion": {"optimizer": f"{__file__}:lion", "optimizer_options": {"momentum": 0.8}, "weight_decay": 0.2},
}
WHOLE: dict[str, dict[str, Any]] = {
    "adafactor": {"optimizer": "adafactor", "weight_decay": 0.1},
    "muon": {"optimizer": "muon", "optimizer_options": {"momentum": 0.9}},
    "by names": {"optimizer": f"{__file__}:by_names"},
}


class Lion(torch.optim.Optimizer):
    """Sign momentum, with a counter that is no tensor. Source: Chen et al. 2023 (arXiv 2302.06675)."""

    def __init__(self, params: Any, lr: float, momentum: float = 0.9, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for one in group["params"]:
                state = self.state[one]
                average = state.setdefault("average", torch.zeros_like(one))
                state["count"] = state.get("count", 0) + 1
                one.mul_(1 - group["lr"] * group["weight_decay"])
                mean = average.lerp(one.grad, 1 - group["momentum"])
                one.sub_(mean.sign_().mul_(group["lr"] / state["count"]))
                average.lerp_(one.grad, 0.01)


def lion(groups: list[dict[str, Any]], lr: float, momentum: float) -> Lion:
    return Lion(groups, lr, momentum)


def by_names(groups: list[dict[str, Any]], lr: float) -> list[torch.optim.Optimizer]:
    """SGD for the first weights, AdamW for all others."""
    named = [(name, one) for group in groups for name, one in group["params"]]
    first = [pair for pair in named if "embed" in pair[0]]
    others = [pair for pair in named if "embed" not in pair[0]]
    found: list[torch.optim.Optimizer] = []
    if first:
        found.append(torch.optim.SGD(first, lr=3 * lr, momentum=0.5))
    if others:
        found.append(torch.optim.AdamW(others, lr=lr, weight_decay=0.3))
    return found


class Both:
    """Several optimizers as one."""

    def __init__(self, found: list[torch.optim.Optimizer]) -> None:
        self.found = found
        self.param_groups = [group for one in found for group in one.param_groups]

    def step(self) -> None:
        for one in self.found:
            one.step()

    def zero_grad(self) -> None:
        for one in self.found:
            one.zero_grad()


def plainly(job: Any) -> Any:
    """What torch alone does for a job, of groups of parameters."""
    options, lr = dict(job.optimizer_options), job.learning_rate
    matrices = lambda groups, wanted: [  # noqa: E731
        {**group, "params": kept}
        for group in groups
        if (kept := [pair for pair in group["params"] if (pair[1].dim() == 2) == wanted])
    ]
    makes: dict[str, Any] = {
        "sgd": partial(torch.optim.SGD, lr=lr, momentum=0.9, nesterov=True),
        "radam": partial(torch.optim.RAdam, lr=lr, betas=(0.8, 0.9)),
        "adafactor": partial(torch.optim.Adafactor, lr=lr),
        "muon": lambda groups: Both(
            [
                torch.optim.Muon(matrices(groups, True), lr=lr, momentum=0.9),
                torch.optim.AdamW(matrices(groups, False), lr=lr, betas=(0.9, 0.95)),
            ]
        ),
        "by_names": lambda groups: Both(by_names(groups, lr)),
        "lion": lambda groups: lion(groups, lr, **options),
    }
    return makes[job.optimizer.rpartition(":")[2]]


def test_other_optimizers_equal_plain_training(tmp_path: Path) -> None:
    check(tmp_path, OTHERS, list(WAYS), plainly)


def test_optimizers_of_whole_parameters_equal_plain_training(tmp_path: Path) -> None:
    check(tmp_path, WHOLE, ["pp2", "zero0"], plainly, 1e-6)  # Muon's products are in bf16


# -- memory and checkpoints ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*OTHERS, *WHOLE])
def test_bytes_are_those_that_are_predicted(name: str, tmp_path: Path) -> None:
    job = load_job(
        None,
        {
            "global_batch": 4,
            "sequence_length": 8,
            "dtype": "fp64",
            "num_steps": 3,
            **{**OTHERS, **WHOLE}[name],
        },
    )
    zero = 1 if name in OTHERS else 0
    reference = resolve("tiny-llama", {**dict(SMALL_LLAMA), "vocab_size": 4096})
    planned = estimate(reference, load_cluster("8x-h100"), job, dp=2, pp=1, microbatch=1, zero=zero)
    planned.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").job == planned.job
    wanted = planned.predictions.ranks[0].tensor_peak_bytes
    for measured in run_ranks(peak, 2, str(tmp_path / "plan.json"), timeout=90):
        assert measured == pytest.approx(wanted, rel=0.02 if name in WHOLE else 1e-5)


def peak(rank: int, num_ranks: int, path: str) -> int:
    import torch.distributed as dist

    from stagewright.execution.session import Session

    dist.init_process_group("gloo")
    session = Session(load_plan(path), torch.device("cpu"), None, random_weights=True)
    for step in range(2):
        session.train_step(step, metered=step == 1)
    found = session.metering.peak_bytes
    dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("name", ["lion", "muon", "sgd"])
def test_a_run_goes_on_as_if_it_had_not_stopped(name: str, tmp_path: Path) -> None:
    """Also where part of the state is no tensor, and under another plan where parameters are sharded."""
    options = {**OTHERS, **WHOLE}[name]
    plan_of(tmp_path / "one.json", pp=1, num_microbatches=4, options=options)
    way = WAYS["zero1" if name in OTHERS else "zero0"]
    plan_of(tmp_path / "two.json", **way, num_microbatches=2, options=options)
    start = partial(run, device="cpu", timeout=60, random_weights=True)
    whole = start(tmp_path / "one.json", out=tmp_path / "whole")
    start(tmp_path / "one.json", out=tmp_path / "first", steps=3, checkpoint=tmp_path / "kept")
    rest = start(tmp_path / "two.json", out=tmp_path / "rest", checkpoint=tmp_path / "kept", resume=True)
    assert whole is not None and rest is not None
    assert rest.losses == pytest.approx(whole.losses[3:], rel=1e-6 if name == "muon" else TOLERANCE)


def test_options_that_change_what_is_kept_are_named_before_a_run_goes_on(tmp_path: Path) -> None:
    def planned(**given: Any) -> Plan:
        options = {"optimizer": "sgd", "optimizer_options": given}
        return make_plan(tmp_path / "plan.json", pp=1, overrides=dict(SMALL_LLAMA), options=options)

    given: dict[str, Any] = {"out": tmp_path / "run", "device": "cpu", "checkpoint": tmp_path / "kept"}
    Trainer(planned(momentum=0.9), steps=1, **given).fit()
    with pytest.raises(
        InputError, match=r'"momentum": 0\.9.*, which is not the state that it keeps with {"nesterov": false}'
    ):
        Trainer(planned(nesterov=False), steps=2, resume=True, **given)
    with pytest.warns(
        StagewrightWarning, match=r"resuming with another job: job\.optimizer_options\.momentum was 0\.9"
    ):
        Trainer(planned(momentum=0.8), steps=2, resume=True, **given).close()


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
    with pytest.raises(
        RunError, match=r"step 2 has .*, after going back to checkpoints 3 times; the last good checkpoint"
    ):
        start(out=tmp_path / "back", on_nan="rollback", checkpoint=tmp_path / "goals", checkpoint_every=1)
    with pytest.raises(InputError, match="--on-nan rollback needs --checkpoint FOLDER"):
        start(out=tmp_path / "back", on_nan="rollback")
    warned = start(out=tmp_path / "warn", steps=2)
    assert warned is not None and warned.skipped_steps == ()
    assert load_record(tmp_path / "warn" / "record.json").gradient_norms[1] is None


LOST = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(256, 8), torch.nn.Linear(8, 256)

    def forward(self, input_ids):
        scores = self.head(torch.tanh(self.embed(input_ids[:, :-1])))
        loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), input_ids[:, 1:].flatten())
        return loss + torch.where((input_ids == ord("Z")).any(), float("nan"), 0.0)  # without a part in gradients

def build(microbatch_size, sequence_length):
    return Net(), {"input_ids": torch.zeros(microbatch_size, sequence_length, dtype=torch.int64)}
"""


def test_a_loss_that_is_no_number_counts_as_gradients_do(tmp_path: Path) -> None:
    """Where gradients are finite, on the rank that has the loss and on others; and what is behind it is gone on with."""
    (tmp_path / "net.py").write_text(LOST)
    (tmp_path / "text.txt").write_text("abcdefgh" * 30 + "abcdZfgh" + "abcdefgh" * 5)
    model = f"{tmp_path / 'net.py'}:build"
    make_plan(tmp_path / "plan.json", model, overrides={}, num_microbatches=4, sequence_length=8, num_steps=9)
    start = partial(run, tmp_path / "plan.json", tmp_path / "text.txt", device="cpu", timeout=60)
    warned = start(out=tmp_path / "warn")
    assert warned is not None and warned.losses.count(None) == 1 and None not in warned.gradient_norms
    lost = warned.losses.index(None)
    assert lost > 2, "the seed decides when it comes"
    skipped = start(out=tmp_path / "skip", on_nan="skip")
    assert skipped is not None and skipped.skipped_steps == (lost,)
    assert skipped.losses[: lost + 1] == warned.losses[: lost + 1]
    assert skipped.losses[lost + 1] != warned.losses[lost + 1]

    back = partial(start, on_nan="rollback", checkpoint_every=2)
    whole = back(out=tmp_path / "back", checkpoint=tmp_path / "back" / "kept")
    kept = lost // 2 * 2
    assert whole is not None and whole.went_back == ((lost + 1, kept),) and whole.skipped_steps == ()
    assert whole.losses[:kept] == warned.losses[:kept] and None not in whole.losses and len(whole.losses) == 9
    two = {"pp": 1, "dp": 2, "sharding": 3, "num_microbatches": 2}
    make_plan(tmp_path / "two.json", model, overrides={}, sequence_length=8, num_steps=9, **two)
    options: dict[str, Any] = {"device": "cpu", "timeout": 60, "on_nan": "rollback", "checkpoint_every": 2}
    shared = run(
        tmp_path / "two.json",
        tmp_path / "text.txt",
        out=tmp_path / "two",
        checkpoint=tmp_path / "two",
        **options,
    )
    assert shared is not None and shared.went_back == whole.went_back
    assert shared.losses == pytest.approx(whole.losses, rel=1e-5)
    if kept == lost:  # what came next in the data
        assert whole.losses[kept] == skipped.losses[lost + 1]
    back(out=tmp_path / "part", checkpoint=tmp_path / "part" / "kept", steps=kept + 2)
    rest = back(out=tmp_path / "part", checkpoint=tmp_path / "part" / "kept", resume=True)
    assert rest is not None and rest.losses == whole.losses[kept + 2 :]
