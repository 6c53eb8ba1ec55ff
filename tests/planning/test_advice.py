"""What is said where nothing fits: figures that hang together, and ways that would help."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stagewright.cluster import load_cluster
from stagewright.estimation.stages import RangeCosts
from stagewright.planning.advice import misses_memory
from stagewright.planning.candidate import make_candidate
from stagewright.planning.configuration import Configuration
from stagewright.planning.job import Job
from stagewright.planning.prediction.staged_model import costing
from stagewright.tracing.cache import trace
from stagewright.units import MIB, format_bytes

CLUSTER = load_cluster("2x-h100")


def test_what_fragmentation_takes_is_part_of_what_is_needed() -> None:
    job = Job(global_batch=4, sequence_length=32, dtype="fp32", memory_limit=2**30)
    graph = trace("tiny-llama", 1, 32, "float32")
    fits = make_candidate(
        RangeCosts(graph, costing(graph, CLUSTER, job)), Configuration(1, 2, 1, 4, "1f1b"), CLUSTER, job
    )
    text = str(misses_memory(replace(fits, excess_bytes=5 * MIB), job))
    assert f"needs {format_bytes(2**30 + 5 * MIB)} on rank" in text
    assert "5.0 MiB more than the memory limit of 1.00 GiB" in text


@pytest.mark.parametrize(
    ("dtype", "helps"),
    [("fp32", True), ("fp64", True), ("tf32", True), ("fp16", False), ("fp8", False), ("bf16", False)],
)
def test_bf16_is_no_way_out_of_what_is_as_short(dtype: str, helps: bool) -> None:
    graph = trace("tiny-llama", 32, 128, "float32")
    job = Job(global_batch=64, sequence_length=128, dtype="fp32")
    found = make_candidate(
        RangeCosts(graph, costing(graph, CLUSTER, job)), Configuration(1, 2, 32, 2, "1f1b"), CLUSTER, job
    )
    limit = max(memory.peak_bytes for memory in found.memories) * 9 // 10
    asked = job.model_copy(update={"dtype": dtype, "memory_limit": limit})
    limited = replace(found, staged=replace(found.staged, job=asked)).with_headroom(0)
    assert ("bf16" in str(misses_memory(limited, asked))) == helps
