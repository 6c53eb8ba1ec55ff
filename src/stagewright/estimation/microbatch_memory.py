"""Memory states of one microbatch on a rank, and the bytes of every transition between them."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock

from stagewright.errors import ScheduleError
from stagewright.estimation.memory_events import Event, EventRun, Key, Rank, StorageEvent, Storages
from stagewright.estimation.stage_memory import Channel, StageMemory
from stagewright.schedule import Action, Kind
from stagewright.schedule.action import RECEIVED_BY, RECEIVES, SEND_OF, SENDS, SENDS_IN_FLIGHT


@dataclass(frozen=True, slots=True)
class Transition:
    """One transition between states of one microbatch; bytes relative to those before it."""

    after: int
    live: int
    """Change of the bytes alive."""
    held: int
    """Change of the bytes of saved activations."""
    above: int
    """Peak of the bytes alive during the transition, above those before it."""
    activations: int
    """Saved activations at the peak, relative to those before; `transient`: bytes of the running function, of which `again`
    are recomputed; `operator`: the running operator."""
    transient: int
    again: int = 0
    operator: str = ""
    script: tuple[StorageEvent, ...] = ()
    """If recorded: allocations and frees in order; saved activations relative to those before."""


_MEMORY_KINDS = frozenset({Kind.F, Kind.R, Kind.B, Kind.I, Kind.W, Kind.RECV_F, Kind.RECV_B, *SENDS})


class MemoryEvents:
    """Conversion of the actions of a rank, in order, to events of microbatches.

    With `has_slots` transfers use permanent buffers (`slot_bytes`): a sent value is copied and need not be kept for the
    send, and a received value is copied before its use.
    """

    def __init__(self, has_slots: bool = False) -> None:
        self._has_slots = has_slots
        self._sent: dict[Channel, deque[int]] = defaultdict(deque)
        self._posted: dict[tuple[Kind, int, int], list[Event]] = defaultdict(list)

    def of(self, action: Action) -> Iterator[tuple[int, Event]]:
        """Yield microbatches and events; a channel with the maximum of pending sends ends the oldest before a new one."""
        for part in (action,) if action.overlapped is None else action.parts:
            kind, microbatch = part.kind, part.microbatch
            if kind not in _MEMORY_KINDS or microbatch is None:
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
    """Return the sizes of the permanent buffers of a rank's transfers: for each dtype and size of a message as many as are
    used at a time."""
    in_use: Counter[tuple[str, int]] = Counter()
    most: Counter[tuple[str, int]] = Counter()
    sending: Counter[Channel] = Counter()
    posted: dict[Channel, set[int]] = defaultdict(set)

    def change(channel: Channel, by: int) -> None:
        for message in memories[channel[1]].messages.get(channel, ()):
            size = message.dtype, message.num_bytes
            in_use[size] += by
            most[size] = max(most[size], in_use[size])

    for part in (part for action in actions for part in action.parts):
        if part.kind in SENDS:
            assert part.peer is not None
            channel = (part.kind, part.stage, part.peer)
            if sending[channel] < SENDS_IN_FLIGHT:
                sending[channel] += 1
                change(channel, 1)
        elif part.kind in RECEIVES:
            assert part.peer is not None and part.microbatch is not None
            channel = (SEND_OF[part.kind], part.peer, part.stage)
            posted[channel].add(part.microbatch)
            change(channel, 1)
        elif part.kind in RECEIVED_BY:
            for channel, microbatches in posted.items():
                is_used = channel[2] == part.stage and channel[0] is SEND_OF[RECEIVED_BY[part.kind]]
                if is_used and part.microbatch in microbatches:
                    microbatches.remove(part.microbatch)
                    change(channel, -1)
    return tuple(num_bytes for (_, num_bytes), count in most.items() for _ in range(count))


@lru_cache(maxsize=64)
def microbatch_states(
    memories: tuple[StageMemory, ...], rank_of_stage: tuple[int, ...], rank: int, is_scripted: bool = False
) -> MicrobatchStates:
    """Return the states of a microbatch on `rank`; cached for programs that differ only in the order of actions."""
    return MicrobatchStates(memories, rank_of_stage, rank, is_scripted)


class MicrobatchStates:
    """The states of a microbatch on `rank`, numbered in the order of discovery; microbatches share no storage.

    With `is_scripted`, transitions record their allocations and frees in order.
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
        stages = (
            memory.stage for memory, placed in zip(memories, rank_of_stage, strict=True) if placed == rank
        )
        read = dict.fromkeys(value for stage in stages for value in stage.inputs)  # the rank gets no others
        inputs = {value: start.new(graph.values[value].meta.storage_bytes) for value in read}
        start.take(inputs.values())
        self.rank = Rank(memories, rank_of_stage, rank, inputs)
        self.input_bytes = start.live
        self.start_sizes = dict(start.size)
        self._states = [start]
        self._steps: dict[tuple[int, Event], Transition] = {}
        self._working = Lock()

    def step(self, state: int, event: Event) -> Transition:
        """Return the transition of a microbatch in `state` by `event`; state 0 is the first.

        Raises:
            ScheduleError: the event uses a value that does not exist.
        """
        transition = self._steps.get((state, event))
        if transition is None:
            with self._working:  # computed transitions are read without it
                transition = self._steps.get((state, event))
                if transition is None:
                    transition = self._steps[state, event] = self._compute(state, event)
        return transition

    def sizes(self, state: int) -> dict[Key, int]:
        """Return the storages of `state` and their bytes."""
        storages = self._states[state]
        return {key: storages.size[key] for key in storages.references}

    def sending_bytes(self, state: int) -> int:
        """Return the bytes of `state` that are alive only because their transfer may still be in flight."""
        storages = self._states[state].copied()
        before = storages.live
        for keys in storages.sending.values():
            storages.release(keys)
        return before - storages.live

    def saved_bytes(self, state: int) -> dict[int, int]:
        """Return the bytes that each stage's forward has saved; storages that several stages save count for the first."""
        storages, seen = self._states[state], set(self.rank.inputs.values())
        saved: dict[int, int] = {}
        for stage, values in sorted(storages.held.items()):
            keys = set(values.values()) - seen
            seen |= keys
            saved[stage] = sum(storages.size[key] for key in keys)
        return saved

    def _compute(self, number: int, event: Event) -> Transition:
        before = self._states[number]
        after = before.copied()
        after.script = [] if self.is_scripted else None
        change = EventRun(self.rank, after)
        try:
            change.act(event)
        except KeyError as missing:
            raise ScheduleError(f"value {missing} is used before it exists") from None
        held = before.held_bytes
        script = tuple(item._replace(saved=item.saved - held) for item in after.script or ())
        after.script = None
        self._states.append(after)
        return Transition(
            len(self._states) - 1, after.live - before.live, after.held_bytes - held,
            change.highest - before.live, change.activations - held, change.transient, change.again,
            change.operator, script,
        )  # fmt: skip
