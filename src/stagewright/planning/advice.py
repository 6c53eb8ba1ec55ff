"""Advice for a search in which nothing fits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from stagewright.cluster import Device
from stagewright.errors import PlanError
from stagewright.estimation.memory import RankMemory
from stagewright.graph.tensor import ITEM_BYTES
from stagewright.planning.candidate import Candidate
from stagewright.planning.job import Job
from stagewright.planning.prediction.predict import reserved_peaks
from stagewright.units import format_bytes

_REGIONS = ". Only what the model's own code checkpoints is recomputed: --recompute auto may need less memory"
_PER_MICROBATCH = ("activations", "recomputed", "transient", "boundary", "inputs")
"""Categories that grow with samples and tokens; the others belong to the weights."""


def misses_memory(best: Candidate, job: Job) -> PlanError:
    """Return the error for a search in which nothing fits and `best` is over by least: by its `excess_bytes`, or more where
    the allocator reserves more for its live values."""
    staged = best.staged
    fullest = max(best.memories, key=lambda memory: (staged.missing_bytes([memory]), memory.peak_bytes))
    device = staged.device_of(fullest.rank)
    limit = job.usable_bytes(device, staged.cluster)
    needed = max(limit + best.excess_bytes, reserved_peaks(staged, best.memories)[fullest.rank])
    allowance = "the memory limit" if job.memory_limit == limit else f"what a {device.name} can give"
    if job.memory_limit is None and job.memory_to_spare:
        allowance += f" with {job.memory_to_spare:.0%} to spare"
    remedies = "; or ".join(_remedies(best, fullest, device, limit, needed, job))
    return PlanError(
        f"no configuration fits: the best ({best.configuration}) needs {format_bytes(needed)} on rank "
        f"{fullest.rank}, {format_bytes(needed - limit)} more than {allowance} of {format_bytes(limit)}. "
        f"It would fit with {remedies}{_REGIONS if best.configuration.recompute == 'model' else ''}"
    )


def _remedies(
    best: Candidate, fullest: RankMemory, device: Device, limit: int, needed: int, job: Job
) -> Iterator[str]:
    """Yield changes, each of which is enough by itself if memory scales in proportion to its parts."""
    growing = sum(fullest.categories.get(name, 0) for name in _PER_MICROBATCH)
    fixed = needed - growing
    configuration = best.configuration
    has_enough = needed <= device.usable_bytes  # the device itself
    is_asked = has_enough and (job.memory_limit is not None or job.memory_to_spare > 0)
    if is_asked:
        limited = job.memory_limit is not None
        yield f"a memory limit of about {format_bytes(needed)}" if limited else "less memory to spare"
    if _fits_in_bf16(job, fixed, growing, limit):
        yield "bf16"
    if configuration.microbatch > 1 and fixed + growing / configuration.microbatch <= limit:
        yield "smaller microbatches"
    tokens = _shorter(job.sequence_length, fixed, growing, limit)
    if tokens:
        yield f"a sequence length of about {tokens}"
    if growing < limit:
        factor = fixed / (limit - growing)
        devices = math.ceil(best.staged.cluster.num_devices * max(factor, 1.0) * 1.1)
        yield f"a pipeline over about {devices} such devices"
    if not is_asked:
        yield f"devices with {format_bytes(needed / limit * device.memory_bytes)} of memory"


def _fits_in_bf16(job: Job, fixed: int, growing: int, limit: int) -> bool:
    """Return whether bf16 is enough; False where types are that small already."""
    now, then = job.torch_name, "bfloat16"
    if ITEM_BYTES[now] <= ITEM_BYTES[then]:
        return False
    half = replace(job.profile.precision(then), num_moments=job.kept.num_moments)
    state = half.bytes_per_parameter / job.precision.bytes_per_parameter
    values = ITEM_BYTES[then] / ITEM_BYTES[job.autocast or now]
    return fixed * state + growing * values <= limit


def _shorter(length: int, fixed: int, growing: int, limit: int) -> int:
    """Return a round sequence length that fits if memory grows in proportion to it; 0 if none does."""
    if limit <= fixed or not growing:
        return 0
    fitting = int(length * (limit - fixed) / growing * 0.95)
    if fitting < 1:
        return 0
    step = 2 ** max(0, fitting.bit_length() - 3)
    return fitting // step * step
