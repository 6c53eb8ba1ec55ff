"""The allocator's replay of a pipeline rank, beside the replay of bytes, which knows no blocks."""

from __future__ import annotations

import pytest

from stagewright.cluster import load_cluster
from stagewright.estimation.reserved import reserved_on
from stagewright.planning.estimate import estimate, line_of
from stagewright.planning.job import Job
from stagewright.planning.pipeline import Pipeline, reserved_bytes
from stagewright.planning.predict import lowered, rank_memories, reserved_peaks, stage_edges

_BLOCK = 512


def pipeline(model: str, schedule: str, pp: int = 2) -> Pipeline:
    cluster = load_cluster(f"{pp}x-h100")
    job = Job(global_batch=6, sequence_length=64)
    plan = estimate(model, cluster, job, pp=pp, schedule=schedule)
    return line_of(plan, cluster)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
@pytest.mark.parametrize("model", ["tiny-llama", "tiny-mixtral"])
def test_active_bytes_are_the_replayed_ones_in_whole_blocks(model: str, schedule: str) -> None:
    line = pipeline(model, schedule)
    program = lowered(line.program, stage_edges(line.stages))
    for memory in rank_memories(line):
        state = sum(line.resident(memory.rank).categories.values())
        found = reserved_on(line.memories, program, memory.rank, state)
        inside = sum(
            stage.graph.storage_bytes[v] > 0 for stage in line.stages for v in stage.graph.storage_bytes
        )
        assert memory.peak_bytes <= found.active_peak_bytes <= memory.peak_bytes + 8 * _BLOCK * inside
        assert found.active_peak_bytes <= found.reserved_peak_bytes
        assert found.reserved_peak_bytes % 2**21 == 0


def test_another_step_reserves_nothing_more() -> None:
    """What a batch leaves in the cache serves the next."""
    line = pipeline("tiny-llama", "1f1b")
    program = lowered(line.program, stage_edges(line.stages))
    state = sum(line.resident(0).categories.values())
    two, four = (reserved_on(line.memories, program, 0, state, num_steps=steps) for steps in (2, 4))
    assert two == four


def test_predictions_hold_what_fragmentation_takes() -> None:
    line = pipeline("tiny-llama", "gpipe", pp=4)
    memories = rank_memories(line)
    reserved = reserved_peaks(line, memories)
    for memory, found in zip(memories, reserved, strict=True):
        assert found >= reserved_bytes(memory, line.cluster.device) > memory.peak_bytes
