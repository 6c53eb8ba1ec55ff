"""Shards of parameters, gradients and optimizer state over the replicas of a stage, in flat buffers.

Level 0 keeps everything on every replica; 1 shards the optimizer state, 2 the gradients too, 3 the parameters too. Streamed
buffers, of a single replica, are in host memory.

`stagewright.estimation.flat_operations`, from which bytes are predicted, determines when buffers are created and dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import methodcaller
from types import MappingProxyType

import torch

from stagewright.errors import RunError
from stagewright.estimation.flat_operations import FlatOperations, is_gathered
from stagewright.execution.accelerator import DeviceEvent, Stream, accelerator_of
from stagewright.execution.collectives import Pending, ReplicaGroup
from stagewright.execution.weights import Weights, starting_tensor
from stagewright.graph.flat_buffers import GRADIENTS, OPTIMIZER, PARAMETERS, BufferEntry, FlatLayout
from stagewright.tracing.arguments import DTYPES


class FlatBuffer:
    """A flat buffer of this rank.

    Args:
        starting: initial values of sharded parameters by name, on the host.
        reduce_dtype: dtype in which gradients are summed over the replicas; None is that of the gradients.
    """

    def __init__(
        self,
        flat: FlatLayout,
        weights: Weights,
        replicas: ReplicaGroup | None,
        starting: Mapping[str, torch.Tensor],
        reduce_dtype: torch.dtype | None,
    ) -> None:
        self.flat = flat
        self.weights = weights
        self._replicas = replicas
        self.index = 0 if replicas is None else replicas.index
        self.part = flat.shard(self.index)
        self.dtype = DTYPES[flat.dtype]
        self.gradient_dtype = weights.accumulate_dtype or self.dtype
        self.reduce_dtype = reduce_dtype or self.gradient_dtype
        self.whole: torch.Tensor | None = None
        self.shard: torch.Tensor | None = None
        self.gradient: torch.Tensor | None = None
        self.gradient_shard: torch.Tensor | None = None
        self._gathering: Pending | None = None
        self._sums: dict[str, tuple[Pending, torch.Tensor]] = {}
        if flat.level >= OPTIMIZER:
            self._fill(starting)
        if flat.is_trained and flat.level < GRADIENTS:
            self.gradient = self.open()
            self.gradient_shard = self.gradient[self.part] if flat.level >= OPTIMIZER else None

    def _fill(self, starting: Mapping[str, torch.Tensor]) -> None:
        """Copy the parameters from `starting` one by one; the device gets only the part that stays there."""
        stays_whole = self.flat.level < PARAMETERS
        device = self.weights.device if stays_whole else torch.device("cpu")
        whole = torch.zeros(self.flat.num_elements, dtype=self.dtype, device=device)
        for entry in self.flat.entries:
            view = _view(whole, entry)
            view.copy_(starting_tensor(starting, entry.name, entry.meta))
            if stays_whole:
                self.weights.put(entry.value, view)
        if stays_whole:
            self.whole, self.shard = whole, whole[self.part]
        else:
            self.shard = whole[self.part].to(self.weights.device, copy=True)

    @property
    def replicas(self) -> ReplicaGroup:
        """The group of the replicas, which all buffers but streamed ones have."""
        assert self._replicas is not None
        return self._replicas

    def _zeros(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(self.flat.num_elements, dtype=dtype, device=self.weights.device)

    def _empty(self) -> torch.Tensor:
        return torch.empty(self.flat.num_elements, dtype=self.dtype, device=self.weights.device)

    def _values(self, whole: torch.Tensor) -> dict[int, torch.Tensor]:
        return {entry.value: _view(whole, entry) for entry in self.flat.entries}

    def _named(self, whole: torch.Tensor) -> dict[str, torch.Tensor]:
        return {entry.name: _view(whole, entry) for entry in self.flat.entries}

    # -- parameters -------------------------------------------------------------------------------------------------

    def gather(self) -> None:
        """Start to gather the parameters."""
        assert self.shard is not None
        if self.whole is None:
            self.whole = self._empty()
        self._gathering = self.replicas.gather(self.whole, self.shard, f"gathering parameters of {self}")

    def gathered(self) -> dict[str, torch.Tensor]:
        """Wait for the gather, if any, and return the whole parameters by name."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
        if self.whole is None:
            raise RunError(f"the parameters of {self} are used before they are gathered")
        return self._named(self.whole)

    def release(self) -> None:
        """Drop the whole parameters."""
        self.gathered()
        self.whole = None

    # -- gradients --------------------------------------------------------------------------------------------------

    def open(self) -> torch.Tensor:
        """Create a whole buffer in which gradients accumulate."""
        self.gradient = self._zeros(self.gradient_dtype)
        self.weights.accumulate_into(self._values(self.gradient))
        return self.gradient

    def reduce(self) -> None:
        """Start to sum the gradients over the replicas; sharded gradients accumulate no further in this buffer."""
        assert self.gradient is not None
        sent, doing = self.gradient.to(self.reduce_dtype), f"summing gradients of {self}"
        if self.flat.level >= GRADIENTS:
            self.gradient = None
            self.weights.close(self.flat.values)
        if self.flat.level >= OPTIMIZER:
            pending = self.replicas.scatter_sum(sent, sent[self.part], doing)
        else:
            pending = self.replicas.sum(sent, doing)
        self._sums["replicas"] = pending, sent

    def _sum(self, over: str) -> torch.Tensor | None:
        """Wait for a sum and return its buffer, or None where no sum was started."""
        if over not in self._sums:
            return None
        pending, sent = self._sums.pop(over)
        pending.wait()
        return sent

    def settle(self) -> None:
        """Wait for the sum and put it into the buffer that the optimizer reads."""
        if (summed := self._sum("replicas")) is None:
            return
        if self.flat.level >= GRADIENTS:
            if self.gradient_shard is None:
                self.gradient_shard = summed[self.part].to(self.gradient_dtype, copy=True)
            else:
                self.gradient_shard.add_(summed[self.part])
        elif summed is not self.gradient:
            part = self.part if self.flat.level >= OPTIMIZER else slice(None)
            self._own_sum().copy_(summed[part])

    def _own_sum(self) -> torch.Tensor:
        """Return this replica's part of the summed gradients."""
        gradients = self.gradient if self.flat.level < OPTIMIZER else self.gradient_shard
        assert gradients is not None
        return gradients

    def cross(self) -> None:
        """Start to sum this replica's part over its copies, if there are any."""
        if self.replicas.copies is not None:
            sent = self._own_sum().to(self.reduce_dtype)
            pending = self.replicas.sum_copies(sent, f"summing gradients of {self} over copies")
            self._sums["copies"] = pending, sent

    def finish(self) -> None:
        """Wait for the sum over the copies."""
        summed = self._sum("copies")
        if summed is not None and self.reduce_dtype != self.gradient_dtype:
            self._own_sum().copy_(summed)

    def drop_gradients(self) -> None:
        """Drop this replica's part of the sum, if it has a separate buffer."""
        if self.flat.level >= GRADIENTS:
            self.gradient_shard = None

    def whole_gradients(self) -> dict[int, torch.Tensor]:
        """Return the whole summed gradients by parameter; every replica must call this."""
        whole, shard = self.gradient, self.gradient_shard
        if shard is not None:
            whole = self._zeros(self.gradient_dtype)
            self.replicas.gather(whole, shard, f"gathering gradients of {self}").wait()
        assert whole is not None
        return self._values(whole)

    def whole_parameters(self) -> dict[str, torch.Tensor]:
        """Return the whole parameters by name, in separate memory; every replica must call this."""
        assert self.shard is not None
        whole = self._empty()
        self.replicas.gather(whole, self.shard, f"gathering parameters of {self}").wait()
        return self._named(whole)

    def counted_gradients(self, is_counted: Callable[[int], bool]) -> Iterable[torch.Tensor]:
        """Return this replica's part of the sum, without parameters that others count: tensor parallel ranks hold some
        parameters whole, the same on each, besides those that are sharded."""
        assert self.gradient_shard is not None
        if all(is_counted(entry.value) for entry in self.flat.entries):
            return [self.gradient_shard]
        first, last = self.part.start, self.part.stop
        spans = [
            (max(entry.offset, first), min(entry.offset + entry.meta.num_elements, last))
            for entry in self.flat.entries
            if is_counted(entry.value)
        ]
        return [self.gradient_shard[low - first : high - first] for low, high in spans if low < high]

    def tensors(self) -> Iterable[torch.Tensor]:
        """Return the tensors held between batches on the device."""
        return [t for t in (self.whole, self.shard, self.gradient, self.gradient_shard) if t is not None]

    def host_tensors(self) -> Iterable[torch.Tensor]:
        """Return the tensors in host memory."""
        return ()

    def __str__(self) -> str:
        stages = ", ".join(map(str, self.flat.stages))
        return f"stage {stages}" if len(self.flat.stages) == 1 else f"stages {stages}"


class StreamedBuffer(FlatBuffer):
    """A flat buffer in host memory. Its parameters are copied to the device before use, and its gradients, if it is trained,
    back after the last backward of a batch.

    On a GPU each direction has the stream of `Accelerator.copy_streams`. A copy begins when the device has computed
    everything issued before it; memory of the device is allocated, and freed after the wait for the copy, on the stream of
    the computations.
    """

    def __init__(self, flat: FlatLayout, weights: Weights, starting: Mapping[str, torch.Tensor]) -> None:
        self._accelerator = accelerator_of(weights.device)
        self._on_host: torch.Tensor | None = None
        """Gradients on the host, from the first batch on."""
        self._added: torch.Tensor | None = None
        """Host memory for gradients that are added to these, where a batch copies several times."""
        self._copied: DeviceEvent | None = None
        """Of the latest copy to the device."""
        self._sent: tuple[torch.Tensor, torch.Tensor, DeviceEvent] | None = None
        """Gradients on the device, where they are copied to, and the event after it."""
        super().__init__(flat, weights, None, starting, None)

    def _host_empty(self, dtype: torch.dtype) -> torch.Tensor:
        return self._accelerator.lasting_on_host((self.flat.num_elements,), dtype, self)

    def _fill(self, starting: Mapping[str, torch.Tensor]) -> None:
        self.shard = self._host_empty(self.dtype).zero_()
        for entry in self.flat.entries:
            _view(self.shard, entry).copy_(starting_tensor(starting, entry.name, entry.meta))
        if self.flat.is_trained:
            self._on_host = self._host_empty(self.gradient_dtype)

    def gather(self) -> None:
        """Start to copy the parameters to the device."""
        assert self.shard is not None
        if self.whole is None:
            self.whole = self._empty()
        _, stream = self._accelerator.copy_streams
        self._copied = self._copy(self.whole, self.shard, stream)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> DeviceEvent:
        stream.wait_stream(self._accelerator.current_stream())
        with stream:
            target.copy_(source, non_blocking=True)
        return stream.record_event()

    def gathered(self) -> dict[str, torch.Tensor]:
        if self._copied is not None:
            self._accelerator.current_stream().wait_event(self._copied)
            self._copied = None
        return super().gathered()

    def reduce(self) -> None:
        """Start to copy the gradients to the host."""
        assert self.gradient is not None
        assert self._on_host is not None
        sent, self.gradient = self.gradient, None
        self.weights.close(self.flat.values)
        target = self._on_host
        if self.gradient_shard is not None:
            self._added = target = self._host_empty(sent.dtype) if self._added is None else self._added
        stream, _ = self._accelerator.copy_streams
        self._sent = sent, target, self._copy(target, sent, stream)

    def settle(self) -> None:
        if self._sent is None:
            return
        (_, target, copied), self._sent = self._sent, None
        self._accelerator.current_stream().wait_event(copied)
        if target is self._on_host:
            self.gradient_shard = target
        else:
            assert self.gradient_shard is not None
            copied.synchronize()
            self.gradient_shard.add_(target)

    def cross(self) -> None:
        pass

    def finish(self) -> None:
        """Wait until the gradients are on the host."""
        if self.gradient_shard is not None:
            self._accelerator.current_stream().synchronize()

    def whole_gradients(self) -> dict[int, torch.Tensor]:
        assert self.gradient_shard is not None
        return self._values(self.gradient_shard.to(self.weights.device))

    def whole_parameters(self) -> dict[str, torch.Tensor]:
        """Return the parameters by name, in host memory."""
        assert self.shard is not None
        return self._named(self.shard)

    def tensors(self) -> Iterable[torch.Tensor]:
        return [tensor for tensor in (self.whole, self.gradient) if tensor is not None]

    def host_tensors(self) -> Iterable[torch.Tensor]:
        """Return the tensors in host memory."""
        return [tensor for tensor in (self.shard, self._on_host, self._added) if tensor is not None]


def _view(buffer: torch.Tensor, entry: BufferEntry) -> torch.Tensor:
    return buffer.as_strided(entry.meta.shape, entry.meta.stride, buffer.storage_offset() + entry.offset)


def _reserve(flats: Iterable[FlatLayout], weights: Weights) -> None:
    """Pin the host memory of streamed parameters and gradients."""
    sizes: list[int] = []
    for flat in flats:
        if flat.is_streamed:
            dtype = DTYPES[flat.dtype]
            kinds = [dtype, weights.accumulate_dtype or dtype] if flat.is_trained else [dtype]
            sizes += [flat.num_elements * kind.itemsize for kind in kinds]
    if sizes and (accelerator := accelerator_of(weights.device)).is_asynchronous:
        accelerator.arena.reserve_lasting(sizes)


class Shards:
    """All flat buffers of a rank.

    Args:
        flats: layouts of the buffers that its stages use; without any, nothing is sharded.
        weights: tensors of the rank, without the sharded parameters.
        replicas: group of the replicas; None where there is only one.
        starting: initial values of sharded parameters by name, on the host; each is read once.
        reduce_dtype: dtype in which gradients are summed; None is that of the gradients.
    """

    def __init__(
        self,
        flats: Sequence[FlatLayout] = (),
        weights: Weights | None = None,
        replicas: ReplicaGroup | None = None,
        starting: Mapping[str, torch.Tensor] = MappingProxyType({}),
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self.flats = tuple(flats)
        self.buffers: dict[FlatLayout, FlatBuffer] = {}
        if weights is not None:
            _reserve(self.flats, weights)
        for flat in self.flats:
            if flat.is_streamed and weights is not None:
                self.buffers[flat] = StreamedBuffer(flat, weights, starting)
            elif weights is not None and replicas is not None:
                self.buffers[flat] = FlatBuffer(flat, weights, replicas, starting, reduce_dtype)
        self.replicas = replicas

    def is_gathered(self, stage: int) -> bool:
        """Return whether parameters of `stage` exist only between GATHER and RELEASE."""
        return is_gathered(self.flats, stage)

    def drop_gradients(self) -> None:
        """Drop the gradients of the last batch."""
        for buffer in self.buffers.values():
            buffer.drop_gradients()

    def before(self, operations: FlatOperations) -> None:
        """Do the operations on buffers before an action, except passing parameters to its stage."""
        for flats, operation in (
            (operations.settles, methodcaller("settle")),
            (operations.crosses, methodcaller("cross")),
            (operations.releases, methodcaller("release")),
            (operations.gathers, methodcaller("gather")),
            (operations.opens, methodcaller("open")),
            (operations.reduces, methodcaller("reduce")),
        ):
            for flat in flats:
                operation(self.buffers[flat])

    def parameters(self, stage: int) -> dict[str, torch.Tensor]:
        """Wait for the gathered parameters of `stage` and return them by name."""
        flats = (flat for flat in self.flats if flat.level >= PARAMETERS and stage in flat.stages)
        return {name: tensor for flat in flats for name, tensor in self.buffers[flat].gathered().items()}

    def end_batch(self, operations: FlatOperations) -> None:
        """Sum the gradients that no REDUCE has summed, and wait for all sums."""
        self.before(operations)
        for flat in operations.reduces:
            self.buffers[flat].settle()
            self.buffers[flat].cross()
        for buffer in self.buffers.values():
            buffer.finish()

    def spread(self) -> None:
        """Gather, after an update of the shards, the parameters that are kept whole."""
        updated = [
            buffer
            for flat, buffer in self.buffers.items()
            if flat.is_trained and OPTIMIZER <= flat.level < PARAMETERS
        ]
        for buffer in updated:
            buffer.gather()
        for buffer in updated:
            buffer.gathered()

    def parts(self, are_trained: bool = True) -> dict[int, torch.Tensor]:
        """Return this rank's shards of trained (or of frozen) parameters, by the first parameter of each buffer."""
        return {
            flat.values[0]: buffer.shard
            for flat, buffer in self.buffers.items()
            if flat.is_trained == are_trained and buffer.shard is not None
        }

    def spans(self, value: int) -> list[tuple[bool, slice]]:
        """Return, for each group in the buffer of a part, whether it has weight decay, and its slice of the part."""
        flat, buffer = next(item for item in self.buffers.items() if item[0].values[0] == value)
        first = buffer.part.start
        spans = flat.spans(buffer.index)
        return [
            (group.is_decayed, slice(span.start - first, span.stop - first))
            for group, span in zip(flat.groups, spans, strict=True)
        ]

    def flat_of(self, value: int) -> FlatLayout:
        """Return the layout of the flat buffer whose first parameter is `value`."""
        return next(flat for flat in self.flats if flat.values[0] == value)

    def whole_parameters(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield sharded parameters, whole and by name, one flat buffer after another; every replica must call this."""
        for flat, buffer in self.buffers.items():
            if flat.level >= PARAMETERS:
                yield buffer.whole_parameters()

    def gradient_parts(self) -> dict[int, torch.Tensor]:
        """Return the gradients of `parts`, complete at the end of a batch."""
        return {
            flat.values[0]: buffer.gradient_shard
            for flat, buffer in self.buffers.items()
            if buffer.gradient_shard is not None
        }

    def counted_gradients(self, is_counted: Callable[[int], bool]) -> list[torch.Tensor]:
        """Return the parts of gradients that this rank counts in a norm over the whole model."""
        buffers = (buffer for buffer in self.buffers.values() if buffer.gradient_shard is not None)
        return [part for buffer in buffers for part in buffer.counted_gradients(is_counted)]

    def is_sharded(self, parameter: int) -> bool:
        """Return whether each replica updates only a part of `parameter`."""
        return any(flat.level >= OPTIMIZER and parameter in flat.values for flat in self.flats)

    def total(self, part: torch.Tensor) -> torch.Tensor:
        """Return the sum of a number over the replicas."""
        return part if self.replicas is None else self.replicas.total(part)

    def whole_gradients(self, weights: Weights) -> Mapping[int, torch.Tensor]:
        """Return all whole gradients of this rank by parameter; every replica must call this."""
        gradients = dict(weights.gradients)
        for buffer in self.buffers.values():
            if buffer.flat.is_trained:
                gradients.update(buffer.whole_gradients())
        return {value: gradients[value] for value in weights.trained}

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors held between batches on the device."""
        return [tensor for buffer in self.buffers.values() for tensor in buffer.tensors()]

    def host_tensors(self) -> list[torch.Tensor]:
        """Return the tensors of streamed buffers in host memory."""
        return [tensor for buffer in self.buffers.values() for tensor in buffer.host_tensors()]

    @property
    def streamed(self) -> frozenset[int]:
        """First parameters of the streamed buffers that are trained."""
        return frozenset(flat.values[0] for flat in self.flats if flat.is_streamed and flat.is_trained)
