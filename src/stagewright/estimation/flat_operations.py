"""Operations on flat buffers by the actions of a rank, for the executor and the memory replay alike.

* GATHER starts an all-gather of the parameters of a stage; the stage's next computation waits for it.
* RELEASE frees them.
* The first computation that adds to sharded gradients of a stage allocates a whole buffer for them.
* REDUCE starts their reduction over the replicas. The next REDUCE of the rank, or the end of the batch, waits for it and
  frees a whole buffer.

With hybrid sharding, reduced gradients are then reduced over the copies: once per batch, started after the last reduction
of a buffer within its shard group, and waited for at the end of the batch.

Gradients that are not sharded stay in one buffer, so they are reduced once, at the last REDUCE of a batch. The same holds
for parameters of several stages. Gradients without a REDUCE are reduced at the end of the batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from stagewright.graph.flat_buffers import GRADIENTS, PARAMETERS, FlatLayout
from stagewright.schedule.action import COMPUTE, Action, Kind

_ADDS_GRADIENTS = frozenset({Kind.W, Kind.B})


@dataclass(frozen=True, slots=True)
class FlatOperations:
    """Operations on flat buffers at the beginning of one action, in the order of these fields."""

    settles: tuple[FlatLayout, ...] = ()
    """Reductions to wait for."""
    crosses: tuple[FlatLayout, ...] = ()
    """Those of `settles` without a later REDUCE, if there are copies to reduce over."""
    releases: tuple[FlatLayout, ...] = ()
    gathers: tuple[FlatLayout, ...] = ()
    uses: tuple[int, ...] = ()
    """Stages with gathered parameters to wait for."""
    leaves: tuple[int, ...] = ()
    """Stages that no longer use their parameters."""
    opens: tuple[FlatLayout, ...] = ()
    """Gradients to allocate a whole buffer for."""
    reduces: tuple[FlatLayout, ...] = ()


NOTHING = FlatOperations()


def flat_operations(actions: Sequence[Action], flats: Iterable[FlatLayout]) -> list[FlatOperations]:
    """Return the operations of each of a rank's `actions` on its `flats`, and last those of the end of the batch."""
    return list(_operations(tuple(actions), tuple(flats)))


@lru_cache(maxsize=32)
def _operations(actions: tuple[Action, ...], flats: tuple[FlatLayout, ...]) -> tuple[FlatOperations, ...]:
    """Return the operations; cached because a rank is replayed under many memory policies."""
    state = _FlatState(flats, actions)
    return (*(state.of(action) for action in actions), state.end())


def is_gathered(flats: Iterable[FlatLayout], stage: int) -> bool:
    """Whether a stage has parameters that exist only between GATHER and RELEASE."""
    return any(flat.level >= PARAMETERS and stage in flat.stages for flat in flats)


@dataclass
class _FlatState:
    """The state of a rank's flat buffers, which its actions change in order."""

    flats: tuple[FlatLayout, ...]
    actions: Sequence[Action]
    gathered: set[int] = field(default_factory=set)
    """Stages between GATHER and RELEASE."""
    unused: set[int] = field(default_factory=set)
    """Those of `gathered` that are not used yet."""
    added: set[FlatLayout] = field(default_factory=set)
    """Flat buffers that have gradients."""
    open: set[FlatLayout] = field(default_factory=set)
    """Those of `added` with a whole buffer."""
    summing: tuple[FlatLayout, ...] = ()
    """Reductions in progress."""
    reduces_left: Counter[FlatLayout] = field(default_factory=Counter)
    """Number of later REDUCE actions of each flat buffer."""
    summed: set[FlatLayout] = field(default_factory=set)
    """Flat buffers whose reduction has started in this batch."""
    of_stage: dict[int, list[FlatLayout]] = field(default_factory=dict)
    """Buffers with parameters of each stage."""

    def __post_init__(self) -> None:
        for flat in self.flats:
            for stage in flat.stages:
                self.of_stage.setdefault(stage, []).append(flat)
        for action in self.actions:
            if action.kind is Kind.REDUCE:
                self.reduces_left.update(self._trained(action.stage))

    def of(self, action: Action) -> FlatOperations:
        """Return the operations at the beginning of the next action, and apply them."""
        match action.kind:
            case Kind.GATHER:
                return self._gather(action.stage)
            case Kind.RELEASE:
                return self._release(action.stage)
            case Kind.REDUCE:
                return self._reduce(action.stage)
            case kind if kind in COMPUTE:
                return self._compute(action)
            case _:
                return NOTHING

    def end(self) -> FlatOperations:
        unsummed = tuple(flat for flat in self.flats if flat in self.added and flat not in self.summed)
        return FlatOperations(settles=self.summing, crosses=self._crossing(self.summing), reduces=unsummed)

    def _gather(self, stage: int) -> FlatOperations:
        fresh = tuple(flat for flat in self._sharded(stage) if not self.gathered.intersection(flat.stages))
        self.gathered.add(stage)
        self.unused.add(stage)
        return FlatOperations(gathers=fresh)

    def _release(self, stage: int) -> FlatOperations:
        self.gathered.discard(stage)
        self.unused.discard(stage)
        done = tuple(flat for flat in self._sharded(stage) if not self.gathered.intersection(flat.stages))
        return FlatOperations(releases=done, leaves=(stage,))

    def _reduce(self, stage: int) -> FlatOperations:
        buffers = self._trained(stage)
        self.reduces_left.subtract(buffers)
        ready = tuple(flat for flat in buffers if self.reduces_left[flat] == 0 or _is_reduced_often(flat))
        settled, self.summing = self.summing, ready
        self.summed.update(ready)
        self.open.difference_update(ready)
        return FlatOperations(settles=settled, crosses=self._crossing(settled, ready), reduces=ready)

    def _crossing(
        self, settled: tuple[FlatLayout, ...], again: tuple[FlatLayout, ...] = ()
    ) -> tuple[FlatLayout, ...]:
        """Return the buffers whose last reduction in this batch has ended, unless they are reduced again at once."""
        return tuple(
            flat
            for flat in settled
            if flat.num_copies > 1 and self.reduces_left[flat] == 0 and flat not in again
        )

    def _compute(self, action: Action) -> FlatOperations:
        stages = [part.stage for part in action.parts]
        adding = {part.stage for part in action.parts if part.kind in _ADDS_GRADIENTS}
        uses = tuple(stage for stage in stages if stage in self.unused)
        self.unused.difference_update(uses)
        receiving = dict.fromkeys(flat for stage in adding for flat in self._trained(stage))
        self.added.update(receiving)
        opens = tuple(flat for flat in receiving if flat.level >= GRADIENTS and flat not in self.open)
        self.open.update(opens)
        return FlatOperations(uses=uses, opens=opens) if uses or opens else NOTHING

    def _sharded(self, stage: int) -> list[FlatLayout]:
        return [flat for flat in self.of_stage.get(stage, ()) if flat.level >= PARAMETERS]

    def _trained(self, stage: int) -> list[FlatLayout]:
        return [flat for flat in self.of_stage.get(stage, ()) if flat.is_trained]


def _is_reduced_often(flat: FlatLayout) -> bool:
    """Whether every REDUCE reduces it, so that a batch may have several."""
    return flat.level >= GRADIENTS and len(flat.stages) == 1
