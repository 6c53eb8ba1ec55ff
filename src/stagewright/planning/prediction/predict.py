"""Predictions of one optimizer step of a pipeline: seconds from the simulator, bytes from the replay."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from stagewright.cluster import Cluster, Device, Host, all_reduce_seconds
from stagewright.errors import InputError
from stagewright.estimation import eager_step
from stagewright.estimation.memory import RankMemory, replay_rank, stage_edges
from stagewright.estimation.reserved import reserved_on
from stagewright.estimation.runtime import runtime_of
from stagewright.estimation.stages import RangeCosts, StageSummary
from stagewright.estimation.time import host_optimizer_seconds, optimizer_seconds
from stagewright.graph.flat_buffers import OPTIMIZER, PARAMETERS, of_stages
from stagewright.graph.layers import layer_of
from stagewright.graph.stage import Stage
from stagewright.graph.tensor import ITEM_BYTES
from stagewright.planning.job import Job
from stagewright.planning.prediction.sharding import gathered_flats
from stagewright.planning.prediction.shortening import shortened
from stagewright.planning.prediction.staged_model import (
    StagedModel,
    allocated_bytes,
    costs_by_rank,
    reserved_bytes,
)
from stagewright.planning.prediction.step_times import simulated, simulated_seconds, whole_step_seconds
from stagewright.planning.prediction.transfers import (
    Floats,
    posting_seconds,
    taken_share,
    transfer_seconds,
    transfers_slow,
)
from stagewright.planning.predictions import (
    WORKSPACE,
    Predictions,
    RankPrediction,
    SavedPrediction,
    StagePrediction,
    StepCosts,
    TransferCosts,
)
from stagewright.schedule import Kind, Program, insert_communication
from stagewright.schedule.lanes import check_lanes
from stagewright.schedule.tokens import Edge
from stagewright.simulation import Timeline

_REPLAYED_RANKS = 2


def predict(
    staged: StagedModel, model_costs: RangeCosts, memories: Sequence[RankMemory] | None = None
) -> Predictions:
    """Return all predictions for `staged`; `memories` are those of its ranks if they were replayed already.

    Raises:
        ScheduleError: its program would hang on GPUs.
    """
    if staged.uses_lanes:
        _check_hangs(shortened(staged.program), stage_edges(staged.stages), staged.receives_ahead)
    costs = step_costs(staged)
    timeline = simulated(staged.program, costs)
    step = whole_step_seconds(timeline, costs)
    memories = rank_memories(staged) if memories is None else memories
    reserved = reserved_peaks(staged, memories)
    num_microbatches = staged.program.num_microbatches * staged.num_holders
    tokens = model_costs.graph.facts.get("num_tokens", 0) * num_microbatches
    peak_flops = sum(staged.job.peak_of(staged.device_of(rank)) for rank in range(staged.pp))
    return Predictions(
        step_seconds=step,
        lower_bound_seconds=_lower_bound(staged, model_costs),
        tokens_per_second=tokens / step,
        mfu=model_costs.costing.model_flop * num_microbatches / (step * staged.num_holders * peak_flops),
        bubble_fraction=timeline.bubble_fraction,
        measured_share=model_costs.costing.measured_share,
        ranks=tuple(
            RankPrediction(
                rank=memory.rank,
                busy_seconds=float(timeline.busy_s[memory.rank]),
                allocated_peak_bytes=allocated_bytes(memory, staged.device_of(memory.rank)),
                reserved_peak_bytes=reserved[memory.rank],
                categories=_categories(memory, staged.device_of(memory.rank).allocated_workspace_bytes),
                host_bytes=staged.resident(memory.rank).host_bytes,
                offloaded_bytes=staged.offloaded_bytes(memory.rank),
                communicator_bytes=staged.communicator_bytes[memory.rank],
                peak_at=memory.at,
                peak_operator=memory.operator,
                saved=_saved(memory),
            )
            for memory in memories
        ),
        stages=tuple(_stage_prediction(summary) for summary in staged.summaries),
        costs=costs,
    )


def _categories(memory: RankMemory, workspace: int) -> dict[str, int]:
    return {**memory.categories, **({WORKSPACE: workspace} if workspace else {})}


@lru_cache(maxsize=64)
def _check_hangs(program: Program, edges: tuple[Edge, ...], ahead: int) -> None:
    """Raise where hosts or devices would wait for each other; cached, because plans of a search share their programs."""
    check_lanes(lowered(program, edges, ahead), edges, waits_for_device=True)


def _saved(memory: RankMemory) -> tuple[SavedPrediction, ...]:
    stages: dict[int, list[int]] = {}
    for alive in memory.alive:
        stages.setdefault(alive.stage, []).append(alive.num_bytes)
    return tuple(
        SavedPrediction(stage=stage, num_microbatches=len(sizes), num_bytes=sum(sizes))
        for stage, sizes in sorted(stages.items())
    )


def _stage_prediction(summary: StageSummary) -> StagePrediction:
    return StagePrediction(
        start=summary.start,
        stop=summary.stop,
        forward_seconds=summary.forward_s,
        input_grad_seconds=summary.input_grad_s,
        weight_grad_seconds=summary.weight_grad_s,
        parameter_bytes=summary.parameter_bytes,
        saved_bytes=summary.saved_bytes,
        boundary_bytes=sum(summary.sent_bytes.values()),
        recomputed_bytes=summary.recomputed_bytes,
        offloaded_bytes=summary.offloaded_bytes,
        recompute_seconds=summary.rebuild_s + summary.recompute_s,
        waiting_seconds=summary.waits_s,
        behind_seconds=summary.behind_s,
    )


# -- time ---------------------------------------------------------------------------------------------------


def run_timeline(staged: StagedModel, *, steps: bool = True) -> Timeline:
    """Return the timeline of one batch; without `steps`, optimizer steps within the batch take no time."""
    return simulated(staged.program, action_costs(staged, steps=steps))


def step_seconds(staged: StagedModel) -> float:
    """Return the seconds of a whole optimizer step."""
    return simulated_seconds(staged.program, step_costs(staged))


def step_costs(staged: StagedModel) -> StepCosts:
    """Return the costs from which the times of a step of `staged` follow.

    After the batch come the gradient reductions over replicas that no action has done, the reductions of tied parameters'
    gradients over the ranks that hold them, the gradient norm over all ranks, AdamW, and the all-gather of updated
    parameters. Programs with STEP actions end with the batch.
    """
    costs = action_costs(staged)
    if steps_early(staged.program):
        return costs
    reduced = {action.stage for action in staged.program if action.kind is Kind.REDUCE}
    updates = _update_seconds(staged, reduced)
    whole = [staged.first_rank(rank) + part for rank in range(staged.pp) for part in range(staged.tp)]
    after = {
        "sum_seconds": tuple(summing for summing, _ in updates),
        "norm_seconds": all_reduce_seconds(staged.cluster, 8, whole),
        "optimizer_seconds": tuple(updating for _, updating in updates),
        "checks_after": staged.job.profile.checks_after
        and any(action.kind is Kind.W for action in staged.program),
    }
    return costs.model_copy(update=after)


def action_costs(staged: StagedModel, *, steps: bool = True) -> StepCosts:
    """Return the costs of the actions and transfers of a batch; without `steps`, optimizer steps within it cost nothing."""
    stages, placed = range(len(staged.stages)), staged.program.placement.rank_of_stage
    edges = stage_edges(staged.stages)
    transfer_s = transfer_seconds(staged, edges)
    forward_posts, backward_posts = posting_seconds(staged, edges)
    pass_s = staged.job.profile.host.pass_s
    gather_s = [staged.collectives(stage).gather(gathered_flats(staged.flats, stage)) for stage in stages]
    reduce_s = [staged.reduce_seconds(stage) for stage in stages]
    slowed_s = _slowed_seconds(staged, gather_s, reduce_s) + transfers_slow(staged, transfer_s) / 2
    rebuild_s = np.array([summary.rebuild_s for summary in staged.summaries])
    early_s, late_s = rebuild_s, 0.0 * rebuild_s
    if not staged.job.profile.recomputes_ahead:
        early_s, late_s = late_s, early_s
    updates = _update_seconds(staged) if steps and steps_early(staged.program) else []
    added_to_backward_s = late_s + pass_s + slowed_s + backward_posts
    return StepCosts(
        forward_seconds=_column(
            pass_s + slowed_s + forward_posts + [summary.forward_s for summary in staged.summaries]
        ),
        input_grad_seconds=_column(
            added_to_backward_s + [summary.input_grad_s for summary in staged.summaries]
        ),
        weight_grad_seconds=tuple(summary.weight_grad_s for summary in staged.summaries),
        backward_seconds=_column(added_to_backward_s + [summary.backward_s for summary in staged.summaries]),
        recompute_seconds=_unless_zero(early_s.tolist()),
        gather_seconds=_unless_zero(gather_s),
        reduce_seconds=_unless_zero(
            _exposed_reduction(staged, stage, seconds) for stage, seconds in enumerate(reduce_s)
        ),
        update_seconds=_unless_zero(sum(updates[rank]) for rank in placed if updates),
        transfers=tuple(
            TransferCosts(
                source=low,
                target=high,
                value_bytes=staged.summaries[low].sent_bytes.get(high, 0),
                gradient_bytes=staged.summaries[high].returned_bytes.get(low, 0),
                value_seconds=transfer_s[low, high],
                gradient_seconds=transfer_s[high, low],
            )
            for low, high in edges
        ),
        receivers_wait=staged.uses_lanes,
    )


def _exposed_reduction(staged: StagedModel, stage: int, reduce_s: float) -> float:
    """Return the seconds of REDUCE of a stage that its last backward does not hide."""
    if not staged.job.profile.overlaps_reduction:
        return reduce_s
    return _exposed(reduce_s, staged.summaries[stage].backward_s, len(_layers_in(staged.stages[stage])) or 1)


def _slowed_seconds(staged: StagedModel, gather_s: Sequence[float], reduce_s: Sequence[float]) -> Floats:
    """Return by how many seconds collectives, which take multiprocessors, slow a forward or backward of each stage on
    average."""
    share = np.array([taken_share(staged, rank) for rank in staged.program.placement.rank_of_stage])
    taken = np.zeros(len(staged.stages))
    if share.any() and not staged.is_streamed:  # a copy takes none
        for kind, seconds in ((Kind.GATHER, gather_s), (Kind.REDUCE, reduce_s)):
            counts = Counter(action.stage for action in staged.program if action.kind is kind)
            taken += [counts[stage] * collective_s for stage, collective_s in enumerate(seconds)]
    return share * taken / (2 * staged.program.num_microbatches)


def _column(seconds: Floats) -> tuple[float, ...]:
    return tuple(seconds.tolist())


def _unless_zero(seconds: Iterable[float]) -> tuple[float, ...]:
    """Return the column as plans state it: empty if all entries are zero."""
    column = tuple(seconds)
    return column if any(column) else ()


def steps_early(program: Program) -> bool:
    """Return whether STEP actions update parameters within a batch; each rank then has one stage."""
    return any(action.kind is Kind.STEP for action in program.actions(0))


def _update_seconds(staged: StagedModel, reduced: Collection[int] = ()) -> list[tuple[float, float]]:
    """Return, per rank, the seconds of gradient reductions and of the update of the parameters.

    The first are over replicas, except for stages in `reduced`, and over ranks that hold a tied parameter; the second are
    AdamW and the all-gather of parameters that other replicas updated.
    """
    updates = []
    for rank in range(staged.pp):
        stages = staged.stages_of(rank)
        trained_flats = [
            flat for flat in of_stages(staged.flats, (stage.index for stage in stages)) if flat.is_trained
        ]
        collectives = staged.collectives(stages[0].index)
        reduce_s = collectives.reduce(
            flat for flat in trained_flats if not set(reduced).intersection(flat.stages)
        )
        gradients = gradient_bytes(stages)
        for flat in trained_flats:
            if flat.level >= OPTIMIZER:
                gradients |= {
                    value: gradients[value] / flat.num_shards for value in flat.values if value in gradients
                }
        gather_s = collectives.gather(flat for flat in trained_flats if OPTIMIZER <= flat.level < PARAMETERS)
        if staged.job.profile.overlaps_reduction:
            summaries = [staged.summaries[stage.index] for stage in stages]
            num_layers = len({layer for stage in stages for layer in _layers_in(stage)}) or 1
            reduce_s = _exposed(reduce_s, sum(summary.backward_s for summary in summaries), num_layers)
            gather_s = _exposed(gather_s, sum(summary.forward_s for summary in summaries), num_layers)
        updating = _rank_optimizer_seconds(staged, rank, sum(gradients.values()), len(gradients)) + gather_s
        updating += _matmul_seconds(staged, rank)
        updates.append((reduce_s + _tied_seconds(staged, gradients), updating))
    return updates


def _layers_in(stage: Stage) -> set[str]:
    """Return the paths of the numbered layers of which a stage holds a part."""
    graph = stage.graph
    names = (layer_of(graph.nodes[node].module) for node in graph.forward_ids[stage.start : stage.stop])
    return {name for name in names if name}


def _exposed(collective_s: float, computing_s: float, num_layers: int) -> float:
    """Return the exposed seconds of collectives that overlap layer by layer with the last backward or the first forward.

    At least one layer's part is exposed, and everything beyond the computations of the other layers.

    Ignores: mutual slowdown of both; bubbles, which hide more.
    """
    other_share = 1 - 1 / num_layers
    return max(collective_s / num_layers, collective_s - computing_s * other_share)


def gradient_bytes(stages: Sequence[Stage]) -> dict[int, float]:
    """Return parameter -> bytes of its whole gradient, for a rank that holds `stages`."""
    num_bytes: dict[int, float] = {}
    runtime = runtime_of(stages[0].graph)
    for stage in stages:
        for value, _ in stage.gradients:
            meta = stage.value(value).meta
            num_bytes[value] = meta.num_elements * ITEM_BYTES[runtime.precision(meta.dtype).gradient]
    return num_bytes


def _tied_seconds(staged: StagedModel, gradients: dict[int, float]) -> float:
    """Return the seconds to all-reduce those `gradients` of a rank whose parameters other pipeline ranks hold too."""
    return sum(
        all_reduce_seconds(
            staged.cluster, num_bytes, [staged.first_rank(rank) for rank in staged.holders[value]]
        )
        for value, num_bytes in gradients.items()
        if len(staged.holders[value]) > 1
    )


def _rank_optimizer_seconds(
    staged: StagedModel, rank: int, gradient_bytes: float, num_gradients: int
) -> float:
    """Return the seconds of AdamW of one rank, on the device or host that holds its state."""
    device, job = staged.device_of(rank), staged.job
    if rank not in staged.host_optimizer:
        return optimizer_step_seconds(job, gradient_bytes, device, num_gradients) + job.profile.host.step_s
    host = host_of(staged.cluster, staged.first_rank(rank))
    copied_from = None if staged.is_streamed else device
    return host_step_seconds(job, gradient_bytes, copied_from, host) + job.profile.host.step_s


def _matmul_seconds(staged: StagedModel, rank: int) -> float:
    """Return the seconds of the matmuls in the optimizer of a rank, in bf16 where its device supports that.

    Source: Newton-Schulz iterations as `torch.optim.Muon` runs them. Ignores: ramping up; that a host is slower.
    """
    kept, device = staged.job.kept, staged.device_of(rank)
    if not any(kept.products):
        return 0.0
    trained = {
        value: stage.value(value).meta for stage in staged.stages_of(rank) for value, _ in stage.gradients
    }
    flop = sum(kept.product_flop(meta.shape) for meta in trained.values())
    dtype = "bf16" if device.peak_flops.get("bf16") else staged.job.computed_in
    return (device.pace or 1.0) * flop / device.matmul_flops(dtype)


def host_step_seconds(job: Job, gradient_bytes: float, device: Device | None, host: Host) -> float:
    """Return the seconds of AdamW of one rank on its host; without a `device` gradients and parameters are there already."""
    sizes = ITEM_BYTES[job.precision.gradient], ITEM_BYTES[job.torch_name]
    clips = job.clip_norm is not None
    return host_optimizer_seconds(
        gradient_bytes / sizes[0], device, host, *sizes, clips=clips, optimizer=job.kept
    )


def host_of(cluster: Cluster, rank: int) -> Host:
    """Return the host of the node of `rank`; raises `InputError` where the cluster describes none."""
    host = cluster.group_of(rank).host
    if host is None:
        raise InputError(
            f"cluster '{cluster.name}' does not describe the host processors of its nodes, so optimizer state cannot be "
            "kept there: add a [nodes.host] table, or plan without a host optimizer"
        )
    return host


def optimizer_step_seconds(job: Job, gradient_bytes: float, device: Device, num_gradients: int = 0) -> float:
    """Return the seconds of a rank's optimizer on its device, for `num_gradients` gradients of `gradient_bytes` in all."""
    num_parameters = gradient_bytes / ITEM_BYTES[job.precision.gradient]
    if job.profile.loop is not None:
        return eager_step.optimizer_seconds(
            job.profile.loop, num_parameters * ITEM_BYTES[job.torch_name], device
        )
    if (step_bytes := job.profile.optimizer.step_bytes) is not None:
        return device.memory_seconds(step_bytes * num_parameters)
    has_master = ITEM_BYTES[job.torch_name] < ITEM_BYTES["float32"]
    clips = job.clip_norm is not None
    return optimizer_seconds(num_parameters, device, has_master, clips, num_gradients, job.kept)


def _lower_bound(staged: StagedModel, model_costs: RangeCosts) -> float:
    """Return `lower_bound_seconds`; on devices of several kinds, the time with every rank always busy at its own speed."""
    num_microbatches = staged.program.num_microbatches
    if staged.cluster.is_homogeneous:
        shards = staged.num_shards if any(staged.sharding) else 1
        return lower_bound_seconds(model_costs, num_microbatches, staged.pp, staged.job, shards)
    stage_costs = costs_by_rank(model_costs, staged.cluster, staged.pp, staged.ranks_per_stage)
    return num_microbatches / sum(1 / float(costs.seconds[-1]) for costs in stage_costs)


def lower_bound_seconds(
    model_costs: RangeCosts, num_microbatches: int, pp: int, job: Job, num_shards: int = 1
) -> float:
    """Return a lower bound on step seconds over all partitions and schedules on `pp` ranks.

    It is the larger of the work of the batch divided evenly and one microbatch through the whole model, whose weight
    gradients overlap; plus the optimizer step, divided evenly over ranks and `num_shards` replicas.
    """
    total = float(model_costs.seconds[-1])
    chain = total - float(model_costs.weight_grad_seconds[-1]) if pp > 1 else total
    precision = job.precision
    gradients = model_costs.trained_bytes[-1] / precision.bytes_per_parameter * ITEM_BYTES[precision.gradient]
    step = optimizer_step_seconds(job, float(gradients) / pp / num_shards, model_costs.costing.device)
    return max(total * num_microbatches / pp, chain) + step


# -- memory -------------------------------------------------------------------------------------------------


def rank_memories(staged: StagedModel) -> tuple[RankMemory, ...]:
    """Return the memory of every pipeline rank over one batch, from a replay of the lowered program.

    The most recent results are cached: a search asks for the same partition with more and more headroom.
    """
    partition = replace(staged, headroom=0)
    for earlier, memories in tuple(_RECENT):
        if earlier.split is partition.split and earlier == partition:
            return memories
    program = shortened(staged.program)
    with_transfers = lowered(program, stage_edges(staged.stages), staged.receives_ahead)
    num_dropped = staged.program.num_microbatches - program.num_microbatches
    memories = tuple(
        replay_rank(staged.memories, with_transfers, rank, staged.resident(rank), num_dropped)
        for rank in range(staged.pp)
    )
    _RECENT.append((partition, memories))
    return memories


_RECENT: deque[tuple[StagedModel, tuple[RankMemory, ...]]] = deque(maxlen=8)
"""The latest partitions, and the memory of their ranks."""


@lru_cache(maxsize=64)
def lowered(program: Program, edges: tuple[Edge, ...], ahead: int) -> Program:
    """Return `program` with its transfers; cached, because all partitions of a search share a few programs."""
    return insert_communication(program, edges, ahead=ahead)


def reserved_peaks(staged: StagedModel, memories: Sequence[RankMemory]) -> list[int]:
    """Return the bytes that the allocator of each rank reserves; on a GPU, from a replay of every allocation.

    In a long pipeline only the fullest ranks are replayed; the other ranks are assumed to lose as large a fraction to
    fragmentation as the worst of these. With split backwards, which free the values of a microbatch in two parts,
    fragmentation may grow over a whole batch, so all of it is replayed: the allocator never returned to an earlier state in
    63 to 253 repetitions of a microbatch in zero-bubble programs of llama-3-8b.
    """
    reserved = [reserved_bytes(memory, staged.device_of(memory.rank)) for memory in memories]
    ranks = [rank for rank in range(staged.pp) if staged.device_of(rank).kind != "cpu"]
    if not ranks:
        return reserved
    fullest = sorted(ranks, key=lambda rank: -memories[rank].peak_bytes)[:_REPLAYED_RANKS]
    is_split = any(action.kind is Kind.W for action in staged.program)
    whole = staged.program if is_split else shortened(staged.program)
    program = lowered(whole, stage_edges(staged.stages), staged.receives_ahead)
    replayed = {rank: _replayed(staged, program, memories[rank]) for rank in fullest}
    worst = max(replayed[rank] / memories[rank].peak_bytes for rank in fullest)
    for rank in ranks:
        reserved[rank] = max(reserved[rank], replayed.get(rank, int(worst * memories[rank].peak_bytes)))
    return reserved


def _replayed(staged: StagedModel, program: Program, memory: RankMemory) -> int:
    """Return the bytes that the allocator of one rank reserves in a replay of `program`."""
    rank, device = memory.rank, staged.device_of(memory.rank)
    peaks = reserved_on(
        staged.memories, program, rank, staged.resident(rank), device.workspace_bytes,
        host_optimizer=rank in staged.host_optimizer,
        is_expandable=runtime_of(staged.stages[0].graph).expandable_segments and device.grows_segments,
        num_dropped=staged.program.num_microbatches - program.num_microbatches,
    )  # fmt: skip
    return peaks.reserved_peak_bytes
