"""Estimates: the predictions of one configuration, whether or not it fits the memory limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from stagewright.cluster import Cluster
from stagewright.errors import InputError, PlanError
from stagewright.estimation.breakdown import Share, breakdown
from stagewright.estimation.eager_step import step_memory
from stagewright.estimation.runtime import STAGEWRIGHT, Loop
from stagewright.graph import OperatorGraph
from stagewright.graph.expert_parallel import expert_parallel_fault
from stagewright.graph.layers import layer_begins
from stagewright.graph.policy import attention_scores
from stagewright.planning.candidate import Choice, make_candidate, make_plan, under_order
from stagewright.planning.job import Job
from stagewright.planning.lengths import with_lengths
from stagewright.planning.loss_pieces import in_pieces, logits_bytes, pieces_by_share
from stagewright.planning.memory.fitting import recompute_of
from stagewright.planning.plan import ClusterSection, Plan, shared_layers
from stagewright.planning.planned_line import planned_line
from stagewright.planning.prediction.pipeline import Pipeline, body_costs
from stagewright.planning.prediction.predict import predict
from stagewright.planning.prediction.sharding import check_shard_size
from stagewright.planning.prediction.units import check_shard_units
from stagewright.planning.predictions import Predictions
from stagewright.planning.space import LossPieces, Recomputed
from stagewright.schedule import Program
from stagewright.tracing.cache import trace as cached_trace
from stagewright.tracing.models.reference import ModelReference, resolve

Trace = Callable[..., OperatorGraph]
Report = Callable[[str], None]


def estimate(
    subject: Plan | str | ModelReference,
    cluster: Cluster,
    job: Job | None = None,
    *,
    dp: int | None = None,
    pp: int | None = None,
    tp: int = 1,
    cp: int = 1,
    ep: int = 1,
    sequence_parallel: bool = False,
    microbatch: int = 1,
    schedule: str = "1f1b",
    chunks: int | None = None,
    layers_per_stage: Sequence[int] | None = None,
    recompute: Recomputed | None = None,
    zero: int | None = None,
    reduce_dtype: Literal["fp32", "bf16"] | None = None,
    shard_size: int | None = None,
    shard_units: int | None = None,
    loss_pieces: LossPieces = 1,
    program: Program | None = None,
    report: Report = lambda stage: None,
    trace: Trace = cached_trace,
) -> Plan:
    """What a plan, or a model in one configuration, takes on `cluster`: a plan with fresh predictions.

    A plan keeps its own job, widths and cuts. A model needs `job`; of `dp` and `pp` the one left out follows from the
    number of devices (by default one replica), and the partition is the one a search would take; `tp` ranks share every
    layer, and with `sequence_parallel` split the sequence between layers; `cp` ranks divide every sample's tokens; `ep` of
    the ranks of one stage share every layer's experts out. `recompute` is what stages recompute of what they save:
    ``none``, ``selective`` (attention's scores, or what the runtime says) or ``full`` of it, or what the ``model``'s own
    code checkpoints, as by default where it does; `chunks` stages per rank are for schedules that place several, and
    `layers_per_stage` says how many numbered layers each has; `zero` is what replicas share out (0 to 3), at most
    `shard_size` of them among each other, with sums of gradients in `reduce_dtype`, and each stage gathered and reduced in
    `shard_units` pieces (by default what is fastest). `program` is the order of forwards and backwards, for stages of
    `layers_per_stage`, where `schedule` names none that is built. Head and loss are evaluated in `loss_pieces` slices of
    tokens, with ``auto`` in several where logits are large.

    The model is built, which runs the code of a factory; what a plan promises is in its `predictions`, without that.

    Raises:
        InputError: widths that do not fit the cluster or the batch, a model without a job, or a runtime that does not
            run such a configuration.
        PlanError: a plan made for another model, or more stages than legal cuts.
        TraceError: the model cannot be traced.
    """
    if isinstance(subject, Plan):
        subject.job.check_devices(cluster)
        again = any(policy in ("layers", "recompute", "selective") for policy in subject.memory_policy)
        _check_loop(subject.job, subject, again)
        return _of_loop(_of_plan(subject, cluster, report, trace), cluster, report, trace)
    if job is None:
        raise InputError("an estimate of a model needs a job: give global_batch and sequence_length")
    job.check_runtime()
    job.check_devices(cluster)
    if job.runtime != STAGEWRIGHT and loss_pieces == "auto":
        loss_pieces = 1
    if job.runtime != STAGEWRIGHT and loss_pieces != 1:
        raise InputError(
            f"runtime '{job.runtime}' evaluates the loss at once: leave out --loss-pieces, or --runtime"
        )
    check_shard_size(zero, shard_size)
    check_shard_units(zero, shard_units)
    reference = subject if isinstance(subject, ModelReference) else resolve(subject)
    job = job.with_state(reference)
    job.check_whole(tp, zero or 0)
    choice = replace(
        _choice(cluster, job, dp, pp, tp, cp, microbatch, schedule),
        sequence_parallel=sequence_parallel and tp > 1,
        ep=ep,
        zero=zero,
        reduce_dtype=reduce_dtype,
        most_sharing=shard_size,
        shard_units=shard_units,
        num_chunks=chunks,
        layers_per_stage=None if layers_per_stage is None else tuple(layers_per_stage),
    )
    _check_loop(job, choice, recompute in ("selective", "full"))
    if fault := expert_parallel_fault(ep, choice.num_holders, tp, choice.sequence_parallel):
        raise InputError(f"{fault}: choose another --ep")
    choice = replace(choice, loss_pieces=_pieces(reference, job, choice, cluster, loss_pieces))
    layers = shared_layers(tp, sequence_parallel, cp, ep) | in_pieces(choice.loss_pieces)
    traced = job.traced(cluster.nodes[0].device.kind) | layers | {"expand": False}
    body = body_costs(_trace(reference, choice.microbatch_size, traced, report, trace), cluster, job)
    choice = replace(choice, recompute=_recomputed(recompute, body.graph, job))
    if program is None:
        candidate = make_candidate(body, choice, cluster, job)
    else:
        candidate = under_order(body, choice, program, cluster, job)
    plan = make_plan(candidate, body, reference)
    return _of_loop(_over_lengths(plan, cluster, report, trace), cluster, report, trace)


def estimate_breakdown(
    plan: Plan,
    cluster: Cluster,
    by: str,
    report: Report = lambda stage: None,
    trace: Trace = cached_trace,
) -> tuple[Share, ...]:
    """Where the time of one microbatch of `plan` goes on `cluster`: by ``operator``, ``layer`` or ``category``.

    Raises:
        InputError: another breakdown.
        PlanError: the model has changed since.
    """
    return breakdown(body_costs(graph_of(plan, report, trace), cluster, plan.job).costing, by)


def graph_of(plan: Plan, report: Report = lambda stage: None, trace: Trace = cached_trace) -> OperatorGraph:
    """The graph of the model that `plan` was made for.

    Raises:
        InputError: the model cannot be resolved.
        PlanError: the model has changed since.
        TraceError: the model cannot be traced.
    """
    reference = plan.model.reference()
    if change := plan.model.change(reference):
        raise PlanError(
            f"model '{plan.model.text}' has changed since the plan was made ({change}): plan again"
        )
    return _trace(reference, plan.microbatch_size, plan.traced(), report, trace)


def line_of(
    plan: Plan, cluster: Cluster, report: Report = lambda stage: None, trace: Trace = cached_trace
) -> Pipeline:
    """The split model of `plan` with its program on `cluster`, ready to be simulated and checked.

    Raises:
        PlanError: the model has changed, or does not have the plan's cuts.
        ScheduleError: the program does not run.
    """
    return planned_line(plan, body_costs(graph_of(plan, report, trace), cluster, plan.job), cluster)


def _of_plan(plan: Plan, cluster: Cluster, report: Report, trace: Trace) -> Plan:
    if cluster.num_devices < plan.num_ranks:
        shared = f" x tp {plan.tp}" if plan.tp > 1 else ""
        divided = f" x cp {plan.cp}" if plan.cp > 1 else ""
        raise InputError(
            f"the plan needs {plan.num_ranks} devices (dp {plan.dp}{shared}{divided} x pp {plan.pp}), but cluster "
            f"'{cluster.name}' has {cluster.num_devices}: name a larger cluster or plan again"
        )
    body = body_costs(graph_of(plan, report, trace), cluster, plan.job)
    predictions = predict(planned_line(plan, body, cluster), body)
    fresh = plan.model_copy(update={"predictions": predictions, "cluster": ClusterSection.of(cluster)})
    return _over_lengths(fresh, cluster, report, trace)


def _over_lengths(plan: Plan, cluster: Cluster, report: Report, trace: Trace) -> Plan:
    return with_lengths(plan, cluster, lambda one: graph_of(one, report, trace))


def _check_loop(job: Job, asked: Choice | Plan, is_recomputed: bool) -> None:
    """Raises `InputError` for what a runtime that is a plain loop does not run: `is_recomputed` but by the model, too."""
    if job.profile.loop is None:
        return
    if (asked.pp, asked.num_holders, asked.tp, asked.num_microbatches) != (1, 1, 1, 1):
        raise InputError(
            f"runtime '{job.runtime}' runs whole batches on one device, not {asked.num_microbatches} microbatches on pp "
            f"{asked.pp} x dp {asked.dp} x tp {asked.tp} x cp {asked.cp}: give --pp 1, --dp 1 and a --microbatch of the "
            "global batch, or another --runtime"
        )
    if is_recomputed:
        raise InputError(
            f"runtime '{job.runtime}' recomputes what the model's own code checkpoints, and nothing else: give --recompute "
            "none or model, or another --runtime"
        )


def _of_loop(plan: Plan, cluster: Cluster, report: Report, trace: Trace) -> Plan:
    """`plan`, with the memory of its runtime's loop, if that is one."""
    loop = plan.job.profile.loop
    if loop is None:
        return plan
    shorter = tuple(
        one.model_copy(
            update={
                "predictions": _of_calls(loop, plan.at_length(one.sequence_length), cluster, report, trace)
            }
        )
        for one in plan.shorter_lengths
    )
    longest = _of_calls(loop, plan, cluster, report, trace)
    return plan.model_copy(update={"predictions": longest, "shorter_lengths": shorter})


def _of_calls(loop: Loop, plan: Plan, cluster: Cluster, report: Report, trace: Trace) -> Predictions:
    """The predictions of `plan`, for its one device, with the memory that single calls take."""
    device = cluster.device
    workspace = 0 if device.kind == "cpu" else device.workspace_bytes
    memory = step_memory(graph_of(plan, report, trace), loop, workspace)
    rank = plan.predictions.ranks[0]
    parameters = rank.categories["parameters"]
    changed = rank.model_copy(
        update={
            "allocated_peak_bytes": memory.active_peak_bytes,
            "reserved_peak_bytes": memory.reserved_peak_bytes,
            "categories": {"parameters": parameters, "rest": memory.active_peak_bytes - parameters},
            "peak_at": memory.at,
            "saved": (),
        }
    )
    return plan.predictions.model_copy(update={"ranks": (changed,)})


def _trace(
    reference: ModelReference, size: int, traced: dict[str, Any], report: Report, trace: Trace
) -> OperatorGraph:
    return trace(reference, size, report=report, **traced)


def _recomputed(asked: Recomputed | None, graph: OperatorGraph, job: Job) -> Recomputed:
    """What stages recompute; raises `InputError` for a model that has nothing of it."""
    if asked == "selective":
        if job.runtime == STAGEWRIGHT:
            raise InputError(
                "recompute 'selective' is what runtimes do that store attention's scores; Stagewright's own recomputes what "
                "`plan` chooses, or give none or full"
            )
        if job.profile.selective is None and not attention_scores(graph):
            raise InputError(
                "recompute 'selective' makes attention's scores again, which this runtime never stores: give none or full"
            )
        if job.profile.selective is not None and not layer_begins(graph):
            raise InputError(
                "recompute 'selective' is of numbered layers, and this model has none: give none or full"
            )
        return "selective"
    meant = recompute_of(asked, graph)
    return "none" if meant == "auto" else meant


def _pieces(reference: ModelReference, job: Job, choice: Choice, cluster: Cluster, asked: LossPieces) -> int:
    if asked != "auto":
        return asked
    num_tokens = choice.microbatch_size * job.sequence_length // choice.cp
    logits = logits_bytes(reference, num_tokens, choice.tp)
    return pieces_by_share(logits, num_tokens, job.usable_bytes(cluster.nodes[0].device, cluster))


def _choice(
    cluster: Cluster,
    job: Job,
    dp: int | None,
    pp: int | None,
    tp: int,
    cp: int,
    microbatch: int,
    schedule: str,
) -> Choice:
    count = cluster.num_devices // max(tp, 1) // max(cp, 1)
    if dp is None:
        dp = 1 if pp is None else max(count // max(pp, 1), 1)
    if pp is None:
        pp = max(count // max(dp, 1), 1)
    if tp < 1 or cp < 1 or dp < 1 or pp < 1 or dp * pp > count:
        shared = (f" x tp {tp}" if tp != 1 else "") + (f" x cp {cp}" if cp != 1 else "")
        raise InputError(
            f"dp {dp}{shared} x pp {pp} does not fit the {cluster.num_devices} devices of cluster '{cluster.name}': "
            "choose widths whose product is at most that"
        )
    if microbatch < 1 or job.global_batch % (dp * microbatch):
        raise InputError(
            f"dp {dp} replicas with microbatches of {microbatch} do not divide the global batch of "
            f"{job.global_batch}: change one of the three"
        )
    return Choice(dp, pp, microbatch, job.global_batch // dp // microbatch, schedule, tp=tp, cp=cp)
