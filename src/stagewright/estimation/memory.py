"""Memory of a rank by exact replay: its program's actions over what is alive in each stage function.

The replay follows the executor: values of one microbatch are held from F to its backward, what other stages
of the rank need changes hands without a copy, receive buffers exist from the moment a receive is posted,
what is sent is kept until the next transfer of its channel is sent or the batch ends, and user inputs and
losses stay for the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from stagewright.errors import ScheduleError
from stagewright.estimation.liveness import FunctionMemory, Peak, function_memory
from stagewright.estimation.state import ResidentBytes
from stagewright.graph.payload import Message, messages
from stagewright.graph.stage import Function, Stage
from stagewright.schedule import Action, Kind, Program

Key = int
Channel = tuple[str, int, int]  # direction, source stage, target stage


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank: the peak, where it is and what is alive then."""

    rank: int
    peak_bytes: int
    at: str
    """Text of the action during which the peak is reached."""
    categories: dict[str, int]
    """Adds up to `peak_bytes`."""
    after_action: tuple[int, ...] = ()
    """Bytes alive after every action of the lowered program, for checking."""


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

    def _of(self, function: Function) -> FunctionMemory:
        return function_memory(function, self.stage.resident, self.stage.value)

    @cached_property
    def saved_bytes(self) -> int:
        """Bytes that F leaves for the backward of one microbatch; received values and user inputs apart."""
        homes = {self.forward.outputs[value] for value in self.stage.saved if value in self.forward.outputs}
        return sum(self.forward.kept.get(home, 0) for home in homes)


def stage_edges(stages: Sequence[Stage]) -> tuple[tuple[int, int], ...]:
    """Pairs of stages (earlier, later) between which values or cotangents travel, neighbours always."""
    forward = {(stage.index, transfer.stage) for stage in stages for transfer in stage.sends}
    backward = {(transfer.stage, stage.index) for stage in stages for transfer in stage.grad_sends}
    return tuple(sorted(forward | backward | {(i, i + 1) for i in range(len(stages) - 1)}))


def replay_rank(
    memories: Sequence[StageMemory], program: Program, rank: int, resident: ResidentBytes, left_out: int = 0
) -> RankMemory:
    """The memory of `rank` over one batch of the lowered `program`, on top of what is `resident`.

    `left_out` microbatches, whose inputs and losses count, repeat states that the program shows.

    Raises:
        ScheduleError: the program uses a value before it is made.
    """
    return _Replay(memories, program, rank, resident, left_out).run()


class _Replay:
    def __init__(
        self,
        memories: Sequence[StageMemory],
        program: Program,
        rank: int,
        resident: ResidentBytes,
        left_out: int,
    ) -> None:
        self.memories = memories
        self.program = program
        self.rank = rank
        self.resident = resident
        self.left_out = left_out
        self.placed = program.placement.rank_of_stage
        self.size: dict[Key, int] = {}
        self.references: dict[Key, int] = {}
        self.live = 0
        self.next_key = 0
        self.held: dict[tuple[int, int], dict[int, Key]] = {}
        self.waiting: dict[tuple[Channel, int], dict[int, Key]] = {}
        self.posted: dict[tuple[Channel, int], list[tuple[Message, Key]]] = {}
        self.sending: dict[Channel, list[Key]] = {}
        self.losses: list[Key] = []
        self.inputs: dict[tuple[int, int], Key] = {}
        self.peak = RankMemory(rank, -1, "", {})
        self.action = "begin"
        self.messages: dict[Channel, tuple[Message, ...]] = {}

    def run(self) -> RankMemory:
        self._load_inputs()
        self._observe(self.live + self.resident.rederived, self.resident.rederived, 0, 0)
        after: list[int] = []
        for action in self.program.actions(self.rank):
            self.action = str(action)
            self._act(action)
            after.append(self.live + self.resident.total)
        for channel in list(self.sending):
            self._settle(channel)
        self.losses.clear()
        self.action = "optimizer step"
        self._observe(self.live + self.resident.step_transient, self.resident.step_transient, 0, 0)
        return replace(self.peak, after_action=tuple(after))

    # -- storages -------------------------------------------------------------------------------------------

    def _new(self, num_bytes: int) -> Key:
        self.next_key += 1
        self.size[self.next_key] = num_bytes
        self.references[self.next_key] = 0
        self.live += num_bytes
        return self.next_key

    def _take(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self.references[key] += 1

    def _release(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self.references[key] -= 1
            if self.references[key] == 0:
                self.live -= self.size.pop(key)
                del self.references[key]

    def _load_inputs(self) -> None:
        """User inputs of every microbatch, which the caller holds for the batch."""
        graph = self.memories[0].stage.graph
        for value in graph.inputs.values():
            size = graph.values[value].meta.storage_bytes * self.left_out
            self.inputs[value, -1] = self._new(size)
            self._take([self.inputs[value, -1]])
        if any(m.stage.computes_loss and self.placed[m.stage.index] == self.rank for m in self.memories):
            loss = graph.values[graph.loss].storage
            self.losses.append(self._new(graph.storage_bytes[loss] * self.left_out))
            self._take(self.losses)
        for value in graph.inputs.values():
            for microbatch in range(self.program.num_microbatches):
                key = self._new(graph.values[value].meta.storage_bytes)
                self._take([key])
                self.inputs[value, microbatch] = key

    # -- actions --------------------------------------------------------------------------------------------

    def _act(self, action: Action) -> None:
        for part in action.parts:
            index = -1 if part.microbatch is None else part.microbatch
            try:
                self._act_part(part, index)
            except KeyError as missing:
                raise ScheduleError(
                    f"rank {self.rank}: {part} uses value {missing} before it is there"
                ) from None

    def _act_part(self, action: Action, microbatch: int) -> None:
        memory, stage = self.memories[action.stage], action.stage
        match action.kind:
            case Kind.F:
                self._forward(memory, microbatch)
            case Kind.B:
                given = self.held.pop((stage, microbatch)) | self._collect("B", stage, microbatch)
                self._hand_over("B", stage, microbatch, self._call(memory.backward, given))
            case Kind.I:
                self._input_grad(memory, microbatch)
            case Kind.W:
                self._forget(self._call(memory.weight_grad, self.held.pop((stage, microbatch))))
            case Kind.RECV_F | Kind.RECV_B:
                self._post(action, microbatch)
            case Kind.SEND_F | Kind.SEND_B:
                self._send(action, microbatch)
            case _:
                pass

    def _forward(self, memory: StageMemory, microbatch: int) -> None:
        stage = memory.stage
        given = self._collect("F", stage.index, microbatch)
        for value in stage.inputs:
            given[value] = self.inputs[value, microbatch]
            self._take([given[value]])
        made = self._call(memory.forward, given)
        held = {value: made[value] for value in stage.saved if value in made}
        self.held[stage.index, microbatch] = held
        self._take(held.values())
        if stage.computes_loss:
            self._take([made[stage.graph.loss]])
            self.losses.append(made[stage.graph.loss])
        self._hand_over("F", stage.index, microbatch, made)

    def _input_grad(self, memory: StageMemory, microbatch: int) -> None:
        stage = memory.stage
        available = self.held.pop((stage.index, microbatch)) | self._collect("B", stage.index, microbatch)
        kept = {value: available[value] for value in stage.relayed if value in available}
        self._take(kept.values())
        self.held[stage.index, microbatch] = kept
        made = self._call(memory.input_grad, available)
        fresh = {value: made[value] for value in stage.relayed if value in made and value not in kept}
        self._take(fresh.values())
        kept.update(fresh)
        self._hand_over("B", stage.index, microbatch, made)

    def _call(self, function: FunctionMemory, given: dict[int, Key]) -> dict[int, Key]:
        """Run `function` on `given`, whose references it takes over; its outputs carry one reference each."""
        last: dict[Key, int] = {}
        for value, key in given.items():
            last[key] = max(last.get(key, -1), function.last.get(value, -1))
            self.references[key] -= 1
        free = [(at, self.size[key]) for key, at in last.items() if self.references[key] == 0]
        peak = function.peak(free)
        self._observe(self.live + peak.above_entry, peak.made, sum(size for _, size in free), peak.released)
        storages = {home: self._new(num_bytes) for home, num_bytes in function.kept.items()}
        outputs = {
            value: storages[home] if home in storages else given[home]
            for value, home in function.outputs.items()
        }
        self._take(outputs.values())
        for key in last:
            if self.references[key] == 0:
                self._take([key])
                self._release([key])
        return outputs

    def _forget(self, made: dict[int, Key]) -> None:
        self._release(made.values())

    # -- values between stages ------------------------------------------------------------------------------

    def _transfers(self, direction: str, stage: int) -> dict[int, tuple[int, ...]]:
        found = self.memories[stage].stage
        transfers = found.sends if direction == "F" else found.grad_sends
        return {transfer.stage: transfer.values for transfer in transfers}

    def _messages(self, channel: Channel) -> tuple[Message, ...]:
        if channel not in self.messages:
            direction, source, target = channel
            values = self._transfers(direction, source).get(target, ())
            stage = self.memories[source].stage
            self.messages[channel] = messages(stage.value(value) for value in values)
        return self.messages[channel]

    def _hand_over(self, direction: str, stage: int, microbatch: int, made: dict[int, Key]) -> None:
        for target, values in self._transfers(direction, stage).items():
            kept = {value: made[value] for value in values}
            self._take(kept.values())
            self.waiting[(direction, stage, target), microbatch] = kept
        self._forget(made)

    def _collect(self, direction: str, stage: int, microbatch: int) -> dict[int, Key]:
        """What other stages made for `stage`; whoever asks takes over the references."""
        own = self.memories[stage].stage
        found: dict[int, Key] = {}
        for transfer in own.receives if direction == "F" else own.grad_receives:
            channel = (direction, transfer.stage, stage)
            if self.placed[transfer.stage] == self.rank:
                found.update(self.waiting.pop((channel, microbatch)))
            else:
                found.update(self._unpack(self.posted.pop((channel, microbatch))))
        return found

    def _post(self, action: Action, microbatch: int) -> None:
        assert action.peer is not None
        channel = ("F" if action.kind is Kind.RECV_F else "B", action.peer, action.stage)
        buffers = [(message, self._new(message.num_bytes)) for message in self._messages(channel)]
        self._take(key for _, key in buffers)
        self.posted[channel, microbatch] = buffers
        self._observe(self.live, 0, 0, 0)

    def _unpack(self, buffers: list[tuple[Message, Key]]) -> dict[int, Key]:
        arrived: dict[int, Key] = {}
        for message, buffer in buffers:
            meta = message.values[0].meta
            key = buffer
            if not message.whole and meta.num_distinct != meta.extent:
                key = self._new(meta.extent * meta.item_bytes)
                self._observe(self.live, 0, 0, 0)
            for value in message.values:
                arrived[value.id] = key
                self._take([key])
            self._release([buffer])
        return arrived

    def _send(self, action: Action, microbatch: int) -> None:
        assert action.peer is not None
        direction = "F" if action.kind is Kind.SEND_F else "B"
        channel = (direction, action.stage, action.peer)
        values = self.waiting.pop((channel, microbatch), {})
        self._settle(channel)
        sending: list[Key] = []
        for message in self._messages(channel):
            first = message.values[0]
            key = values[first.id] if _goes_as_it_is(message) else self._new(message.num_bytes)
            self._take([key])
            sending.append(key)
        self._observe(self.live, 0, 0, 0)
        self.sending[channel] = sending
        self._release(values.values())

    def _settle(self, channel: Channel) -> None:
        self._release(self.sending.pop(channel, ()))

    # -- the peak -------------------------------------------------------------------------------------------

    def _observe(self, live: int, transient: int, given: int, released: int) -> None:
        """Note a moment at which `live` bytes exist beside what is resident."""
        total = live + self.resident.total
        if total <= self.peak.peak_bytes:
            return
        held = {key for values in self.held.values() for key in values.values()}
        inputs = sum(self.size[key] for key in self.inputs.values())
        activations = sum(self.size[key] for key in held - set(self.inputs.values())) + given - released
        categories = {
            **self.resident.categories,
            "inputs": inputs,
            "activations": activations,
            "transient": transient,
            "boundary": live - inputs - activations - transient,
        }
        self.peak = RankMemory(self.rank, total, self.action, categories)


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


__all__ = ["Peak", "RankMemory", "StageMemory", "replay_rank", "stage_edges"]
