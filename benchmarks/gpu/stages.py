"""Stages of a model on one device, run one after the other: gradients, and time and memory next to their predictions.

On a CPU the peak is that of the executor's meter, and nothing is reserved.
"""

from __future__ import annotations

import gc
import statistics
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from results_file import Row, verdict

from stagewright.cluster import Cluster
from stagewright.errors import StagewrightWarning
from stagewright.estimation.stages import BodyCosts
from stagewright.execution.accelerator import accelerator_of
from stagewright.execution.clock import synchronize
from stagewright.execution.metering import StorageMeter
from stagewright.execution.random import keyed
from stagewright.execution.rank_runner import RankRunner, stage_edges
from stagewright.execution.verification import largest_difference, without_dropout
from stagewright.execution.weights import Weights
from stagewright.graph.carving import carve
from stagewright.graph.policy import KEEP, Policy
from stagewright.graph.stage import Stage
from stagewright.planning.job import Job
from stagewright.planning.prediction.pipeline import Pipeline, costing, pipeline
from stagewright.planning.prediction.predict import rank_memories, reserved_peaks
from stagewright.planning.prediction.regions import layers_policy
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

POLICIES = ("keep", "recompute", "offload attention", "offload all")
_FETCH_AHEAD = 4
"""Largest offloaded values that are on their way back at once, as in plans."""

_SECONDS = {
    Kind.F: "forward_s", Kind.B: "backward_s", Kind.I: "input_grad_s", Kind.W: "weight_grad_s", Kind.R: "rebuild_s",
}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """The device that is measured, and the descriptions that predict it."""

    device: torch.device
    described: tuple[Cluster, ...]
    dtype: str
    length: int
    num_stages: int
    repeats: int

    def job(self, samples: int, compiled: bool = False) -> Job:
        given = {"global_batch": samples, "sequence_length": self.length, "dtype": self.dtype}
        return Job.model_validate({**given, "compiled": compiled})


class Staged:
    """One sample through a model that is cut into stages of equally many operators."""

    def __init__(self, setting: Setting, model: ModelReference, compiled: bool = False) -> None:
        self.setting = setting
        self.device = setting.device
        self.job = setting.job(1, compiled)
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

    def policies(self, name: str) -> list[Policy]:
        """Of every stage, by one of the names of `POLICIES`; as `plan --recompute full` recomputes."""
        stages = carve(self.graph, self.cuts)
        if name in ("keep", "recompute"):
            return [KEEP if name == "keep" else layers_policy(self.graph)] * len(stages)
        return [_offloading(stage, name == "offload attention") for stage in stages]

    def saving(self, policies: Sequence[Policy]) -> Program:
        """With R where the policy of a stage needs it."""
        return insert_recomputation(self.whole, [n for n, one in enumerate(policies) if one is not KEEP])

    def runner(self, program: Program, policies: Sequence[Policy] = ()) -> RankRunner:
        stages = carve(self.graph, self.cuts, policies)
        tensors = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        weights = Weights(stages, tensors, self.device, torch.float32 if self.job.dtype == "bf16" else None)
        lowered = insert_communication(program, stage_edges(stages))
        return RankRunner(
            stages, lowered, 0, [0], weights, self.device, 1.0, is_compiled=self.job.compiled
        )  # fmt: skip

    def lines(self, program: Program, policies: Sequence[Policy] = ()) -> list[Pipeline]:
        """As every description predicts them."""
        bodies = [BodyCosts(self.graph, costing(self.graph, one, self.job)) for one in self.setting.described]
        pairs = zip(bodies, self.setting.described, strict=True)
        return [pipeline(body, self.cuts, program, one, self.job, 1, policies) for body, one in pairs]

    def difference(self, runner: RankRunner) -> float:
        """The largest difference of the loss, or of a gradient, from plain autograd."""
        (loss,) = runner.run_batch(0, [self.inputs]).losses.values()
        self.module.zero_grad(set_to_none=True)
        with keyed(0, 0, 0):  # drops out what the runner does
            plain = self.module(**self.inputs)
        plain.backward()
        named = self.module.named_parameters()
        wanted = {name: parameter.grad for name, parameter in named if parameter.grad is not None}
        names, gradients = runner.weights.names, runner.weights.gradients
        differences = (largest_difference(g, wanted[names[v]].to(g.dtype)) for v, g in gradients.items())
        worst = max(*differences, abs(float(loss) / float(plain.detach()) - 1))
        self.module.zero_grad(set_to_none=True)
        return worst

    def peaks(self, runner: RankRunner, lines: Sequence[Pipeline], what: str) -> Iterator[Row]:
        """Peak bytes of a batch beyond what the optimizer keeps, which does not exist here."""
        active, reserved = map(list, zip(*map(_predicted_peaks, lines), strict=True))
        accelerator = accelerator_of(self.device)
        runner.run_batch(0, [self.inputs])
        if not accelerator.counts_bytes:
            resident = [t for stage in runner.runners.values() for t in stage.resident.values()]
            weights = (*runner.weights.tensors.values(), *runner.weights.gradients.values())
            with StorageMeter([*resident, *weights, *self.inputs.values()]) as meter:
                runner.run_batch(1, [self.inputs])
            yield f"{what}: active peak bytes", active, meter.peak_bytes
            return
        accelerator.synchronize()
        gc.collect()
        accelerator.empty_cache()
        accelerator.reset_peaks()
        runner.run_batch(1, [self.inputs])
        accelerator.synchronize()
        yield f"{what}: active peak bytes", active, accelerator.peak_allocated_bytes()
        yield f"{what}: reserved peak bytes", reserved, accelerator.peak_reserved_bytes()

    def seconds(self, runner: RankRunner) -> dict[str, float]:
        """Medians of every action, by its text."""
        taken: dict[str, list[float]] = {}
        for step in range(1 + self.setting.repeats):
            batch = runner.run_batch(step, [self.inputs])
            synchronize(self.device)
            for moment in batch.moments() if step else ():
                taken.setdefault(str(moment.action), []).append(moment.end - moment.start)
        return {text: statistics.median(seconds) for text, seconds in taken.items()}


def _offloading(stage: Stage, is_attention: bool) -> Policy:
    """Offload what attention saves, or all that is saved."""
    values, graph = stage.graph.values, stage.graph
    made = {value: values[values[value].storage].node for value in stage.saved}
    own = [value for value, node in made.items() if node in graph.position]
    if is_attention:
        own = [value for value in own if "attention" in graph.nodes[made[value]].op]
    roots = list(dict.fromkeys(values[value].storage for value in own))
    largest = max((stage.held_bytes([root]) for root in roots), default=0)
    return Policy(offload=frozenset(roots), fetch_ahead=_FETCH_AHEAD * largest) if roots else KEEP


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


def _predicted_seconds(line: Pipeline, text: str) -> float:
    action = Action.parse(text)
    return getattr(line.summaries[action.stage], _SECONDS[action.kind])


def passes(
    setting: Setting, model: ModelReference, is_split: bool = False, compiled: bool = False
) -> Iterator[Row | str]:
    """F and B of every stage, or F, I and W, and gradients next to plain autograd's."""
    name = f"{model.name}, {'compiled' if compiled else 'eager'}{' split' if is_split else ''}"
    staged = Staged(setting, without_dropout(model) if compiled else model, compiled)
    program = staged.split if is_split else staged.whole
    runner, lines = staged.runner(program), staged.lines(program)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", StagewrightWarning)
        worst = staged.difference(runner)
    yield from (f"{name}: {one.message}" for one in caught if issubclass(one.category, StagewrightWarning))
    tolerance = (COMPILED_TOLERANCES if compiled else TOLERANCES)[setting.dtype]
    yield verdict(f"{name}, gradients", worst, tolerance)
    for text, seconds in staged.seconds(runner).items():
        yield f"{name}: {text} s", [_predicted_seconds(line, text) for line in lines], seconds


def saving(setting: Setting, model: ModelReference) -> Iterator[Row | str]:
    """Gradients, peaks and seconds of all passes of stages that recompute or offload, by policy."""
    staged = Staged(setting, model)
    for name in POLICIES:
        policies, what = staged.policies(name), f"{model.name}, {name}"
        program = staged.saving(policies)
        runner, lines = staged.runner(program, policies), staged.lines(program, policies)
        yield verdict(f"{what}, gradients", staged.difference(runner), TOLERANCES[setting.dtype])
        yield from staged.peaks(runner, lines, what)
        seconds = staged.seconds(runner)
        predictions = [sum(_predicted_seconds(line, text) for text in seconds) for line in lines]
        yield f"{what}: all passes s", predictions, sum(seconds.values())
        size = sum(summary.offloaded_bytes for summary in lines[0].summaries)
        yield f"{what}: {size:.4g} bytes to the host and back"
        del runner
