"""What to change when nothing fits."""

from __future__ import annotations

import math
from collections.abc import Iterator

from stagewright.errors import PlanError
from stagewright.estimation.memory import RankMemory
from stagewright.planning.candidate import Candidate
from stagewright.planning.job import Job
from stagewright.planning.pipeline import reserved_bytes
from stagewright.units import format_bytes

_PER_MICROBATCH = ("activations", "transient", "boundary", "inputs")
"""Categories that grow with samples and tokens; the others belong to the weights."""


def misses_memory(best: Candidate, job: Job) -> PlanError:
    """The error for a search in which nothing fits and `best` misses by least."""
    cluster = best.line.cluster
    fullest = max(best.memories, key=lambda memory: memory.peak_bytes)
    limit = job.usable_bytes(cluster.device)
    needed = reserved_bytes(fullest, cluster.device)
    allowance = (
        "the memory limit" if job.memory_limit is not None else f"what a {cluster.device.name} can give"
    )
    ways = "; or ".join(_ways(best, fullest, limit, needed, job))
    return PlanError(
        f"no configuration fits: the best ({best.choice}) needs {format_bytes(needed)} on rank "
        f"{fullest.rank}, {format_bytes(best.excess_bytes)} more than {allowance} of {format_bytes(limit)}. "
        f"It would fit with {ways}"
    )


def _ways(best: Candidate, fullest: RankMemory, limit: int, needed: int, job: Job) -> Iterator[str]:
    """Changes, each of which is enough by itself if memory scales with what it is made of."""
    growing = sum(fullest.categories.get(name, 0) for name in _PER_MICROBATCH)
    fixed = needed - growing
    choice = best.choice
    device = best.line.cluster.device
    if job.memory_limit is not None and needed <= device.usable_bytes:
        yield f"a memory limit of at least {format_bytes(needed)}"
    if job.dtype != "bf16" and fixed * 18 / (16 if job.dtype == "fp32" else 32) + growing / 2 <= limit:
        yield "bf16"
    if choice.microbatch_size > 1 and fixed + growing / choice.microbatch_size <= limit:
        yield "smaller microbatches"
    tokens = _shorter(job.sequence_length, fixed, growing, limit)
    if tokens:
        yield f"a sequence length of about {tokens}"
    if growing < limit:
        factor = fixed / (limit - growing)
        devices = math.ceil(best.line.cluster.num_devices * max(factor, 1.0) * 1.1)
        yield f"a pipeline over about {devices} such devices"
    yield f"devices with {format_bytes(needed / limit * device.memory_bytes)} of memory"


def _shorter(length: int, fixed: int, growing: int, limit: int) -> int:
    """A round sequence length that fits if what grows does so in proportion to it; 0 if none."""
    if limit <= fixed or not growing:
        return 0
    fitting = int(length * (limit - fixed) / growing * 0.95)
    if fitting < 1:
        return 0
    step = 2 ** max(0, fitting.bit_length() - 3)
    return fitting // step * step
