"""Estimates: the predictions of one configuration, whether or not it fits the memory limit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from stagewright.cluster import Cluster, given_cluster
from stagewright.documents import is_plan_file
from stagewright.errors import InputError, PlanError
from stagewright.estimation.breakdown import Share, breakdown
from stagewright.estimation.eager_step import step_memory
from stagewright.estimation.runtime import STAGEWRIGHT, Loop
from stagewright.graph import OperatorGraph
from stagewright.graph.expert_parallel import expert_parallel_fault
from stagewright.graph.layers import layer_begins
from stagewright.graph.policy import attention_scores
from stagewright.machine import without_collection
from stagewright.planning.candidate import make_candidate, make_plan
from stagewright.planning.configuration import Configuration, Recompute
from stagewright.planning.job import Job, given_job
from stagewright.planning.loss_pieces import logits_bytes, pieces_by_share
from stagewright.planning.plan import ClusterSection, Plan, cluster_of, load_plan
from stagewright.planning.plan_stages import staged_by_plan
from stagewright.planning.prediction.predict import predict
from stagewright.planning.prediction.sharding import check_shard_size, check_streamed, is_frozen
from stagewright.planning.prediction.staged_model import StagedModel, costs_of_model
from stagewright.planning.prediction.units import check_shard_units
from stagewright.planning.predictions import Predictions
from stagewright.planning.sequence_lengths import with_lengths
from stagewright.planning.space import recompute_of
from stagewright.text import silent
from stagewright.tracing.cache import trace as cached_trace
from stagewright.tracing.models.reference import ModelReference, resolve

Trace = Callable[..., OperatorGraph]
Report = Callable[[str], None]


@without_collection()
def estimate(
    subject: Plan | str | Path | ModelReference,
    cluster: Cluster | str | Path | None = None,
    job: Job | Mapping[str, Any] | str | Path | None = None,
    configuration: Configuration | None = None,
    *,
    report: Report | None = None,
    trace: Trace | None = None,
    **fields: Any,
) -> Plan:
    """Return a plan, or the one in a file, or a model in one configuration, with fresh predictions for `cluster`.

    It need not fit. A plan keeps its own job, degrees and cuts. A model needs `job`, and the partition is the one a search
    would take. The model is built, which runs the code of a factory; a plan's own `predictions` need no model.

    Args:
        cluster: a cluster, its name in the catalog or its file; default: the plan's.
        job: a job, a dict of its fields or its file.
        configuration: that of a model; by default one replica on a pipeline over all devices.
        fields: fields of `Configuration` by name, in place of `configuration`.
        report: called with a line of text about the progress.
        trace: makes operator graphs; default: `stagewright.tracing.cache.trace`, whose arguments it takes.

    Raises:
        InputError: degrees that do not fit the cluster or the batch, a model without a job, or a runtime that does not
            run such a configuration.
        PlanError: a plan made for another model, or more stages than legal cuts.
        TraceError: the model cannot be traced.
    """
    report, trace = report or silent, trace or cached_trace
    if isinstance(subject, str | Path) and is_plan_file(subject):
        subject = load_plan(subject)
    if isinstance(subject, Plan):
        cluster = cluster_of(subject, cluster)
        subject.job.check_devices(cluster)
        again = any(policy in ("layers", "recompute", "selective") for policy in subject.memory_policy)
        _check_loop(subject.job, subject, again)
        return _of_loop(_of_plan(subject, cluster, report, trace), cluster, report, trace)
    if job is None or cluster is None:
        raise InputError(
            "an estimate of a model needs a cluster and a job: give both, the job with global_batch and sequence_length"
        )
    cluster, job = given_cluster(cluster), given_job(job)
    job.check_runtime()
    job.check_devices(cluster)
    request = Configuration.of(configuration, **fields)
    if job.runtime != STAGEWRIGHT and request.loss_pieces > 1:
        raise InputError(
            f"runtime '{job.runtime}' evaluates the loss at once: leave out --loss-pieces, or --runtime"
        )
    check_shard_size(request.zero, request.shard_size)
    check_shard_units(request.zero, request.shard_units)
    reference = subject if isinstance(subject, ModelReference) else resolve(subject)
    job = job.with_state(reference)
    job.check_whole(request.tp, request.zero or 0)
    configuration = request.completed(cluster, job)
    if configuration.streamed:
        check_streamed(configuration.num_holders, configuration.zero, job)
    _check_loop(job, configuration, request.recompute in ("selective", "full"))
    if fault := expert_parallel_fault(
        configuration.ep,
        configuration.num_holders,
        configuration.tp,
        job.divides_tokens(configuration.sequence_parallel),
    ):
        raise InputError(f"{fault}: choose another --ep")
    configuration = replace(configuration, loss_pieces=_pieces(reference, job, configuration, cluster))
    traced = job.traced(cluster.nodes[0].device.kind) | configuration.trace_arguments | {"expand": False}
    graph = trace(reference, configuration.microbatch, report=report, **traced)
    model_costs = costs_of_model(graph, cluster, job)
    configuration = replace(
        configuration,
        recompute=_recomputed(request.recompute, model_costs.graph, job),
        host_optimizer=configuration.streamed and not is_frozen(graph),
    )
    plan = make_plan(make_candidate(model_costs, configuration, cluster, job), model_costs, reference)
    return _of_loop(_over_lengths(plan, cluster, report, trace), cluster, report, trace)


def estimate_breakdown(
    plan: Plan, cluster: Cluster, by: str, report: Report = lambda stage: None
) -> tuple[Share, ...]:
    """Return the time of one microbatch of `plan` on `cluster`, by ``operator``, ``layer`` or ``category``.

    Raises:
        InputError: an unknown breakdown.
        PlanError: the model has changed since.
    """
    return breakdown(costs_of_model(graph_of(plan, report), cluster, plan.job).costing, by)


def graph_of(plan: Plan, report: Report = lambda stage: None, trace: Trace = cached_trace) -> OperatorGraph:
    """Return the graph of the model that `plan` was made for.

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
    return trace(reference, plan.microbatch_size, report=report, **plan.traced())


def staged_model_of(plan: Plan, cluster: Cluster, report: Report = lambda stage: None) -> StagedModel:
    """Return the split model of `plan` with its program on `cluster`, ready to be simulated and checked.

    Raises:
        PlanError: the model has changed, or does not have the plan's cuts.
        ScheduleError: the program does not run.
    """
    return staged_by_plan(plan, costs_of_model(graph_of(plan, report), cluster, plan.job), cluster)


def _of_plan(plan: Plan, cluster: Cluster, report: Report, trace: Trace) -> Plan:
    if cluster.num_devices < plan.num_ranks:
        shared = f" x tp {plan.tp}" if plan.tp > 1 else ""
        divided = f" x cp {plan.cp}" if plan.cp > 1 else ""
        raise InputError(
            f"the plan needs {plan.num_ranks} devices (dp {plan.dp}{shared}{divided} x pp {plan.pp}), but cluster "
            f"'{cluster.name}' has {cluster.num_devices}: name a larger cluster or plan again"
        )
    model_costs = costs_of_model(graph_of(plan, report, trace), cluster, plan.job)
    predictions = predict(staged_by_plan(plan, model_costs, cluster), model_costs)
    fresh = plan.model_copy(update={"predictions": predictions, "cluster": ClusterSection.of(cluster)})
    return _over_lengths(fresh, cluster, report, trace)


def _over_lengths(plan: Plan, cluster: Cluster, report: Report, trace: Trace) -> Plan:
    return with_lengths(plan, cluster, lambda other: graph_of(other, report, trace))


def _check_loop(job: Job, request: Configuration | Plan, is_recomputed: bool) -> None:
    """Raise `InputError` for what a runtime that is a plain loop does not run; `is_recomputed` means recomputation that the
    model's own code does not do."""
    if job.profile.loop is None:
        return
    if (request.pp, request.num_holders, request.tp, request.num_microbatches) != (1, 1, 1, 1):
        raise InputError(
            f"runtime '{job.runtime}' runs whole batches on one device, not {request.num_microbatches} microbatches on pp "
            f"{request.pp} x dp {request.dp} x tp {request.tp} x cp {request.cp}: give --pp 1, --dp 1 and a --microbatch "
            "of the global batch, or another --runtime"
        )
    if is_recomputed:
        raise InputError(
            f"runtime '{job.runtime}' recomputes what the model's own code checkpoints, and nothing else: give --recompute "
            "none or model, or another --runtime"
        )


def _of_loop(plan: Plan, cluster: Cluster, report: Report, trace: Trace) -> Plan:
    """Return `plan` with the memory of its runtime's training loop, if the runtime is one."""
    loop = plan.job.profile.loop
    if loop is None:
        return plan
    shorter = tuple(
        length.model_copy(
            update={
                "predictions": _of_calls(loop, plan.at_length(length.sequence_length), cluster, report, trace)
            }
        )
        for length in plan.shorter_lengths
    )
    longest = _of_calls(loop, plan, cluster, report, trace)
    return plan.model_copy(update={"predictions": longest, "shorter_lengths": shorter})


def _of_calls(loop: Loop, plan: Plan, cluster: Cluster, report: Report, trace: Trace) -> Predictions:
    """Return the predictions of `plan` for its one device, with the memory of calls outside a pipeline."""
    memory = step_memory(graph_of(plan, report, trace), loop, cluster.device.allocated_workspace_bytes)
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


def _recomputed(recompute: Recompute | None, graph: OperatorGraph, job: Job) -> Recompute:
    """Return what stages recompute; raises `InputError` for a model or runtime without it."""
    if recompute == "selective":
        if job.runtime == STAGEWRIGHT:
            raise InputError(
                "recompute 'selective' is only for other runtimes, which store attention scores: give none or full, or let "
                "`stagewright plan` choose what to recompute"
            )
        if job.profile.selective is None and not attention_scores(graph):
            raise InputError(
                "recompute 'selective' recomputes attention scores, which this runtime never stores: give none or full"
            )
        if job.profile.selective is not None and not layer_begins(graph):
            raise InputError(
                "recompute 'selective' needs numbered layers, and this model has none: give none or full"
            )
        return "selective"
    resolved = recompute_of(recompute, graph)
    return "none" if resolved == "auto" else resolved


def _pieces(reference: ModelReference, job: Job, configuration: Configuration, cluster: Cluster) -> int:
    if configuration.loss_pieces:
        return configuration.loss_pieces
    if job.runtime != STAGEWRIGHT:
        return 1
    num_tokens = configuration.microbatch * job.sequence_length // configuration.cp
    logits = logits_bytes(reference, num_tokens, configuration.tp)
    return pieces_by_share(logits, num_tokens, job.usable_bytes(cluster.nodes[0].device, cluster))
