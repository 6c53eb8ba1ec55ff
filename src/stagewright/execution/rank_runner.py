"""One rank at work: an interpreter of actions that knows no schedule's name.

It does what each action says, in the order of its rank's part of the lowered program. What an action needs from other
ranks was posted by an earlier action; what it makes for other stages of the same rank changes hands without a copy.
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
    """When an action ran, in seconds of this rank's monotonic clock; from when what it needs had arrived."""

    action: Action
    start: float
    end: float


@dataclass
class BatchResult:
    """Losses of the microbatches this rank computed, unscaled, and marks of when each action started and ended."""

    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    marks: list[tuple[Action, Any, Any]] = field(default_factory=list)
    timer: ActionTimer = field(default_factory=lambda: ActionTimer(torch.device("cpu")))

    def moments(self) -> list[Moment]:
        """When each action ran; on a GPU to be asked for once its work is done."""
        seconds = self.timer.seconds
        return [Moment(action, seconds(start), seconds(end)) for action, start, end in self.marks]


@dataclass(frozen=True)
class PipelineRank:
    """The place of this process in the pipeline of its replica."""

    rank: int
    """Its pipeline rank."""
    global_ranks: Sequence[int]
    """Of every pipeline rank."""
    group_of: GroupOf = lambda lane: None
    """The process group of a lane; None is the default group."""


class RankRunner:
    """Runs one rank's actions of a program.

    Args:
        stages: all stages of the pipeline; only those placed on this rank are compiled.
        program: a lowered program (with sends and receives).
        watch: told the text of every action before it runs.
        shards: what is sharded over replicas; GATHER, RELEASE and REDUCE are about it.
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
        self._started: Any = None  # mark of when the present action had what it needs
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
        """Compile what the program calls, before anything waits for it. Only this rank takes part: no receive may be
        outstanding, because compilers wait for the whole device."""
        for number, runner in self.runners.items():
            runner.prepare({action.kind for action in self.actions if action.stage == number})

    def follow(self, program: Program) -> None:
        """Run batches in the order of another lowered program from now on, of the same stages and microbatches."""
        self.actions = program.actions(self.rank)
        *self._moves, self._last_moves = flat_operations(self.actions, self.shards.flats)

    def scale_loss(self, cotangent: float) -> None:
        """Start backwards from another cotangent of each microbatch's loss."""
        for runner in self.runners.values():
            runner.scale_loss(cotangent)

    def release(self) -> None:
        """Until `restore`, hold nothing that can be computed again from the weights."""
        self.transport.release()
        for runner in self.runners.values():
            runner.release()

    def restore(self) -> None:
        """Ready for batches again."""
        for runner in self.runners.values():
            runner.restore()

    def boundary(self) -> Iterator[torch.Tensor]:
        """What is on its way between stages."""
        yield from self.transport.buffers()
        for made in self._waiting.values():
            yield from made.values()

    def channels_between(self, low: int, high: int) -> tuple[Channel, Channel]:
        """Of values from a stage of this rank to one of another, or the other way round, and of what comes back for them."""
        return _remote(self._forward, (low, high)), _remote(self._backward, (high, low))

    def drop(self) -> None:
        """Forget a batch that cannot be finished."""
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
        those of the loss of each microbatch, where they are not all `loss_scale`. Raises `RunError` where an action failed;
        names the action and what it waited for."""
        result = self._current = BatchResult(timer=self.timer)
        self.timer.begin()
        self.weights.begin_step()
        self.shards.drop_gradients()
        for runner in self.runners.values():
            runner.begin_step(step, cotangents)
        for action, before in zip(self.actions, self._moves, strict=True):
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
        self.shards.end_batch(self._last_moves)
        self.transport.settle_all()
        return result

    def device_position(self) -> str:
        """Return what the device is at in the present batch, which may be far behind the host; empty if it is not behind."""
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
        """Return what an action needs from other ranks, or which earlier transfers it waits for."""
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
        """What an action does with sharded parameters and gradients before it does anything else."""
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
                pass  # their moves are all they do
            case _:
                raise RunError(f"this executor does not run {action.kind} actions yet")

    def _run_forward(self, stage: int, microbatch: int, inputs: Inputs, result: BatchResult) -> None:
        arrived = self._collect("forward", self._forward, stage, microbatch)
        made = self.runners[stage].forward(microbatch, arrived, inputs)
        self._hand_over("forward", stage, microbatch, made, result)

    def _run_backward(self, kind: Kind, stage: int, microbatch: int, result: BatchResult) -> None:
        cotangents = self._collect("backward", self._backward, stage, microbatch)
        runner = self.runners[stage]
        made = (runner.backward if kind is Kind.B else runner.input_grad)(microbatch, cotangents)
        self._hand_over("backward", stage, microbatch, made, result)

    def _collect(self, kind: str, channels: _Channels, stage: int, microbatch: int) -> Tensors:
        """What other stages made for `stage`: received from other ranks, or handed over on this one."""
        found: Tensors = {}
        for (source, target), link in channels.items():
            if target != stage:
                continue
            if link is None:
                found.update(self._waiting.pop((kind, source, target, microbatch)))
            else:
                found.update(self.transport.receive(link, microbatch))
        self._started = self.timer.mark()  # waiting is not part of the action
        return found

    def _hand_over(self, kind: str, stage: int, microbatch: int, made: Tensors, result: BatchResult) -> None:
        """Set values aside for the stages that need them, until they are sent or used, and note the loss if it is among
        what F, or with a late loss B or I, has made."""
        own = self.runners[stage].stage
        if own.graph.loss in made:
            result.losses[microbatch] = made.pop(own.graph.loss)
        transfers = own.sends if kind == "forward" else own.grad_sends
        values = {transfer.stage: transfer.values for transfer in transfers}
        channels = self._forward if kind == "forward" else self._backward
        for source, target in channels:
            if source == stage:
                kept = {value: made[value] for value in values.get(target, ())}
                self._waiting[kind, source, target, microbatch] = kept

    def _send(self, kind: str, channels: _Channels, edge: tuple[int, int], microbatch: int) -> None:
        values = self._waiting.pop((kind, *edge, microbatch))
        self.transport.send(_remote(channels, edge), microbatch, values)


def _channels(
    stages: Sequence[Stage], placed: Sequence[int], place: PipelineRank
) -> tuple[_Channels, _Channels]:
    """Between every two stages that exchange values, one of them on this rank: by (source, target), for values and for
    cotangents; None where both are."""
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
