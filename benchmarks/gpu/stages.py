"""Stages of a model on one device, run one after the other without pipelining: gradients, and time and memory beside what is
predicted.

Without a GPU the peak is that of the executor's meter, and there is no reserved memory to speak of.
"""

from __future__ import annotations

import gc
import statistics
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from budget import Row

from stagewright.cluster import Cluster
from stagewright.errors import StagewrightWarning
from stagewright.estimation.stages import BodyCosts
from stagewright.execution.clock import synchronize
from stagewright.execution.metering import StorageMeter
from stagewright.execution.random import keyed
from stagewright.execution.rank_runner import RankRunner, stage_edges
from stagewright.execution.verification import largest_difference, without_dropout
from stagewright.execution.weights import Weights
from stagewright.graph.carving import carve
from stagewright.graph.policy import KEEP, Policy
from stagewright.planning.job import Job
from stagewright.planning.prediction.pipeline import Pipeline, costing, pipeline
from stagewright.planning.prediction.predict import rank_memories, reserved_peaks
from stagewright.schedule.action import Action, Kind
from stagewright.schedule.families import build as build_schedule
from stagewright.schedule.lower import insert_communication
from stagewright.schedule.program import Program
from stagewright.schedule.saving import insert_recomputation
from stagewright.tracing.cache import trace
from stagewright.tracing.models.build import build
from stagewright.tracing.models.reference import ModelReference

TOLERANCES = {"bf16": 0.05, "fp32": 1e-5}
"""Largest difference of a gradient from plain autograd on the same device, relative to its largest element."""
COMPILED_TOLERANCES = {"bf16": 0.1, "fp32": 1e-3}

_SECONDS = {
    Kind.F: "forward_s", Kind.B: "backward_s", Kind.I: "input_grad_s", Kind.W: "weight_grad_s", Kind.R: "rebuild_s",
}  # fmt: skip

Seconds = dict[str, float]
"""Of the actions of a batch, by their text."""


@dataclass(frozen=True)
class Setting:
    """What every part is measured on, and what predicts it."""

    device: torch.device
    described: tuple[Cluster, ...]
    dtype: str
    length: int
    num_stages: int
    repeats: int

    @property
    def tolerance(self) -> float:
        return TOLERANCES[self.dtype]


class Staged:
    """One sample through a model that is cut into stages of as many operators each."""

    def __init__(self, setting: Setting, model: ModelReference, compiled: bool = False) -> None:
        self.setting = setting
        self.device = setting.device
        self.job = Job(
            global_batch=1, sequence_length=setting.length, dtype=setting.dtype, compiled=compiled  # type: ignore[arg-type]
        )  # fmt: skip
        self.graph = trace(model, 1, device=self.device.type, **self.job.traced(self.device.type))
        size, count = len(self.graph.body), setting.num_stages
        self.cuts = [size * index // count for index in range(1, count)]
        self.whole = build_schedule("breadth-first", 1, 1, count)
        built = build(model, 1, setting.length, self.job.torch_name, seed=0)
        self.module = built.module.to(self.device)
        self.inputs = {name: tensor.to(self.device) for name, tensor in built.inputs.items()}

    @property
    def split(self) -> Program:
        """With I and W in place of B."""
        return self.whole.with_ranks(map(_split, self.whole.ranks))

    def saving(self, policies: Sequence[Policy]) -> Program:
        """With R where the policy of a stage asks for it."""
        return insert_recomputation(self.whole, [n for n, one in enumerate(policies) if one is not KEEP])

    def runner(self, program: Program, policies: Sequence[Policy] = ()) -> RankRunner:
        stages = carve(self.graph, self.cuts, policies)
        tensors = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        wide = torch.float32 if self.job.dtype == "bf16" else None
        weights = Weights(stages, tensors, self.device, wide)
        lowered = insert_communication(program, stage_edges(stages))
        return RankRunner(
            stages, lowered, 0, [0], weights, self.device, 1.0, is_compiled=self.job.compiled
        )  # fmt: skip

    @cached_property
    def _bodies(self) -> list[BodyCosts]:
        """As every description has them."""
        return [
            BodyCosts(self.graph, costing(self.graph, one, self.job)) for one in self.setting.described
        ]  # fmt: skip

    def lines(self, program: Program, policies: Sequence[Policy] = ()) -> list[Pipeline]:
        """As every description predicts them."""
        pairs = zip(self._bodies, self.setting.described, strict=True)
        return [pipeline(body, self.cuts, program, one, self.job, 1, policies) for body, one in pairs]

    # -- gradients --------------------------------------------------------------------------------------------------

    def difference(self, runner: RankRunner) -> float:
        """The largest difference of the loss, or of a gradient, from plain autograd."""
        (loss,) = runner.run_batch(0, [self.inputs]).losses.values()
        self.module.zero_grad(set_to_none=True)
        with keyed(0, 0, 0):  # drops out what the runner does
            plain = self.module(**self.inputs)
        plain.backward()
        named = self.module.named_parameters()
        wanted = {name: one.grad for name, one in named if one.grad is not None}
        names, found = runner.weights.names, runner.weights.gradients
        worst = max(largest_difference(found[v], wanted[names[v]].to(found[v].dtype)) for v in found)
        self.module.zero_grad(set_to_none=True)
        return max(worst, abs(float(loss) / float(plain.detach()) - 1))

    def gradients(self, runner: RankRunner) -> dict[int, torch.Tensor]:
        runner.run_batch(0, [self.inputs])
        return {value: gradient.clone() for value, gradient in runner.weights.gradients.items()}

    # -- memory -----------------------------------------------------------------------------------------------------

    def peaks(self, runner: RankRunner, lines: Sequence[Pipeline], what: str = "") -> Iterator[Row]:
        """Peak bytes of a batch beyond what the optimizer keeps, which does not exist here."""
        predicted = [_predicted_peaks(line) for line in lines]
        active, reserved = ([one[index] for one in predicted] for index in (0, 1))
        runner.run_batch(0, [self.inputs])
        if self.device.type == "cpu":
            resident = [t for one in runner.runners.values() for t in one.resident.values()]
            weights = (*runner.weights.tensors.values(), *runner.weights.gradients.values())
            with StorageMeter([*resident, *weights, *self.inputs.values()]) as meter:
                runner.run_batch(1, [self.inputs])
            yield f"{what}peak bytes", active, meter.peak_bytes
            return
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        runner.run_batch(1, [self.inputs])
        torch.cuda.synchronize()
        yield f"{what}active peak bytes", active, torch.cuda.max_memory_allocated()
        yield f"{what}reserved peak bytes", reserved, torch.cuda.max_memory_reserved()

    # -- time -------------------------------------------------------------------------------------------------------

    def seconds(self, runner: RankRunner) -> Seconds:
        """Medians of every action."""
        taken: dict[str, list[float]] = {}
        for step in range(1 + self.setting.repeats):
            batch = runner.run_batch(step, [self.inputs])
            synchronize(self.device)
            for moment in batch.moments() if step else ():
                taken.setdefault(str(moment.action), []).append(moment.end - moment.start)
        return {text: statistics.median(found) for text, found in taken.items()}


def _split(actions: Sequence[Action]) -> Iterator[Action]:
    for action in actions:
        if action.kind is Kind.B:
            yield from (Action(kind, action.stage, action.microbatch) for kind in (Kind.I, Kind.W))
        else:
            yield action


def _predicted_peaks(line: Pipeline) -> tuple[float, float]:
    """Active and reserved, without the optimizer."""
    (memory,) = memories = rank_memories(line)
    absent = sum(memory.categories[name] for name in ("optimizer", "master"))
    return memory.peak_bytes - absent, reserved_peaks(line, memories)[0] - absent


def predicted_seconds(line: Pipeline, action: str) -> float:
    done = Action.parse(action)
    return getattr(line.summaries[done.stage], _SECONDS[done.kind])


def verdict(what: str, difference: float, tolerance: float) -> str:
    judged = "within" if difference <= tolerance else "OUTSIDE"
    return f"{what}: largest difference {difference:.2e}: {judged} {tolerance}"


def whole(setting: Setting, model: ModelReference) -> Iterator[Row | str]:
    """F and B of every stage, peaks, and gradients beside plain autograd's."""
    staged = Staged(setting, model)
    runner, lines = staged.runner(staged.whole), staged.lines(staged.whole)
    yield verdict(f"{model.name}, loss and gradients", staged.difference(runner), setting.tolerance)
    yield from staged.peaks(runner, lines, f"{model.name}: ")
    for action, taken in staged.seconds(runner).items():
        yield f"{model.name}: {action} s", [predicted_seconds(line, action) for line in lines], taken


def apart(setting: Setting, model: ModelReference, compiled: bool) -> Iterator[Row | str]:
    """F, I and W of every stage, and gradients beside those of B as it is."""
    name = f"{model.name}, {'compiled' if compiled else 'eager'}"
    model = without_dropout(model)  # what draws random numbers is not compiled
    plain = Staged(setting, model)
    wanted = plain.gradients(plain.runner(plain.whole))
    staged = Staged(setting, model, True) if compiled else plain
    del plain
    runner = staged.runner(staged.split)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", StagewrightWarning)
        found = staged.gradients(runner)
    yield from (f"{name}: {one.message}" for one in told if issubclass(one.category, StagewrightWarning))
    worst = max(largest_difference(found[value], wanted[value]) for value in wanted)
    tolerance = COMPILED_TOLERANCES[setting.dtype] if compiled else setting.tolerance
    yield verdict(f"{name}, gradients of I and W beside B's", worst, tolerance)
    del wanted, found
    lines = staged.lines(staged.split)
    for action, taken in staged.seconds(runner).items():
        yield f"{name}: {action} s", [predicted_seconds(line, action) for line in lines], taken
