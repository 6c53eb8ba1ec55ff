"""Bytes of the flat buffers that the actions of a rank allocate and free."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stagewright.estimation.flat_operations import NOTHING, FlatOperations, flat_operations
from stagewright.estimation.state import ResidentBytes
from stagewright.graph.flat_buffers import GRADIENTS, FlatLayout
from stagewright.graph.tensor import ITEM_BYTES
from stagewright.schedule.action import Action

GATHERED, WHOLE, SUMMED, SHARDS = "gathered", "whole_gradients", "reducing", "gradient_shards"
DERIVED, CROSSING = "derived", "crossing"
_CATEGORY = {DERIVED: GATHERED, CROSSING: SUMMED}
"""Category under which a kind of buffer is counted if it has none of its own."""


@dataclass(frozen=True)
class FlatSizes:
    """Bytes of the flat buffers of a rank with `resident` bytes; `accumulates`: whether several microbatches accumulate
    whole gradients, in the reduce dtype, before they are reduced."""

    resident: ResidentBytes
    accumulates: bool = False

    def parameter(self, flat: FlatLayout) -> int:
        """Return the bytes of a buffer's whole parameters."""
        return flat.num_elements * ITEM_BYTES[flat.dtype]

    def derived(self, stage: int) -> int:
        """Return the bytes of values that a stage derives from its parameters."""
        derived = self.resident.derived.get(stage)
        return sum(derived.kept.values()) if derived is not None else 0

    def deriving(self, stage: int) -> int:
        """Return the additional peak bytes while a stage derives them."""
        return max(self.resident.derived[stage].peak(()).above_entry - self.derived(stage), 0)

    def is_cast(self, flat: FlatLayout) -> bool:
        """Whether a buffer's gradients are reduced in another type."""
        return self.resident.reduce_dtype not in (None, self.resident.runtime.precision(flat.dtype).gradient)

    def whole_gradient(self, flat: FlatLayout) -> int:
        """Return the bytes of a buffer's whole gradients, in the type in which microbatches accumulate them."""
        reduce_dtype = self.resident.reduce_dtype
        if reduce_dtype is None or not self.accumulates:
            return self.gradient(flat)
        return flat.num_elements * ITEM_BYTES[reduce_dtype]

    def gradient(self, flat: FlatLayout) -> int:
        """Return the bytes of a buffer's whole gradients, in the type that the optimizer uses."""
        return flat.num_elements * ITEM_BYTES[self.resident.runtime.precision(flat.dtype).gradient]

    def summed(self, flat: FlatLayout) -> int:
        """Return the bytes of a reduction in progress, beyond the gradients that are kept anyway."""
        if self.resident.reduce_dtype is not None and self.is_cast(flat):
            return flat.num_elements * ITEM_BYTES[self.resident.reduce_dtype]
        is_separate = flat.level >= GRADIENTS or self.resident.runtime.optimizer.flattens_gradients
        return self.gradient(flat) if is_separate else 0

    def summed_shard(self, flat: FlatLayout) -> int:
        """Return the bytes of the part of the reduced gradients that stays on the device until the optimizer step."""
        return 0 if flat.is_streamed else self.gradient(flat) // flat.num_shards

    def crossing(self, flat: FlatLayout) -> int:
        """Return the bytes of a reduction over copies, which stay until the end of the batch if it has another type."""
        if self.resident.reduce_dtype is None or flat.num_copies == 1 or not self.is_cast(flat):
            return 0
        return flat.summed_elements * ITEM_BYTES[self.resident.reduce_dtype]


class FlatBuffers(ABC):
    """The flat buffers of a rank that its actions allocate and free.

    Buffers are identified by kind and by their layout or stage. Subclasses define the allocation.
    """

    def __init__(self, resident: ResidentBytes, actions: Sequence[Action]) -> None:
        once = resident.runtime.reduces == "last microbatch"
        self.sizes = FlatSizes(resident, once and _has_several(actions))
        *self._moves, self._last = flat_operations(actions, resident.flats)
        self._has_shard: set[FlatLayout] = set()

    @abstractmethod
    def _make(self, kind: str, of: FlatLayout | int, num_bytes: int, then: str | None = None) -> None:
        """Allocate a buffer, and `then` free one of another kind."""

    @abstractmethod
    def _drop(self, kind: str, of: FlatLayout | int) -> int:
        """Free a buffer, if it exists; return its bytes."""

    @abstractmethod
    def _rename(self, kind: str, of: FlatLayout, other: str) -> None:
        """Change the kind of a buffer, if it exists."""

    @abstractmethod
    def _allocate_briefly(self, num_bytes: int) -> None:
        """Allocate a buffer and free it at once."""

    def changes(self, index: int) -> bool:
        """Whether buffers change at the beginning of action `index`."""
        return self._moves[index] is not NOTHING

    def before(self, index: int) -> None:
        """Apply the changes at the beginning of action `index`."""
        if self.changes(index):
            self._apply(self._moves[index])

    def end(self) -> None:
        """Apply the end of a batch: of the reductions only the shards of gradients remain."""
        self._apply(self._last)
        for flat in self._last.reduces:
            self._settle(flat)
            self._make(CROSSING, flat, self.sizes.crossing(flat))
        for flat in self.sizes.resident.flats:
            self._drop(SUMMED, flat)
            self._drop(CROSSING, flat)

    def _apply(self, change: FlatOperations) -> None:
        sizes = self.sizes
        for stage in change.leaves:
            self._drop(DERIVED, stage)
        for flat in change.settles:
            self._settle(flat)
        for flat in change.crosses:
            self._make(CROSSING, flat, sizes.crossing(flat))
        for flat in change.releases:
            self._drop(GATHERED, flat)
        for flat in change.gathers:
            self._make(GATHERED, flat, sizes.parameter(flat))
        for flat in change.opens:
            self._make(WHOLE, flat, sizes.whole_gradient(flat))
        for flat in change.reduces:
            if flat.level >= GRADIENTS and not sizes.is_cast(flat):
                self._rename(WHOLE, flat, SUMMED)
            else:
                self._make(SUMMED, flat, sizes.summed(flat), then=WHOLE)
        for stage in change.uses:
            if stage in sizes.resident.derived:
                self._make(DERIVED, stage, sizes.derived(stage))
                self._allocate_briefly(sizes.deriving(stage))

    def _settle(self, flat: FlatLayout) -> None:
        if flat.level >= GRADIENTS and flat not in self._has_shard:
            self._has_shard.add(flat)
            self._make(SHARDS, flat, self.sizes.summed_shard(flat))
        self._drop(SUMMED, flat)


def _has_several(actions: Sequence[Action]) -> bool:
    """Whether actions are of several microbatches."""
    return len({action.microbatch for action in actions if action.microbatch is not None}) > 1


class FlatBytes(FlatBuffers):
    """Counter of the buffers, with the bytes of each kind in `categories`.

    After every allocation, `observe` is called with the temporary bytes beyond these.
    """

    def __init__(
        self, resident: ResidentBytes, actions: Sequence[Action], observe: Callable[[int], None]
    ) -> None:
        super().__init__(resident, actions)
        self._observe = observe
        self._bytes: dict[tuple[str, FlatLayout | int], int] = {}
        self.categories: dict[str, int] = dict.fromkeys((GATHERED, WHOLE, SUMMED, SHARDS), 0)
        self.total = 0

    def _make(self, kind: str, of: FlatLayout | int, num_bytes: int, then: str | None = None) -> None:
        dropped = 0 if then is None else self._drop(then, of)
        self._bytes[kind, of] = num_bytes
        self.categories[_CATEGORY.get(kind, kind)] += num_bytes
        self.total += num_bytes
        self._observe(dropped)

    def _drop(self, kind: str, of: FlatLayout | int) -> int:
        num_bytes = self._bytes.pop((kind, of), 0)
        self.categories[_CATEGORY.get(kind, kind)] -= num_bytes
        self.total -= num_bytes
        return num_bytes

    def _rename(self, kind: str, of: FlatLayout, other: str) -> None:
        self._make(other, of, self._drop(kind, of))

    def _allocate_briefly(self, num_bytes: int) -> None:
        self._observe(num_bytes)
