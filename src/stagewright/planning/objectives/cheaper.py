"""What to run instead of a plan that needed more memory than there was.

``python -m stagewright.planning.objectives.cheaper RANK LENGTH < plan.json`` prints it in a sentence; LENGTH are the tokens
of a sample of the step that ran out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from stagewright.errors import StagewrightError
from stagewright.graph.flat_buffers import LEVELS
from stagewright.planning.plan import Plan
from stagewright.planning.search import plan
from stagewright.planning.space import SCHEDULES
from stagewright.schedule import FAMILIES
from stagewright.units import format_bytes

LESS = 0.9
"""A plan is cheaper when its fullest rank needs at most this part of what the rank that ran out was to need."""


def nearest_cheaper(known: Plan, pipeline_rank: int, length: int) -> Plan | None:
    """The first plan that needs less memory at every length than `known` was to need at `length` on `pipeline_rank`, which
    ran out of it; None if there is none.

    Tried are, at the same widths: the same microbatches with what is saved recomputed or offloaded as far as it must be,
    then replicas that share out more, then smaller microbatches.
    """
    reference = known.model.reference()
    promised = known.at_length(length).predictions.ranks[pipeline_rank]
    limit = int(LESS * promised.reserved_peak_bytes)
    job = known.job.model_copy(update={"memory_limit": limit})
    families = [known.schedule] if known.schedule in FAMILIES else [*SCHEDULES]
    for size, level in _ways(known):
        try:
            found = plan(
                reference, known.cluster.load(), job, pp=known.pp, dp=known.dp, tp=known.tp,
                sequence_parallel=known.sequence_parallel, microbatch=size, schedules=families, zero=(level,),
                recompute="auto", reduce_dtype=known.reduce_dtype, shard_size=known.shard_size,
            )  # fmt: skip
        except StagewrightError:
            continue
        return found.plans[0]
    return None


def _ways(known: Plan) -> Iterator[tuple[int, int | None]]:
    """Samples of a microbatch, and what replicas share out."""
    level = max(known.sharding, default=0)
    levels = [level or None, *(more for more in LEVELS if more > level)] if known.dp > 1 else [None]
    sizes = [size for size in range(known.microbatch_size, 0, -1) if known.microbatch_size % size == 0]
    yield from ((size, wanted) for size in sizes for wanted in levels)


def difference(known: Plan, other: Plan) -> str:
    """What `other` does otherwise, and what it costs."""
    ways: list[str] = []
    if other.microbatch_size != known.microbatch_size:
        ways.append(f"microbatches of {other.microbatch_size}")
    if max(other.sharding) != max(known.sharding):
        ways.append(f"--zero {max(other.sharding)}")
    saving = [stage for stage, policy in enumerate(other.memory_policy) if policy != "keep"]
    if saving and other.memory_policy != known.memory_policy:
        ways.append(f"stages {', '.join(map(str, saving))} recompute or offload")
    if other.loss_pieces != known.loss_pieces:
        ways.append(f"--loss-pieces {other.loss_pieces}")
    if other.cuts != known.cuts:
        ways.append("other cuts")
    slower = other.mean_step_seconds / known.mean_step_seconds - 1
    return f"{', '.join(ways) or 'another order'}; step {slower:+.0%}"


def advice(known: Plan, pipeline_rank: int, length: int) -> str:
    """A sentence for the user whose run of `known` ran out of memory on `pipeline_rank`."""
    found = nearest_cheaper(known, pipeline_rank, length)
    if found is None:
        return "No plan of these widths needs less: plan for more devices, or a shorter sequence"
    needs = max(rank.reserved_peak_bytes for one in found.by_length.values() for rank in one.ranks)
    return (
        f"The nearest plan that needs less takes {format_bytes(needs)}: {difference(known, found)}. "
        f"Plan again with --memory-limit {-(-needs // 2**20)}MiB"
    )


if __name__ == "__main__":
    print(advice(Plan.model_validate_json(sys.stdin.read()), *map(int, sys.argv[1:3])))
