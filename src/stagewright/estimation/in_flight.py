"""The states that one microbatch goes through on a rank, and the bytes of every change between them."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from stagewright.errors import ScheduleError
from stagewright.estimation.liveness import FREED, FunctionMemory, function_memory
from stagewright.graph.payload import Message, messages
from stagewright.graph.stage import Function, Stage
from stagewright.schedule import Action, Kind
from stagewright.schedule.action import SENDS, SENDS_IN_FLIGHT

Key = int
Channel = tuple[Kind, int, int]
"""``SEND_F`` or ``SEND_B``, source stage, target stage."""
Event = tuple[bool, Kind, int, int | None]
"""True and the kind, stage and peer of an action; False and a channel that is done with what it sent."""


class StageMemory:
    """The functions of one stage as the replay needs them; each is looked at once."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    @cached_property
    def forward(self) -> FunctionMemory:
        return self._of(self.stage.forward)

    @cached_property
    def input_grad(self) -> FunctionMemory:
        return self._of(self.stage.input_grad)

    @cached_property
    def weight_grad(self) -> FunctionMemory:
        return self._of(self.stage.weight_grad)

    @cached_property
    def backward(self) -> FunctionMemory:
        return self._of(self.stage.backward)

    @cached_property
    def rebuild(self) -> FunctionMemory:
        return self._of(self.stage.rebuild)

    def _of(self, function: Function) -> FunctionMemory:
        return function_memory(function, self.stage.resident, self.stage.value)

    @cached_property
    def saved_bytes(self) -> int:
        """Bytes that F leaves for the backward of one microbatch; received values and user inputs apart."""
        homes = {self.forward.outputs[value] for value in self.stage.saved if value in self.forward.outputs}
        return sum(self.forward.kept.get(home, 0) for home in homes)

    @cached_property
    def messages(self) -> dict[Channel, tuple[Message, ...]]:
        """What this stage sends on each of its channels."""
        stage = self.stage
        pairs = ((Kind.SEND_F, stage.sends), (Kind.SEND_B, stage.grad_sends))
        return {
            (kind, stage.index, transfer.stage): messages(stage.value(value) for value in transfer.values)
            for kind, transfers in pairs
            for transfer in transfers
        }


@dataclass(frozen=True, slots=True)
class Step:
    """One change of state of one microbatch; bytes beside those of all other microbatches."""

    after: int
    live: int
    """Bytes alive afterwards less those before."""
    held: int
    """Bytes of saved activations afterwards less those before."""
    above: int
    """The most bytes alive on the way, above those before."""
    activations: int
    """Saved activations at that moment less those before; `transient`: bytes of the running function."""
    transient: int
    script: tuple[tuple[Key, int], ...] = ()
    """Where asked for: storages in the order in which they are made, with their bytes, and freed, with `FREED`."""


@dataclass
class _State:
    """Storages of one microbatch with the number of names each has; user inputs are always there."""

    size: dict[Key, int] = field(default_factory=dict)
    references: dict[Key, int] = field(default_factory=dict)
    held: dict[int, dict[int, Key]] = field(default_factory=dict)
    waiting: dict[Channel, dict[int, Key]] = field(default_factory=dict)
    posted: dict[Channel, list[tuple[Message, Key]]] = field(default_factory=dict)
    sending: dict[Channel, list[Key]] = field(default_factory=dict)
    away: dict[int, tuple[dict[int, int], tuple[int, ...]]] = field(default_factory=dict)
    """Stage -> the storage that each value on the host lies in, and the bytes of those storages."""
    live: int = 0
    next_key: int = 0
    script: list[tuple[Key, int]] | None = None

    def copied(self) -> _State:
        """What is inside the inner collections is never changed, only replaced."""
        return _State(
            dict(self.size), dict(self.references), dict(self.held), dict(self.waiting), dict(self.posted),
            dict(self.sending), dict(self.away), self.live, self.next_key, self.script,
        )  # fmt: skip

    def new(self, num_bytes: int) -> Key:
        self.next_key += 1
        self.size[self.next_key] = num_bytes
        self.references[self.next_key] = 0
        self.live += num_bytes
        if self.script is not None:
            self.script.append((self.next_key, num_bytes))
        return self.next_key

    def take(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self.references[key] += 1

    def release(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self.references[key] -= 1
            if self.references[key] == 0:
                self.live -= self.size.pop(key)
                del self.references[key]
                if self.script is not None:
                    self.script.append((key, FREED))


MOVES = frozenset(
    {Kind.OFFLOAD, Kind.FETCH, Kind.F, Kind.R, Kind.B, Kind.I, Kind.W, Kind.RECV_F, Kind.RECV_B, *SENDS}
)


class Happenings:
    """What the actions of a rank, in order, do to which microbatch."""

    def __init__(self) -> None:
        self._sent: dict[Channel, deque[int]] = defaultdict(deque)

    def of(self, action: Action) -> Iterator[tuple[int, Event]]:
        """Microbatches and events; a channel with enough on its way is done with the oldest before it sends anew."""
        for part in (action,) if action.beside is None else action.parts:
            kind, microbatch = part.kind, part.microbatch
            if kind not in MOVES or microbatch is None:
                continue
            if kind in SENDS:
                assert part.peer is not None
                channel = (kind, part.stage, part.peer)
                sent = self._sent[channel]
                if len(sent) == SENDS_IN_FLIGHT:
                    yield sent.popleft(), (False, *channel)
                sent.append(microbatch)
            yield microbatch, (True, kind, part.stage, part.peer)


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
        self.memories = memories
        self.rank_of_stage = rank_of_stage
        self.rank = rank
        graph = memories[0].stage.graph
        start = _State()
        self.inputs = {
            value: start.new(graph.values[value].meta.storage_bytes) for value in graph.inputs.values()
        }
        start.take(self.inputs.values())
        self.input_bytes = start.live
        self.start_sizes = dict(start.size)
        self._states = [start]
        self._steps: dict[tuple[int, Event], Step] = {}

    def step(self, state: int, event: Event) -> Step:
        """The change that `event` makes to a microbatch in `state`; states are numbered from 0, the first.

        Raises:
            ScheduleError: the event uses a value that is not there.
        """
        known = self._steps.get((state, event))
        if known is None:
            known = self._steps[state, event] = self._worked_out(state, event)
        return known

    def sending_bytes(self, state: int) -> int:
        """Bytes of `state` that are alive only because they may still be on their way."""
        found = self._states[state].copied()
        before = found.live
        for keys in found.sending.values():
            found.release(keys)
        return before - found.live

    def saved_bytes(self, state: int) -> dict[int, int]:
        """Stage -> bytes that its forward has saved; what several stages of the rank save counts for the first."""
        found, seen = self._states[state], set(self.inputs.values())
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
        change = _Change(self, after)
        try:
            change.act(event)
        except KeyError as missing:
            raise ScheduleError(f"value {missing} is used before it is there") from None
        held, script = self.held_bytes(before), tuple(after.script or ())
        after.script = None
        self._states.append(after)
        return Step(
            len(self._states) - 1, after.live - before.live, self.held_bytes(after) - held,
            change.highest - before.live, change.activations - held, change.transient, script,
        )  # fmt: skip

    def held_bytes(self, state: _State) -> int:
        """Bytes of saved activations, user inputs apart."""
        keys = {key for values in state.held.values() for key in values.values()}
        return sum(state.size[key] for key in keys - set(self.inputs.values()))


class _Change:
    """One event happening to one microbatch, and the most bytes alive meanwhile."""

    def __init__(self, flight: InFlight, state: _State) -> None:
        self.flight = flight
        self.state = state
        self.highest = state.live
        self.activations = flight.held_bytes(state)
        self.transient = 0

    def act(self, event: Event) -> None:
        is_action, kind, stage, peer = event
        memory = self.flight.memories[stage]
        match kind if is_action else None:
            case None:
                assert peer is not None
                self.state.release(self.state.sending.pop((kind, stage, peer)))
            case Kind.F:
                self._forward(memory)
            case Kind.B:
                given = self.state.held.pop(stage) | self._collect(Kind.SEND_B, stage)
                self._hand_over(Kind.SEND_B, stage, self._call(memory.backward, given))
            case Kind.I:
                self._input_grad(memory)
            case Kind.R:
                self._rebuild(memory)
            case Kind.OFFLOAD:
                self._offload(memory)
            case Kind.FETCH:
                self._fetch(memory)
            case Kind.W:
                self.state.release(self._call(memory.weight_grad, self.state.held.pop(stage)).values())
            case Kind.RECV_F | Kind.RECV_B:
                assert peer is not None
                self._post((Kind.SEND_F if kind is Kind.RECV_F else Kind.SEND_B, peer, stage))
            case Kind.SEND_F | Kind.SEND_B:
                assert peer is not None
                self._send((kind, stage, peer))
            case _:
                raise ScheduleError(f"the memory of {kind} actions is not known")

    def _forward(self, memory: StageMemory) -> None:
        state, stage = self.state, memory.stage
        given = self._collect(Kind.SEND_F, stage.index)
        for value in stage.inputs:
            given[value] = self.flight.inputs[value]
            state.take([given[value]])
        made = self._call(memory.forward, given)
        held = {value: made[value] for value in stage.saved if value in made}
        state.held[stage.index] = held
        state.take(held.values())
        if stage.computes_loss:
            state.take([made[stage.graph.loss]])  # for the batch
        self._hand_over(Kind.SEND_F, stage.index, made)

    def _offload(self, memory: StageMemory) -> None:
        state, stage = self.state, memory.stage
        held = state.held[stage.index]
        moved = {value: held[value] for value in stage.offloaded if value in held}
        numbers = {key: number for number, key in enumerate(dict.fromkeys(moved.values()))}
        sizes = tuple(state.size[key] for key in numbers)
        state.away[stage.index] = {value: numbers[key] for value, key in moved.items()}, sizes
        state.held[stage.index] = {value: key for value, key in held.items() if value not in moved}
        state.release(moved.values())

    def _fetch(self, memory: StageMemory) -> None:
        state, stage = self.state, memory.stage
        places, sizes = state.away.pop(stage.index)
        keys = [state.new(size) for size in sizes]
        back = {value: keys[place] for value, place in places.items()}
        state.take(back.values())
        state.held[stage.index] = state.held[stage.index] | back
        self._observe()

    def _rebuild(self, memory: StageMemory) -> None:
        state, stage = self.state, memory.stage
        held = state.held.pop(stage.index)
        kept = {value: key for value, key in held.items() if value in stage.backward.inputs}
        given = {value: held[value] for value in stage.rebuild.inputs}
        state.take((*kept.values(), *given.values()))
        state.release(held.values())
        state.held[stage.index] = kept
        state.held[stage.index] = kept | self._call(memory.rebuild, given)

    def _input_grad(self, memory: StageMemory) -> None:
        state, stage = self.state, memory.stage
        available = state.held.pop(stage.index) | self._collect(Kind.SEND_B, stage.index)
        kept = {value: available[value] for value in stage.relayed if value in available}
        state.take(kept.values())
        state.held[stage.index] = kept
        made = self._call(memory.input_grad, available)
        fresh = {value: made[value] for value in stage.relayed if value in made and value not in kept}
        state.take(fresh.values())
        state.held[stage.index] = kept | fresh
        self._hand_over(Kind.SEND_B, stage.index, made)

    def _call(self, function: FunctionMemory, given: dict[int, Key]) -> dict[int, Key]:
        """Run `function` on `given`, whose references it takes over; its outputs carry one reference each."""
        state, last = self.state, dict[Key, int]()
        for value, key in given.items():
            last[key] = max(last.get(key, -1), function.last.get(value, -1))
            state.references[key] -= 1
        free = [(at, state.size[key]) for key, at in last.items() if state.references[key] == 0]
        peak = function.peak(free)
        own = sum(size for _, size in free) - peak.released
        self._observe(peak.above_entry, peak.made, own)
        script, state.script = state.script, None  # the function's own order, not that of what follows
        storages = {home: state.new(num_bytes) for home, num_bytes in function.kept.items()}
        outputs = {
            value: storages[home] if home in storages else given[home]
            for value, home in function.outputs.items()
        }
        state.take(outputs.values())
        gone = {key: at for key, at in last.items() if state.references[key] == 0}
        for key in gone:
            state.take([key])
            state.release([key])
        if script is not None:
            state.script = script
            script.extend(_script(function, storages, gone))
        return outputs

    # -- values between stages ------------------------------------------------------------------------------

    def _transfers(self, kind: Kind, stage: int) -> dict[int, tuple[int, ...]]:
        found = self.flight.memories[stage].stage
        transfers = found.sends if kind is Kind.SEND_F else found.grad_sends
        return {transfer.stage: transfer.values for transfer in transfers}

    def _hand_over(self, kind: Kind, stage: int, made: dict[int, Key]) -> None:
        for target, values in self._transfers(kind, stage).items():
            kept = {value: made[value] for value in values}
            self.state.take(kept.values())
            self.state.waiting[kind, stage, target] = kept
        self.state.release(made.values())

    def _collect(self, kind: Kind, stage: int) -> dict[int, Key]:
        """What other stages made for `stage`; whoever asks takes over the references."""
        own = self.flight.memories[stage].stage
        found: dict[int, Key] = {}
        for transfer in own.receives if kind is Kind.SEND_F else own.grad_receives:
            channel = (kind, transfer.stage, stage)
            if self.flight.rank_of_stage[transfer.stage] == self.flight.rank:
                found.update(self.state.waiting.pop(channel))
            else:
                found.update(self._unpack(self.state.posted.pop(channel)))
        return found

    def _messages(self, channel: Channel) -> tuple[Message, ...]:
        return self.flight.memories[channel[1]].messages.get(channel, ())

    def _post(self, channel: Channel) -> None:
        buffers = [(message, self.state.new(message.num_bytes)) for message in self._messages(channel)]
        self.state.take(key for _, key in buffers)
        self.state.posted[channel] = buffers
        self._observe()

    def _unpack(self, buffers: list[tuple[Message, Key]]) -> dict[int, Key]:
        arrived: dict[int, Key] = {}
        for message, buffer in buffers:
            meta = message.values[0].meta
            key = buffer
            if not message.whole and meta.num_distinct != meta.extent:
                key = self.state.new(meta.extent * meta.item_bytes)
                self._observe()
            for value in message.values:
                arrived[value.id] = key
                self.state.take([key])
            self.state.release([buffer])
        return arrived

    def _send(self, channel: Channel) -> None:
        values = self.state.waiting.pop(channel, {})
        sending: list[Key] = []
        for message in self._messages(channel):
            first = message.values[0]
            key = values[first.id] if _goes_as_it_is(message) else self.state.new(message.num_bytes)
            self.state.take([key])
            sending.append(key)
        self._observe()
        self.state.sending[channel] = sending
        self.state.release(values.values())

    def _observe(self, above: int = 0, transient: int = 0, own: int = 0) -> None:
        """Note that `above` more bytes are alive than are listed, `own` of them saved values a function has taken."""
        if self.state.live + above > self.highest:
            self.highest = self.state.live + above
            self.activations = self.flight.held_bytes(self.state) + own
            self.transient = transient


def _script(
    function: FunctionMemory, storages: dict[int, Key], gone: dict[Key, int]
) -> Iterator[tuple[Key, int]]:
    """What a run of `function` makes and frees, in order: after each statement its own, then inputs that are `gone`.

    `storages` are the keys of what stays; what does not has negative ones.
    """
    waiting = sorted((at, key) for key, at in gone.items())
    place = 0
    for statement, home, num_bytes in function.events:
        while place < len(waiting) and waiting[place][0] < statement:
            yield waiting[place][1], FREED
            place += 1
        yield storages.get(home, -1 - home), num_bytes
    for _, key in waiting[place:]:
        yield key, FREED


def _goes_as_it_is(message: Message) -> bool:
    """Whether a message is sent out of the storage it lies in, without a packed copy."""
    if message.whole:
        return True
    meta = message.values[0].meta
    step = 1
    for size, stride in zip(reversed(meta.shape), reversed(meta.stride), strict=True):
        distinct = 1 if stride == 0 else size
        if distinct != 1 and stride != step:
            return False
        step *= distinct
    return True
