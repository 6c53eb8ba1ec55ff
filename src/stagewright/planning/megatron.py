"""What a model takes on each rank when Megatron trains it: the memory of one of its configurations."""

from __future__ import annotations

from dataclasses import dataclass, replace

from stagewright.cluster import Cluster
from stagewright.errors import InputError
from stagewright.estimation.megatron import (
    Layout,
    MegatronStack,
    RankFootprint,
    Shape,
    find_megatron_stack,
    footprints,
    shape_of,
)
from stagewright.planning.job import Job
from stagewright.tracing.models.reference import ModelReference


@dataclass(frozen=True)
class MegatronFootprint:
    """Memory by pipeline rank of `model` under `stack`; `usable_bytes` of a device for its allocator."""

    model: str
    stack: str
    cluster: str
    layout: Layout
    ranks: tuple[RankFootprint, ...]
    usable_bytes: int

    @property
    def fits(self) -> bool:
        """Whether every rank's allocated peak is below what may be used; fragmentation comes on top."""
        return all(rank.peak_bytes <= self.usable_bytes for rank in self.ranks)


def megatron_footprint(
    reference: ModelReference, cluster: Cluster, job: Job, layout: Layout, stack: str
) -> MegatronFootprint:
    """The memory of `reference` in one configuration of Megatron.

    `layout.num_microbatches` and `layout.sequence_length` are set from `job`.

    Raises:
        InputError: a factory, a kind of model or a precision Megatron's stacks do not have, or widths that do not fit the
            model, the batch or the cluster.
        ScheduleError: the schedule cannot be built.
    """
    runtime = find_megatron_stack(stack)
    if reference.config is None:
        raise InputError(f"stack '{stack}' reads widths from a config: '{reference.text}' is a factory")
    check_precision(runtime, job)
    layout = _filled(layout, cluster, job)
    shape = shape_of(reference.config)
    check_length(shape, job)
    ranks = footprints(shape, layout, runtime)
    usable = job.usable_bytes(cluster.device)
    return MegatronFootprint(reference.name, stack, cluster.name, layout, ranks, usable)


def check_precision(stack: MegatronStack, job: Job) -> None:
    """Raises `InputError` for a job in a precision whose time and memory are not those of `stack`."""
    if job.dtype not in stack.dtypes:
        known = " or ".join(stack.dtypes)
        raise InputError(
            f"stack '{stack.name}' trains in {known}, not in {job.dtype}: give --dtype {stack.dtypes[0]}"
        )


def check_length(shape: Shape, job: Job) -> None:
    """Raises `InputError` for samples longer than the learned positions of a model."""
    if 0 < shape.num_positions < job.sequence_length:
        raise InputError(
            f"sequence length {job.sequence_length} exceeds the {shape.num_positions} learned positions of the model: "
            "shorten it, or give the model more (--set)"
        )


def _filled(layout: Layout, cluster: Cluster, job: Job) -> Layout:
    count = layout.tp * layout.cp * layout.pp * layout.dp
    if count != cluster.num_devices:
        raise InputError(
            f"tp {layout.tp} x cp {layout.cp} x pp {layout.pp} x dp {layout.dp} are {count} devices, but cluster "
            f"'{cluster.name}' has {cluster.num_devices}: choose widths whose product is that"
        )
    samples = layout.dp * layout.microbatch_size
    if job.global_batch % samples:
        raise InputError(
            f"dp {layout.dp} x microbatches of {layout.microbatch_size} do not divide the global batch of "
            f"{job.global_batch}: change one of the three"
        )
    return replace(layout, sequence_length=job.sequence_length, num_microbatches=job.global_batch // samples)
