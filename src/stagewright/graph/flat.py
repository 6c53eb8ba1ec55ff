"""Flat buffers: the parameters of a stage one after the other, so that one collective moves all of them.

The layout is worked out here, once: the executor allocates it, the memory replay counts it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stagewright.graph.expert_parallel import expert_parallelism
from stagewright.graph.stage import Stage
from stagewright.graph.tensor import ITEM_BYTES, TensorMeta, contiguous
from stagewright.graph.tensor_parallel import tensor_width

ALIGNMENT_BYTES = 128
"""Every parameter and every shard starts at a multiple of this: a cache line of a GPU."""

LEVELS = (0, 1, 2, 3)
"""What replicas share out among each other. Source: Rajbhandari et al. 2020, "ZeRO" (arXiv 1910.02054)."""
OPTIMIZER, GRADIENTS, PARAMETERS = 1, 2, 3
"""The level from which on each is sharded."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One parameter in a flat buffer: `offset` counts elements, `meta` says how its elements lie from there."""

    value: int
    name: str
    offset: int
    meta: TensorMeta


@dataclass(frozen=True, slots=True)
class DecayGroup:
    """Parameters of a flat buffer whose weights all decay, or none of them: the elements from `first` to `stop`."""

    is_decayed: bool
    entries: tuple[Entry, ...]
    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class Flat:
    """Parameters of one type that the same stages use, in one buffer of `num_elements` in `num_shards` equal parts.

    Parameters of several stages (tied ones) are sharded as the least sharded of these stages. There are `num_copies` of
    every part, each in another group of `num_shards` replicas. Where experts are shared out, one in `every` replicas holds
    these parameters. The first `num_decayed` entries are of weights that decay.
    """

    stages: tuple[int, ...]
    dtype: str
    is_trained: bool
    level: int
    num_shards: int
    entries: tuple[Entry, ...]
    num_elements: int
    num_copies: int = 1
    every: int = 1
    num_decayed: int = 0

    def __hash__(self) -> int:
        """Of what tells the buffers of a model apart: a batch asks by the million, and entries are long."""
        return hash((self.stages, self.dtype, self.is_trained, self.num_elements))

    @property
    def summed_elements(self) -> int:
        """What one replica has of the gradients, once those it shares them out with have summed them."""
        return self.shard_elements if self.level >= OPTIMIZER else self.num_elements

    @property
    def shard_elements(self) -> int:
        return self.num_elements // self.num_shards

    def shard(self, index: int) -> slice:
        """Where part `index` lies."""
        return slice(index * self.shard_elements, (index + 1) * self.shard_elements)

    @property
    def values(self) -> tuple[int, ...]:
        return tuple(entry.value for entry in self.entries)

    @property
    def groups(self) -> tuple[DecayGroup, ...]:
        """One or two, the same on all ranks; together they are the whole buffer."""
        decayed, others = self.entries[: self.num_decayed], self.entries[self.num_decayed :]
        if not (decayed and others):
            return (DecayGroup(bool(decayed), self.entries, 0, self.num_elements),)
        middle = others[0].offset
        return DecayGroup(True, decayed, 0, middle), DecayGroup(False, others, middle, self.num_elements)

    def spans(self, index: int) -> tuple[slice, ...]:
        """Where what part `index` has of each of the `groups` lies, of which one may be nothing."""
        part = self.shard(index)
        ends = [min(max(group.stop, part.start), part.stop) for group in self.groups]
        return tuple(slice(first, stop) for first, stop in zip([part.start, *ends], ends, strict=False))


def flats(
    stages: Sequence[Stage],
    levels: Sequence[int],
    num_shards: int,
    num_copies: int = 1,
    least_decayed_dims: int = 0,
) -> tuple[Flat, ...]:
    """The flat buffers of all `stages` of a pipeline, whose sharding is `levels`, in `num_shards` parts of so many copies.

    Parameters that are not trained are in one only where they are sharded. Parameters of fewer than `least_decayed_dims`
    dimensions, which do not decay, come behind the others. The order is the same on every rank.
    """
    groups: dict[tuple[tuple[int, ...], tuple[int, ...], str, int], list[int]] = defaultdict(list)
    every = _sparse(stages[0]) if stages else {}
    trains = {stage.index: {value for value, _ in stage.gradients} for stage in stages}
    for value, users in _users(stages).items():
        indices = tuple(stage.index for stage in users)
        training = tuple(index for index in indices if value in trains[index])
        groups[indices, training, users[0].value(value).meta.dtype, every.get(value, 1)].append(value)
    found: list[Flat] = []
    for (users, training, dtype, step), values in sorted(groups.items()):
        level = min(levels[stage] for stage in users)
        shards = max(1, num_shards // step)
        copies = num_shards * num_copies // step // shards
        if shards * copies > 1 and (training or level >= PARAMETERS):
            stage = stages[users[0]]
            decayed = [value for value in values if len(stage.value(value).meta.shape) >= least_decayed_dims]
            others = [value for value in values if len(stage.value(value).meta.shape) < least_decayed_dims]
            entries, end = _laid_out(stage, (*decayed, *others), dtype)
            unit = shards * _aligned(1, dtype)
            total = -(-end // unit) * unit
            found.append(
                Flat(users, dtype, bool(training), level, shards, entries, total, copies, step, len(decayed))
            )
    return tuple(found)


def _sparse(stage: Stage) -> dict[int, int]:
    """By parameter that not every replica holds, one in how many does."""
    shared = expert_parallelism(stage.graph)
    if shared is None:
        return {}
    every = shared.spacing // tensor_width(stage.graph)
    return dict.fromkeys((stage.graph.parameters[name] for name in shared.parameters), every)


def of_stages(found: Iterable[Flat], stages: Iterable[int]) -> tuple[Flat, ...]:
    """Those flat buffers that one of `stages` uses."""
    wanted = set(stages)
    return tuple(flat for flat in found if wanted.intersection(flat.stages))


def _users(stages: Sequence[Stage]) -> dict[int, list[Stage]]:
    """The stages that use each parameter."""
    users: dict[int, list[Stage]] = defaultdict(list)
    for stage in stages:
        for value in stage.parameters:
            users[value].append(stage)
    return users


def _laid_out(stage: Stage, values: Sequence[int], dtype: str) -> tuple[tuple[Entry, ...], int]:
    """The entries of `values` in order, and where the last ends."""
    entries: list[Entry] = []
    end = 0
    for value in values:
        described = stage.value(value)
        meta = _dense(described.meta)
        offset = _aligned(end, dtype)
        entries.append(Entry(value, described.name, offset, meta))
        end = offset + meta.num_elements
    return tuple(entries), end


def _aligned(num_elements: int, dtype: str) -> int:
    """The next multiple of the alignment.

    >>> _aligned(0, "float32"), _aligned(1, "float32"), _aligned(33, "bfloat16")
    (0, 32, 64)
    """
    step = ALIGNMENT_BYTES // ITEM_BYTES[dtype]
    return -(-num_elements // step) * step


def _dense(meta: TensorMeta) -> TensorMeta:
    """The layout of `meta` from offset 0, row-major where it has gaps or repeats elements."""
    if meta.extent == meta.num_elements and 0 not in meta.stride:
        return TensorMeta(meta.shape, meta.stride, meta.dtype)
    return contiguous(meta.shape, meta.dtype)
