"""Stages run in turn in one process and measured, beside the plain run they must equal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stagewright.estimation.liveness import FREED, function_memory
from stagewright.execution.random import keyed
from stagewright.execution.stage_runner import StageOptions, StageRunner
from stagewright.execution.transport import _pack, _unpack
from stagewright.execution.weights import Weights
from stagewright.graph import OperatorGraph, Origin
from stagewright.graph.messages import Message, messages
from stagewright.graph.policy import Policy
from stagewright.graph.split import split_graph
from stagewright.graph.stage import Function, Stage, Transfer
from stagewright.graph.verify import verify_stages
from stagewright.tracing.arguments import from_contents

Batch = Mapping[str, Tensor]
Tensors = dict[int, Tensor]
SEED = 11
STEP = 3


@dataclass(frozen=True)
class Outcome:
    """What a step of training leaves behind; `shared` names parameters whose gradient was added up over stages."""

    losses: list[float]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    shared: frozenset[str] = frozenset()


def run_plain(model: nn.Module, batches: Sequence[Batch]) -> Outcome:
    """Plain autograd, one microbatch after the other, under keyed random numbers. Changes `model`."""
    losses = []
    for microbatch, batch in enumerate(batches):
        with keyed(SEED, STEP, microbatch):
            loss = model(**batch)
        (loss * (1.0 / len(batches))).backward()
        losses.append(loss.item())
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Outcome(losses, gradients, dict(model.named_buffers()))


def bytes_kept_by_autograd(model: nn.Module, batch: Batch) -> int:
    """Bytes of the distinct storages autograd keeps between forward and backward, parameters and buffers excluded."""
    own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), keyed(SEED, STEP, 0):
        loss = model(**batch)
    total = sum(size for storage, size in kept.items() if storage not in own)
    del loss
    return total


@dataclass(frozen=True)
class Parcel:
    """One message of one microbatch on its way between two stages."""

    source: int
    target: int
    message: Message
    buffer: Tensor


class Meter(TorchDispatchMode):
    """Knows which storages came to life in which scope and which of them are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self._scope: object = None
        self._seen: set[int] = set()
        self._made: dict[object, list[tuple[StorageWeakRef, int]]] = {}

    @contextmanager
    def scope(self, name: object) -> Iterator[None]:
        self._scope = name
        with self:
            yield

    def ignore(self, tensors: Sequence[Tensor]) -> None:
        """What outlives a microbatch: parameters, buffers, constants, gradients."""
        self._seen.update(tensor.untyped_storage()._cdata for tensor in tensors)

    def alive(self, name: object) -> int:
        """Bytes of the storages made in a scope that something still refers to."""
        return sum(size for reference, size in self._made.get(name, ()) if not reference.expired())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self._seen:
                storage = tensor.untyped_storage()
                self._seen.add(storage._cdata)  # a weak reference keeps the address from being used again
                self._made.setdefault(self._scope, []).append((StorageWeakRef(storage), storage.nbytes()))
        return result


class Pipeline:
    """The stages of one cutting, run by hand; every transfer is a copy in the layout the receiver expects.

    After each action the bytes alive on behalf of a microbatch are compared with what the graph says; where it
    `is_watched`, with what is predicted after every statement.
    """

    def __init__(
        self,
        graph: OperatorGraph,
        model: nn.Module,
        cuts: Sequence[int],
        num_microbatches: int,
        policies: Sequence[Policy] = (),
        is_watched: bool = False,
        is_compiled: bool = False,
    ) -> None:
        self.graph = graph
        self.stages = split_graph(graph, cuts, policies)
        verify_stages(self.stages)
        tensors = {**_named(model.named_parameters), **_named(model.named_buffers), **_constants(graph)}
        device, scale = torch.device("cpu"), 1.0 / num_microbatches
        self.is_watched = is_watched
        self.present: object = None
        self.statements: list[int] = []
        mark = self._mark if is_watched else None
        self.runners = [
            StageRunner(
                stage,
                Weights([stage], _copies(tensors), device),
                device,
                StageOptions(scale, SEED, is_compiled=is_compiled),
                mark=mark,
            )
            for stage in self.stages
        ]
        self.meter = Meter()
        self.losses: list[float] = []
        for runner in self.runners:
            runner.weights.begin_step()
            runner.begin_step(STEP)
            self.meter.ignore([*runner.resident.values(), *runner.weights.gradients.values()])

    def step(self, batches: Sequence[Batch], split: bool) -> Outcome:
        for microbatch, batch in enumerate(batches):
            self.forward(microbatch, batch)
        for microbatch in range(len(batches)):
            self.backward(microbatch, split)
        return self.outcome()

    def forward(self, microbatch: int, batch: Batch) -> None:
        travelling: list[Parcel] = []
        for stage, runner in zip(self.stages, self.runners, strict=True):
            with self.meter.scope((stage.index, microbatch)):
                arrived = _received(stage, travelling)
                inputs = {
                    stage.value(value).name: batch[stage.value(value).name].clone() for value in stage.inputs
                }
                given = {value: inputs[stage.value(value).name] for value in stage.inputs} | arrived
                with self._watched(stage, microbatch, stage.forward, given, stage.inputs):
                    del given
                    sent = runner.forward(microbatch, arrived, inputs)
            self._take_loss(sent)
            travelling += _sent(stage, stage.sends, sent)
            del inputs, sent
            self._check(stage, microbatch, "F", stage.held_bytes(stage.saved))

    def backward(self, microbatch: int, split: bool) -> None:
        travelling: list[Parcel] = []
        for stage, runner in reversed(list(zip(self.stages, self.runners, strict=True))):
            with self.meter.scope((stage.index, microbatch)):
                arrived = _received(stage, travelling)
                if stage.rebuild.nodes:
                    later = {*stage.after_rebuild, *arrived}
                    with self._watched(stage, microbatch, stage.rebuild, arrived, later):
                        runner.recompute(microbatch)
                function, run = (
                    (stage.input_grad, runner.input_grad) if split else (stage.backward, runner.backward)
                )
                with self._watched(
                    stage, microbatch, function, arrived, stage.saved_for_weight_grad if split else ()
                ):
                    sent = run(microbatch, arrived)
            self._take_loss(sent)
            travelling += _sent(stage, stage.grad_sends, sent)
            del sent
            if split:
                self._check(stage, microbatch, "I", stage.held_bytes(stage.saved_for_weight_grad))
                with (
                    self.meter.scope((stage.index, microbatch)),
                    self._watched(stage, microbatch, stage.weight_grad, {}),
                ):
                    runner.weight_grad(microbatch)
            self._check(stage, microbatch, "the backward", 0)

    def _take_loss(self, sent: Tensors) -> None:
        if self.graph.loss in sent:
            self.losses.append(sent.pop(self.graph.loss).item())

    def outcome(self) -> Outcome:
        gradients: dict[str, Tensor] = {}
        shared: set[str] = set()
        buffers: dict[str, Tensor] = {}
        for stage, runner in zip(self.stages, self.runners, strict=True):
            for value, gradient in runner.weights.gradients.items():
                name = stage.value(value).name
                if name in gradients:
                    shared.add(name)
                gradients[name] = gradients[name] + gradient if name in gradients else gradient
            changed = {buffer for buffer, _ in stage.mutations}
            for value in stage.buffers:
                name = stage.value(value).name
                if value in changed or name not in buffers:
                    buffers[name] = runner.resident[value]
        return Outcome(self.losses, gradients, buffers, frozenset(shared))

    def _mark(self) -> None:
        if self.present is not None:
            self.statements.append(self.meter.alive(self.present))

    @contextmanager
    def _watched(
        self,
        stage: Stage,
        microbatch: int,
        function: Function,
        arrived: Tensors,
        elsewhere: Iterable[int] = (),
    ) -> Iterator[None]:
        """Compares what is alive after every statement of `function`. Of what is held or `arrived` only the values
        `elsewhere` stay after it, and what it is not given goes in front of it."""
        given = arrived | self.runners[stage.index].held.get(microbatch, {})
        storages = {value: tensor.untyped_storage()._cdata for value, tensor in given.items()}
        del given, arrived
        self.present, self.statements = (stage.index, microbatch), []
        yield
        self.present = None
        if not self.is_watched:
            return
        staying = {value for value in storages if value in elsewhere}
        expected = predicted(stage, function, storages, staying)
        assert self.statements == expected, (
            f"stage {stage.index} has {self.statements} bytes alive after the statements of a function of "
            f"{[node.op for node in function.nodes]}; predicted are {expected}"
        )

    def _check(self, stage: Stage, microbatch: int, action: str, expected: int) -> None:
        alive = self.meter.alive((stage.index, microbatch))
        assert alive == expected, (
            f"after {action} stage {stage.index} holds {alive} bytes of microbatch {microbatch}; "
            f"the graph says {expected}"
        )


def predicted(stage: Stage, function: Function, storages: dict[int, int], staying: set[int]) -> list[int]:
    """Bytes alive in front of `function` and after each of its statements, on values that lie in these storages; those that
    are `staying` outlive it."""
    memory = function_memory(function, stage)
    count = len(function.nodes)
    last: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for value, storage in storages.items():
        end = count if value in staying else memory.last.get(value, -1)
        last[storage] = max(last.get(storage, -1), end)
        sizes[storage] = stage.held_bytes([value])
    alive = [sum(sizes[root] for root, end in last.items() if end > place) for place in range(-1, count)]
    made: dict[int, int] = {}
    for statement, storage, num_bytes in memory.events.tolist():
        change = -made[storage] if num_bytes == FREED else num_bytes
        made[storage] = num_bytes
        for place in range(statement + 1, count + 1):
            alive[place] += change
    return alive


def assert_equal(plain: Outcome, pipelined: Outcome, tolerance: float = 1e-12) -> None:
    """Bit for bit; a gradient added up over stages within `tolerance` of its size."""
    assert pipelined.losses == plain.losses
    assert set(pipelined.gradients) == set(plain.gradients)
    for name, expected in plain.gradients.items():
        found = pipelined.gradients[name]
        if name in pipelined.shared:
            bound = tolerance * expected.abs().max().item()
            assert (found - expected).abs().max().item() <= bound, f"gradient of {name}"
        else:
            assert torch.equal(found, expected), (
                f"gradient of {name} is off by {(found - expected).abs().max().item()}"
            )
    for name, found in pipelined.buffers.items():
        assert torch.equal(found, plain.buffers[name]), (
            f"buffer {name}: {found} instead of {plain.buffers[name]}"
        )


def _named(members: Any) -> dict[str, Tensor]:
    return dict(members(remove_duplicate=False))


def _constants(graph: OperatorGraph) -> dict[str, Tensor]:
    made = (value for value in graph.values if value.origin is Origin.CONSTANT)
    return {value.name: from_contents(graph.constants[value.name], value.meta) for value in made}


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _sent(stage: Stage, transfers: Sequence[Transfer], made: Tensors) -> list[Parcel]:
    """What leaves a stage: the bytes on the wire, as the transport packs them."""
    return [
        Parcel(stage.index, transfer.stage, message, _pack(message, made).clone())
        for transfer in transfers
        for message in messages(stage.value(value) for value in transfer.values)
    ]


def _received(stage: Stage, parcels: Sequence[Parcel]) -> Tensors:
    found: Tensors = {}
    for parcel in parcels:
        if parcel.target == stage.index:
            found.update(_unpack(parcel.message, parcel.buffer.clone()))
    return found
