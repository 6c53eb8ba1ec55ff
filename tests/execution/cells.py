"""Cells of the matrix of data parallelism: a plan trained by real processes beside plain autograd and the prediction."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from plans import make_plan

from stagewright.cluster import load_cluster
from stagewright.execution.collectives import Traffic
from stagewright.planning.estimate import line_of
from stagewright.planning.plan import Plan, load_plan, stage_program
from stagewright.planning.predict import rank_memories

NUM_STEPS = 2
SMALL_GPT2 = (("num_hidden_layers", 2), ("n_embd", 32), ("vocab_size", 96))
SMALL_LLAMA = (
    ("num_hidden_layers", 4), ("hidden_size", 32), ("intermediate_size", 64), ("vocab_size", 96),
    ("num_attention_heads", 4), ("num_key_value_heads", 2), ("head_dim", 8),
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One plan to try."""

    model: str = "tiny-llama"
    schedule: str = "1f1b"
    sharding: int = 0
    dp: int = 2
    pp: int = 2
    num_chunks: int | None = None
    policy: str = "keep"
    num_microbatches: int = 3
    dtype: str = "fp64"
    overrides: tuple[tuple[str, object], ...] = ()
    reduce_dtype: str | None = None

    def __str__(self) -> str:
        chunks = f" x {self.num_chunks} chunks" if self.num_chunks else ""
        return f"{self.model} {self.schedule} zero {self.sharding} dp {self.dp} pp {self.pp}{chunks} {self.policy}"

    def plan(self, folder: Path) -> Path:
        path = folder / f"{str(self).replace(' ', '-')}.json"
        make_plan(
            path, self.model, self.schedule, self.pp, self.dp, self.num_microbatches, self.dtype, NUM_STEPS,
            overrides=dict(self.overrides), microbatch_size=2, sharding=self.sharding, num_chunks=self.num_chunks,
            policy=self.policy, sequence_length=16, reduce_dtype=self.reduce_dtype,
        )  # fmt: skip
        return path


@dataclass(frozen=True)
class Outcome:
    """What one rank found: differences from the plain run relative to its largest element, and bytes."""

    loss: float
    gradients: dict[str, float]
    tied: tuple[str, ...]
    losses: tuple[float, ...]
    peak_bytes: int
    traffic: dict[str, int]
    """Of one step: numbers of collectives and bytes."""


def predicted(path: Path) -> list[int]:
    """Bytes at the peak of every pipeline rank, as predicted."""
    return [memory.peak_bytes for memory in rank_memories(line_of(load_plan(path), load_cluster("8x-h100")))]


def train(rank: int, num_ranks: int, paths: list[str]) -> list[Outcome]:
    """Each plan on this rank."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    plain: dict[tuple[object, ...], Plain] = {}
    found = []
    for path in paths:
        plan = load_plan(path)
        key = (plan.model.digest, plan.job.dtype, plan.dp, plan.num_microbatches)
        if key not in plain:
            plain[key] = Plain(plan)
        found.append(_train_one(plan, plain[key]))
        dist.barrier()
    dist.destroy_process_group()
    return found


def _train_one(plan: Plan, plain: Plain) -> Outcome:
    import torch

    from stagewright.execution.session import Session
    from stagewright.execution.verification import largest_difference

    session = Session(plan, torch.device("cpu"), None, random_weights=True)
    loss = session.accumulate(0)
    gradients = session.gradients()
    differences = {}
    for stage in session.own:
        wanted = plain.gradients(_order(plan, stage.index))
        for value, _ in stage.gradients:
            name = stage.value(value).name
            differences[name] = largest_difference(gradients[name], wanted[name])
    users = [stage.value(value).name for stage in session.stages for value, _ in stage.gradients]
    traffic = session.shards.replicas.traffic if session.shards.replicas else Traffic()
    before = replace(traffic)
    results = [session.train_step(step, metered=step == 1) for step in range(NUM_STEPS)]
    return Outcome(
        abs(loss - plain.loss) / abs(plain.loss),
        differences,
        tuple(name for name in set(users) if users.count(name) > 1),
        tuple(result.loss for result in results),
        session.peak_bytes,
        {name: (value - getattr(before, name)) // NUM_STEPS for name, value in vars(traffic).items()},
    )


def evaluate(rank: int, num_ranks: int, paths: list[str]) -> list[float]:
    """The loss in evaluation mode after two steps of training each plan."""
    import torch
    import torch.distributed as dist

    from stagewright.execution.session import Session

    dist.init_process_group("gloo")
    losses = []
    for path in paths:
        session = Session(load_plan(path), torch.device("cpu"), None, random_weights=True)
        for step in range(NUM_STEPS):
            session.train_step(step)
        losses.append(session.evaluate(7))
    dist.barrier()
    dist.destroy_process_group()
    return losses


def _order(plan: Plan, stage: int) -> tuple[int, ...]:
    """The order in which a stage adds up the gradients of its microbatches."""
    actions = (part for action in stage_program(plan) for part in action.parts)
    return tuple(
        action.microbatch
        for action in actions
        if action.stage == stage and action.kind in ("B", "W") and action.microbatch is not None
    )


class Plain:
    """The model under autograd on the global batch: each replica's share added up in order, then the shares."""

    def __init__(self, plan: Plan) -> None:
        from stagewright.execution.data import SyntheticBatches
        from stagewright.tracing.cache import trace
        from stagewright.tracing.models.build import build
        from stagewright.tracing.models.reference import resolve

        job, share = plan.job, plan.num_microbatches
        self.size, self.seed = plan.microbatch_size, job.seed
        self.shares = [range(replica * share, (replica + 1) * share) for replica in range(plan.dp)]
        self.count = plan.dp * share
        reference = resolve(plan.model.text, plan.model.overrides)
        self.graph = trace(reference, plan.microbatch_size, **job.traced(plan.cluster.kind))
        built = build(reference, plan.microbatch_size, job.sequence_length, job.torch_name, seed=job.seed)
        self.module = built.module
        self.batches = SyntheticBatches(built.inputs, job.seed)
        self._known: dict[tuple[int, ...], dict[str, Any]] = {}
        losses = [float(self._loss(index).detach()) for index in range(self.count)]
        self.loss = sum(sum(losses[index] for index in share) for share in self.shares) / self.count

    def gradients(self, order: tuple[int, ...]) -> dict[str, Any]:
        """With the microbatches of each replica in `order`."""
        if order not in self._known:
            self._known[order] = self._gradients(order)
        return self._known[order]

    def _gradients(self, order: tuple[int, ...]) -> dict[str, Any]:
        total: dict[str, Any] = {}
        for share in self.shares:
            self.module.zero_grad(set_to_none=True)
            for index in order:
                (self._loss(share[index]) * (1.0 / self.count)).backward()
            for name, parameter in self.module.named_parameters():
                if parameter.grad is not None:
                    total[name] = total[name] + parameter.grad if name in total else parameter.grad.clone()
        return total

    def _loss(self, index: int) -> Any:
        from stagewright.execution.random import keyed

        inputs = self.batches.microbatch(0, index * self.size, self.graph)
        with keyed(self.seed, 0, index):
            return self.module(**inputs)
