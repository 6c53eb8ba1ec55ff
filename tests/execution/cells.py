"""Cells of the matrix of data parallelism: a plan trained by real processes beside plain autograd and the prediction."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from plans import make_plan

from stagewright.cluster import load_cluster
from stagewright.execution.collectives import TrafficCounts
from stagewright.graph.flat_buffers import GRADIENTS
from stagewright.graph.tensor import ITEM_BYTES
from stagewright.planning.estimate import staged_model_of
from stagewright.planning.plan import Plan, load_plan
from stagewright.planning.plan_stages import stage_program
from stagewright.planning.prediction.predict import rank_memories
from stagewright.planning.prediction.staged_model import StagedModel
from stagewright.schedule import Action
from stagewright.tracing.models.lora import Lora

NUM_STEPS = 2
CPUS = load_cluster("8x-h100", {"device.kind": "cpu"})
"""What these runs are on: GPUs keep buffers for what they send."""
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
    shard_size: int | None = None
    host_optimizer: tuple[int, ...] = ()
    num_units: int = 1
    lora: Lora | None = None
    streamed: bool = False

    def __str__(self) -> str:
        model = self.model.rpartition(":")[2]
        chunks = f" x {self.num_chunks} chunks" if self.num_chunks else ""
        return (
            f"{model} {self.schedule} zero {self.sharding} dp {self.dp} pp {self.pp}{chunks} {self.policy}"
            + " streamed" * self.streamed
        )

    def plan(self, folder: Path) -> Path:
        path = folder / f"{zlib.crc32(repr(self).encode())}.json"
        make_plan(
            path, self.model, self.schedule, self.pp, self.dp, self.num_microbatches, self.dtype, NUM_STEPS,
            overrides=dict(self.overrides), microbatch_size=2, sharding=self.sharding, num_chunks=self.num_chunks,
            policy=self.policy, sequence_length=16, reduce_dtype=self.reduce_dtype, shard_size=self.shard_size,
            host_optimizer=self.host_optimizer, num_units=self.num_units, lora=self.lora,
            streamed=self.streamed,
        )  # fmt: skip
        return path


@dataclass(frozen=True)
class Outcome:
    """What one rank found: differences from the plain run relative to its largest element, and bytes."""

    loss: float
    gradients: dict[str, float]
    reordered: frozenset[str]
    """Parameters whose gradients are added up in another order than plain training has: tied ones, those that the replicas
    sum several times in a batch, and all where there are more than two replicas."""
    losses: tuple[float, ...]
    peak_bytes: int
    traffic: dict[str, int]
    """Of one step: numbers of collectives and bytes."""


def predicted(path: Path) -> list[int]:
    """Bytes at the peak of every pipeline rank, as predicted."""
    return [memory.peak_bytes for memory in rank_memories(staged_model_of(load_plan(path), CPUS))]


def expected_traffic(plan: Plan) -> list[dict[str, int]]:
    """What every pipeline rank moves in one step, by the formulas of ZeRO on a ring: a part of ``(dp - 1) / dp`` of a
    buffer for a gather or a scattered sum, twice that for an all-reduce."""
    staged = staged_model_of(plan, CPUS)
    return [vars(_traffic_of(plan, staged, rank)) for rank in range(plan.pp)]


def _traffic_of(plan: Plan, staged: StagedModel, rank: int) -> TrafficCounts:
    traffic, own = TrafficCounts(), set(staged.program.placement.stages_of(rank))
    for flat in staged.flats:
        stages = own.intersection(flat.stages)
        if not stages:
            continue
        part = flat.num_elements - flat.shard_elements
        gathers = {0: 0, 1: 1, 2: 1, 3: _times_gathered(staged.program.actions(rank), stages)}[flat.level]
        sums = sum(
            action.kind == "REDUCE" and action.stage in stages for action in staged.program.actions(rank)
        )
        sums = sums if flat.level >= 2 and len(flat.stages) == 1 else 1
        sums = sums if flat.is_trained else 0
        traffic.num_gathers += gathers
        traffic.gathered_bytes += gathers * part * ITEM_BYTES[flat.dtype]
        traffic.num_reductions += sums
        traffic.reduced_bytes += sums * part * ITEM_BYTES[flat.dtype] * (2 if flat.level == 0 else 1)
        if flat.num_copies > 1:
            size = flat.summed_elements * ITEM_BYTES[flat.dtype]
            traffic.num_copy_sums += 1
            traffic.copy_sum_bytes += 2 * (flat.num_copies - 1) * size // flat.num_copies
    return traffic


def _times_gathered(actions: Iterable[Action], stages: set[int]) -> int:
    """How often a buffer that `stages` share is made whole."""
    held: set[int] = set()
    count = 0
    for action in actions:
        if action.kind == "GATHER" and action.stage in stages:
            count += not held
            held.add(action.stage)
        elif action.kind == "RELEASE":
            held.discard(action.stage)
    return count


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
    for stage in session.own_stages:
        wanted = plain.gradients(_order(plan, stage.index))
        for value, _ in stage.gradients:
            name = stage.value(value).name
            differences[name] = largest_difference(gradients[name], wanted[name])
    traffic = session.shards.replicas.traffic if session.shards.replicas else TrafficCounts()
    before = replace(traffic)
    results = [session.train_step(step, metered=step == 1) for step in range(NUM_STEPS)]
    return Outcome(
        abs(loss - plain.loss) / abs(plain.loss),
        differences,
        _reordered(plan, session),
        tuple(result.loss for result in results),
        session.metering.peak_bytes,
        {name: (value - getattr(before, name)) // NUM_STEPS for name, value in vars(traffic).items()},
    )


def _reordered(plan: Plan, session: Any) -> frozenset[str]:
    sums = Counter(action.stage for action in stage_program(plan) if action.kind == "REDUCE")
    users = Counter(stage.value(value).name for stage in session.stages for value, _ in stage.gradients)
    return frozenset(
        stage.value(value).name
        for stage in session.stages
        for value, _ in stage.gradients
        if plan.dp > 2
        or users[stage.value(value).name] > 1
        or (sums[stage.index] > 1 and plan.sharding[stage.index] >= GRADIENTS)
    )


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
        import torch

        from stagewright.execution.data.synthetic import SyntheticBatches
        from stagewright.tracing.cache import trace
        from stagewright.tracing.models.build import build

        job, share = plan.job, plan.num_microbatches
        self.size, self.seed = plan.microbatch_size, job.seed
        self.shares = [range(replica * share, (replica + 1) * share) for replica in range(plan.dp)]
        self.count = plan.dp * share
        self.scale = job.loss_scale if job.dtype == "fp16" else 1.0
        self.added_in = torch.float32 if job.torch_name in ("bfloat16", "float16") else None
        reference = plan.model.reference()
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
            of_share: dict[str, Any] = {}
            for index in order:
                _add(of_share, self._of_microbatch(share[index]))
            _add(total, of_share)
        return {name: gradient / self.scale for name, gradient in total.items()}

    def _of_microbatch(self, index: int) -> dict[str, Any]:
        self.module.zero_grad(set_to_none=True)
        (self._loss(index) * (self.scale / self.count)).backward()
        found = {name: p.grad for name, p in self.module.named_parameters() if p.grad is not None}
        return {name: gradient.to(self.added_in or gradient.dtype) for name, gradient in found.items()}

    def _loss(self, index: int) -> Any:
        from stagewright.execution.random import keyed

        inputs = self.batches.microbatch(0, index * self.size, self.graph)
        with keyed(self.seed, 0, index):
            return self.module(**inputs)


def _add(total: dict[str, Any], gradients: dict[str, Any]) -> None:
    for name, gradient in gradients.items():
        total[name] = total[name] + gradient if name in total else gradient
