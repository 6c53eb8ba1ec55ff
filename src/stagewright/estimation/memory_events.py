"""Memory events of one microbatch on a rank: storages that each allocates and frees, and the peak during it."""

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


class StorageEvent(NamedTuple):
    """Allocation of a storage, with its bytes, or its freeing, with `FREED`; and the bytes alive afterwards: `saved`
    activations, and `transient` bytes of the running function, of which `again` are recomputed."""

    key: Key
    num_bytes: int
    saved: int
    transient: int = 0
    again: int = 0


@dataclass
class Storages:
    """Reference-counted storages of one microbatch on a rank; user inputs are always alive.

    * `size`: bytes of every storage there has been in this or in another state, shared by all of them;
    * `references`: of the storages that are alive;
    * `held`: values that each stage's forward has saved;
    * `waiting`: results not yet sent or used; `posted`: receive buffers; `sending`: transfers that may still be in flight;
    * `holders`: number of stages that have saved a storage, except user inputs; `held_bytes`: total of these storages;
    * `script`: allocations and frees in order, if recorded.
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
    script: list[StorageEvent] | None = None

    def copied(self) -> Storages:
        """Return a shallow copy: inner collections are replaced, never modified."""
        return Storages(
            self.size, dict(self.references), dict(self.held), dict(self.waiting), dict(self.posted),
            dict(self.sending), dict(self.holders), self.held_bytes, self.live, self.script,
        )  # fmt: skip

    def hold(self, stage: int, values: dict[int, Key], inputs: frozenset[Key]) -> None:
        """Replace the values that `stage` has saved by `values`."""
        if stage in self.held:
            self.let_go(stage, inputs)
        self.held[stage] = values
        for key in {*values.values()} - inputs:
            number = self.holders.get(key, 0)
            self.holders[key] = number + 1
            self.held_bytes += 0 if number else self.size[key]

    def let_go(self, stage: int, inputs: frozenset[Key]) -> dict[int, Key]:
        """Remove and return the values that `stage` has saved."""
        values = self.held.pop(stage)
        for key in {*values.values()} - inputs:
            number = self.holders.pop(key) - 1
            if number:
                self.holders[key] = number
            else:
                self.held_bytes -= self.size[key]
        return values

    def new(self, num_bytes: int) -> Key:
        key = len(self.size) + 1
        self.size[key] = num_bytes
        self.references[key] = 0
        self.live += num_bytes
        if self.script is not None:
            self.script.append(StorageEvent(key, num_bytes, self.held_bytes))
        return key

    def take(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self.references[key] += 1

    def release(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self.references[key] -= 1
            if self.references[key] == 0:
                self.live -= self.size[key]
                del self.references[key]
                if self.script is not None:
                    self.script.append(StorageEvent(key, FREED, self.held_bytes))


Event = tuple[bool, Kind, int, int | None]
"""True and the kind, stage and peer of an action; False and a channel whose oldest transfer has ended."""


@dataclass(frozen=True)
class Rank:
    """Pipeline rank `number`, with the storages of a microbatch's user inputs."""

    memories: Sequence[StageMemory]
    rank_of_stage: Sequence[int]
    number: int
    inputs: Mapping[int, Key]

    @cached_property
    def input_keys(self) -> frozenset[Key]:
        return frozenset(self.inputs.values())


class EventRun:
    """Execution of one event on one microbatch.

    `highest` is the peak of alive bytes. The other results are those at the peak: saved `activations`, `transient` bytes of
    the running function, of which `again` are recomputed, and the running `operator`.
    """

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
                outputs = self._call(memory.backward, given)
                self._keep_loss(memory, outputs)
                self._hand_over(Kind.SEND_B, stage, outputs)
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
                raise ScheduleError(f"the memory of {kind} actions is not modelled")

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
        outputs = self._call(memory.forward, given)
        held = {value: outputs[value] for value in stage.saved if value in outputs}
        self._hold(stage.index, held)
        state.take(held.values())
        self._keep_loss(memory, outputs)
        self._hand_over(Kind.SEND_F, stage.index, outputs)

    def _keep_loss(self, memory: StageMemory, outputs: Mapping[int, Key]) -> None:
        """Keep the loss, if it is among the outputs, until the end of the batch."""
        if memory.stage.computes_loss and memory.stage.graph.loss in outputs:
            self.state.take([outputs[memory.stage.graph.loss]])

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
        outputs = self._call(memory.input_grad, available)
        fresh = {
            value: outputs[value]
            for value in stage.saved_for_weight_grad
            if value in outputs and value not in kept
        }
        state.take(fresh.values())
        self._hold(stage.index, kept | fresh)
        self._keep_loss(memory, outputs)
        self._hand_over(Kind.SEND_B, stage.index, outputs)

    def _call(self, function: FunctionMemory, given: dict[int, Key]) -> dict[int, Key]:
        """Run `function` on `given`, whose references it takes over; each output has one reference."""
        state, last = self.state, dict[Key, int]()
        for value, key in given.items():
            last[key] = max(last.get(key, -1), function.last.get(value, -1))
            state.references[key] -= 1
        free = [(at, state.size[key]) for key, at in last.items() if state.references[key] == 0]
        peak = function.peak(free)
        freed_bytes = sum(size for _, size in free)
        self._observe(
            peak.above_entry, peak.allocated, freed_bytes - peak.released, peak.again, peak.operator
        )
        # `_script` yields the events in the order of the statements, unlike what follows.
        script, state.script = state.script, None
        storages = {home: state.new(num_bytes) for home, num_bytes in function.kept.items()}
        outputs = {
            value: storages[home] if home in storages else given[home]
            for value, home in function.outputs.items()
        }
        state.take(outputs.values())
        freed = [(at, key, state.size[key]) for key, at in last.items() if state.references[key] == 0]
        for _, key, _ in freed:
            state.take([key])
            state.release([key])
        if script is not None:
            state.script = script
            script.extend(_script(function, storages, freed, state.held_bytes + freed_bytes))
        return outputs

    # -- values between stages ------------------------------------------------------------------------------

    def _transfers(self, kind: Kind, stage: int) -> dict[int, tuple[int, ...]]:
        described = self.rank.memories[stage].stage
        transfers = described.sends if kind is Kind.SEND_F else described.grad_sends
        return {transfer.stage: transfer.values for transfer in transfers}

    def _hand_over(self, kind: Kind, stage: int, outputs: dict[int, Key]) -> None:
        for target, values in self._transfers(kind, stage).items():
            kept = {value: outputs[value] for value in values}
            self.state.take(kept.values())
            self.state.waiting[kind, stage, target] = kept
        self.state.release(outputs.values())

    def _collect(self, kind: Kind, stage: int) -> dict[int, Key]:
        """Return the values for `stage` from other stages; the caller takes over the references."""
        described = self.rank.memories[stage].stage
        values: dict[int, Key] = {}
        for transfer in described.receives if kind is Kind.SEND_F else described.grad_receives:
            channel = (kind, transfer.stage, stage)
            if self.rank.rank_of_stage[transfer.stage] == self.rank.number:
                values.update(self.state.waiting.pop(channel))
            else:
                values.update(self._unpack(self.state.posted.pop(channel)))
        return values

    def _messages(self, channel: Channel) -> tuple[Message, ...]:
        return self.rank.memories[channel[1]].messages.get(channel, ())

    def _post(self, channel: Channel) -> None:
        buffers = [(message, self.state.new(message.num_bytes)) for message in self._messages(channel)]
        self.state.take(key for _, key in buffers)
        self.state.posted[channel] = buffers
        self._observe()

    def _unpack(self, buffers: list[tuple[Message, Key]]) -> dict[int, Key]:
        values: dict[int, Key] = {}
        for message, buffer in buffers:
            meta = message.values[0].meta
            key = buffer
            if not message.whole and meta.num_distinct != meta.extent:
                key = self.state.new(meta.extent * meta.item_bytes)
                self._observe()
            for value in message.values:
                values[value.id] = key
                self.state.take([key])
            self.state.release([buffer])
        return values

    def _send(self, channel: Channel) -> None:
        values = self.state.waiting.pop(channel, {})
        sending: list[Key] = []
        for message in self._messages(channel):
            first = message.values[0]
            key = values[first.id] if _is_sent_in_place(message) else self.state.new(message.num_bytes)
            self.state.take([key])
            sending.append(key)
        self._observe()
        self.state.sending[channel] = sending
        self.state.release(values.values())

    def _observe(
        self, above: int = 0, transient: int = 0, taken: int = 0, again: int = 0, operator: str = ""
    ) -> None:
        """Record a moment with `above` bytes beyond those of the state, if it is a new peak.

        While a function runs, `transient` bytes are its own, `again` of them recomputed; `taken` are those of inputs that it
        has taken over and not freed yet, which `held_bytes` no longer counts.
        """
        if self.state.live + above > self.highest:
            self.highest = self.state.live + above
            self.activations = self.state.held_bytes + taken
            self.transient, self.again, self.operator = transient, again, operator


def _script(
    function: FunctionMemory, storages: dict[int, Key], freed: Iterable[tuple[int, Key, int]], saved: int
) -> Iterator[StorageEvent]:
    """Yield allocations and frees of a run of `function` in order: after each statement its own, then inputs that are
    `freed` (statement of the last use, storage, bytes), which are among the `saved` bytes at the beginning.

    `storages` are the keys of storages that stay; others have negative keys.
    """
    waiting = deque(sorted(freed))
    sizes: dict[int, int] = {}
    transient = again = 0
    for statement, home, num_bytes in function.events.tolist():
        while waiting and waiting[0][0] < statement:
            _, key, freed_bytes = waiting.popleft()
            saved -= freed_bytes
            yield StorageEvent(key, FREED, saved, transient, again)
        change = -sizes[home] if num_bytes == FREED else num_bytes
        sizes[home] = num_bytes
        transient += change
        again += change if home in function.recomputed else 0
        yield StorageEvent(
            storages[home] if home in storages else -1 - home, num_bytes, saved, transient, again
        )
    for _, key, freed_bytes in waiting:
        saved -= freed_bytes
        yield StorageEvent(key, FREED, saved, transient, again)


def _is_sent_in_place(message: Message) -> bool:
    """Whether a message is sent directly from its storage, without a packed copy."""
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
