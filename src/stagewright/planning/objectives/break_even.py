"""Up to which batch breadth-first order is the fastest, and by how much."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from stagewright.cluster import Cluster
from stagewright.errors import InputError, PlanError
from stagewright.planning.job import Job
from stagewright.planning.plan import Plan
from stagewright.planning.search import plan
from stagewright.planning.space import JOINT, Space
from stagewright.tracing.models.reference import ModelReference

BREADTH_FIRST = "breadth-first"
_DOUBLINGS = 3
"""How often the batch is halved or doubled at most."""
_FAR = 0.01
"""Where breadth-first order is slower by more than this, smaller batches are not looked at."""


@dataclass(frozen=True)
class Compared:
    """A batch of so many samples: what a step takes in breadth-first order, and in the fastest of the other families',
    infinite where none is possible."""

    global_batch: int
    breadth_first_s: float
    others_s: float

    @property
    def gain(self) -> float:
        """By which part of its own step breadth-first order is faster; negative where it is slower."""
        return self.others_s / self.breadth_first_s - 1


@dataclass(frozen=True)
class BreakEven:
    """Batches from small to large."""

    num_devices: int
    asked: Compared
    batches: tuple[Compared, ...]

    @property
    def largest_win(self) -> Compared | None:
        """The largest of the batches at which breadth-first order is the fastest; None where it is at none of them."""
        return next((one for one in reversed(self.batches) if one.gain > 0), None)

    def per_device(self, one: Compared) -> float:
        """Samples a device."""
        return one.global_batch / self.num_devices


def break_even(
    plans: Sequence[Plan],
    model: ModelReference,
    cluster: Cluster,
    job: Job,
    space: Space,
    report: Callable[[str], None] = lambda stage: None,
) -> BreakEven | None:
    """Where breadth-first order stops being the fastest of the families; None where it is far from that among `plans`, those
    of `job`, or where the fastest of these is no pipeline.

    The batch is halved until it wins, or doubled until it loses, and everything else is searched at every batch anew.

    Source: Lamy-Poirier 2023, Breadth-First Pipeline Parallelism (arXiv 2211.05953), which looks for the smallest batch per
    device that still uses pipeline and network. Ignores: the joint search, and a longer look at what is recomputed.
    """
    job = job.with_state(model)
    families = replace(space.of_runtime(job), schedules=space.of_runtime(job).families)
    others = [name for name in families.families if name != BREADTH_FIRST]
    if not others or BREADTH_FIRST not in families.families:
        return None
    known = [*plans, *_like_fastest(plans, model, cluster, job, families)]
    if not any(one.schedule == BREADTH_FIRST and one.pp > 1 for one in known):
        return None
    asked = _compared(_completed(known, model, cluster, job, families), job.global_batch)
    if asked is None or asked.gain < -_FAR:
        return None
    found = [asked]
    is_faster = asked.gain > 0
    for power in range(1, _DOUBLINGS + 1):
        batch = job.global_batch << power if is_faster else job.global_batch >> power
        if batch < 1 or (not is_faster and batch << power != job.global_batch):
            break
        report(f"breadth-first order with batches of {batch}")
        sized = job.model_copy(update={"global_batch": batch})
        one = _compared(_plans(model, cluster, sized, families), batch)
        if one is None:
            break
        found.append(one)
        if (one.gain > 0) != is_faster:
            break
    return BreakEven(cluster.num_devices, asked, tuple(sorted(found, key=lambda one: one.global_batch)))


def _like_fastest(
    plans: Sequence[Plan], model: ModelReference, cluster: Cluster, job: Job, space: Space
) -> list[Plan]:
    """In breadth-first order, with as many ranks of each kind as the fastest of `plans`, unless that is in it."""
    fastest = min(plans, key=lambda one: (one.schedule == JOINT, one.predictions.step_seconds))
    if fastest.pp == 1 or any(one.schedule == BREADTH_FIRST for one in plans):
        return []
    alike = replace(
        space, schedules=(BREADTH_FIRST,), dp=fastest.dp, pp=fastest.pp, tp=fastest.tp, cp=fastest.cp, ep=fastest.ep,
        microbatch=fastest.microbatch_size,
    )  # fmt: skip
    with suppress(PlanError, InputError):
        return plan(model, cluster, job, alike, is_improved=False).plans
    return []


def _compared(plans: Sequence[Plan], batch: int) -> Compared | None:
    """The fastest plan in breadth-first order and the fastest of the other families; None without the former."""
    seconds: dict[bool, float] = {}
    for one in plans:
        if one.schedule != JOINT and (one.pp > 1 or one.schedule != BREADTH_FIRST):
            is_own = one.schedule == BREADTH_FIRST
            seconds[is_own] = min(seconds.get(is_own, math.inf), one.predictions.step_seconds)
    if True not in seconds:
        return None
    return Compared(batch, seconds[True], seconds.get(False, math.inf))


def _completed(
    plans: Sequence[Plan], model: ModelReference, cluster: Cluster, job: Job, space: Space
) -> list[Plan]:
    """`plans`, and the fastest in breadth-first order and in others where none of these is among them, if there are any."""
    own = [name for name in space.families if name == BREADTH_FIRST]
    found = list(plans)
    for schedules in (own, [name for name in space.families if name not in own]):
        if not any(one.schedule in schedules for one in found):
            with suppress(PlanError, InputError):
                within = replace(space, schedules=tuple(schedules))
                found += plan(model, cluster, job, within, is_improved=False).plans
    return found


def _plans(model: ModelReference, cluster: Cluster, job: Job, space: Space) -> list[Plan]:
    """The fastest of all families, and of each side at least one, if there is any."""
    found: list[Plan] = []
    with suppress(PlanError, InputError):
        found += plan(model, cluster, job, space, is_improved=False).plans
    return _completed(found, model, cluster, job, space)
