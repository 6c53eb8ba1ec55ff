"""What training changes on one rank, as regions of the whole model's tensors: what a checkpoint is made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from stagewright.errors import InputError
from stagewright.execution.regions import Region, in_whole, stretches
from stagewright.graph.flat_buffers import Entry
from stagewright.graph.tensor_parallel import parallelism

if TYPE_CHECKING:
    from stagewright.execution.session import Session

OF_REPLICA = "#"
"""In names of what every replica has of its own: in front of its number and the pipeline rank's."""


@dataclass(frozen=True)
class Held:
    """A region of something that training changes: its name in the whole model, the rank that writes it (this one or another
    with the same), and where this rank has it."""

    name: str
    region: Region
    writer: int
    tensor: torch.Tensor

    @property
    def key(self) -> str:
        """Its name in a file."""
        return key_of(self.name, self.region)


def key_of(name: str, region: Region) -> str:
    """Under which name a file has a region of tensor `name`.

    >>> key_of("weight:exp_avg", Region((4, 0), (2, 8)))
    'weight:exp_avg@4,0'
    """
    return f"{name}@{','.join(map(str, region.start))}"


def named_by(key: str, shape: tuple[int, ...]) -> tuple[str, Region]:
    """Which region of which tensor the entry `key` of a file is. Raises `ValueError` where it is none.

    >>> named_by("weight:step@", ())
    ('weight:step', Region(start=(), shape=()))
    """
    name, _, start = key.rpartition("@")
    region = Region(tuple(map(int, start.split(","))) if start else (), shape)
    if len(region.start) != len(shape):
        raise ValueError(f"'{key}' is of {len(shape)} dimensions")
    return name, region


LossScaleState = tuple[float, int]
"""The loss scale, and the steps since it last changed."""

Source = TypeVar("Source", str, int)


class RegionIndex(Generic[Source]):
    """Who has which regions of which tensors: files of a checkpoint, or ranks; `has_optimizer_state` where it is not weights
    alone."""

    def __init__(self, has_optimizer_state: bool = True) -> None:
        self.has_optimizer_state = has_optimizer_state
        self._where: dict[str, dict[Region, Source]] = {}
        self._with_state: set[str] | None = None

    def add(self, name: str, region: Region, source: Source) -> None:
        """`source` has this region; who was added before goes first."""
        self._where.setdefault(name, {}).setdefault(region, source)

    def sources(self, name: str, wanted: Region) -> list[tuple[Source, Region]]:
        """Who has which regions of what is `wanted` of a tensor. Raises `InputError` where nobody has some of it."""
        stored = self._where.get(self.known_as(name), {})
        if wanted in stored:
            return [(stored[wanted], wanted)]
        found = [(source, region) for region, source in stored.items() if wanted.overlap(region) is not None]
        if sum(overlap(wanted, region).num_elements for _, region in found) != wanted.num_elements:
            raise InputError(
                f"it does not have all of '{name}', so it is of another model, or was written by another version of "
                "stagewright"
            )
        return found

    def regions(self, name: str) -> dict[Region, Source]:
        """Of a tensor, who has each."""
        return self._where[name]

    @property
    def names(self) -> list[str]:
        """Of all tensors."""
        return list(self._where)

    def has_state(self, parameter: str) -> bool:
        """Whether there is more of a parameter than its weight."""
        if self._with_state is None:
            parts = (name.rpartition(":") for name in self._where)
            self._with_state = {name for name, _, part in parts if part != "weight"}
        return parameter in self._with_state

    def known_as(self, name: str) -> str:
        """Under which name it is there: of statistics that each replica has of its own, where there were fewer of them, the
        first replica's."""
        if name in self._where or OF_REPLICA not in name:
            return name
        prefix = name.rpartition(OF_REPLICA)[0] + OF_REPLICA
        return min((one for one in self._where if one.startswith(prefix)), default=name)


def overlap(one: Region, other: Region) -> Region:
    """What two regions have in common that were chosen because they overlap."""
    found = one.overlap(other)
    assert found is not None
    return found


def held(session: Session, index: RegionIndex[Any] | None = None) -> Iterator[Held]:
    """All that training changes and that this rank has; where it is to be read from what `index` has, with room for state
    of the optimizer that only its first step makes."""
    mesh, weights, names = session.mesh, session.weights, session.weights.names
    shared = parallelism(session.graph)
    shards = shared.shards if shared else {}
    holders: dict[int, int] = {}
    for stage in session.stages:
        for value in stage.parameters:
            here = session.plan.placement[stage.index]
            holders[value] = min(here, holders.get(value, here))

    def writer(value: int, replica: int) -> int:
        """Of those that hold the same, the first."""
        tensor_rank = mesh.tensor_rank if names[value] in shards else 0
        return mesh.global_rank(holders[value], replica, tensor_rank)

    def placed(value: int, part: str, region: Region, replica: int, tensor: torch.Tensor) -> Iterator[Held]:
        """A region of what this rank has of a parameter, as those of the whole one."""
        name = names[value]
        pieces = (
            in_whole(region, shards[name], mesh.tp, mesh.tensor_rank)
            if name in shards and region.shape
            else ((region, region),)
        )
        for whole, own in pieces:
            yield Held(
                f"{name}:{part}",
                whole,
                writer(value, replica),
                tensor[own.within(region)] if own.shape else tensor,
            )

    sharer = mesh.replica % mesh.num_shards
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
                for group, span in zip(flat.groups, flat.spans(sharer), strict=True)
                if group.is_decayed == target.span.is_decayed
            )
            for own, region, piece in _of_flat(group.entries, span, tensor):
                yield from placed(own, part, region, sharer, piece)
    if session.model_files.is_adapter:
        frozen, parts = {}, {}  # are those that the run started from
    else:
        frozen, parts = weights.parameters, session.shards.parts(are_trained=False)
    for value, tensor in frozen.items():
        if value not in weights.trained:
            yield from placed(value, "weight", Region.whole(tensor.shape), 0, tensor)
    for value, tensor in parts.items():
        flat = session.shards.flat_of(value)
        for own, region, piece in _of_flat(flat.entries, flat.shard(sharer), tensor):
            yield from placed(own, "weight", region, sharer, piece)
    first = mesh.global_rank(mesh.pipeline_rank, mesh.replica, 0)
    for value in dict.fromkeys(buffer for stage in session.own for buffer, _ in stage.mutations):
        tensor = weights.tensors[value]
        own = f"{names[value]}{OF_REPLICA}{mesh.replica}.{mesh.pipeline_rank}"
        yield Held(own, Region.whole(tensor.shape), first, tensor)


def loss_scale_of(session: Session) -> LossScaleState | None:
    """The loss scale, where there is one."""
    scale = session.loss_scale
    return None if scale is None else (scale.value, scale.num_good)


def resumed(session: Session, loss_scale: LossScaleState | None) -> None:
    """Everything that follows from what `held` gives, which was filled, and from the loss scale is as these are now; every
    rank must call this."""
    session.optimizer.updater.restored()
    session.shards.spread()
    if session.loss_scale is not None:
        if loss_scale is not None:
            session.loss_scale.value, session.loss_scale.num_good = loss_scale
        session.lengths.scale_loss(session.cotangent)
    session.runner.release()  # what was computed from parameters that have changed
    session.runner.restore()


def _of_flat(
    entries: Sequence[Entry], part: slice, shard: torch.Tensor
) -> Iterator[tuple[int, Region, torch.Tensor]]:
    """What `shard`, which is `part` of a flat buffer, or a number that belongs to it, is of each parameter of `entries`:
    regions and where they are."""
    for entry in entries:
        if not shard.dim():
            yield entry.value, Region.whole(()), shard
            continue
        first = max(entry.offset, part.start)
        stop = min(entry.offset + entry.meta.num_elements, part.stop)
        for stretch in stretches(entry.meta, first - entry.offset, stop - entry.offset):
            begin = first - part.start + stretch.offset
            rows = shard[begin : begin + stretch.region.num_elements]
            turned = rows.view([stretch.region.shape[dim] for dim in stretch.order])
            inverse = sorted(range(len(stretch.order)), key=stretch.order.__getitem__)
            yield entry.value, stretch.region, turned.permute(inverse)
