"""The memory replay against bytes really alive, counted by a tracker that shares no code with the estimator.

Every rank of a pipeline runs in this process with the executor's own interpreter; transfers go through a
mailbox.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nasty import NASTY
from stagewright.cluster import load_cluster
from stagewright.estimation.memory import RankMemory, replay_rank, stage_edges
from stagewright.estimation.stage_memory import StageMemory
from stagewright.estimation.stages import RangeCosts
from stagewright.estimation.state import resident_bytes
from stagewright.estimation.time import Costing
from stagewright.execution import rank_runner
from stagewright.execution.optimizer import Optimizer
from stagewright.execution.rank_runner import BatchResult, PipelineRank, RankRunner
from stagewright.execution.stage_runner import StageOptions, StageRunner
from stagewright.execution.transport import Channel, _pack, _unpack
from stagewright.execution.weights import Weights
from stagewright.graph import Origin
from stagewright.graph.split import split_graph
from stagewright.planning.job import Job
from stagewright.schedule import Kind, Program, build, insert_communication
from stagewright.tracing.arguments import DTYPES, from_contents
from stagewright.tracing.models.build import build as build_model
from stagewright.tracing.models.pieces import evaluate_in_pieces
from stagewright.tracing.models.reference import resolve
from stagewright.tracing.trace import trace_module

CPU = torch.device("cpu")


class Tracker(TorchDispatchMode):
    """Live bytes of storages, charged to the rank at work when they first appear."""

    def __init__(self) -> None:
        super().__init__()
        self.rank = 0
        self.live: dict[int, int] = {}
        self.peak: dict[int, int] = {}
        self.known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.add(item for item in tree_leaves(result) if isinstance(item, torch.Tensor))
        return result

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self.known:
                self._enter(storage, storage._cdata, self.rank, storage.nbytes())

    def _enter(self, storage: torch.UntypedStorage, key: int, rank: int, size: int) -> None:
        def leave(_: object) -> None:
            del self.known[key]
            self.live[rank] -= size

        self.known[key] = weakref.ref(storage, leave)
        self.live[rank] = self.live.get(rank, 0) + size
        self.peak[rank] = max(self.peak.get(rank, 0), self.live[rank])


class Mailbox:
    """What was sent; it lies outside every rank's memory."""

    def __init__(self) -> None:
        self.letters: dict[tuple[str, int], list[bytes]] = {}


class LocalTransport:
    """The executor's transport with a mailbox in place of a process group."""

    mailbox = Mailbox()

    def __init__(self, device: torch.device) -> None:
        self.posted: dict[tuple[str, int], list[torch.Tensor]] = {}
        self.sending: dict[str, list[list[torch.Tensor]]] = {}

    def post(self, channel: Channel, microbatch: int) -> None:
        self.posted[channel.name, microbatch] = [
            torch.empty(message.num_elements, dtype=DTYPES[message.dtype]) for message in channel.messages
        ]

    def receive(self, channel: Channel, microbatch: int) -> dict[int, torch.Tensor]:
        arrived: dict[int, torch.Tensor] = {}
        letters = self.mailbox.letters.pop((channel.name, microbatch))
        posted = self.posted.pop((channel.name, microbatch))
        for message, letter in zip(channel.messages, letters, strict=True):
            buffer = posted.pop(0)
            buffer.view(torch.uint8).numpy()[:] = bytearray(letter)
            arrived.update(_unpack(message, buffer))
        return arrived

    def send(self, channel: Channel, microbatch: int, values: dict[int, torch.Tensor]) -> None:
        waiting = self.sending.setdefault(channel.name, [])
        if len(waiting) == 2:
            del waiting[0]
        buffers = [_pack(message, values) for message in channel.messages]
        self.mailbox.letters[channel.name, microbatch] = [
            buffer.view(torch.uint8).numpy().tobytes() for buffer in buffers
        ]
        waiting.append(buffers)

    def settle_all(self) -> None:
        self.sending.clear()


class Alone:
    """Tied parameters of a process that reduces with nobody."""

    def reduce(self, gradients: object) -> None:
        pass

    def counted(self, gradients: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        return list(gradients.values())


@dataclass
class Measured:
    peak: dict[int, int]
    after: dict[int, list[int]]


@cache
def traced(name: str, dtype: str = "float32") -> tuple[Any, Any]:
    built = build_model(resolve(name), 2, 32, dtype, seed=0)
    return built, trace_module(built.module, built.inputs, name)


def predicted(graph: Any, cuts: list[int], program: Program) -> list[RankMemory]:
    stages = split_graph(graph, cuts)
    memories = [StageMemory(stage) for stage in stages]
    lowered = insert_communication(program, stage_edges(stages))
    ranks = range(program.num_ranks)
    own = [[memories[s] for s in program.placement.stages_of(rank)] for rank in ranks]
    return [replay_rank(memories, lowered, rank, resident_bytes(own[rank])) for rank in ranks]


def measured(
    built: Any, graph: Any, cuts: list[int], program: Program, gradient: torch.dtype | None
) -> Measured:
    """The second optimizer step of every rank, each with tensors of its own."""
    stages = split_graph(graph, cuts)
    lowered = insert_communication(program, stage_edges(stages))
    tensors = dict(built.module.named_parameters(remove_duplicate=False))
    tensors |= dict(built.module.named_buffers(remove_duplicate=False))
    constants = (value for value in graph.values if value.origin is Origin.CONSTANT)
    tensors |= {value.name: from_contents(graph.constants[value.name], value.meta) for value in constants}
    LocalTransport.mailbox = Mailbox()
    tracker, runners, optimizers, inputs = Tracker(), [], [], []
    job = Job(global_batch=1, sequence_length=1)
    for rank in range(program.num_ranks):
        tracker.rank = rank
        own = [stages[s] for s in program.placement.stages_of(rank)]
        fresh = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        needed = {stage.value(value).name for stage in own for value in stage.inputs}
        inputs.append(
            [{name: built.inputs[name].clone() for name in needed} for _ in range(program.num_microbatches)]
        )
        with tracker:
            weights = Weights(own, fresh, CPU, gradient)
            tracker.add(weights.tensors.values())
            tracker.add(tensor for batch in inputs[rank] for tensor in batch.values())
            place = PipelineRank(rank, range(program.num_ranks))
            runners.append(RankRunner(stages, lowered, place, weights, CPU, StageOptions(1.0)))
            optimizers.append(Optimizer(weights, job, Alone(), None, None))  # type: ignore[arg-type]
        del fresh
    with tracker:
        run_batch(runners, inputs, tracker, 0)
        for rank, optimizer in enumerate(optimizers):
            tracker.rank = rank
            optimizer.step(job.rate_of(0))
        tracker.peak = dict(tracker.live)
        after = run_batch(runners, inputs, tracker, 1)
    return Measured(tracker.peak, after)


def run_batch(
    runners: list[RankRunner], inputs: list[list[Any]], tracker: Tracker, step: int
) -> dict[int, list[int]]:
    """All ranks in turn, each as far as what it received allows; bytes alive after every action."""
    results = [BatchResult() for _ in runners]
    after: dict[int, list[int]] = {rank: [] for rank in range(len(runners))}
    for rank, runner in enumerate(runners):
        tracker.rank = rank
        runner.weights.begin_step()
        for stage in runner.runners.values():
            stage.begin_step(step)
    while any(len(after[rank]) < len(runner.actions) for rank, runner in enumerate(runners)):
        for rank, runner in enumerate(runners):
            tracker.rank = rank
            while len(after[rank]) < len(runner.actions):
                action = runner.actions[len(after[rank])]
                if not arrived(runner, action):
                    break
                runner._act(action, inputs[rank], results[rank])
                after[rank].append(tracker.live[rank])
    for runner in runners:
        runner.transport.settle_all()
    return after


def arrived(runner: RankRunner, action: Any) -> bool:
    links = {Kind.F: runner._forward, Kind.B: runner._backward, Kind.I: runner._backward}.get(action.kind, {})
    return all(
        (link.name, action.microbatch) in LocalTransport.mailbox.letters
        for (_, target), link in links.items()
        if target == action.stage and link is not None
    )


@pytest.fixture(autouse=True)
def local_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_runner, "Transport", LocalTransport)


def compare(built: Any, graph: Any, cuts: list[int], program: Program, gradient: torch.dtype | None) -> None:
    found = measured(built, graph, cuts, program, gradient)
    for memory in predicted(graph, cuts, program):
        assert list(memory.after_action) == found.after[memory.rank], f"after an action of rank {memory.rank}"
        assert memory.peak_bytes == found.peak[memory.rank], f"peak of rank {memory.rank} at {memory.at}"
        assert sum(memory.categories.values()) == memory.peak_bytes
        assert min(memory.categories.values()) >= 0


def check(name: str, program: Program, dtype: str = "float32", gradient: torch.dtype | None = None) -> None:
    built, graph = traced(name, dtype)
    size, num_stages = len(graph.forward_ids), program.num_stages
    cuts = [size * index // num_stages + index % 3 for index in range(1, num_stages)]
    compare(built, graph, cuts, program, gradient)


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2", "tiny-t5", "tiny-mixtral"])
@pytest.mark.parametrize(
    ("schedule", "ranks", "split"),
    [("gpipe", 2, False), ("1f1b", 4, False), ("1f1b", 3, True), ("gpipe", 1, True)],
)
def test_bytes_of_every_rank_are_exact(name: str, schedule: str, ranks: int, split: bool) -> None:
    check(name, build(schedule, ranks, 4, split_backward=split))


@pytest.mark.parametrize(
    "name", ["tiny-gemma", "tiny-vit", "tiny-nemotron-h", "tiny-deepseek-v3", "tiny-bert"]
)
def test_bytes_of_other_models_are_exact(name: str) -> None:
    check(name, build("1f1b", 2, 3))


@pytest.mark.parametrize(("schedule", "ranks"), [("zb-v", 2), ("interleaved-1f1b", 2), ("zb-h2", 3)])
def test_bytes_of_ranks_with_several_stages_are_exact(schedule: str, ranks: int) -> None:
    check("tiny-llama", build(schedule, ranks, 4))


def test_bytes_with_master_weights_are_exact() -> None:
    check("tiny-llama", build("1f1b", 2, 3), "bfloat16", torch.float32)


@cache
def traced_in_pieces(num_pieces: int, dtype: str = "float32") -> tuple[Any, Any]:
    """A small Llama whose logits are the largest tensors of its last stage; a narrower one in half precision, products of
    which take most processors long."""
    narrow = {} if dtype == "float32" else {"hidden_size": 64}
    built = build_model(resolve("tiny-llama", {"vocab_size": 8192} | narrow), 2, 256, dtype, seed=0)
    if num_pieces > 1:
        evaluate_in_pieces(built.module, num_pieces, 512)
    return built, trace_module(built.module, built.inputs, "tiny-llama")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("schedule", "ranks", "split"), [("1f1b", 2, False), ("1f1b", 2, True), ("gpipe", 1, True)]
)
def test_bytes_of_a_loss_in_pieces_are_exact(schedule: str, ranks: int, split: bool, dtype: str) -> None:
    built, graph = traced_in_pieces(4, dtype)
    cuts = [graph.late // 2][: ranks - 1]
    gradient = torch.float32 if dtype == "bfloat16" else None
    compare(built, graph, cuts, build(schedule, ranks, 3, split_backward=split), gradient)


def test_a_rank_with_the_loss_alone_is_exact() -> None:
    built, graph = traced_in_pieces(4)
    compare(built, graph, [graph.late], build("1f1b", 2, 3), None)


def test_pieces_save_what_all_logits_but_those_of_a_piece_take() -> None:
    """At the peak are the logarithms of probabilities, their cotangents and those of the logits: of all tokens or of a
    piece, which adds what has come of the cotangents of hidden states."""
    program = build("1f1b", 2, 4)
    (_, whole), (_, parts) = traced_in_pieces(1), traced_in_pieces(4)
    cut = whole.position[next(n.id for n in whole if n.module == "net.model.norm" and n.id in whole.position)]
    before, after = (predicted(graph, [cut], program)[1] for graph in (whole, parts))
    logits, hidden = 4 * 512 * 8192, 4 * 512 * 256
    assert before.at[:2] == after.at[:2] == "1B"
    saved = before.peak_bytes - after.peak_bytes
    assert 3 * (logits - logits // 4) - hidden - 1000 <= saved <= 3 * (logits - logits // 4)


class Discards(torch.nn.Module):
    """Uses one of several results; the others are made and freed at once."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(16, 24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.weight
        best, order, largest = y.topk(5).indices, y.sort(dim=-1).indices, y.max(dim=-1).values
        return (y.gather(1, best).sum() + y.gather(1, order[:, :2]).sum() + largest.sum()).tanh()


def test_results_that_nobody_uses_are_counted() -> None:
    torch.manual_seed(0)
    module, inputs = Discards(), {"x": torch.randn(64, 16)}
    graph = trace_module(module, inputs)
    used = {value for node in graph.nodes for value in node.inputs} | {graph.loss}
    assert any(set(node.outputs) - used for node in graph.nodes if node.op == "aten.sort.default")
    built = SimpleNamespace(module=module, inputs=inputs)
    compare(built, graph, [], build("1f1b", 1, 2), None)
    compare(built, graph, [3], build("gpipe", 2, 2, split_backward=True), None)


@pytest.mark.parametrize("name", NASTY)
@pytest.mark.parametrize("split", [False, True])
def test_bytes_of_nasty_modules_are_exact(name: str, split: bool) -> None:
    torch.manual_seed(0)
    built = SimpleNamespace(module=NASTY[name].model(), inputs=NASTY[name].batch())
    graph = trace_module(built.module, built.inputs)
    legal = RangeCosts(graph, Costing(graph, load_cluster("1x-h100").device)).legal_cuts.tolist()
    cuts = legal[len(legal) // 3 :: max(1, len(legal) // 3)][:2]
    program = build("1f1b", len(cuts) + 1, 3, split_backward=split)
    compare(built, graph, cuts, program, None)


def test_a_leak_of_one_tensor_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    leaked: list[torch.Tensor] = []
    forward = StageRunner.forward

    def leaking(runner: StageRunner, microbatch: int, *more: Any) -> Any:
        result = forward(runner, microbatch, *more)
        leaked.append(next(iter(runner._held[microbatch].values())))
        return result

    monkeypatch.setattr(StageRunner, "forward", leaking)
    with pytest.raises(AssertionError, match="after an action"):
        check("tiny-llama", build("1f1b", 2, 3))
