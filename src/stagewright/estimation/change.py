"""One event happening to one microbatch on a rank: what it makes and frees, and the most bytes alive meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from stagewright.errors import ScheduleError
from stagewright.estimation.liveness import FREED, FunctionMemory
from stagewright.estimation.stage_memory import Channel, StageMemory
from stagewright.graph.messages import Message
from stagewright.schedule import Kind

Key = int


class Request(NamedTuple):
    """A storage that is made, with its bytes, or freed, with `FREED`; and what is alive afterwards, in bytes: `saved`
    activations, and what a running function has made, of which `again` there was before."""

    key: Key
    num_bytes: int
    saved: int
    transient: int = 0
    again: int = 0


@dataclass
class Storages:
    """Those of one microbatch on a rank with the number of names each has; user inputs are always there.

    * `held`: stage -> what its forward has saved, by value;
    * `waiting`: what is made and not yet sent or used; `posted`: buffers to receive into; `sending`: what may still be on
      its way;
    * `holders`: how many stages have saved a storage, user inputs apart; `held_bytes`: of all these storages;
    * `script`: where asked for, what was made and freed, in order.
    """

    size: dict[Key, int] = field(default_factory=dict)
    references: dict[Key, int] = field(default_factory=dict)
    held: dict[int, dict[int, Key]] = field(default_factory=dict)
    waiting: dict[Channel, dict[int, Key]] = field(default_factory=dict)
    posted: dict[Channel, list[tuple[Message, Key]]] = field(default_factory=dict)
    sending: dict[Channel, list[Key]] = field(default_factory=dict)
    holders: dict[Key, int] = field(default_factory=dict)
    held_bytes: int = 0
    live: int = 0
    next_key: int = 0
    script: list[Request] | None = None

    def copied(self) -> Storages:
        """What is inside the inner collections is never changed, only replaced."""
        return Storages(
            dict(self.size), dict(self.references), dict(self.held), dict(self.waiting), dict(self.posted),
            dict(self.sending), dict(self.holders), self.held_bytes, self.live, self.next_key, self.script,
        )  # fmt: skip

    def hold(self, stage: int, values: dict[int, Key], inputs: frozenset[Key]) -> None:
        """`values` are from now on what `stage` has saved."""
        if stage in self.held:
            self.let_go(stage, inputs)
        self.held[stage] = values
        for key in {*values.values()} - inputs:
            number = self.holders.get(key, 0)
            self.holders[key] = number + 1
            self.held_bytes += 0 if number else self.size[key]

    def let_go(self, stage: int, inputs: frozenset[Key]) -> dict[int, Key]:
        """What `stage` has saved, from now on no longer."""
        values = self.held.pop(stage)
        for key in {*values.values()} - inputs:
            number = self.holders.pop(key) - 1
            if number:
                self.holders[key] = number
            else:
                self.held_bytes -= self.size[key]
        return values

    def new(self, num_bytes: int) -> Key:
        self.next_key += 1
        self.size[self.next_key] = num_bytes
        self.references[self.next_key] = 0
        self.live += num_bytes
        if self.script is not None:
            self.script.append(Request(self.next_key, num_bytes, self.held_bytes))
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
                    self.script.append(Request(key, FREED, self.held_bytes))


Event = tuple[bool, Kind, int, int | None]
"""True and the kind, stage and peer of an action; False and a channel that is done with what it sent."""


@dataclass(frozen=True)
class Rank:
    """Where events happen: pipeline rank `number`, with the storages of a microbatch's user inputs."""

    memories: Sequence[StageMemory]
    rank_of_stage: Sequence[int]
    number: int
    inputs: Mapping[int, Key]

    @cached_property
    def input_keys(self) -> frozenset[Key]:
        return frozenset(self.inputs.values())


class Change:
    """One event happening to one microbatch, and the most bytes alive meanwhile."""

    def __init__(self, rank: Rank, state: Storages) -> None:
        self.rank = rank
        self.state = state
        self.highest = state.live
        self.activations = state.held_bytes
        self.transient = 0
        self.again = 0
        self.operator = ""

    def act(self, event: Event) -> None:
        is_action, kind, stage, peer = event
        memory = self.rank.memories[stage]
        match kind if is_action else None:
            case None:
                assert peer is not None
                self.state.release(self.state.sending.pop((kind, stage, peer)))
            case Kind.F:
                self._forward(memory)
            case Kind.B:
                given = self._let_go(stage) | self._collect(Kind.SEND_B, stage)
                made = self._call(memory.backward, given)
                self._keep_loss(memory, made)
                self._hand_over(Kind.SEND_B, stage, made)
            case Kind.I:
                self._input_grad(memory)
            case Kind.R:
                self._rebuild(memory)
            case Kind.W:
                self.state.release(self._call(memory.weight_grad, self._let_go(stage)).values())
            case Kind.RECV_F | Kind.RECV_B:
                assert peer is not None
                self._post((Kind.SEND_F if kind is Kind.RECV_F else Kind.SEND_B, peer, stage))
            case Kind.SEND_F | Kind.SEND_B:
                assert peer is not None
                self._send((kind, stage, peer))
            case _:
                raise ScheduleError(f"the memory of {kind} actions is not known")

    def _hold(self, stage: int, values: dict[int, Key]) -> None:
        self.state.hold(stage, values, self.rank.input_keys)

    def _let_go(self, stage: int) -> dict[int, Key]:
        return self.state.let_go(stage, self.rank.input_keys)

    def _forward(self, memory: StageMemory) -> None:
        state, stage = self.state, memory.stage
        given = self._collect(Kind.SEND_F, stage.index)
        for value in stage.inputs:
            given[value] = self.rank.inputs[value]
            state.take([given[value]])
        made = self._call(memory.forward, given)
        held = {value: made[value] for value in stage.saved if value in made}
        self._hold(stage.index, held)
        state.take(held.values())
        self._keep_loss(memory, made)
        self._hand_over(Kind.SEND_F, stage.index, made)

    def _keep_loss(self, memory: StageMemory, made: Mapping[int, Key]) -> None:
        """The loss, if it is among what was made, stays for the batch."""
        if memory.stage.computes_loss and memory.stage.graph.loss in made:
            self.state.take([made[memory.stage.graph.loss]])

    def _rebuild(self, memory: StageMemory) -> None:
        state, stage = self.state, memory.stage
        held = self._let_go(stage.index)
        kept = {value: key for value, key in held.items() if value in stage.after_rebuild}
        given = {value: held[value] for value in stage.rebuild.inputs}
        state.take((*kept.values(), *given.values()))
        state.release(held.values())
        self._hold(stage.index, kept)
        self._hold(stage.index, kept | self._call(memory.rebuild, given))

    def _input_grad(self, memory: StageMemory) -> None:
        state, stage = self.state, memory.stage
        available = self._let_go(stage.index) | self._collect(Kind.SEND_B, stage.index)
        kept = {value: available[value] for value in stage.saved_for_weight_grad if value in available}
        state.take(kept.values())
        self._hold(stage.index, kept)
        made = self._call(memory.input_grad, available)
        fresh = {
            value: made[value] for value in stage.saved_for_weight_grad if value in made and value not in kept
        }
        state.take(fresh.values())
        self._hold(stage.index, kept | fresh)
        self._keep_loss(memory, made)
        self._hand_over(Kind.SEND_B, stage.index, made)

    def _call(self, function: FunctionMemory, given: dict[int, Key]) -> dict[int, Key]:
        """Run `function` on `given`, whose references it takes over; its outputs carry one reference each."""
        state, last = self.state, dict[Key, int]()
        for value, key in given.items():
            last[key] = max(last.get(key, -1), function.last.get(value, -1))
            state.references[key] -= 1
        free = [(at, state.size[key]) for key, at in last.items() if state.references[key] == 0]
        peak = function.peak(free)
        own = sum(size for _, size in free)
        self._observe(peak.above_entry, peak.made, own - peak.released, peak.again, peak.operator)
        script, state.script = state.script, None  # the function's own order, not that of what follows
        storages = {home: state.new(num_bytes) for home, num_bytes in function.kept.items()}
        outputs = {
            value: storages[home] if home in storages else given[home]
            for value, home in function.outputs.items()
        }
        state.take(outputs.values())
        gone = [(at, key, state.size[key]) for key, at in last.items() if state.references[key] == 0]
        for _, key, _ in gone:
            state.take([key])
            state.release([key])
        if script is not None:
            state.script = script
            script.extend(_script(function, storages, gone, state.held_bytes + own))
        return outputs

    # -- values between stages ------------------------------------------------------------------------------

    def _transfers(self, kind: Kind, stage: int) -> dict[int, tuple[int, ...]]:
        found = self.rank.memories[stage].stage
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
        own = self.rank.memories[stage].stage
        found: dict[int, Key] = {}
        for transfer in own.receives if kind is Kind.SEND_F else own.grad_receives:
            channel = (kind, transfer.stage, stage)
            if self.rank.rank_of_stage[transfer.stage] == self.rank.number:
                found.update(self.state.waiting.pop(channel))
            else:
                found.update(self._unpack(self.state.posted.pop(channel)))
        return found

    def _messages(self, channel: Channel) -> tuple[Message, ...]:
        return self.rank.memories[channel[1]].messages.get(channel, ())

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

    def _observe(
        self, above: int = 0, transient: int = 0, own: int = 0, again: int = 0, operator: str = ""
    ) -> None:
        """Note that `above` more bytes are alive than are listed, `own` of them saved values a function has taken, while
        `operator` of it runs; of what it has made, `again` bytes were there before."""
        if self.state.live + above > self.highest:
            self.highest = self.state.live + above
            self.activations = self.state.held_bytes + own
            self.transient, self.again, self.operator = transient, again, operator


def _script(
    function: FunctionMemory, storages: dict[int, Key], gone: Iterable[tuple[int, Key, int]], saved: int
) -> Iterator[Request]:
    """What a run of `function` makes and frees, in order: after each statement its own, then inputs that are `gone`
    (statement of the last use, storage, bytes), which are among the `saved` bytes at its begin.

    `storages` are the keys of what stays; what does not has negative ones.
    """
    waiting = deque(sorted(gone))
    sizes: dict[int, int] = {}
    transient = again = 0
    for statement, home, num_bytes in function.events:
        while waiting and waiting[0][0] < statement:
            _, key, freed = waiting.popleft()
            saved -= freed
            yield Request(key, FREED, saved, transient, again)
        change = -sizes[home] if num_bytes == FREED else num_bytes
        sizes[home] = num_bytes
        transient += change
        again += change if home in function.made_again else 0
        yield Request(storages.get(home, -1 - home), num_bytes, saved, transient, again)
    for _, key, freed in waiting:
        saved -= freed
        yield Request(key, FREED, saved, transient, again)


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
