"""Transfer of state from the ranks of one plan to those of another, in the same processes and without a disk."""

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
    """The state that this rank hands over from the previous plan: copies in host memory, and the loss scale."""

    regions: Mapping[str, tuple[str, Region, torch.Tensor]]
    """By `key_of`: name, region, contents."""
    loss_scale: LossScaleState | None


def take(session: Session) -> Taken:
    """Copy the part of a session's state that this rank writes; the session may be dropped then."""
    written = [state for state in held(session) if state.writer == session.mesh.rank]
    return Taken(
        {
            state.key: (state.name, state.region, state.tensor.detach().to("cpu", copy=True))
            for state in written
        },
        loss_scale_of(session),
    )


@dataclass(frozen=True)
class _RegionRequest:
    """A request for the box `part` of `region`, which rank `source` has taken under `key`, to be stored in elements of
    `item_bytes` bytes."""

    source: int
    key: str
    region: Region
    part: Region
    item_bytes: int


@dataclass(frozen=True)
class _ChunkPart:
    """The part of request number `request` in a chunk: a box, and the offset of its first byte in the chunk."""

    request: int
    box: Region
    offset: int
    num_bytes: int

    def of(self, chunk: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return chunk[self.offset : self.offset + self.num_bytes].view(dtype).view(self.box.shape)


def give(session: Session, taken: Taken, chunk_bytes: int = CHUNK_BYTES) -> None:
    """Put the state that all ranks have `taken` into `session`, whatever its plan; every rank must call this.

    State moves between two ranks at a time in chunks of at most `chunk_bytes`, one each way, so that a device holds the
    session's state and at most two chunks. All ranks go through the pairs in one order.

    Raises:
        InputError: the state is of another model.
    """
    rank = session.mesh.rank
    index = RegionIndex[int]()
    regions_by_rank = exchange(
        [[name, region.start, region.shape] for name, region, _ in taken.regions.values()]
    )
    for source, regions in enumerate(regions_by_rank):
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
    """The transfer of state between this rank and others, through a buffer each way.

    Args:
        of_ranks: the requests of each rank.
        places: tensors that receive this rank's requests.
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
        in_bytes = _buffer_bytes(
            [request for request in of_ranks[rank] if request.source != rank], chunk_bytes
        )
        self._packed = torch.empty(out_bytes, dtype=torch.uint8)
        self._sent = self._packed.to(device)
        self._arrived = torch.empty(in_bytes, dtype=torch.uint8, device=device)

    def between(self, other: int) -> None:
        """Send rank `other` the parts that it requests from this rank, and receive those that this rank requests."""
        requests = [request for request in self.of_ranks[other] if request.source == self.rank]
        numbers = [
            number for number, request in enumerate(self.of_ranks[self.rank]) if request.source == other
        ]
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
        """Return the contents of `pieces` from the taken state, packed on the device."""
        for piece in pieces:
            request = requests[piece.request]
            tensor = self.taken.regions[request.key][2]
            part = tensor[piece.box.within(request.region)] if piece.box.shape else tensor
            piece.of(self._packed, tensor.dtype).copy_(part)
        size = _num_bytes(pieces)
        sent = self._sent[:size]
        return sent if self._sent is self._packed else sent.copy_(self._packed[:size])


def _buffer_bytes(requests: Sequence[_RegionRequest], chunk_bytes: int) -> int:
    """Return an upper bound on the bytes of a chunk of `requests`."""
    sizes = [request.part.num_elements * request.item_bytes for request in requests]
    return min(max(chunk_bytes, _ALIGNMENT_BYTES), sum(map(_aligned, sizes)))


def _num_bytes(pieces: Sequence[_ChunkPart]) -> int:
    return pieces[-1].offset + pieces[-1].num_bytes


def _chunks(requests: Sequence[_RegionRequest], chunk_bytes: int) -> Iterator[list[_ChunkPart]]:
    """Yield all requested parts in chunks of at most `chunk_bytes`, identical on both ends."""
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
    """Return the next offset at which an element of any type may lie."""
    return -(-offset // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
