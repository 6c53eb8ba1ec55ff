"""A model as one stage on one device: what saving within a limit makes of it, what that costs, and the peak as it is run.

Peaks leave out what lasts from step to step (parameters, gradients, optimizer state), the user's inputs and the loss's
cotangent, and have in them what is computed from constants alone once per run (masks, rotary tables), so that they compare
with those of systems that compute it in every forward.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from stagewright.cluster import Cluster, load_cluster
from stagewright.estimation.memory import RankMemory
from stagewright.estimation.operators import work
from stagewright.estimation.stages import RangeCosts
from stagewright.estimation.time import Costing
from stagewright.execution.metering import StorageMeter
from stagewright.execution.stage_runner import StageOptions, StageRunner
from stagewright.execution.weights import Weights
from stagewright.graph import Node, OperatorGraph, Origin
from stagewright.graph.policy import Policy
from stagewright.graph.stage import Stage
from stagewright.graph.views import Lookup
from stagewright.planning.checkpointing.fit import fit
from stagewright.planning.job import Job
from stagewright.planning.prediction.predict import rank_memories
from stagewright.planning.prediction.staged_model import StagedModel, allocatable_bytes, staged_model
from stagewright.schedule import Program
from stagewright.schedule.builders import build
from stagewright.schedule.lower import insert_recomputation
from stagewright.tracing.arguments import from_contents
from stagewright.tracing.models.build import BuiltModel

_SEGMENT_BYTES = 2 * 2**20


def _without_fixed_costs() -> Cluster:
    """An H100 on which operators take what their arithmetic and traffic take, however small they are: models of a benchmark
    on a CPU are small, and the launches of their kernels would decide."""
    cluster = load_cluster("1x-h100")
    (group,) = cluster.nodes
    fixed = {"host_overhead_s": 0.0, "launch_overhead_s": 0.0, "matmul_half_flop": 0.0}
    device = group.device.model_copy(update=fixed)
    return cluster.model_copy(update={"nodes": (group.model_copy(update={"device": device}),)})


CLUSTER = _without_fixed_costs()


@dataclass(frozen=True)
class Recomputed:
    """Work that a backward repeats: FLOP of products and attention, bytes moved by all else, seconds of all."""

    flop: float
    moved_bytes: float
    seconds: float


def repeated(nodes: Iterable[Node], value: Lookup, seconds: float) -> Recomputed:
    works = [work(node, value) for node in nodes]
    moved = sum(one.bytes_moved for one in works if not one.flop)
    return Recomputed(sum(one.flop for one in works), moved, seconds)


@dataclass(frozen=True)
class Saved:
    """The stage under a policy."""

    staged: StagedModel
    memory: RankMemory

    @property
    def stage(self) -> Stage:
        return self.staged.stages[0]

    @property
    def again(self) -> tuple[Node, ...]:
        """Operators of the forward that run again."""
        return (*self.stage.rebuild.nodes, *self.stage.recomputed.nodes)

    @property
    def added_seconds(self) -> float:
        summary = self.staged.summaries[0]
        return summary.rebuild_s + summary.recompute_s

    @cached_property
    def recomputed(self) -> Recomputed:
        return repeated(self.again, self.stage.value, self.added_seconds)

    @property
    def peak_bytes(self) -> int:
        """As replayed; see the module for what counts."""
        return self.memory.peak_bytes - _lasting_bytes(self.staged, self.memory)


class OneStage:
    """A traced model that is not cut, for one microbatch at a time."""

    def __init__(self, graph: OperatorGraph, cluster: Cluster = CLUSTER) -> None:
        self.graph = graph
        self.cluster = cluster
        self.costs = RangeCosts(graph, Costing(graph, cluster.device, cluster))
        self.program = build("1f1b", 1, 1)

    @cached_property
    def kept(self) -> Saved:
        """Nothing is recomputed."""
        return self.under(Policy())

    def under(self, policy: Policy) -> Saved:
        program: Program = self.program
        if policy.recomputes:
            program = insert_recomputation(program, [0])
        staged = staged_model(self.costs, [], program, self.cluster, self._job(None), 1, [policy])
        return Saved(staged, rank_memories(staged)[0])

    def within(self, peak_bytes: int) -> Saved | None:
        """What `fit` chooses for a peak of so many bytes, thorough as it is for the best plan of a search; None if it finds
        nothing."""
        staged = self._line_within(peak_bytes)
        found = fit(staged, self.costs, offload=False, thorough=True)
        return None if found is None else Saved(found.staged, found.memories[0])

    def _line_within(self, peak_bytes: int) -> StagedModel:
        """The staged that keeps everything, with a limit that is exact to the byte: limits are in whole segments less the
        workspace, so that the workspace takes what is beyond."""
        target = peak_bytes + _lasting_bytes(self.kept.staged, self.kept.memory)
        (group,) = self.cluster.nodes
        limit = (target // _SEGMENT_BYTES + 1) * _SEGMENT_BYTES
        device = group.device.model_copy(update={"workspace_bytes": limit - target})
        cluster = self.cluster.model_copy(update={"nodes": (group.model_copy(update={"device": device}),)})
        job = self._job(limit)
        allowed = allocatable_bytes(job.usable_bytes(device, cluster), device)
        if allowed != target:
            raise ValueError(f"a limit of {limit} bytes allows {allowed}, not {target}")
        return staged_model(self.costs, [], self.program, cluster, job, 1)

    def _job(self, limit: int | None) -> Job:
        facts = self.graph.facts
        return Job(
            global_batch=facts["microbatch_size"], sequence_length=max(facts["sequence_length"], 1), dtype="fp32",
            clip_norm=None, memory_limit=limit,
        )  # fmt: skip

    def measured_peak(self, saved: Saved, built: BuiltModel) -> int:
        """Most bytes alive while F, R and B of one microbatch run on this machine's CPU."""
        stage, device = saved.stage, torch.device("cpu")
        named = {**dict(built.module.named_parameters(remove_duplicate=False)),
                 **dict(built.module.named_buffers(remove_duplicate=False))}  # fmt: skip
        tensors: dict[str, Tensor] = {name: tensor.detach().clone() for name, tensor in named.items()}
        for value in self.graph.values:
            if value.origin is Origin.CONSTANT:
                tensors[value.name] = from_contents(self.graph.constants[value.name], value.meta)
        weights = Weights([stage], tensors, device)
        inputs = {stage.value(value).name: built.inputs[stage.value(value).name] for value in stage.inputs}
        lasting = [*weights.tensors.values(), *weights.gradients.values(), *inputs.values()]
        with StorageMeter(elsewhere=lasting) as meter:
            runner = StageRunner(stage, weights, device, StageOptions(1.0))
            weights.begin_step()
            runner.begin_step(0)
            loss = runner.forward(0, {}, inputs)
            if stage.rebuild.nodes:
                runner.recompute(0)
            runner.backward(0, {})
            del loss
        return meter.peak_bytes - _cotangent_bytes(stage)


def _lasting_bytes(staged: StagedModel, memory: RankMemory) -> int:
    resident = staged.resident(0)
    stage = staged.stages[0]
    constants = sum(
        stage.graph.storage_bytes[stage.value(value).storage] for value in (*stage.buffers, *stage.constants)
    )
    made = resident.categories["constants"] - constants - _cotangent_bytes(stage)
    return resident.total - made + memory.categories["inputs"]


def _cotangent_bytes(stage: Stage) -> int:
    """Of the loss's cotangent, which lasts."""
    return stage.value(stage.graph.seed).meta.storage_bytes
