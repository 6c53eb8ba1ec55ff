"""Translation of a plan to the nearest configuration another framework runs, and the predicted cost of the difference.

A plan may be cut inside a layer, order forwards and backwards as no named schedule does, and recompute different tensors on
every stage. The configurations closest to the plan that a framework runs are predicted as by `stagewright estimate`, and
the fastest that fits is taken.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from stagewright.cluster.catalog import is_catalog_name
from stagewright.errors import InputError
from stagewright.estimation.runtime import load_runtime
from stagewright.export.differences import (
    PlanDifference,
    Report,
    with_fields,
    with_job,
    with_layers,
    with_level,
    with_policy,
    with_predicted_time,
    with_schedule,
    with_weights_on_devices,
)
from stagewright.graph import OperatorGraph
from stagewright.graph.layers import even_layers
from stagewright.planning.configuration import Configuration, Recompute
from stagewright.planning.estimate import estimate, graph_of
from stagewright.planning.job import ADAMW_NAME, Job
from stagewright.planning.plan import Plan
from stagewright.planning.plan_stages import configuration_of, is_looped, stage_program, whole_layers
from stagewright.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Stack:
    """A training framework, and which features of a plan it supports."""

    name: str
    runtimes: tuple[str, ...]
    """Runtimes that model it, as for `--runtime`, the usual one first; empty: the plan's."""
    schedules: tuple[str, ...]
    """Schedules it knows by name."""
    recomputes: tuple[Recompute, ...]
    level: Callable[[int, int], int]
    """The ZeRO level it runs for a given level and number of pipeline ranks."""
    parallelism: tuple[str, ...] = ("pp", "tp", "cp", "ep")
    """Supported kinds of parallelism other than replicas."""
    reads_orders: bool = False
    """Whether it runs any order of forwards and backwards of stages that are placed round-robin."""
    shards_in_groups: bool = False
    splits_sequence: bool = False
    """Whether tensor parallelism always implies sequence parallelism."""
    compiles: bool = False
    """Whether its configuration can enable compilation."""
    decays_all: bool = False
    """Whether weight decay is that of all parameters, norms and biases included."""
    plan_options: tuple[str, ...] = ()
    """Options of `stagewright plan` besides `--runtime` that restrict its search to this framework."""
    reduces_in_half: bool = True
    """Whether gradients may be reduced in half precision."""


@dataclass(frozen=True)
class Translation:
    """A plan translated to another framework."""

    plan: Plan
    """The plan of the translated configuration, under the framework's runtime."""
    configuration: Configuration
    differences: tuple[str, ...]
    """Differences from the original plan, a sentence each."""
    cost: str | None
    """Predicted time and memory relative to the original plan; None if nothing differs."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Return all differences and the cost, a sentence each."""
        return self.differences if self.cost is None else (*self.differences, self.cost)


def translate(plan: Plan, stack: Stack, report: Report = lambda stage: None) -> Translation:
    """Return `plan` in the nearest configuration that `stack` runs.

    Raises:
        InputError: `stack` lacks a kind of parallelism of the plan, does not train in its precision, or runs no
            configuration near the plan within the memory of its devices.
        PlanError: the model has changed since planning.
    """
    _check_parallelism(plan, stack)
    is_kept = not stack.runtimes or plan.job.runtime in stack.runtimes
    job = _job_of(plan.job, plan.job.runtime if is_kept else stack.runtimes[0])
    graph = graph_of(plan, report)
    candidates, differences = _candidates(plan, stack, graph)
    if not differences and len(candidates) == 1 and job.runtime == plan.job.runtime:
        _check_memory(plan, plan, stack)
        return Translation(plan, candidates[0], (), None)

    def predicted(configuration: Configuration, under: Job) -> Plan:
        report(f"predicting {configuration.schedule}")
        cluster = plan.cluster.load()
        return estimate(plan.model.resolved(), cluster, under, configuration, report=report)

    predictions = {candidate: predicted(candidate, plan.job) for candidate in candidates}
    nearest = min(candidates, key=lambda candidate: _preference(predictions[candidate]))
    nearest_plan = predictions[nearest]
    stack_plan = nearest_plan if job.runtime == plan.job.runtime else predicted(nearest, job)
    _check_memory(stack_plan, plan, stack)
    if configuration_of(plan).recompute not in stack.recomputes:
        candidate = nearest.recompute or "none"
        what = f"stages save tensors of their own choice under the plan, and there all {_DOES[candidate]}"
        differences.append(PlanDifference(what, lambda: with_policy(plan, graph, candidate)))
    sentences = tuple(with_predicted_time(difference, plan, report) for difference in differences)
    return Translation(
        stack_plan, nearest, sentences, _cost(plan, nearest_plan, stack_plan, bool(differences))
    )


def _job_of(job: Job, runtime: str) -> Job:
    """Return `job` under another runtime. Raises `InputError` if that runtime does not support it."""
    compiles = job.compiled and not load_runtime(runtime).kernels
    changed = job.model_copy(update={"runtime": runtime, "compiled": compiles})
    changed.check_runtime()
    return changed


def _check_parallelism(plan: Plan, stack: Stack) -> None:
    for name in ("pp", "tp", "cp", "ep"):
        width = getattr(plan, name)
        if width > 1 and name not in stack.parallelism:
            raise InputError(
                f"{stack.name}: {name} {width} has no counterpart in its configuration: plan with --{name} 1, or export to "
                "another stack"
            )


def _candidates(
    plan: Plan, stack: Stack, graph: OperatorGraph
) -> tuple[list[Configuration], list[PlanDifference]]:
    """Return the configurations closest to `plan`, and what they all lack."""
    planned = configuration_of(plan)
    differences = list(_unsupported(plan, stack))
    base = replace(
        planned,
        zero=_level(planned, stack),
        shard_size=planned.shard_size if stack.shards_in_groups else None,
        recompute=planned.recompute if planned.recompute in stack.recomputes else None,
        sequence_parallel=planned.sequence_parallel or (stack.splits_sequence and plan.tp > 1),
        reduce_dtype=planned.reduce_dtype if stack.reduces_in_half else None,
        streamed=False,
    )
    level = base.zero or 0
    if level != (planned.zero or 0):
        what = f"replicas shard as ZeRO {level}, and under the plan as ZeRO {planned.zero or 0}"
        differences.append(PlanDifference(what, lambda: with_level(plan, graph, level)))
    pipelines, changed = _pipelines(plan, base, stack, graph)
    kept = (base.recompute,) if base.recompute else ("none", "full")
    candidates = [replace(pipeline, recompute=recompute) for pipeline, recompute in product(pipelines, kept)]
    return candidates, [*differences, *changed]


def _level(planned: Configuration, stack: Stack) -> int | None:
    """Return the ZeRO level; None (reductions at the end of the batch) is kept if nothing is sharded."""
    level = stack.level(planned.zero or 0, planned.pp)
    return level if level or planned.zero else planned.zero


def _pipelines(
    plan: Plan, base: Configuration, stack: Stack, graph: OperatorGraph
) -> tuple[list[Configuration], list[PlanDifference]]:
    """Return configurations with the schedules and cuts closest to those of `plan`, and their differences."""
    if plan.pp == 1:
        return [replace(base, schedule="1f1b", chunks=None, layers_per_stage=None)], []
    counts, is_moved = whole_layers(plan, graph)
    what = "cuts inside layers go to the nearest place between layers"
    differences = [PlanDifference(what, lambda: with_layers(plan, graph, counts))] if is_moved else []
    is_whole = 0 not in counts[1:-1]
    has_name = plan.schedule in stack.schedules and not (
        plan.num_stages == plan.pp and plan.schedule in _OF_SEVERAL_STAGES
    )
    if is_whole and has_name:
        return [replace(base, layers_per_stage=counts)], differences
    if is_whole and stack.reads_orders and is_looped(plan) and len(counts) == plan.num_stages:
        order = stage_program(plan).compute_only()
        program = order.with_ranks(
            (action for action in actions if action.kind.value != "R") for actions in order.ranks
        )
        return [replace(base, layers_per_stage=counts, program=program)], differences
    num_layers = sum(counts)
    chunks = min(max(1, round(len(counts) / plan.pp)), num_layers // plan.pp)
    candidates = [replace(base, schedule="1f1b", chunks=None, layers_per_stage=even_layers(graph, plan.pp))]
    if chunks > 1 and plan.num_microbatches % plan.pp == 0 and "interleaved-1f1b" in stack.schedules:
        layers = even_layers(graph, plan.pp * chunks)
        candidates.append(replace(base, schedule="interleaved-1f1b", chunks=chunks, layers_per_stage=layers))
    if is_whole and len(counts) == plan.pp and is_looped(plan):
        candidates.append(replace(candidates[0], layers_per_stage=counts))
    unsupported = f"is not among its schedules ({', '.join(stack.schedules)})"
    if has_name:
        what = f"some of the {len(counts)} stages have no whole layer under the plan, and there all have"
        return candidates, [*differences, PlanDifference(what)]
    if stack.reads_orders and is_whole and not is_looped(plan):
        unsupported = "places stages otherwise than round the ranks, as an order of its own has to there"
    what = f"the schedule {plan.schedule}{' of one stage a rank' * (plan.schedule in stack.schedules)} {unsupported}"
    return candidates, [
        *differences,
        PlanDifference(what, lambda: with_schedule(plan, graph, stack.schedules)),
    ]


def _unsupported(plan: Plan, stack: Stack) -> Iterator[PlanDifference]:
    """Yield the features of a plan that no configuration of a framework has."""
    if plan.loss_pieces > 1:
        what = f"the loss goes in {plan.loss_pieces} pieces under the plan, and there whole"
        yield PlanDifference(what, with_fields(plan, loss_pieces=1))
    if plan.host_optimizer:
        what = "the optimizer runs on the host under the plan, and there on the devices"
        yield PlanDifference(what, with_fields(plan, host_optimizer=()))
    if plan.streamed:
        what = "weights are streamed from the host under the plan, and there on the devices"
        yield PlanDifference(what, lambda: with_weights_on_devices(plan))
    if plan.shard_size is not None and not stack.shards_in_groups:
        what = f"replicas shard in groups of {plan.shard_size} under the plan, and there all together"
        yield PlanDifference(what, with_fields(plan, shard_size=None))
    if plan.tp > 1 and stack.splits_sequence and not plan.sequence_parallel:
        what = "ranks of tp split the sequence between layers there, and not under the plan"
        yield PlanDifference(what, with_fields(plan, sequence_parallel=True))
    if plan.reduce_dtype == "bf16" and not stack.reduces_in_half:
        what = "gradients are summed in fp32 there, and in bf16 under the plan"
        yield PlanDifference(what, with_fields(plan, reduce_dtype=None))
    if plan.job.compiled and not stack.compiles:
        what = "operators are compiled under the plan, which its settings do not say"
        yield PlanDifference(what, with_job(plan, compiled=False))
    if plan.job.least_decayed_dims and stack.decays_all:
        yield PlanDifference(
            "weight decay is that of all parameters there, and of matrices alone under the plan"
        )
    if plan.job.documents_apart:
        yield PlanDifference(
            "documents of a sample see each other there", with_job(plan, documents_apart=False)
        )
    if plan.job.sequence_lengths:
        yield PlanDifference(f"batches have one length there, {plan.job.sequence_length} tokens")
    if not plan.job.is_plain_adamw:
        what = f"the optimizer is {plan.job.optimizer} under the plan, and there AdamW"
        yield PlanDifference(
            what, with_job(plan, optimizer=ADAMW_NAME, optimizer_options={}, optimizer_state=None)
        )
    if plan.devices and plan.devices != tuple(range(plan.num_ranks)):
        what = "ranks are on devices of the plan's choice, and there in the order of the nodes"
        yield PlanDifference(what, with_fields(plan, devices=()))


def _preference(plan: Plan) -> tuple[bool, float]:
    """Return a sort key: plans that fit come first, by step time; others by the memory they lack."""
    spare = _spare_bytes(plan)
    return (True, -spare) if spare < 0 else (False, plan.predictions.step_seconds)


def _spare_bytes(plan: Plan) -> int:
    limits = plan.usable_bytes(plan.cluster.load())
    return min(limits[rank.rank] - rank.reserved_peak_bytes for rank in plan.predictions.ranks)


def _check_memory(stack_plan: Plan, plan: Plan, stack: Stack) -> None:
    """Raise `InputError` if `stack_plan`, the nearest to `plan` that `stack` runs, needs more memory than there is."""
    if (spare := _spare_bytes(stack_plan)) >= 0:
        return
    fullest = stack_plan.predictions.reserved_peak_bytes
    runtime = ("--runtime", stack.runtimes[0]) if stack.runtimes else ()
    command = plan_command(plan, *runtime, *stack.plan_options)
    raise InputError(
        f"{stack.name}: the nearest configuration that it runs needs {format_bytes(fullest)} on its fullest device, "
        f"{format_bytes(-spare)} more than there is: plan for it instead: {command}"
    )


def plan_command(plan: Plan, *options: str) -> str:
    """Return the command that plans the same job with these options."""
    job, cluster = plan.job, plan.cluster.name
    words = ["stagewright", "plan", plan.model.text]
    words += [
        word
        for key, value in plan.model.overrides.items()
        for word in ("--set", f"{key}={json.dumps(value)}")
    ]
    words += ["--cluster", cluster if is_catalog_name(cluster) else f"{cluster}.toml"]
    words += ["--global-batch", str(job.global_batch), "--sequence-length", str(job.sequence_length)]
    words += [] if job.dtype == "bf16" else ["--dtype", job.dtype]
    words += [] if job.memory_limit is None else ["--memory-limit", str(job.memory_limit)]
    return shlex.join([*words, *options, "-o", "plan-to-export.json"])


_OF_SEVERAL_STAGES = ("interleaved-1f1b", "breadth-first", "interleaved-zb")
"""Schedules that frameworks run only with several stages per rank."""

_DOES = {
    "none": "keep everything", "full": "recompute every layer", "selective": "recompute selectively",
    "model": "recompute as the model says",
}  # fmt: skip


def _cost(plan: Plan, nearest: Plan, stack_plan: Plan, differs: bool) -> str:
    """Return predicted step time and memory of the translation, compared to the plan: as the framework's own runtime takes
    them where one is known."""
    is_own = stack_plan.job.runtime == plan.job.runtime
    if is_own and not differs:
        return ""
    planned, predicted = plan.predictions, (nearest if is_own else stack_plan).predictions
    runtime = "" if is_own else f" (runtime {stack_plan.job.runtime})"
    return (
        f"predicted to take {format_seconds(predicted.step_seconds)} a step "
        f"({predicted.step_seconds / planned.step_seconds - 1:+.1%}) and {format_bytes(predicted.reserved_peak_bytes)} of "
        f"memory{runtime}; this plan takes {format_seconds(planned.step_seconds)} and "
        f"{format_bytes(planned.reserved_peak_bytes)}"
    )
