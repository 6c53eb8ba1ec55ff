"""Bytes of the flat buffers that come and go while the actions of a rank go by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stagewright.estimation.sharded import Moves, moves
from stagewright.estimation.state import ResidentBytes
from stagewright.graph.flat import GRADIENTS, Flat
from stagewright.graph.tensor import ITEM_BYTES
from stagewright.schedule.action import Action

GATHERED, WHOLE, SUMMED, SHARDS = "gathered", "whole_gradients", "reducing", "gradient_shards"


class FlatBytes:
    """The buffers of a rank beyond those it keeps from step to step: `categories` says how many bytes there are.

    The iterators go through what an action changes, step by step; each step gives the bytes that exist for a moment beyond
    `categories`, which then holds what stays.
    """

    def __init__(self, resident: ResidentBytes, actions: Sequence[Action]) -> None:
        self.resident = resident
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
            live[GATHERED] -= self._derived_bytes(stage)
        for flat in change.settles:
            yield from self._settle(flat)
        for flat in change.crosses:
            yield from self._cross(flat)
        for flat in change.releases:
            live[GATHERED] -= _parameter_bytes(flat)
        for flat in change.gathers:
            live[GATHERED] += _parameter_bytes(flat)
            yield 0
        for flat in change.opens:
            live[WHOLE] += self._gradient_bytes(flat)
            yield 0
        for flat in change.reduces:
            live[SUMMED] += self._summed_bytes(flat)
            closed = self._gradient_bytes(flat) if flat.level >= GRADIENTS else 0
            live[WHOLE] -= closed
            yield closed if self._is_cast(flat) else 0
        for stage in change.uses:
            if stage in self.resident.derived:
                live[GATHERED] += self._derived_bytes(stage)
                peak = self.resident.derived[stage].peak(()).above_entry
                yield max(peak - self._derived_bytes(stage), 0)

    def _settle(self, flat: Flat) -> Iterator[int]:
        if flat.level >= GRADIENTS and flat not in self._has_shard:
            self._has_shard.add(flat)
            self.categories[SHARDS] += self._gradient_bytes(flat) // flat.num_shards
            yield 0
        self.categories[SUMMED] -= self._summed_bytes(flat)

    def _cross(self, flat: Flat) -> Iterator[int]:
        """A sum over copies takes bytes of its own, to the end of the batch, where it is of another type."""
        if self.resident.wire is not None and flat.num_copies > 1 and self._is_cast(flat):
            self.categories[SUMMED] += flat.summed_elements * ITEM_BYTES[self.resident.wire]
            yield 0

    def _derived_bytes(self, stage: int) -> int:
        derived = self.resident.derived.get(stage)
        return sum(derived.kept.values()) if derived is not None else 0

    def _is_cast(self, flat: Flat) -> bool:
        return self.resident.wire not in (None, self.resident.runtime.precision(flat.dtype).gradient)

    def _gradient_bytes(self, flat: Flat) -> int:
        return flat.num_elements * ITEM_BYTES[self.resident.runtime.precision(flat.dtype).gradient]

    def _summed_bytes(self, flat: Flat) -> int:
        """Bytes that a sum on its way takes beyond the gradients that are kept anyway."""
        if self.resident.wire is not None and self._is_cast(flat):
            return flat.num_elements * ITEM_BYTES[self.resident.wire]
        return self._gradient_bytes(flat) if flat.level >= GRADIENTS else 0


def _parameter_bytes(flat: Flat) -> int:
    return flat.num_elements * ITEM_BYTES[flat.dtype]
