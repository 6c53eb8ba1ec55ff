"""Flat buffers: the parameters of a stage one after the other, so that one collective moves them all.

The layout is computed once, here: the executor allocates it, the memory replay counts it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stagewright.graph.expert_parallel import expert_parallelism
from stagewright.graph.stage import Stage
from stagewright.graph.tensor import ITEM_BYTES, TensorMeta, contiguous
from stagewright.graph.tensor_parallel import tensor_parallel_size

ALIGNMENT_BYTES = 128
"""Every parameter and every shard starts at a multiple of this: a cache line of a GPU."""

LEVELS = (0, 1, 2, 3)
"""Levels of sharding over replicas. Source: Rajbhandari et al. 2020, "ZeRO" (arXiv 1910.02054)."""
OPTIMIZER, GRADIENTS, PARAMETERS = 1, 2, 3
"""The lowest level at which each is sharded."""


@dataclass(frozen=True, slots=True)
class BufferEntry:
    """One parameter in a flat buffer: `offset` counts elements, `meta` says how its elements lie from there."""

    value: int
    name: str
    offset: int
    meta: TensorMeta


@dataclass(frozen=True, slots=True)
class DecayGroup:
    """Parameters of a flat buffer that all have weight decay, or none of them: the elements from `first` to `stop`."""

    is_decayed: bool
    entries: tuple[BufferEntry, ...]
    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Parameters of one type that the same stages use, in one buffer of `num_elements` that is cut into `num_shards` equal
    parts.

    Parameters of several stages (tied ones) have the lowest sharding level of these stages. Every part has `num_copies`
    copies, one in each group of `num_shards` replicas. With expert parallelism, one in `every` replicas holds these
    parameters. The first `num_decayed` entries have weight decay.

    A streamed buffer (`is_streamed`) is in host memory, with its gradients between batches, and has one part: GATHER copies
    it to the device.
    """

    stages: tuple[int, ...]
    dtype: str
    is_trained: bool
    level: int
    num_shards: int
    entries: tuple[BufferEntry, ...]
    num_elements: int
    num_copies: int = 1
    every: int = 1
    num_decayed: int = 0
    is_streamed: bool = False

    def __hash__(self) -> int:
        """Hash only what distinguishes the buffers of a model: a batch needs millions of hashes, and entries are long."""
        return hash((self.stages, self.dtype, self.is_trained, self.num_elements))

    @property
    def summed_elements(self) -> int:
        """Elements of the reduced gradients that one replica holds."""
        return self.shard_elements if self.level >= OPTIMIZER else self.num_elements

    @property
    def shard_elements(self) -> int:
        return self.num_elements // self.num_shards

    def shard(self, index: int) -> slice:
        """Return the range of part `index`."""
        return slice(index * self.shard_elements, (index + 1) * self.shard_elements)

    @property
    def values(self) -> tuple[int, ...]:
        return tuple(entry.value for entry in self.entries)

    @property
    def groups(self) -> tuple[DecayGroup, ...]:
        """One or two groups, the same on all ranks; together they cover the buffer."""
        decayed, others = self.entries[: self.num_decayed], self.entries[self.num_decayed :]
        if not (decayed and others):
            return (DecayGroup(bool(decayed), self.entries, 0, self.num_elements),)
        middle = others[0].offset
        return DecayGroup(True, decayed, 0, middle), DecayGroup(False, others, middle, self.num_elements)

    def spans(self, index: int) -> tuple[slice, ...]:
        """Return the range of each of `groups` within part `index`; one of them may be empty."""
        part = self.shard(index)
        ends = [min(max(group.stop, part.start), part.stop) for group in self.groups]
        return tuple(slice(first, stop) for first, stop in zip([part.start, *ends], ends, strict=False))


def flats(
    stages: Sequence[Stage],
    levels: Sequence[int],
    num_shards: int,
    num_copies: int = 1,
    least_decayed_dims: int = 0,
    updated_on_host: frozenset[int] | None = None,
) -> tuple[FlatLayout, ...]:
    """Lay out the flat buffers of all `stages` of a pipeline, in `num_shards` parts with `num_copies` copies each.

    `levels` is the sharding of each stage. Parameters that are not trained are in a buffer only if they are sharded.
    Parameters of fewer than `least_decayed_dims` dimensions, which have no weight decay, come last. The order is the same
    on every rank.

    Where weights are streamed, `updated_on_host` are the stages whose optimizer is on the host. Of those, trained
    parameters are streamed too, unless several stages use them, whose gradients ranks sum on their devices.
    """
    groups: dict[tuple[tuple[int, ...], tuple[int, ...], str, int], list[int]] = defaultdict(list)
    every = _sparse(stages[0]) if stages else {}
    trains = {stage.index: {value for value, _ in stage.gradients} for stage in stages}
    for value, users in _users(stages).items():
        indices = tuple(stage.index for stage in users)
        training = tuple(index for index in indices if value in trains[index])
        groups[indices, training, users[0].value(value).meta.dtype, every.get(value, 1)].append(value)
    buffers: list[FlatLayout] = []
    for (users, training, dtype, step), values in sorted(groups.items()):
        is_streamed = updated_on_host is not None and (
            not training or (len(users) == 1 and updated_on_host.issuperset(users))
        )
        level = PARAMETERS if is_streamed else min(levels[stage] for stage in users)
        shards = max(1, num_shards // step)
        copies = num_shards * num_copies // step // shards
        if is_streamed or (shards * copies > 1 and (training or level >= PARAMETERS)):
            stage = stages[users[0]]
            decayed = [value for value in values if len(stage.value(value).meta.shape) >= least_decayed_dims]
            others = [value for value in values if len(stage.value(value).meta.shape) < least_decayed_dims]
            entries, end = _laid_out(stage, (*decayed, *others), dtype)
            unit = shards * _aligned(1, dtype)
            total = -(-end // unit) * unit
            buffers.append(FlatLayout(
                users, dtype, bool(training), level, shards, entries, total, copies, step, len(decayed), is_streamed,
            ))  # fmt: skip
    return tuple(buffers)


def _sparse(stage: Stage) -> dict[int, int]:
    """Map each parameter that only one in several replicas holds to that number of replicas."""
    shared = expert_parallelism(stage.graph)
    if shared is None:
        return {}
    every = shared.spacing // tensor_parallel_size(stage.graph)
    return dict.fromkeys((stage.graph.parameters[name] for name in shared.parameters), every)


def of_stages(buffers: Iterable[FlatLayout], stages: Iterable[int]) -> tuple[FlatLayout, ...]:
    """Return the flat buffers that one of `stages` uses."""
    wanted = set(stages)
    return tuple(flat for flat in buffers if wanted.intersection(flat.stages))


def _users(stages: Sequence[Stage]) -> dict[int, list[Stage]]:
    """Return the stages that use each parameter."""
    users: dict[int, list[Stage]] = defaultdict(list)
    for stage in stages:
        for value in stage.parameters:
            users[value].append(stage)
    return users


def _laid_out(stage: Stage, values: Sequence[int], dtype: str) -> tuple[tuple[BufferEntry, ...], int]:
    """Return the entries of `values` in order, and the end of the last."""
    entries: list[BufferEntry] = []
    end = 0
    for value in values:
        described = stage.value(value)
        meta = _dense(described.meta)
        offset = _aligned(end, dtype)
        entries.append(BufferEntry(value, described.name, offset, meta))
        end = offset + meta.num_elements
    return tuple(entries), end


def _aligned(num_elements: int, dtype: str) -> int:
    """Round up to a multiple of the alignment.

    >>> _aligned(0, "float32"), _aligned(1, "float32"), _aligned(33, "bfloat16")
    (0, 32, 64)
    """
    step = ALIGNMENT_BYTES // ITEM_BYTES[dtype]
    return -(-num_elements // step) * step


def _dense(meta: TensorMeta) -> TensorMeta:
    """Return the layout of `meta` at offset 0, row-major where it has gaps or repeats elements."""
    if meta.extent == meta.num_elements and 0 not in meta.stride:
        return TensorMeta(meta.shape, meta.stride, meta.dtype)
    return contiguous(meta.shape, meta.dtype)
