"""What ranks recompute and offload: within the limit when replayed, named so that it can be run."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch

from stagewright.cluster import load_cluster
from stagewright.estimation.memory import replay_rank, stage_edges
from stagewright.estimation.stages import RangeCosts
from stagewright.estimation.time import Costing
from stagewright.graph.policy import RECOMPUTE_ALL
from stagewright.planning.candidate import make_program
from stagewright.planning.checkpointing.fit import Fitted, TooSlow, fit
from stagewright.planning.configuration import Configuration
from stagewright.planning.job import Job
from stagewright.planning.prediction.predict import rank_memories, run_timeline
from stagewright.planning.prediction.shortening import shortened
from stagewright.planning.prediction.staged_model import StagedModel, reserved_bytes, staged_model
from stagewright.schedule import insert_communication
from stagewright.schedule.lower import insert_recomputation
from stagewright.tracing.cache import trace

CLUSTER = load_cluster("2x-h100")


@cache
def model_costs(model: str = "tiny-llama") -> RangeCosts:
    graph = trace(model, 2, 32, "float32")
    return RangeCosts(graph, Costing(graph, CLUSTER.device))


def staged_model_of(schedule: str, limit: int | None = None) -> StagedModel:
    job = Job(global_batch=16, sequence_length=32, dtype="fp32", memory_limit=limit)
    program = make_program(Configuration(1, 2, 2, 8, schedule))
    cuts = [model_costs().size * stage // program.num_stages for stage in range(1, program.num_stages)]
    return staged_model(model_costs(), cuts, program, CLUSTER, job, 1)


def fullest(staged: StagedModel) -> int:
    return max(reserved_bytes(memory, CLUSTER.device) for memory in rank_memories(staged))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "breadth-first", "interleaved-1f1b"])
@pytest.mark.parametrize("offload", [True, False])
def test_a_fitted_line_is_within_its_limit_when_replayed(schedule: str, offload: bool) -> None:
    plain = staged_model_of(schedule)
    stages = range(plain.program.num_stages)
    least = staged_model(
        model_costs(), [stage.start for stage in plain.stages[1:]], insert_recomputation(plain.program, stages),
        CLUSTER, plain.job, 1, [RECOMPUTE_ALL] * len(stages),
    )  # fmt: skip
    limit = (fullest(plain) + fullest(least)) // 2
    assert limit < fullest(plain)
    found = fit(staged_model_of(schedule, limit), model_costs(), offload=offload)
    assert found is not None
    replayed = rank_memories(found.staged)
    assert [memory.peak_bytes for memory in replayed] == [memory.peak_bytes for memory in found.memories]
    assert fullest(found.staged) <= limit
    assert found.choice.recomputed or found.choice.moved
    assert offload or not found.choice.moved


def lone_rank(host_link_bandwidth: float) -> tuple[RangeCosts, Callable[[int | None], StagedModel]]:
    """Return costs, and a function from a limit of memory to one microbatch in flight.

    The device is slow, so that the small model does not wait for the host instead."""
    cluster = load_cluster("1x-gh200")
    (node,) = cluster.nodes
    figures = {"memory_bandwidth": 1e9, "host_link_bandwidth": host_link_bandwidth}
    slow = node.device.model_copy(update=figures)
    cluster = cluster.model_copy(update={"nodes": (node.model_copy(update={"device": slow}),)})
    graph = trace("tiny-llama", 4, 128, "float32")
    costs = RangeCosts(graph, Costing(graph, cluster.device))

    def lone(limit: int | None) -> StagedModel:
        job = Job(global_batch=4, sequence_length=128, dtype="fp32", memory_limit=limit)
        return staged_model(costs, [], make_program(Configuration(1, 1, 4, 1, "1f1b")), cluster, job, 1)

    return costs, lone


def tight_limit(plain: StagedModel) -> int:
    peak = max(reserved_bytes(memory, plain.cluster.device) for memory in rank_memories(plain))
    (summary,) = plain.summaries
    return peak - summary.saved_bytes // 3


def test_nothing_is_offloaded_to_the_memory_that_a_device_computes_on() -> None:
    costs, lone = lone_rank(0.0)
    fitted = fit(lone(tight_limit(lone(None))), costs)
    assert fitted is not None and fitted.choice.recomputed and not fitted.choice.moved


def test_a_lone_rank_offloads_where_the_link_is_fast() -> None:
    """What comes back piece by piece makes room, in less time than recomputing takes."""
    costs, lone = lone_rank(1e9)
    plain = lone(None)
    (summary,) = plain.summaries
    limit = tight_limit(plain)
    moved, kept = fit(lone(limit), costs), fit(lone(limit), costs, offload=False)
    assert moved is not None and kept is not None
    assert moved.choice.moved and moved.staged.summaries[0].offloaded_bytes > 0
    assert all(
        reserved_bytes(memory, plain.cluster.device) <= limit for memory in rank_memories(moved.staged)
    )

    def added(staged: StagedModel) -> float:
        (one,) = staged.summaries
        return one.forward_s + one.backward_s - summary.forward_s - summary.backward_s

    assert added(moved.staged) < added(kept.staged)
    (policy,) = moved.memory_policy
    assert not isinstance(policy, str) and policy.offload and policy.fetch_ahead > 0


def test_nothing_is_given_up_where_everything_fits() -> None:
    found = fit(staged_model_of("1f1b"), model_costs())
    assert found is not None and not found.choice.recomputed and not found.choice.moved


def test_a_limit_below_what_lasts_cannot_be_met() -> None:
    assert fit(staged_model_of("1f1b", 20 * 2**20), model_costs()) is None


def test_what_computes_for_too_long_is_not_fitted() -> None:
    limit = fullest(staged_model_of("1f1b")) - 2**21
    staged = staged_model_of("1f1b", limit)
    fitted = fit(staged, model_costs(), offload=False)
    assert isinstance(fitted, Fitted)
    within = fit(staged, model_costs(), offload=False, below_s=1.01 * run_timeline(fitted.staged).makespan_s)
    assert isinstance(within, Fitted) and within.choice == fitted.choice
    busy_s = float(run_timeline(staged).busy_s.max())
    assert fit(staged, model_costs(), offload=False, below_s=0.9 * busy_s) == TooSlow()


def test_a_shortened_program_that_saves_has_the_same_peaks() -> None:
    job = Job(global_batch=80, sequence_length=32, dtype="fp32")
    program = make_program(Configuration(1, 4, 2, 40, "1f1b"))
    cuts = [model_costs().size * stage // 4 for stage in range(1, 4)]
    cluster = load_cluster("4x-h100")
    plain = staged_model(model_costs(), cuts, program, cluster, job, 1)
    limit = fullest(plain) - 2**22
    found = fit(
        staged_model(
            model_costs(), cuts, program, cluster, job.model_copy(update={"memory_limit": limit}), 1
        ),
        model_costs(),
    )
    assert found is not None and (found.choice.recomputed or found.choice.moved)
    edges, ahead = stage_edges(found.staged.stages), found.staged.receives_ahead
    short = shortened(found.staged.program)
    assert short.num_microbatches < 10
    for rank, known in enumerate(found.memories):
        resident = found.staged.resident(rank)
        whole = replay_rank(
            found.staged.memories,
            insert_communication(found.staged.program, edges, ahead=ahead),
            rank,
            resident,
            0,
        )
        assert (whole.peak_bytes, whole.categories) == (known.peak_bytes, known.categories)
        part = replay_rank(
            found.staged.memories,
            insert_communication(short, edges, ahead=ahead),
            rank,
            resident,
            40 - short.num_microbatches,
        )
        assert part.peak_bytes == known.peak_bytes


def test_a_stage_that_copies_changing_buffers_can_be_fitted() -> None:
    """Its copies are operators that no graph numbers; they stay, and what is computed from them can be recomputed."""
    from torch import nn

    from stagewright.tracing.trace import trace_module

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.BatchNorm1d(512) for _ in range(4)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x).square().mean()

    facts = {"microbatch_size": 4096, "sequence_length": 1, "num_tokens": 4096}
    graph = trace_module(Normed(), {"x": torch.empty(4096, 512)}, "normed", facts)
    normed = RangeCosts(graph, Costing(graph, CLUSTER.device))
    program = make_program(Configuration(1, 1, 4096, 1, "1f1b"))
    job = Job(global_batch=4096, sequence_length=1, dtype="fp32")
    kept = fullest(staged_model(normed, [], program, CLUSTER, job, 1))
    tight = job.model_copy(update={"memory_limit": kept - 2**20})
    found = fit(staged_model(normed, [], program, CLUSTER, tight, 1), normed, offload=False)
    assert found is not None and fullest(found.staged) <= kept - 2**20
