"""The runner of a rank: an interpreter of actions that knows no schedule's name.

It executes the rank's actions of the lowered program in order. Receives of values that an action needs from other ranks
were posted by earlier actions; values for other stages of the same rank are passed on without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from stagewright.errors import RunError
from stagewright.estimation.flat_operations import NOTHING, FlatOperations, flat_operations
from stagewright.estimation.memory import stage_edges
from stagewright.execution.clock import ActionTimer
from stagewright.execution.shards import Shards
from stagewright.execution.stage_runner import StageOptions, StageRunner, Tensors
from stagewright.execution.transport import Channel, Transport
from stagewright.execution.weights import Weights
from stagewright.graph.messages import messages
from stagewright.graph.stage import Stage, Transfer
from stagewright.schedule.action import COMPUTE, SENDS, Action, Kind
from stagewright.schedule.lanes import Lane
from stagewright.schedule.program import Program

Inputs = Mapping[str, torch.Tensor]
GroupOf = Callable[[Lane], dist.ProcessGroup | None]
_Channels = dict[tuple[int, int], Channel | None]


@dataclass(frozen=True)
class Moment:
    """The start and end of an action, in seconds of this rank's monotonic clock; it starts when its inputs have arrived."""

    action: Action
    start: float
    end: float


@dataclass
class BatchResult:
    """The unscaled losses of the microbatches that this rank computed, and marks of the start and end of each action."""

    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    marks: list[tuple[Action, Any, Any]] = field(default_factory=list)
    timer: ActionTimer = field(default_factory=lambda: ActionTimer(torch.device("cpu")))

    def moments(self) -> list[Moment]:
        """Return the start and end of each action; on a GPU, its work must be done."""
        seconds = self.timer.seconds
        return [Moment(action, seconds(start), seconds(end)) for action, start, end in self.marks]


@dataclass(frozen=True)
class PipelineRank:
    """The position of this process in the pipeline of its replica."""

    rank: int
    """Pipeline rank of this process."""
    global_ranks: Sequence[int]
    """Global rank of every pipeline rank."""
    group_of: GroupOf = lambda lane: None
    """The process group of a lane; None is the default group."""


class RankRunner:
    """A runner of one rank's actions of a program.

    Args:
        stages: all stages of the pipeline; only those placed on this rank are compiled.
        program: a lowered program (with sends and receives).
        watch: called with the text of every action before it runs.
        shards: the state sharded over replicas, to which GATHER, RELEASE and REDUCE apply.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        program: Program,
        place: PipelineRank,
        weights: Weights,
        device: torch.device,
        options: StageOptions,
        watch: Callable[[str], None] = lambda action: None,
        shards: Shards | None = None,
    ) -> None:
        self.device = device
        self.weights = weights
        self.watch = watch
        self.rank = place.rank
        self.shards = shards or Shards()
        self.follow(program)
        self.transport = Transport(device)
        self.timer = ActionTimer(device)
        self._started: Any = None  # mark of when the inputs of the present action had arrived
        self._current = BatchResult()
        placed = program.placement.rank_of_stage
        self.runners = {
            stage.index: StageRunner(stage, weights, device, options, self.shards.is_gathered(stage.index))
            for stage in stages
            if placed[stage.index] == place.rank
        }
        self._forward, self._backward = _channels(stages, placed, place)
        self._waiting: dict[tuple[str, int, int, int], Tensors] = {}

    def prepare(self) -> None:
        """Compile the functions that the program calls, before anything waits for them. Only this rank takes part: no
        receive may be outstanding, because compilers wait for the whole device."""
        for number, runner in self.runners.items():
            runner.prepare({action.kind for action in self.actions if action.stage == number})

    def follow(self, program: Program) -> None:
        """Run batches by another lowered program, of the same stages and microbatches, from now on."""
        self.actions = program.actions(self.rank)
        *self._flat_operations, self._last_operations = flat_operations(self.actions, self.shards.flats)

    def scale_loss(self, cotangent: float) -> None:
        """Set the cotangent of each microbatch's loss from which backwards start."""
        for runner in self.runners.values():
            runner.scale_loss(cotangent)

    def release(self) -> None:
        """Release all values that can be recomputed from the weights, until `restore`."""
        self.transport.release()
        for runner in self.runners.values():
            runner.release()

    def restore(self) -> None:
        """Recompute released values, ready for batches."""
        for runner in self.runners.values():
            runner.restore()

    def boundary(self) -> Iterator[torch.Tensor]:
        """Yield the tensors in transfer between stages."""
        yield from self.transport.buffers()
        for values in self._waiting.values():
            yield from values.values()

    def channels_between(self, low: int, high: int) -> tuple[Channel, Channel]:
        """Return the channels of values between a stage of this rank and one of another, and of their cotangents."""
        return _remote(self._forward, (low, high)), _remote(self._backward, (high, low))

    def drop(self) -> None:
        """Drop a batch that cannot be finished."""
        self._waiting.clear()
        for runner in self.runners.values():
            runner.drop()

    def run_batch(
        self,
        step: int,
        microbatches: Sequence[Inputs],
        cotangents: Sequence[float] | torch.Tensor | None = None,
    ) -> BatchResult:
        """Run the program once: F, I and W of every microbatch; gradients are in `weights` afterwards. `cotangents` are
        those of the loss of each microbatch, where they are not all `loss_scale`. Raises `RunError` where an action fails;
        names the action and the transfer that it waited for."""
        result = self._current = BatchResult(timer=self.timer)
        self.timer.begin()
        self.weights.begin_step()
        self.shards.drop_gradients()
        for runner in self.runners.values():
            runner.begin_step(step, cotangents)
        for action, before in zip(self.actions, self._flat_operations, strict=True):
            self.watch(str(action))
            self._started = self.timer.mark()
            try:
                if before is not NOTHING:
                    self._move(before)
                self._act(action, microbatches, result)
            except RunError as error:
                raise RunError(f"action {action}: {error}") from error
            except (KeyError, RuntimeError) as error:
                raise RunError(f"action {action} failed: {type(error).__name__}: {error}") from error
            result.marks.append((action, self._started, self.timer.mark()))
        self.watch("end of batch")
        self.shards.end_batch(self._last_operations)
        self.transport.settle_all()
        return result

    def device_position(self) -> str:
        """Return the device's position in the present batch, which may be far behind the host; empty if it is not behind."""
        marks = list(self._current.marks)
        done = next((index for index, (*_, end) in enumerate(marks) if not end.query()), len(marks))
        if done == len(marks):
            return ""
        action, started, _ = marks[done]
        last = f"has finished {marks[done - 1][0]}" if done else "has finished none"
        waits = self._awaited(action)
        is_waiting = action.kind in SENDS or not started.query()
        doing = f"waits at {action} for {waits}" if waits and is_waiting else f"computes {action}"
        return f"{last} ({done} of {len(self.actions)} actions) and {doing}"

    def _awaited(self, action: Action) -> str:
        """Return the values from other ranks, or the earlier transfers, that an action waits for."""
        match action.kind:
            case Kind.SEND_F | Kind.SEND_B:
                channels = self._forward if action.kind is Kind.SEND_F else self._backward
                channel = _remote(channels, (action.stage, _peer(action)))
                return f"rank {channel.peer} to receive earlier messages of stages {channel.name}"
            case Kind.RECV_F | Kind.RECV_B:
                return ""
        parts = [
            f"microbatch {part.microbatch} of stages {channel.name} from rank {channel.peer}"
            for part in action.parts
            for (_, target), channel in (self._forward if part.kind is Kind.F else self._backward).items()
            if target == part.stage and channel is not None and part.kind in (Kind.F, Kind.B, Kind.I)
        ]
        return " and ".join(parts)

    def _move(self, before: FlatOperations) -> None:
        """Do what an action does first: gather and release sharded parameters and reduce gradients."""
        for stage in before.leaves:
            self.runners[stage].drop_parameters()
        self.shards.before(before)
        for stage in before.uses:
            self.runners[stage].put_parameters(self.shards.parameters(stage))
            self._started = self.timer.mark()  # waiting is not part of the action

    def _act(self, action: Action, microbatches: Sequence[Inputs], result: BatchResult) -> None:
        stage, microbatch = action.stage, action.microbatch
        assert microbatch is not None or action.kind not in COMPUTE
        index = microbatch if microbatch is not None else -1
        match action.kind:
            case Kind.F:
                self._run_forward(stage, index, microbatches[index], result)
            case Kind.B | Kind.I:
                self._run_backward(action.kind, stage, index, result)
            case Kind.W:
                self.runners[stage].weight_grad(index)
            case Kind.R:
                self.runners[stage].recompute(index)
            case Kind.SEND_F:
                self._send("forward", self._forward, (stage, _peer(action)), index)
            case Kind.SEND_B:
                self._send("backward", self._backward, (stage, _peer(action)), index)
            case Kind.RECV_F:
                self.transport.post(_remote(self._forward, (_peer(action), stage)), index)
            case Kind.RECV_B:
                self.transport.post(_remote(self._backward, (_peer(action), stage)), index)
            case Kind.GATHER | Kind.RELEASE | Kind.REDUCE:
                pass  # done by `_move`
            case _:
                raise RunError(f"this executor does not run {action.kind} actions yet")

    def _run_forward(self, stage: int, microbatch: int, inputs: Inputs, result: BatchResult) -> None:
        arrived = self._collect("forward", self._forward, stage, microbatch)
        computed = self.runners[stage].forward(microbatch, arrived, inputs)
        self._hand_over("forward", stage, microbatch, computed, result)

    def _run_backward(self, kind: Kind, stage: int, microbatch: int, result: BatchResult) -> None:
        cotangents = self._collect("backward", self._backward, stage, microbatch)
        runner = self.runners[stage]
        computed = (runner.backward if kind is Kind.B else runner.input_grad)(microbatch, cotangents)
        self._hand_over("backward", stage, microbatch, computed, result)

    def _collect(self, kind: str, channels: _Channels, stage: int, microbatch: int) -> Tensors:
        """Return the values of other stages for `stage`: received from other ranks, or handed over on this one."""
        values: Tensors = {}
        for (source, target), link in channels.items():
            if target != stage:
                continue
            if link is None:
                values.update(self._waiting.pop((kind, source, target, microbatch)))
            else:
                values.update(self.transport.receive(link, microbatch))
        self._started = self.timer.mark()  # waiting is not part of the action
        return values

    def _hand_over(
        self, kind: str, stage: int, microbatch: int, values: Tensors, result: BatchResult
    ) -> None:
        """Keep values for the stages that need them, until they are sent or used, and record the loss if it is among the
        results of F, or with a late loss of B or I."""
        source_stage = self.runners[stage].stage
        if source_stage.graph.loss in values:
            result.losses[microbatch] = values.pop(source_stage.graph.loss)
        transfers = source_stage.sends if kind == "forward" else source_stage.grad_sends
        by_target = {transfer.stage: transfer.values for transfer in transfers}
        channels = self._forward if kind == "forward" else self._backward
        for source, target in channels:
            if source == stage:
                kept = {value: values[value] for value in by_target.get(target, ())}
                self._waiting[kind, source, target, microbatch] = kept

    def _send(self, kind: str, channels: _Channels, edge: tuple[int, int], microbatch: int) -> None:
        values = self._waiting.pop((kind, *edge, microbatch))
        self.transport.send(_remote(channels, edge), microbatch, values)


def _channels(
    stages: Sequence[Stage], placed: Sequence[int], place: PipelineRank
) -> tuple[_Channels, _Channels]:
    """Return the channels of values and of cotangents, by (source, target), between stages of which at least one is on this
    rank; None where both are."""
    rank, group_of = place.rank, place.group_of
    forward: _Channels = {}
    backward: _Channels = {}
    for low, high in stage_edges(stages):
        if rank not in (placed[low], placed[high]):
            continue
        forward[low, high] = backward[high, low] = None
        if placed[low] != placed[high]:
            peer = place.global_ranks[placed[high] if placed[low] == rank else placed[low]]
            values = group_of(Lane(Kind.F, placed[low], placed[high]))
            gradients = group_of(Lane(Kind.B, placed[high], placed[low]))
            forward[low, high] = _channel(stages[low], high, stages[low].sends, peer, values)
            backward[high, low] = _channel(stages[high], low, stages[high].grad_sends, peer, gradients)
    return forward, backward


def _channel(
    source: Stage, target: int, transfers: Iterable[Transfer], peer: int, group: dist.ProcessGroup | None
) -> Channel:
    sent = next((transfer.values for transfer in transfers if transfer.stage == target), ())
    return Channel(f"{source.index}>{target}", peer, messages(tuple(map(source.value, sent))), group)


def _peer(action: Action) -> int:
    if action.peer is None:
        raise RunError(f"transfer {action} names no peer")
    return action.peer


def _remote(channels: _Channels, edge: tuple[int, int]) -> Channel:
    link = channels.get(edge)
    if link is None:
        raise RunError(
            f"stages {edge[0]} and {edge[1]} exchange nothing across ranks, but the program says they do"
        )
    return link
