"""Bytes of the flat buffers that come and go while the actions of a rank go by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stagewright.estimation.sharded import Moves, moves
from stagewright.estimation.state import ResidentBytes
from stagewright.graph.flat import GRADIENTS, Flat
from stagewright.graph.tensor import ITEM_BYTES
from stagewright.schedule.action import Action

GATHERED, WHOLE, SUMMED, SHARDS = "gathered", "whole_gradients", "reducing", "gradient_shards"


@dataclass(frozen=True)
class FlatSizes:
    """Bytes of the flat buffers of a rank whose resident bytes are `resident`."""

    resident: ResidentBytes

    def parameter(self, flat: Flat) -> int:
        """Of its parameters, whole."""
        return flat.num_elements * ITEM_BYTES[flat.dtype]

    def derived(self, stage: int) -> int:
        """Of what a stage derives from its parameters."""
        derived = self.resident.derived.get(stage)
        return sum(derived.kept.values()) if derived is not None else 0

    def deriving(self, stage: int) -> int:
        """The most beside that while it does."""
        return max(self.resident.derived[stage].peak(()).above_entry - self.derived(stage), 0)

    def is_cast(self, flat: Flat) -> bool:
        """Whether its gradients are summed in another type."""
        return self.resident.wire not in (None, self.resident.runtime.precision(flat.dtype).gradient)

    def gradient(self, flat: Flat) -> int:
        """Of its gradients, whole."""
        return flat.num_elements * ITEM_BYTES[self.resident.runtime.precision(flat.dtype).gradient]

    def summed(self, flat: Flat) -> int:
        """Of a sum on its way, beyond the gradients that are kept anyway."""
        if self.resident.wire is not None and self.is_cast(flat):
            return flat.num_elements * ITEM_BYTES[self.resident.wire]
        return self.gradient(flat) if flat.level >= GRADIENTS else 0

    def crossing(self, flat: Flat) -> int:
        """Of a sum over copies, which lasts to the end of the batch where it is of another type."""
        if self.resident.wire is None or flat.num_copies == 1 or not self.is_cast(flat):
            return 0
        return flat.summed_elements * ITEM_BYTES[self.resident.wire]


class FlatBytes:
    """The buffers of a rank beyond those it keeps from step to step: `categories` says how many bytes there are.

    The iterators go through what an action changes, step by step; each step gives the bytes that exist for a moment beyond
    `categories`, which then holds what stays.
    """

    def __init__(self, resident: ResidentBytes, actions: Sequence[Action]) -> None:
        self.resident = resident
        self.sizes = FlatSizes(resident)
        *self._moves, self._last = moves(actions, resident.flats)
        self.categories: dict[str, int] = (
            dict.fromkeys((GATHERED, WHOLE, SUMMED, SHARDS), 0) if resident.flats else {}
        )
        self._has_shard: set[Flat] = set()

    @property
    def total(self) -> int:
        return sum(self.categories.values())

    def before(self, index: int) -> Iterator[int]:
        """What action `index` changes before it does anything else."""
        return self._apply(self._moves[index])

    def end(self) -> Iterator[int]:
        """What the end of the batch changes."""
        yield from self._apply(self._last)
        for flat in self._last.reduces:
            yield from self._settle(flat)
            yield from self._cross(flat)
        if self.resident.flats:
            self.categories[SUMMED] = 0

    def _apply(self, change: Moves) -> Iterator[int]:
        live = self.categories
        for stage in change.leaves:
            live[GATHERED] -= self.sizes.derived(stage)
        for flat in change.settles:
            yield from self._settle(flat)
        for flat in change.crosses:
            yield from self._cross(flat)
        for flat in change.releases:
            live[GATHERED] -= self.sizes.parameter(flat)
        for flat in change.gathers:
            live[GATHERED] += self.sizes.parameter(flat)
            yield 0
        for flat in change.opens:
            live[WHOLE] += self.sizes.gradient(flat)
            yield 0
        for flat in change.reduces:
            live[SUMMED] += self.sizes.summed(flat)
            closed = self.sizes.gradient(flat) if flat.level >= GRADIENTS else 0
            live[WHOLE] -= closed
            yield closed if self.sizes.is_cast(flat) else 0
        for stage in change.uses:
            if stage in self.resident.derived:
                live[GATHERED] += self.sizes.derived(stage)
                yield self.sizes.deriving(stage)

    def _settle(self, flat: Flat) -> Iterator[int]:
        if flat.level >= GRADIENTS and flat not in self._has_shard:
            self._has_shard.add(flat)
            self.categories[SHARDS] += self.sizes.gradient(flat) // flat.num_shards
            yield 0
        self.categories[SUMMED] -= self.sizes.summed(flat)

    def _cross(self, flat: Flat) -> Iterator[int]:
        if crossing := self.sizes.crossing(flat):
            self.categories[SUMMED] += crossing
            yield 0
