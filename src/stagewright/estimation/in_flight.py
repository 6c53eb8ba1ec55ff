"""The states that one microbatch goes through on a rank, and the bytes of every change between them."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock

from stagewright.errors import ScheduleError
from stagewright.estimation.change import Change, Event, Key, Rank, Request, Storages
from stagewright.estimation.stage_memory import Channel, StageMemory
from stagewright.schedule import Action, Kind
from stagewright.schedule.action import RECEIVED_BY, RECEIVES, SEND_OF, SENDS, SENDS_IN_FLIGHT


@dataclass(frozen=True, slots=True)
class Step:
    """One change of state of one microbatch; bytes besides those of all other microbatches."""

    after: int
    live: int
    """Bytes alive afterwards less those before."""
    held: int
    """Bytes of saved activations afterwards less those before."""
    above: int
    """The most bytes alive on the way, above those before."""
    activations: int
    """Saved activations at that moment less those before; `transient`: bytes of the running function, of which `again` are
    recomputed; `operator`: the one that runs."""
    transient: int
    again: int = 0
    operator: str = ""
    script: tuple[Request, ...] = ()
    """Where asked for: storages in the order in which they are made and freed; saved activations less those before."""


MOVES = frozenset({Kind.F, Kind.R, Kind.B, Kind.I, Kind.W, Kind.RECV_F, Kind.RECV_B, *SENDS})


class MemoryEvents:
    """What the actions of a rank, in order, do to which microbatch.

    With `has_slots` transfers use buffers that stay (`slot_bytes`): what is sent is copied and then no longer held for that,
    and what is received is copied in front of its use.
    """

    def __init__(self, has_slots: bool = False) -> None:
        self._has_slots = has_slots
        self._sent: dict[Channel, deque[int]] = defaultdict(deque)
        self._posted: dict[tuple[Kind, int, int], list[Event]] = defaultdict(list)

    def of(self, action: Action) -> Iterator[tuple[int, Event]]:
        """Microbatches and events; a channel with enough on its way is done with the oldest before it sends anew."""
        for part in (action,) if action.overlapped is None else action.parts:
            kind, microbatch = part.kind, part.microbatch
            if kind not in MOVES or microbatch is None:
                continue
            event: Event = (True, kind, part.stage, part.peer)
            if self._has_slots and kind in SENDS:
                yield microbatch, event
                yield microbatch, (False, kind, part.stage, part.peer)
                continue
            if kind in SENDS:
                assert part.peer is not None
                channel = (kind, part.stage, part.peer)
                sent = self._sent[channel]
                if len(sent) == SENDS_IN_FLIGHT:
                    yield sent.popleft(), (False, *channel)
                sent.append(microbatch)
            elif self._has_slots and kind in RECEIVES:
                self._posted[kind, part.stage, microbatch].append(event)
                continue
            elif self._has_slots and kind in RECEIVED_BY:
                yield from (
                    (microbatch, posted)
                    for posted in self._posted.pop((RECEIVED_BY[kind], part.stage, microbatch), ())
                )
            yield microbatch, event


def slot_bytes(memories: Sequence[StageMemory], actions: Sequence[Action]) -> tuple[int, ...]:
    """Return the sizes of the buffers that a rank's transfers use, where these stay: of each channel as many as are in use
    at a time."""
    num_slots: dict[tuple[Kind, int, int], int] = defaultdict(int)
    posted: dict[tuple[Kind, int, int], set[int]] = defaultdict(set)
    for part in (part for action in actions for part in action.parts):
        if part.kind in SENDS:
            assert part.peer is not None
            channel = (part.kind, part.stage, part.peer)
            num_slots[channel] = min(num_slots[channel] + 1, SENDS_IN_FLIGHT)
        elif part.kind in RECEIVES:
            assert part.peer is not None and part.microbatch is not None
            channel = (SEND_OF[part.kind], part.peer, part.stage)
            posted[channel].add(part.microbatch)
            num_slots[channel] = max(num_slots[channel], len(posted[channel]))
        elif part.kind in RECEIVED_BY:
            for (kind, _, target), microbatches in posted.items():
                if target == part.stage and kind is SEND_OF[RECEIVED_BY[part.kind]]:
                    microbatches.discard(part.microbatch or 0)
    return tuple(
        message.num_bytes
        for (kind, source, target), count in num_slots.items()
        for message in memories[source].messages.get((kind, source, target), ())
        for _ in range(count)
    )


@lru_cache(maxsize=512)
def in_flight(
    memories: tuple[StageMemory, ...], rank_of_stage: tuple[int, ...], rank: int, is_scripted: bool = False
) -> InFlight:
    """The states of a microbatch on `rank`, kept for programs that differ in the order of actions only."""
    return InFlight(memories, rank_of_stage, rank, is_scripted)


class InFlight:
    """The states of a microbatch on `rank`, numbered as they are met; microbatches share no storage.

    `is_scripted` steps tell the order in which they make and free storages.
    """

    def __init__(
        self,
        memories: Sequence[StageMemory],
        rank_of_stage: Sequence[int],
        rank: int,
        is_scripted: bool = False,
    ) -> None:
        self.is_scripted = is_scripted
        graph = memories[0].stage.graph
        start = Storages()
        own = (one.stage for one, placed in zip(memories, rank_of_stage, strict=True) if placed == rank)
        read = dict.fromkeys(value for stage in own for value in stage.inputs)  # others it is not given
        inputs = {value: start.new(graph.values[value].meta.storage_bytes) for value in read}
        start.take(inputs.values())
        self.rank = Rank(memories, rank_of_stage, rank, inputs)
        self.input_bytes = start.live
        self.start_sizes = dict(start.size)
        self._states = [start]
        self._steps: dict[tuple[int, Event], Step] = {}
        self._working = Lock()

    def step(self, state: int, event: Event) -> Step:
        """The change that `event` makes to a microbatch in `state`; states are numbered from 0, the first.

        Raises:
            ScheduleError: the event uses a value that is not there.
        """
        known = self._steps.get((state, event))
        if known is None:
            with self._working:  # kept ones serve every thread
                known = self._steps.get((state, event))
                if known is None:
                    known = self._steps[state, event] = self._worked_out(state, event)
        return known

    def sizes(self, state: int) -> dict[Key, int]:
        """The storages of `state`, and their bytes."""
        return self._states[state].size

    def sending_bytes(self, state: int) -> int:
        """Bytes of `state` that are alive only because they may still be on their way."""
        found = self._states[state].copied()
        before = found.live
        for keys in found.sending.values():
            found.release(keys)
        return before - found.live

    def saved_bytes(self, state: int) -> dict[int, int]:
        """Stage -> bytes that its forward has saved; what several stages of the rank save counts for the first."""
        found, seen = self._states[state], set(self.rank.inputs.values())
        saved: dict[int, int] = {}
        for stage, values in sorted(found.held.items()):
            own = set(values.values()) - seen
            seen |= own
            saved[stage] = sum(found.size[key] for key in own)
        return saved

    def _worked_out(self, number: int, event: Event) -> Step:
        before = self._states[number]
        after = before.copied()
        after.script = [] if self.is_scripted else None
        change = Change(self.rank, after)
        try:
            change.act(event)
        except KeyError as missing:
            raise ScheduleError(f"value {missing} is used before it is there") from None
        held = before.held_bytes
        script = tuple(each._replace(saved=each.saved - held) for each in after.script or ())
        after.script = None
        self._states.append(after)
        return Step(
            len(self._states) - 1, after.live - before.live, after.held_bytes - held,
            change.highest - before.live, change.activations - held, change.transient, change.again,
            change.operator, script,
        )  # fmt: skip
