"""What another stack makes of a plan: the nearest configuration that it runs, and what the difference costs.

A plan may be cut inside a layer, order its passes as no schedule does, and recompute other tensors on every stage. Of the
configurations that a stack does run those next to the plan are predicted as `stagewright estimate` predicts them, and the
fastest that fits is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from stagewright.errors import InputError
from stagewright.estimation.runtime import load_runtime
from stagewright.export.differences import (
    Difference,
    Report,
    priced,
    with_fields,
    with_job,
    with_layers,
    with_level,
    with_policy,
    with_schedule,
)
from stagewright.graph import OperatorGraph
from stagewright.graph.layers import even_layers
from stagewright.planning.configuration import (
    Configuration,
    Recomputed,
    configuration_of,
    is_looped,
    whole_layers,
)
from stagewright.planning.estimate import estimate, graph_of
from stagewright.planning.job import ADAMW_NAME, Job
from stagewright.planning.plan import Plan
from stagewright.planning.plan_stages import stage_program
from stagewright.planning.promises import usable_bytes
from stagewright.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Stack:
    """What a training framework runs of what a plan may say."""

    name: str
    runtime: str | None
    """Whose execution it is, as `--runtime` has it; None: that of the plan."""
    schedules: tuple[str, ...]
    """Those that it knows by name."""
    recomputes: tuple[Recomputed, ...]
    level: Callable[[int, int], int]
    """Which ZeRO level it runs in place of one, at so many pipeline ranks."""
    widths: tuple[str, ...] = ("tp", "cp", "ep")
    """Kinds of parallelism that it has beside pipelines and replicas."""
    reads_orders: bool = False
    """Whether it runs any order of passes, of stages that go round the ranks."""
    cuts_freely: bool = True
    """Whether stages may have any numbers of layers."""
    shards_in_groups: bool = False
    splits_sequence: bool = False
    """Whether ranks that share layers always split the sequence between these, too."""
    compiles: bool = False
    """Whether it says that operators are compiled."""
    reduces_in_half: bool = True
    """Whether gradients may be summed in half precision."""


@dataclass(frozen=True)
class Expressed:
    """A plan as a stack runs it."""

    plan: Plan
    """What it runs, under its runtime."""
    configuration: Configuration
    differences: tuple[str, ...]
    """What of the plan that was asked for is not in it, a sentence each."""
    cost: str | None
    """What it takes in predicted time and memory, beside the plan; None where it is the plan."""

    @property
    def notes(self) -> tuple[str, ...]:
        """All of it, a sentence each."""
        return self.differences if self.cost is None else (*self.differences, self.cost)


def expressed(plan: Plan, stack: Stack, report: Report = lambda stage: None) -> Expressed:
    """The configuration next to `plan` that `stack` runs.

    Raises:
        InputError: it has no such parallelism, or does not train in the precision.
        PlanError: the model has changed since.
    """
    _check_widths(plan, stack)
    job = _job_of(plan.job, stack.runtime or plan.job.runtime)
    graph = graph_of(plan, report)
    ways, differences = _ways(plan, stack, graph)
    if not differences and len(ways) == 1 and job.runtime == plan.job.runtime:
        return Expressed(plan, ways[0], (), None)

    def predicted(configuration: Configuration, one: Job) -> Plan:
        report(f"predicting {configuration.schedule}")
        cluster = plan.cluster.load()
        return estimate(plan.model.resolved(), cluster, one, report=report, **configuration.arguments())

    tried = {way: predicted(way, plan.job) for way in ways}
    nearest = min(ways, key=lambda way: _worth(tried[way]))
    own = tried[nearest]
    there = own if job.runtime == plan.job.runtime else predicted(nearest, job)
    if configuration_of(plan).recompute not in stack.recomputes:
        way = nearest.recompute or "none"
        what = f"stages save tensors of their own choice under the plan, and there all {_DOES[way]}"
        differences.append(Difference(what, lambda: with_policy(plan, graph, way)))
    sentences = tuple(priced(one, plan, report) for one in differences)
    return Expressed(there, nearest, sentences, _cost(plan, own, there, bool(differences)))


def _job_of(job: Job, runtime: str) -> Job:
    """`job` under another runtime. Raises `InputError` where that does not train so."""
    compiles = job.compiled and not load_runtime(runtime).kernels
    changed = job.model_copy(update={"runtime": runtime, "compiled": compiles})
    changed.check_runtime()
    return changed


def _check_widths(plan: Plan, stack: Stack) -> None:
    for name in ("tp", "cp", "ep"):
        width = getattr(plan, name)
        if width > 1 and name not in stack.widths:
            raise InputError(
                f"{stack.name}: {name} {width} has no counterpart in its configuration: plan with --{name} 1, or export to "
                "another stack"
            )


def _ways(plan: Plan, stack: Stack, graph: OperatorGraph) -> tuple[list[Configuration], list[Difference]]:
    """Configurations next to `plan`, and what is given up in all of them."""
    asked = configuration_of(plan)
    differences = list(_given_up(plan, stack))
    base = replace(
        asked,
        zero=_level(asked, stack),
        shard_size=asked.shard_size if stack.shards_in_groups else None,
        recompute=asked.recompute if asked.recompute in stack.recomputes else None,
        sequence_parallel=asked.sequence_parallel or (stack.splits_sequence and plan.tp > 1),
        reduce_dtype=asked.reduce_dtype if stack.reduces_in_half else None,
    )
    level = base.zero or 0
    if level != (asked.zero or 0):
        what = f"replicas shard as ZeRO {level}, and under the plan as ZeRO {asked.zero or 0}"
        differences.append(Difference(what, lambda: with_level(plan, graph, level)))
    pipelines, changed = _pipelines(plan, base, stack, graph)
    kept = (base.recompute,) if base.recompute else ("none", "full")
    found = [replace(one, recompute=way) for one, way in product(pipelines, kept)]
    return found, [*differences, *changed]


def _level(asked: Configuration, stack: Stack) -> int | None:
    """What is sharded; sums at the end of the batch (None) stay what they are where nothing is."""
    level = stack.level(asked.zero or 0, asked.pp or 1)
    return level if level or asked.zero else asked.zero


def _pipelines(
    plan: Plan, base: Configuration, stack: Stack, graph: OperatorGraph
) -> tuple[list[Configuration], list[Difference]]:
    """Schedules and cuts next to those of `plan`, and in what they differ."""
    if plan.pp == 1:
        return [replace(base, schedule="1f1b", chunks=None, layers_per_stage=None)], []
    counts, moves = whole_layers(plan, graph)
    what = "cuts inside layers go to the nearest place between layers"
    differences = [Difference(what, lambda: with_layers(plan, graph, counts))] if moves else []
    if not stack.cuts_freely:
        even = even_layers(graph, plan.pp)
        what = "stages have even numbers of layers there"
        is_even = not moves and counts == even
        differences = [] if is_even else [Difference(what, lambda: with_layers(plan, graph, even))]
        if plan.schedule not in stack.schedules:
            what = f"the order of passes is that of {stack.schedules[0]} there, and {plan.schedule} under the plan"
            differences.append(Difference(what, lambda: with_schedule(plan, graph, stack.schedules)))
        return [replace(base, schedule=stack.schedules[0], chunks=None, layers_per_stage=even)], differences
    is_whole = 0 not in counts[1:-1]
    if is_whole and plan.schedule in stack.schedules:
        return [replace(base, layers_per_stage=counts)], differences
    if is_whole and stack.reads_orders and is_looped(plan) and len(counts) == plan.num_stages:
        order = stage_program(plan).compute_only()
        program = order.with_ranks(
            (one for one in actions if one.kind.value != "R") for actions in order.ranks
        )
        return [replace(base, layers_per_stage=counts, program=program)], differences
    num_layers = sum(counts)
    chunks = min(max(1, round(len(counts) / plan.pp)), num_layers // plan.pp)
    found = [replace(base, schedule="1f1b", chunks=None, layers_per_stage=even_layers(graph, plan.pp))]
    if chunks > 1 and plan.num_microbatches % plan.pp == 0 and "interleaved-1f1b" in stack.schedules:
        layers = even_layers(graph, plan.pp * chunks)
        found.append(replace(base, schedule="interleaved-1f1b", chunks=chunks, layers_per_stage=layers))
    if is_whole and len(counts) == plan.pp and is_looped(plan):
        found.append(replace(found[0], layers_per_stage=counts))
    known = f"is not among its schedules ({', '.join(stack.schedules)})"
    if plan.schedule in stack.schedules:
        what = f"of the {len(counts)} stages some have no whole layer under the plan, and there every one has"
        return found, [*differences, Difference(what)]
    what = f"the order of passes that {plan.schedule} has {known}"
    return found, [*differences, Difference(what, lambda: with_schedule(plan, graph, stack.schedules))]


def _given_up(plan: Plan, stack: Stack) -> Iterator[Difference]:
    """What no configuration of a stack says."""
    if plan.loss_pieces > 1:
        what = f"the loss goes in {plan.loss_pieces} pieces under the plan, and there whole"
        yield Difference(what, with_fields(plan, loss_pieces=1))
    if plan.host_optimizer:
        what = "the optimizer runs on the host under the plan, and there on the devices"
        yield Difference(what, with_fields(plan, host_optimizer=()))
    if plan.shard_size is not None and not stack.shards_in_groups:
        what = f"replicas shard in groups of {plan.shard_size} under the plan, and there all together"
        yield Difference(what, with_fields(plan, shard_size=None))
    if plan.tp > 1 and stack.splits_sequence and not plan.sequence_parallel:
        what = "ranks of tp split the sequence between layers there, and not under the plan"
        yield Difference(what, with_fields(plan, sequence_parallel=True))
    if plan.reduce_dtype == "bf16" and not stack.reduces_in_half:
        what = "gradients are summed in fp32 there, and in bf16 under the plan"
        yield Difference(what, with_fields(plan, reduce_dtype=None))
    if plan.job.compiled and not stack.compiles:
        what = "operators are compiled under the plan, which its settings do not say"
        yield Difference(what, with_job(plan, compiled=False))
    if plan.job.documents_apart:
        yield Difference("documents of a sample see each other there", with_job(plan, documents_apart=False))
    if plan.job.sequence_lengths:
        yield Difference(f"batches have one length there, {plan.job.sequence_length} tokens")
    if not plan.job.is_plain_adamw:
        what = f"the optimizer is {plan.job.optimizer} under the plan, and there AdamW"
        yield Difference(
            what, with_job(plan, optimizer=ADAMW_NAME, optimizer_options={}, optimizer_state=None)
        )
    if plan.devices and plan.devices != tuple(range(plan.num_ranks)):
        what = "ranks are on devices of the plan's choice, and there in the order of the nodes"
        yield Difference(what, with_fields(plan, devices=()))


def _worth(plan: Plan) -> tuple[bool, float]:
    """Least is best: what fits, the faster; else what lacks least."""
    spare = _spare_bytes(plan)
    return (True, -spare) if spare < 0 else (False, plan.predictions.step_seconds)


def _spare_bytes(plan: Plan) -> int:
    limits = usable_bytes(plan, plan.cluster.load())
    return min(limits[one.rank] - one.reserved_peak_bytes for one in plan.predictions.ranks)


_DOES = {
    "none": "keep everything", "full": "recompute every layer", "selective": "recompute selectively",
    "model": "recompute as the model says",
}  # fmt: skip


def _cost(plan: Plan, own: Plan, there: Plan, differs: bool) -> str:
    """Predicted step and memory of what runs, beside those of the plan."""
    parts = []
    if differs:
        asked, taken = plan.predictions, own.predictions
        parts.append(
            f"with these a step takes {format_seconds(taken.step_seconds)} in place of {format_seconds(asked.step_seconds)} "
            f"({taken.step_seconds / asked.step_seconds - 1:+.1%}), and {format_bytes(taken.reserved_peak_bytes)} of memory "
            f"in place of {format_bytes(asked.reserved_peak_bytes)}"
        )
    if there.job.runtime != plan.job.runtime:
        parts.append(
            f"as {there.job.runtime} runs it, {format_seconds(there.predictions.step_seconds)} a step and "
            f"{format_bytes(there.predictions.reserved_peak_bytes)} are predicted"
        )
    if (spare := _spare_bytes(there)) < 0:
        parts.append(f"which is {format_bytes(-spare)} more than there is")
    return "; ".join(parts)
