"""The allocator's replay of a pipeline rank, beside the replay of bytes, which knows no blocks."""

from __future__ import annotations

import pytest

from stagewright.cluster import load_cluster
from stagewright.estimation.reserved import reserved_on
from stagewright.planning.estimate import estimate, staged_model_of
from stagewright.planning.job import Job
from stagewright.planning.prediction.predict import lowered, rank_memories, reserved_peaks, stage_edges
from stagewright.planning.prediction.staged_model import StagedModel, reserved_bytes
from stagewright.schedule import build
from stagewright.units import MIB

_BLOCK = 512


def staged_model(
    model: str, schedule: str, pp: int = 2, dp: int = 1, zero: int | None = None, size: int = 1
) -> StagedModel:
    cluster = load_cluster(f"{pp * dp}x-h100")
    job = Job(global_batch=6 * dp * size, sequence_length=64 * size)
    plan = estimate(model, cluster, job, pp=pp, dp=dp, schedule=schedule, zero=zero, microbatch=size)
    return staged_model_of(plan, cluster)


@pytest.mark.parametrize(
    ("schedule", "dp", "zero"),
    [
        ("1f1b", 1, None),
        ("gpipe", 1, None),
        ("zb-h1", 1, None),
        ("1f1b", 2, None),
        ("1f1b", 2, 0),
        ("1f1b", 2, 1),
        ("1f1b", 2, 2),
        ("1f1b", 2, 3),
        ("gpipe", 2, 3),
    ],
)
@pytest.mark.parametrize("model", ["tiny-llama", "tiny-mixtral"])
def test_active_bytes_are_the_replayed_ones_in_whole_blocks(
    model: str, schedule: str, dp: int, zero: int | None
) -> None:
    staged = staged_model(model, schedule, dp=dp, zero=zero)
    program = lowered(staged.program, stage_edges(staged.stages), staged.receives_ahead)
    for memory in rank_memories(staged):
        found = reserved_on(staged.memories, program, memory.rank, staged.resident(memory.rank))
        inside = sum(
            stage.graph.storage_bytes[v] > 0 for stage in staged.stages for v in stage.graph.storage_bytes
        )
        assert memory.peak_bytes <= found.active_peak_bytes <= memory.peak_bytes + 8 * _BLOCK * inside
        assert found.active_peak_bytes <= found.reserved_peak_bytes
        assert found.reserved_peak_bytes % 2**21 == 0


def test_microbatches_that_are_left_out_count_with_inputs_and_losses() -> None:
    staged = staged_model("tiny-llama", "1f1b", size=2)
    programs = [build("1f1b", 2, count) for count in (40, 6)]
    for rank in range(2):
        resident = staged.resident(rank)
        whole, short = (
            reserved_on(
                staged.memories, lowered(program, stage_edges(staged.stages), staged.receives_ahead), rank, resident,
                num_dropped=40 - program.num_microbatches,
            )
            for program in programs
        )  # fmt: skip
        assert whole == short


def test_another_step_reserves_nothing_more() -> None:
    """What a batch leaves in the cache serves the next."""
    staged = staged_model("tiny-llama", "1f1b")
    program = lowered(staged.program, stage_edges(staged.stages), staged.receives_ahead)
    two, four = (
        reserved_on(staged.memories, program, 0, staged.resident(0), num_steps=steps) for steps in (2, 4)
    )
    assert two == four


def test_predictions_hold_what_fragmentation_takes() -> None:
    staged = staged_model("tiny-llama", "gpipe", pp=4)
    memories = rank_memories(staged)
    reserved = reserved_peaks(staged, memories)
    for memory, found in zip(memories, reserved, strict=True):
        assert found >= reserved_bytes(memory, staged.cluster.device) > memory.peak_bytes


@pytest.mark.parametrize("zero", [None, 0, 1, 3])
def test_replicas_lose_memory_to_fragmentation_as_one_alone_does(zero: int | None) -> None:
    def lost(staged: StagedModel) -> list[int]:
        memories = rank_memories(staged)
        least = [reserved_bytes(memory, staged.cluster.device) for memory in memories]
        return [whole - own for whole, own in zip(reserved_peaks(staged, memories), least, strict=True)]

    alone, replicated = (lost(staged_model("tiny-llama", "gpipe", 2, dp, zero, size=8)) for dp in (1, 2))
    assert min(*alone, *replicated) > MIB
    assert max(replicated) <= 3 * max(alone)
