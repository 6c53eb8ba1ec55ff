"""The state of a rank that training changes, as regions of the whole model's tensors; the contents of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from stagewright.errors import InputError
from stagewright.execution.regions import Region, in_whole, memory_ranges
from stagewright.graph.flat_buffers import BufferEntry
from stagewright.graph.tensor_parallel import parallelism

if TYPE_CHECKING:
    from stagewright.execution.session import Session

OF_REPLICA = "#"
"""Separator, in names of state that differs between replicas, before the numbers of replica and pipeline rank."""


@dataclass(frozen=True)
class Held:
    """A region of state that training changes: its name in the whole model, the rank that writes it (this one or another
    with the same region), and this rank's tensor of it."""

    name: str
    region: Region
    writer: int
    tensor: torch.Tensor

    @property
    def key(self) -> str:
        """Key of the region in a file."""
        return key_of(self.name, self.region)


def key_of(name: str, region: Region) -> str:
    """Return the key of a region of tensor `name` in a file.

    >>> key_of("weight:exp_avg", Region((4, 0), (2, 8)))
    'weight:exp_avg@4,0'
    """
    return f"{name}@{','.join(map(str, region.start))}"


def named_by(key: str, shape: tuple[int, ...]) -> tuple[str, Region]:
    """Return the tensor's name and the region of the entry `key` of a file. Raises `ValueError` where it is not a region.

    >>> named_by("weight:step@", ())
    ('weight:step', Region(start=(), shape=()))
    """
    name, _, start = key.rpartition("@")
    region = Region(tuple(map(int, start.split(","))) if start else (), shape)
    if len(region.start) != len(shape):
        raise ValueError(f"'{key}' is of {len(shape)} dimensions")
    return name, region


LossScaleState = tuple[float, int]
"""The loss scale, and the number of steps since it last changed."""

Source = TypeVar("Source", str, int)


class RegionIndex(Generic[Source]):
    """An index of the sources (files of a checkpoint, or ranks) of regions of tensors; `has_optimizer_state` unless it has
    only weights."""

    def __init__(self, has_optimizer_state: bool = True) -> None:
        self.has_optimizer_state = has_optimizer_state
        self._where: dict[str, dict[Region, Source]] = {}
        self._with_state: set[str] | None = None

    def add(self, name: str, region: Region, source: Source) -> None:
        """Add `source` for a region, unless an earlier source has it."""
        self._where.setdefault(name, {}).setdefault(region, source)

    def sources(self, name: str, wanted: Region) -> list[tuple[Source, Region]]:
        """Return the sources of a tensor's regions that overlap `wanted`. Raises `InputError` where a part of it has no
        source."""
        stored = self._where.get(self.known_as(name), {})
        if wanted in stored:
            return [(stored[wanted], wanted)]
        overlapping = [
            (source, region) for region, source in stored.items() if wanted.overlap(region) is not None
        ]
        if sum(overlap(wanted, region).num_elements for _, region in overlapping) != wanted.num_elements:
            raise InputError(
                f"it does not have all of '{name}', so it is of another model, or was written by another version of "
                "stagewright"
            )
        return overlapping

    def regions(self, name: str) -> dict[Region, Source]:
        """Return the regions of a tensor, each with its source."""
        return self._where[name]

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._where)

    def has_state(self, parameter: str) -> bool:
        """Return whether there is state of a parameter besides its weight."""
        if self._with_state is None:
            parts = (name.rpartition(":") for name in self._where)
            self._with_state = {name for name, _, part in parts if part != "weight"}
        return parameter in self._with_state

    def known_as(self, name: str) -> str:
        """Return the stored name of a tensor: for statistics that differ between replicas, the first replica's if there
        were fewer replicas."""
        if name in self._where or OF_REPLICA not in name:
            return name
        prefix = name.rpartition(OF_REPLICA)[0] + OF_REPLICA
        return min((stored for stored in self._where if stored.startswith(prefix)), default=name)


def overlap(region: Region, other: Region) -> Region:
    """Return the intersection of two regions, which must overlap."""
    common = region.overlap(other)
    assert common is not None
    return common


def held(session: Session, index: RegionIndex[Any] | None = None) -> Iterator[Held]:
    """Yield all state of this rank that training changes; with an `index` to read it from, including optimizer state that
    otherwise only the first step creates."""
    mesh, weights, names = session.mesh, session.weights, session.weights.names
    parallel = parallelism(session.graph)
    shards = parallel.shards if parallel else {}
    holders: dict[int, int] = {}
    for stage in session.stages:
        for value in stage.parameters:
            here = session.plan.placement[stage.index]
            holders[value] = min(here, holders.get(value, here))

    def writer(value: int, replica: int) -> int:
        """Return the first of the ranks that hold the same part of a parameter."""
        tensor_rank = mesh.tensor_rank if names[value] in shards else 0
        return mesh.global_rank(holders[value], replica, tensor_rank)

    def placed(value: int, part: str, region: Region, replica: int, tensor: torch.Tensor) -> Iterator[Held]:
        """Yield a region of this rank's part of a parameter as regions of the whole parameter."""
        name = names[value]
        pieces = (
            in_whole(region, shards[name], mesh.tp, mesh.tensor_rank)
            if name in shards and region.shape
            else ((region, region),)
        )
        for whole, piece in pieces:
            yield Held(
                f"{name}:{part}",
                whole,
                writer(value, replica),
                tensor[piece.within(region)] if piece.shape else tensor,
            )

    shard_index = mesh.replica % mesh.num_shards
    for target, state in session.optimizer.updater.states(
        lambda value: index is not None and index.has_state(names[value])
    ):
        value = target.value
        flat = session.shards.flat_of(value) if value in session.optimizer.sharded else None
        if index is not None and not index.has_optimizer_state:
            state = {"weight": state["weight"]}
        for part, tensor in state.items():
            if flat is None:
                yield from placed(value, part, Region.whole(tensor.shape), 0, tensor)
                continue
            group, span = next(
                (group, span)
                for group, span in zip(flat.groups, flat.spans(shard_index), strict=True)
                if group.is_decayed == target.span.is_decayed
            )
            for parameter, region, piece in _of_flat(group.entries, span, tensor):
                yield from placed(parameter, part, region, shard_index, piece)
    if session.model_files.is_adapter:
        frozen, parts = {}, {}  # unchanged since the run started
    else:
        frozen, parts = weights.parameters, session.shards.parts(are_trained=False)
    for value, tensor in frozen.items():
        if value not in weights.trained:
            yield from placed(value, "weight", Region.whole(tensor.shape), 0, tensor)
    for value, tensor in parts.items():
        flat = session.shards.flat_of(value)
        for parameter, region, piece in _of_flat(flat.entries, flat.shard(shard_index), tensor):
            yield from placed(parameter, "weight", region, shard_index, piece)
    first = mesh.global_rank(mesh.pipeline_rank, mesh.replica, 0)
    for value in dict.fromkeys(buffer for stage in session.own_stages for buffer, _ in stage.mutations):
        tensor = weights.tensors[value]
        name = f"{names[value]}{OF_REPLICA}{mesh.replica}.{mesh.pipeline_rank}"
        yield Held(name, Region.whole(tensor.shape), first, tensor)


def loss_scale_of(session: Session) -> LossScaleState | None:
    """Return the state of the loss scale, or None where there is none."""
    scale = session.loss_scale
    return None if scale is None else (scale.value, scale.num_good)


def resumed(session: Session, loss_scale: LossScaleState | None) -> None:
    """Update everything that depends on the loss scale and on the tensors of `held`, which were filled; every rank must
    call this."""
    session.optimizer.updater.restored()
    session.shards.spread()
    if session.loss_scale is not None:
        if loss_scale is not None:
            session.loss_scale.value, session.loss_scale.num_good = loss_scale
        session.by_length.scale_loss(session.cotangent)
    session.runner.release()  # values computed from parameters, which have changed
    session.runner.restore()


def _of_flat(
    entries: Sequence[BufferEntry], part: slice, shard: torch.Tensor
) -> Iterator[tuple[int, Region, torch.Tensor]]:
    """Yield the regions of each parameter of `entries` in `shard`, which is `part` of a flat buffer or a number that belongs
    to it, each with its tensor."""
    for entry in entries:
        if not shard.dim():
            yield entry.value, Region.whole(()), shard
            continue
        first = max(entry.offset, part.start)
        stop = min(entry.offset + entry.meta.num_elements, part.stop)
        for memory_range in memory_ranges(entry.meta, first - entry.offset, stop - entry.offset):
            begin = first - part.start + memory_range.offset
            rows = shard[begin : begin + memory_range.region.num_elements]
            turned = rows.view([memory_range.region.shape[dim] for dim in memory_range.order])
            inverse = sorted(range(len(memory_range.order)), key=memory_range.order.__getitem__)
            yield entry.value, memory_range.region, turned.permute(inverse)
