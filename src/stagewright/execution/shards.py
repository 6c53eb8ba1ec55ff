"""Shards of parameters, gradients and optimizer state over the replicas of a stage, in flat buffers.

Level 0 keeps everything on every replica; 1 shards the optimizer state, 2 the gradients too, 3 the parameters too.
`stagewright.estimation.flat_operations`, from which bytes are predicted, determines when buffers are created and dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

import torch

from stagewright.errors import RunError
from stagewright.estimation.flat_operations import FlatOperations, is_gathered
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
        replicas: ReplicaGroup,
        starting: Mapping[str, torch.Tensor],
        reduce_dtype: torch.dtype | None,
    ) -> None:
        self.flat = flat
        self.weights = weights
        self.replicas = replicas
        self.part = flat.shard(replicas.index)
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
        """Return the tensors held between batches."""
        return [t for t in (self.whole, self.shard, self.gradient, self.gradient_shard) if t is not None]

    def __str__(self) -> str:
        stages = ", ".join(map(str, self.flat.stages))
        return f"stage {stages}" if len(self.flat.stages) == 1 else f"stages {stages}"


def _view(buffer: torch.Tensor, entry: BufferEntry) -> torch.Tensor:
    return buffer.as_strided(entry.meta.shape, entry.meta.stride, buffer.storage_offset() + entry.offset)


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
        if weights is not None and replicas is not None:
            self.buffers = {
                flat: FlatBuffer(flat, weights, replicas, starting, reduce_dtype) for flat in self.flats
            }
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
            (operations.settles, FlatBuffer.settle),
            (operations.crosses, FlatBuffer.cross),
            (operations.releases, FlatBuffer.release),
            (operations.gathers, FlatBuffer.gather),
            (operations.opens, FlatBuffer.open),
            (operations.reduces, FlatBuffer.reduce),
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
        spans = flat.spans(buffer.replicas.index)
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
        assert self.replicas is not None
        return self.replicas.total(part)

    def whole_gradients(self, weights: Weights) -> Mapping[int, torch.Tensor]:
        """Return all whole gradients of this rank by parameter; every replica must call this."""
        gradients = dict(weights.gradients)
        for buffer in self.buffers.values():
            if buffer.flat.is_trained:
                gradients.update(buffer.whole_gradients())
        return {value: gradients[value] for value in weights.trained}

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors held between batches."""
        return [tensor for buffer in self.buffers.values() for tensor in buffer.tensors()]
