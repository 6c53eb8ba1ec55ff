"""Transport of values between ranks: asynchronous, in the order of the lowered program.

Every transfer of the program is a group of messages with distinct tags. A channel connects two stages in one direction; the
channels of one kind from one rank to another share a lane (`stagewright.schedule.lanes`), on which NCCL, which has no tags,
matches messages by their order. The buffers of a transfer are kept until `SENDS_IN_FLIGHT` more of the same channel were
sent, or the batch ends: the program, not timing, decides which buffers are alive.

Where messages match by order, transfers have slots: permanent buffers that channels share. Torch's NCCL backend registers
every tensor that it sends or receives with the allocator, which frees it only once an event of the lane's stream has
happened. The host is a batch ahead of the device, so that memory would grow by every boundary of the batch; a copy on the
device costs less.

Source: `ProcessGroupNCCL::pointToPoint`, which calls `recordStream` (pytorch issue 132292).
"""

from __future__ import annotations

import zlib
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from stagewright.errors import RunError
from stagewright.execution.collectives import Pending, is_ordered
from stagewright.graph.messages import Message, distinct
from stagewright.schedule.action import SENDS_IN_FLIGHT
from stagewright.tracing.arguments import DTYPES

_TAG_SPACE = 1 << 30
_Transfer = list[tuple[Pending, torch.Tensor]]
"""A transfer's messages in flight, and their buffers."""


@dataclass(frozen=True, eq=False)
class Channel:
    """One direction between two stages: the peer and the messages, the same on both sides."""

    name: str  # such as "0>1", from stage 0 to stage 1
    peer: int  # global rank at the other end
    messages: tuple[Message, ...]
    group: dist.ProcessGroup | None

    def tag(self, microbatch: int, index: int) -> int:
        return zlib.crc32(f"{self.name}/{microbatch}/{index}".encode()) % _TAG_SPACE


class Transport:
    """The transfers between a rank and its peers."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.num_bytes_sent = 0
        self._has_slots = dist.is_initialized() and is_ordered()
        self._idle: dict[tuple[str, int], list[torch.Tensor]] = defaultdict(list)
        """By dtype and number of elements."""
        self._posted: dict[tuple[str, int], _Transfer] = {}
        self._sending: dict[Channel, deque[_Transfer]] = defaultdict(deque)

    def post(self, channel: Channel, microbatch: int) -> None:
        """Allocate buffers for a transfer and begin to receive into them."""
        posted = self._posted[channel.name, microbatch] = []
        for index in range(len(channel.messages)):
            buffer = self._buffer(channel, index)
            work = dist.irecv(_raw(buffer), channel.peer, channel.group, channel.tag(microbatch, index))
            doing = f"receiving microbatch {microbatch} of stages {channel.name}"
            posted.append((Pending(work, doing, f"rank {channel.peer}"), buffer))

    def receive(self, channel: Channel, microbatch: int) -> dict[int, torch.Tensor]:
        """Wait for a posted transfer and return its values by id."""
        arrived: dict[int, torch.Tensor] = {}
        posted = self._posted.pop((channel.name, microbatch), None)
        if posted is None:
            raise RunError(
                f"microbatch {microbatch} of channel {channel.name} is used before its receive is posted"
            )
        for pending, _ in posted:  # before anything is launched, which may wait for the device
            pending.wait()
        for index, message in enumerate(channel.messages):
            _, buffer = posted.pop(0)
            content = buffer.clone() if self._has_slots else buffer
            arrived.update(_unpack(message, content))
            self._free(channel, index, buffer)
        return arrived

    def send(self, channel: Channel, microbatch: int, values: dict[int, torch.Tensor]) -> None:
        """Begin to send, after waiting until fewer than `SENDS_IN_FLIGHT` transfers of the same channel are in flight."""
        if len(self._sending[channel]) == SENDS_IN_FLIGHT:
            self._settle(channel)
        sending = []
        for index, message in enumerate(channel.messages):
            buffer = _pack(message, values)
            if self._has_slots:
                buffer = self._buffer(channel, index).copy_(buffer)
            work = dist.isend(_raw(buffer), channel.peer, channel.group, channel.tag(microbatch, index))
            pending = Pending(work, f"sending of stages {channel.name}", f"rank {channel.peer}")
            sending.append((pending, buffer))
            self.num_bytes_sent += message.num_bytes
        self._sending[channel].append(sending)

    def _settle(self, channel: Channel) -> None:
        """Wait for the oldest transfer on a channel and release its buffers."""
        for index, (pending, buffer) in enumerate(self._sending[channel].popleft()):
            pending.wait()
            self._free(channel, index, buffer)

    def _buffer(self, channel: Channel, index: int) -> torch.Tensor:
        """Return a buffer for message `index` of a transfer: an idle slot if there is one."""
        message = channel.messages[index]
        if idle := self._idle[message.dtype, message.num_elements]:
            return idle.pop()
        return torch.empty(message.num_elements, dtype=DTYPES[message.dtype], device=self.device)

    def _free(self, channel: Channel, index: int, buffer: torch.Tensor) -> None:
        """Return `buffer` to the idle slots: its next use, on any lane, runs after the present one, as lanes wait for the
        computations issued before."""
        if self._has_slots:
            message = channel.messages[index]
            self._idle[message.dtype, message.num_elements].append(buffer)

    def release(self) -> None:
        """Release the slots."""
        self._idle.clear()

    def buffers(self) -> Iterator[torch.Tensor]:
        """Yield the buffers of transfers in flight, and idle slots."""
        for idle in self._idle.values():
            yield from idle
        sent = (sending for waiting in self._sending.values() for sending in waiting)
        for transfer in (*self._posted.values(), *sent):
            yield from (buffer for _, buffer in transfer)

    def settle_all(self) -> None:
        """Wait for everything that was sent."""
        for channel, waiting in self._sending.items():
            while waiting:
                self._settle(channel)


def blank_values(channel: Channel, device: torch.device) -> dict[int, torch.Tensor]:
    """Return values by id as a transfer on `channel` moves them, all zero."""
    values: dict[int, torch.Tensor] = {}
    for message in channel.messages:
        values |= _unpack(
            message, torch.zeros(message.num_elements, dtype=DTYPES[message.dtype], device=device)
        )
    return values


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a flat tensor, so that dtypes that the backend does not support can be sent too."""
    return tensor.view(torch.uint8)


def _pack(message: Message, values: dict[int, torch.Tensor]) -> torch.Tensor:
    first = message.values[0]
    tensor = values[first.id]
    if message.whole:
        offset = first.meta.offset if len(message.values) > 1 else 0
        return tensor.as_strided((message.num_elements,), (1,), tensor.storage_offset() - offset)
    shape, stride = distinct(first.meta)
    return tensor.as_strided(shape, stride, tensor.storage_offset()).contiguous().view(-1)


def _unpack(message: Message, buffer: torch.Tensor) -> dict[int, torch.Tensor]:
    if message.whole:
        alone = len(message.values) == 1
        return {
            v.id: buffer.as_strided(v.meta.shape, v.meta.stride, 0 if alone else v.meta.offset)
            for v in message.values
        }
    value = message.values[0]
    shape, stride = distinct(value.meta)
    if value.meta.num_distinct == value.meta.extent:
        spread = buffer
    else:
        spread = torch.empty(value.meta.extent, dtype=buffer.dtype, device=buffer.device)
    spread.as_strided(shape, stride, 0).copy_(buffer.view(shape))
    return {value.id: spread.as_strided(value.meta.shape, value.meta.stride, 0)}
