"""Whether the ranks that are to be processes of this machine have room in its memory."""

from __future__ import annotations

import os
from pathlib import Path

from stagewright.errors import InputError
from stagewright.planning.plan import Plan
from stagewright.units import format_bytes

_CONTAINER = Path("/sys/fs/cgroup/memory.max")


def machine_bytes() -> int:
    """Memory of this machine, or of the container if that may use less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = _CONTAINER.read_text(encoding="ascii").strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def refuse_without_room(plan: Plan) -> None:
    """Before the processes of a plan are started on the CPU of this machine, all of them: the system would not refuse them
    memory but end one of them, or of somebody else's, when there is no more. Raises `InputError` where their predicted
    peaks together are more than the machine has."""
    replicas = plan.dp * plan.tp
    needed = replicas * sum(rank.allocated_peak_bytes + rank.host_bytes for rank in plan.predictions.ranks)
    available = machine_bytes()
    if needed > available:
        raise InputError(
            f"the {plan.num_ranks} ranks of the plan need {format_bytes(needed)} of memory, and as processes on the CPU of "
            f"this machine they have {format_bytes(available)} together: run the plan on {plan.cluster.name}, for "
            "which it was made, or plan for this machine, which `stagewright probe` describes"
        )
