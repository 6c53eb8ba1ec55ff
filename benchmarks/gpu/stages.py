"""Steps of plans for one device through the product's own session, next to plain PyTorch and to their predictions."""

from __future__ import annotations

import copy
import gc
import statistics
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from results_file import Results
from torch import nn

from stagewright.cluster import Cluster
from stagewright.errors import StagewrightWarning
from stagewright.execution.accelerator import accelerator_of
from stagewright.execution.collectives import backend_of
from stagewright.execution.random import keyed
from stagewright.execution.session import Session
from stagewright.execution.verification import largest_difference
from stagewright.graph.split import split_graph
from stagewright.graph.stage import Stage
from stagewright.planning.estimate import estimate, graph_of
from stagewright.planning.job import Job
from stagewright.planning.plan import Plan, StagePolicy
from stagewright.planning.plan_stages import stage_cuts, stage_program
from stagewright.planning.predictions import Predictions
from stagewright.schedule.action import COMPUTE, Action, Kind
from stagewright.schedule.lower import insert_recomputation
from stagewright.tracing.models.build import build
from stagewright.tracing.models.reference import ModelReference

TOLERANCES = {("bf16", False): 0.05, ("bf16", True): 0.1, ("fp32", False): 1e-5, ("fp32", True): 1e-3}
"""Largest difference of a gradient from plain autograd on the same device, relative to its largest element, by type and
whether stages are compiled."""

POLICIES = ("keep", "recompute", "offload attention", "offload all")
_FETCH_AHEAD = 4  # largest offloaded values that are on their way back at once, as in plans
_LATEST: dict[tuple[object, ...], nn.Module] = {}
_METERED = 1  # the first step makes the state of the optimizer
_SECONDS = {
    Kind.F: "forward_seconds", Kind.B: "backward_seconds", Kind.I: "input_grad_seconds", Kind.W: "weight_grad_seconds",
    Kind.R: "recompute_seconds",
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
    is_small: bool

    def job(self, samples: int, compiled: bool = False) -> Job:
        given = {"global_batch": samples, "sequence_length": self.length, "dtype": self.dtype}
        return Job.model_validate({**given, "compiled": compiled})

    def plan(self, model: ModelReference, job: Job, schedule: str = "breadth-first") -> Plan:
        """All stages on one rank, where nothing is recomputed."""
        stages = {"chunks": self.num_stages, "schedule": schedule}
        return estimate(model, self.described[0], job, dp=1, pp=1, recompute="none", **stages)


def saving(plan: Plan, name: str) -> Plan:
    """`plan` under one of `POLICIES`; what offloads names operators, as plans do."""
    if name == "keep":
        return plan
    graph = graph_of(plan)
    stages = split_graph(graph, stage_cuts(plan, graph))
    policies = [
        "layers" if name == "recompute" else _offloading(stage, name == "offload attention")
        for stage in stages
    ]
    changes = [number for number, policy in enumerate(policies) if policy != "keep"]
    program = insert_recomputation(stage_program(plan), changes)
    ranks = tuple(tuple(map(str, actions)) for actions in program.ranks)
    return plan.model_copy(update={"memory_policy": tuple(policies), "program": ranks})


def _offloading(stage: Stage, is_attention: bool) -> StagePolicy | str:
    """Offload what attention saves, or all that is saved."""
    values, graph = stage.graph.values, stage.graph
    roots = [
        values[value].storage for value in stage.saved if values[values[value].storage].node in graph.position
    ]
    makers = {root: graph.nodes[values[root].node] for root in dict.fromkeys(roots)}
    makers = {root: node for root, node in makers.items() if "attention" in node.op or not is_attention}
    if not makers:
        return "keep"
    largest = max(stage.held_bytes([root]) for root in makers)
    names = tuple(dict.fromkeys(node.name for node in makers.values()))
    return StagePolicy(offload=names, fetch_ahead=_FETCH_AHEAD * largest)


@contextmanager
def alone(device: torch.device) -> Iterator[None]:
    """Inside, this process is all of its group."""
    if dist.is_initialized():  # the time of the case before ended while it left its group
        dist.destroy_process_group()
    dist.init_process_group(backend_of(device.type), store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def plain_model(session: Session) -> nn.Module:
    """The model of a session, on its device, for plain autograd."""
    plan = session.plan
    module = _built(
        session.reference, plan.microbatch_size, plan.job.sequence_length, plan.job.torch_name, plan.job.seed
    )
    return copy.deepcopy(module).to(session.device)


def _built(reference: ModelReference, *arguments: Any) -> nn.Module:
    """The model of `build`, whose weights take seconds to draw: it is kept for the next cases of the same."""
    key = reference.digest, *arguments
    if key not in _LATEST:
        _LATEST.clear()
        _LATEST[key] = build(reference, *arguments).module
    return _LATEST[key]


def difference(session: Session) -> float:
    """The largest difference of the loss, or of a gradient, from plain autograd on the same batch of one microbatch."""
    loss, gradients = session.accumulate(0), session.gradients()
    (inputs,), module = session.microbatches(0, session.graph), plain_model(session)
    with keyed(session.plan.job.seed, 0, 0):  # drops out what the session does
        plain = module(**inputs)
    plain.backward()
    named = module.named_parameters(remove_duplicate=False)
    wanted = {name: parameter.grad for name, parameter in named if parameter.grad is not None}
    pairs = ((gradient, wanted[name].to(gradient.dtype)) for name, gradient in gradients.items())
    return max(*(largest_difference(*pair) for pair in pairs), abs(loss / float(plain.detach()) - 1))


def steps(setting: Setting, plan: Plan, what: str, by_action: bool = False) -> Results:
    """Gradients (of one microbatch), step time and peaks, and the seconds of all passes or of every action."""
    predictions = [estimate(plan, cluster).predictions for cluster in setting.described]
    seconds: dict[str, list[float]] = {}
    step_s = []
    with alone(setting.device), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", StagewrightWarning)
        session = Session(plan, setting.device, None, True)
        if plan.num_microbatches == 1:
            tolerance = TOLERANCES[setting.dtype, plan.job.compiled]
            largest = difference(session)
            judged = "within" if largest <= tolerance else "OUTSIDE"
            gc.collect()
            accelerator_of(setting.device).empty_cache()  # which the plain model has filled
            yield f"{what}: gradients: largest difference {largest:.2e}: {judged} {tolerance}"
        for step in range(_METERED + 1 + setting.repeats):
            result = session.train_step(step, metered=step == _METERED)
            if step > _METERED and session.metering.timed is not None:
                step_s.append(result.seconds)
                for moment in session.metering.timed.batch.moments():
                    if moment.action.kind in COMPUTE:
                        seconds.setdefault(str(moment.action), []).append(moment.end - moment.start)
        metering = session.metering
    yield from (f"{what}: {one.message}" for one in caught if issubclass(one.category, StagewrightWarning))
    yield f"{what}: step s", [one.step_seconds for one in predictions], statistics.median(step_s)
    active = [float(one.ranks[0].allocated_peak_bytes) for one in predictions]
    yield f"{what}: active peak bytes", active, metering.peak_bytes
    if metering.reserved_bytes is not None:
        reserved = [float(one.reserved_peak_bytes) for one in predictions]
        yield f"{what}: reserved peak bytes", reserved, metering.reserved_bytes
    medians = {text: statistics.median(values) for text, values in seconds.items()}
    if not by_action:
        totals = [sum(_predicted(one, text) for text in medians) for one in predictions]
        yield f"{what}: all passes s", totals, sum(medians.values())
        return
    for text, median in medians.items():
        yield f"{what}: {text} s", [_predicted(one, text) for one in predictions], median


def _predicted(predictions: Predictions, text: str) -> float:
    action = Action.parse(text)
    column = getattr(predictions.costs, _SECONDS[action.kind])
    return column[action.stage] if column else 0.0
