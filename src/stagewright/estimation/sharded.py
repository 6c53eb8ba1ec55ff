"""What the actions of a rank do with flat buffers: one account for the executor and for the memory replay.

* GATHER starts to make the parameters of a stage whole; the first computation of the stage behind it waits for them.
* RELEASE drops them.
* The first computation that adds to the gradients of a stage whose gradients are sharded makes a whole buffer for them.
* REDUCE starts to sum them over the replicas. It is waited for at the next REDUCE of the rank, or at the end of the
  batch, and then a whole buffer is dropped.

Where only some of the replicas share out, what they have summed is summed over the copies then: once per batch, started
where the last sum of a buffer is waited for, and waited for at the end of the batch.

Gradients that are not sharded stay in one buffer, so they are summed once, at the last REDUCE of a batch. The same goes for
parameters of several stages. What no REDUCE has summed is summed at the end of the batch.
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
class Moves:
    """What one action does with flat buffers before anything else, in the order of these fields."""

    settles: tuple[FlatLayout, ...] = ()
    """Sums that are waited for."""
    crosses: tuple[FlatLayout, ...] = ()
    """Those of `settles` that no REDUCE is left for, if there are copies to sum them over."""
    releases: tuple[FlatLayout, ...] = ()
    gathers: tuple[FlatLayout, ...] = ()
    uses: tuple[int, ...] = ()
    """Stages whose gathered parameters are waited for."""
    leaves: tuple[int, ...] = ()
    """Stages whose parameters are used no longer."""
    opens: tuple[FlatLayout, ...] = ()
    """Gradients that get a whole buffer."""
    reduces: tuple[FlatLayout, ...] = ()


NOTHING = Moves()


def moves(actions: Sequence[Action], flats: Iterable[FlatLayout]) -> list[Moves]:
    """What each of a rank's `actions` does with its `flats`, and as the last entry what the end of the batch does."""
    return list(_moves(tuple(actions), tuple(flats)))


@lru_cache(maxsize=32)
def _moves(actions: tuple[Action, ...], flats: tuple[FlatLayout, ...]) -> tuple[Moves, ...]:
    """Kept: a rank is replayed under one memory policy after another."""
    account = _Account(flats, actions)
    return (*(account.of(action) for action in actions), account.end())


def is_gathered(flats: Iterable[FlatLayout], stage: int) -> bool:
    """Whether a stage has parameters that are there between GATHER and RELEASE only."""
    return any(flat.level >= PARAMETERS and stage in flat.stages for flat in flats)


@dataclass
class _Account:
    """Which buffers there are while the actions go by."""

    flats: tuple[FlatLayout, ...]
    actions: Sequence[Action]
    gathered: set[int] = field(default_factory=set)
    """Stages between GATHER and RELEASE."""
    unused: set[int] = field(default_factory=set)
    """Those of `gathered` that nothing has used yet."""
    added: set[FlatLayout] = field(default_factory=set)
    """Flat buffers that have gradients."""
    open: set[FlatLayout] = field(default_factory=set)
    """Those of `added` with a whole buffer of their own."""
    summing: tuple[FlatLayout, ...] = ()
    left: Counter[FlatLayout] = field(default_factory=Counter)
    """REDUCE actions to come that concern each flat buffer."""
    summed: set[FlatLayout] = field(default_factory=set)
    of_stage: dict[int, list[FlatLayout]] = field(default_factory=dict)
    """The buffers that hold something of a stage."""

    def __post_init__(self) -> None:
        for flat in self.flats:
            for stage in flat.stages:
                self.of_stage.setdefault(stage, []).append(flat)
        for action in self.actions:
            if action.kind is Kind.REDUCE:
                self.left.update(self._trained(action.stage))

    def of(self, action: Action) -> Moves:
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

    def end(self) -> Moves:
        rest = tuple(flat for flat in self.flats if flat in self.added and flat not in self.summed)
        return Moves(settles=self.summing, crosses=self._crossing(self.summing), reduces=rest)

    def _gather(self, stage: int) -> Moves:
        fresh = tuple(flat for flat in self._sharded(stage) if not self.gathered.intersection(flat.stages))
        self.gathered.add(stage)
        self.unused.add(stage)
        return Moves(gathers=fresh)

    def _release(self, stage: int) -> Moves:
        self.gathered.discard(stage)
        self.unused.discard(stage)
        done = tuple(flat for flat in self._sharded(stage) if not self.gathered.intersection(flat.stages))
        return Moves(releases=done, leaves=(stage,))

    def _reduce(self, stage: int) -> Moves:
        found = self._trained(stage)
        self.left.subtract(found)
        ready = tuple(flat for flat in found if self.left[flat] == 0 or _is_reduced_often(flat))
        settled, self.summing = self.summing, ready
        self.summed.update(ready)
        self.open.difference_update(ready)
        return Moves(settles=settled, crosses=self._crossing(settled, ready), reduces=ready)

    def _crossing(
        self, settled: tuple[FlatLayout, ...], again: tuple[FlatLayout, ...] = ()
    ) -> tuple[FlatLayout, ...]:
        """What is summed for the last time in this batch, unless it is summed again at once."""
        return tuple(
            flat for flat in settled if flat.num_copies > 1 and self.left[flat] == 0 and flat not in again
        )

    def _compute(self, action: Action) -> Moves:
        stages = [part.stage for part in action.parts]
        adding = {part.stage for part in action.parts if part.kind in _ADDS_GRADIENTS}
        uses = tuple(stage for stage in stages if stage in self.unused)
        self.unused.difference_update(uses)
        fed = dict.fromkeys(flat for stage in adding for flat in self._trained(stage))
        self.added.update(fed)
        opens = tuple(flat for flat in fed if flat.level >= GRADIENTS and flat not in self.open)
        self.open.update(opens)
        return Moves(uses=uses, opens=opens) if uses or opens else NOTHING

    def _sharded(self, stage: int) -> list[FlatLayout]:
        return [flat for flat in self.of_stage.get(stage, ()) if flat.level >= PARAMETERS]

    def _trained(self, stage: int) -> list[FlatLayout]:
        return [flat for flat in self.of_stage.get(stage, ()) if flat.is_trained]


def _is_reduced_often(flat: FlatLayout) -> bool:
    """Whether every REDUCE sums it, so that a batch may have several."""
    return flat.level >= GRADIENTS and len(flat.stages) == 1
