"""State on its way from the ranks of one plan to those of another, in the same processes and without a disk."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from stagewright.execution.collectives import exchange
from stagewright.execution.links import rounds
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
from stagewright.units import MIB

CHUNK_BYTES = 256 * MIB
_ALIGNMENT_BYTES = 16  # of the widest element, complex128


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


@dataclass(frozen=True)
class _RegionRequest:
    """A box `part` of `region`, which rank `source` has taken under `key`, for a place with elements of `item_bytes`."""

    source: int
    key: str
    region: Region
    part: Region
    item_bytes: int


@dataclass(frozen=True)
class _ChunkPart:
    """Part of request number `request` in a chunk: a box, and its first byte there."""

    request: int
    box: Region
    offset: int
    num_bytes: int

    def of(self, chunk: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return chunk[self.offset : self.offset + self.num_bytes].view(dtype).view(self.box.shape)


def give(session: Session, taken: Taken, chunk_bytes: int = CHUNK_BYTES) -> None:
    """Put the state that all ranks have `taken` into `session`, whatever its plan; every rank must call this.

    State moves between two ranks at a time in chunks of at most `chunk_bytes`, each way one, so that a device has the
    session's state and two chunks at most. All ranks go through the pairs in one order.

    Raises:
        InputError: it is of another model.
    """
    rank = session.mesh.rank
    index = RegionIndex[int]()
    offers = exchange([[name, region.start, region.shape] for name, region, _ in taken.regions.values()])
    for source, regions in enumerate(offers):
        for name, start, shape in regions:
            index.add(name, Region(tuple(start), tuple(shape)), source)
    wanted: list[_RegionRequest] = []
    places: list[torch.Tensor] = []
    for state in held(session, index):
        for source, region in index.sources(state.name, state.region):
            both = overlap(state.region, region)
            key = key_of(index.known_as(state.name), region)
            wanted.append(_RegionRequest(source, key, region, both, state.tensor.element_size()))
            places.append(state.tensor[both.within(state.region)] if both.shape else state.tensor)
    requests = TypeAdapter(list[_RegionRequest])
    of_ranks = [*map(requests.validate_python, exchange(requests.dump_python(wanted, mode="json")))]
    for place, request in zip(places, wanted, strict=True):
        if request.source == rank:
            part = taken.regions[request.key][2]
            place.copy_(part[request.part.within(request.region)] if request.part.shape else part)
    moving = _Moving(session.device, rank, taken, of_ranks, places, chunk_bytes)
    for pair in itertools.chain.from_iterable(rounds([[other] for other in range(len(of_ranks))])):
        if rank in pair:
            moving.between(sum(pair) - rank)
    resumed(session, taken.loss_scale)


class _Moving:
    """State on its way between this rank and others, through a buffer each way.

    Args:
        of_ranks: what each rank wants; `places` are where it goes on this one.
    """

    def __init__(
        self,
        device: torch.device,
        rank: int,
        taken: Taken,
        of_ranks: Sequence[Sequence[_RegionRequest]],
        places: Sequence[torch.Tensor],
        chunk_bytes: int,
    ) -> None:
        self.rank, self.taken, self.of_ranks, self.places = rank, taken, of_ranks, places
        self.chunk_bytes = chunk_bytes
        out = [request for other, of_other in enumerate(of_ranks) if other != rank for request in of_other]
        out_bytes = _buffer_bytes([request for request in out if request.source == rank], chunk_bytes)
        in_bytes = _buffer_bytes([own for own in of_ranks[rank] if own.source != rank], chunk_bytes)
        self._packed = torch.empty(out_bytes, dtype=torch.uint8)
        self._sent = self._packed.to(device)
        self._arrived = torch.empty(in_bytes, dtype=torch.uint8, device=device)

    def between(self, other: int) -> None:
        """Send rank `other` what it wants of this one, and receive what this one wants of it."""
        requests = [request for request in self.of_ranks[other] if request.source == self.rank]
        numbers = [number for number, own in enumerate(self.of_ranks[self.rank]) if own.source == other]
        wanted = [self.of_ranks[self.rank][number] for number in numbers]
        both_ways = itertools.zip_longest(
            _chunks(requests, self.chunk_bytes), _chunks(wanted, self.chunk_bytes), fillvalue=()
        )
        for going, coming in both_ways:
            operations = []
            if coming:
                operations.append(dist.P2POp(dist.irecv, self._arrived[: _num_bytes(coming)], other))
            if going:
                operations.append(dist.P2POp(dist.isend, self._pack(requests, going), other))
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            for piece in coming:
                place, part = self.places[numbers[piece.request]], wanted[piece.request].part
                inner = place[piece.box.within(part)] if part.shape else place
                inner.copy_(piece.of(self._arrived, place.dtype))

    def _pack(self, requests: Sequence[_RegionRequest], pieces: Sequence[_ChunkPart]) -> torch.Tensor:
        """What `pieces` say of what was taken, on the device."""
        for piece in pieces:
            request = requests[piece.request]
            tensor = self.taken.regions[request.key][2]
            part = tensor[piece.box.within(request.region)] if piece.box.shape else tensor
            piece.of(self._packed, tensor.dtype).copy_(part)
        size = _num_bytes(pieces)
        sent = self._sent[:size]
        return sent if self._sent is self._packed else sent.copy_(self._packed[:size])


def _buffer_bytes(requests: Sequence[_RegionRequest], chunk_bytes: int) -> int:
    """Bytes that no chunk of `requests` exceeds."""
    sizes = [request.part.num_elements * request.item_bytes for request in requests]
    return min(max(chunk_bytes, _ALIGNMENT_BYTES), sum(map(_aligned, sizes)))


def _num_bytes(pieces: Sequence[_ChunkPart]) -> int:
    return pieces[-1].offset + pieces[-1].num_bytes


def _chunks(requests: Sequence[_RegionRequest], chunk_bytes: int) -> Iterator[list[_ChunkPart]]:
    """All that is requested in chunks of at most so many bytes, the same on both ends."""
    chunk: list[_ChunkPart] = []
    for number, request in enumerate(requests):
        for box in request.part.pieces(max(1, chunk_bytes // request.item_bytes)):
            size = box.num_elements * request.item_bytes
            offset = _aligned(_num_bytes(chunk)) if chunk else 0
            if chunk and offset + size > chunk_bytes:
                yield chunk
                chunk, offset = [], 0
            if size:
                chunk.append(_ChunkPart(number, box, offset, size))
    if chunk:
        yield chunk


def _aligned(offset: int) -> int:
    """The next byte at which an element of any type may lie."""
    return -(-offset // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
