"""State on its way from the ranks of one plan to those of another, in the same processes and without a disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from stagewright.execution.collectives import exchange
from stagewright.execution.regions import Region
from stagewright.execution.session import Session
from stagewright.execution.state import (
    LossScaleState,
    RegionIndex,
    held,
    key_of,
    loss_scale_of,
    overlap,
    resumed,
)


@dataclass(frozen=True)
class Taken:
    """What this rank had to hand over under the plan before: copies in memory of the host, and the loss scale."""

    regions: Mapping[str, tuple[str, Region, torch.Tensor]]
    """By `key_of`: name, region, contents."""
    loss_scale: LossScaleState | None


def take(session: Session) -> Taken:
    """A copy of the part of a session's state that this rank stands for; the session may go then."""
    own = [one for one in held(session) if one.writer == session.mesh.rank]
    return Taken(
        {one.key: (one.name, one.region, one.tensor.detach().to("cpu", copy=True)) for one in own},
        loss_scale_of(session),
    )


def give(session: Session, taken: Taken) -> None:
    """Put the state that all ranks have `taken` into `session`, whatever its plan; every rank must call this.

    Raises:
        InputError: it is of another model.
    """
    rank = session.mesh.rank
    index = RegionIndex[int]()
    told = exchange([[name, region.start, region.shape] for name, region, _ in taken.regions.values()])
    for source, offers in enumerate(told):
        for name, start, shape in offers:
            index.add(name, Region(tuple(start), tuple(shape)), source)
    wanted: list[tuple[int, str, Region, Region]] = []
    places: list[torch.Tensor] = []
    for one in held(session, index):
        for source, region in index.sources(one.name, one.region):
            both = overlap(one.region, region)
            wanted.append((source, key_of(index.known_as(one.name), region), region, both))
            places.append(one.tensor[both.within(one.region)] if both.shape else one.tensor)
    asked = exchange(
        [
            [source, key, region.start, region.shape, both.start, both.shape]
            for source, key, region, both in wanted
        ]
    )
    sent = [
        (reader, _packed(_parts(requests, rank, taken)))
        for reader, requests in enumerate(asked)
        if any(one[0] == rank for one in requests)
    ]
    arrived = _moved(session.device, rank, sent, wanted, places)
    for source, packed in arrived.items():
        offset = 0
        for place, request in zip(places, wanted, strict=True):
            if request[0] != source:
                continue
            size = place.numel() * place.element_size()
            part = torch.empty(place.shape, dtype=place.dtype)
            part.view(-1).view(torch.uint8).copy_(packed[offset : offset + size])
            place.copy_(part)
            offset += size
    resumed(session, taken.loss_scale)


def _parts(requests: Sequence[Any], rank: int, taken: Taken) -> Iterator[torch.Tensor]:
    """What a rank has asked this one for, in the order of its requests."""
    for source, key, start, shape, inner, extent in requests:
        if source != rank:
            continue
        _, _, tensor = taken.regions[key]
        region, both = Region(tuple(start), tuple(shape)), Region(tuple(inner), tuple(extent))
        yield tensor[both.within(region)] if both.shape else tensor


def _packed(parts: Iterator[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])


def _moved(
    device: torch.device,
    rank: int,
    sent: Sequence[tuple[int, torch.Tensor]],
    wanted: Sequence[tuple[int, str, Region, Region]],
    places: Sequence[torch.Tensor],
) -> dict[int, torch.Tensor]:
    """The bytes that every rank has packed for this one, by rank."""
    sizes: dict[int, int] = {}
    for place, (source, *_) in zip(places, wanted, strict=True):
        sizes[source] = sizes.get(source, 0) + place.numel() * place.element_size()
    arrived = {
        source: torch.empty(size, dtype=torch.uint8, device=device)
        for source, size in sizes.items()
        if source != rank
    }
    own = {reader: packed for reader, packed in sent if reader == rank}
    going = [(reader, packed.to(device)) for reader, packed in sent if reader != rank]
    works = [
        *(dist.P2POp(dist.irecv, buffer, source) for source, buffer in sorted(arrived.items())),
        *(dist.P2POp(dist.isend, packed, reader) for reader, packed in going),
    ]
    if works:
        for work in dist.batch_isend_irecv(works):
            work.wait()
    return {**own, **{source: buffer.cpu() for source, buffer in arrived.items()}}
