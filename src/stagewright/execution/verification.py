"""`verify`: does a plan train the user's model as plain PyTorch would? Tried on a reduced copy of that model.

The copy has fewer layers and shorter samples, and float64 parameters where its operators have such kernels. One batch
is trained plainly in this process and then, with the plan's schedule, placement and number of stages, by one process
per pipeline rank (and by two replicas where the plan has more than one), each of which compares the gradients it holds.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from stagewright.errors import InputError, RunError, StagewrightError
from stagewright.execution.data import SyntheticBatches
from stagewright.execution.launch import refuse_what_is_not_run
from stagewright.execution.processes import start_ranks
from stagewright.execution.random import keyed
from stagewright.execution.reduced_copy import (
    Dtype,
    Report,
    layers_of,
    reduced_model,
    reduced_plan,
    without_dropout,
)
from stagewright.graph import OperatorGraph
from stagewright.planning.plan import Plan
from stagewright.tracing.models.build import build
from stagewright.tracing.models.reference import ModelReference, resolve

TOLERANCES = {"float64": 1e-10, "float32": 1e-4}
"""Largest difference relative to the largest element that rounding explains: microbatches are added in another order."""

PLAIN = "plain.safetensors"
OUTCOME = "outcome.json"


@dataclass(frozen=True)
class Difference:
    """Of one tensor: the largest difference of an element, relative to its largest element in the plain run."""

    name: str
    relative: float


@dataclass(frozen=True)
class Verification:
    """How far a pipelined batch is from the plain one."""

    model: str
    num_layers: int | None
    """Of the copy; None where the model could not be reduced."""
    num_parameters: int
    dtype: str
    sequence_length: int
    num_stages: int
    num_ranks: int
    """Of one replica."""
    schedule: str
    loss: float
    loss_difference: float
    """Relative."""
    num_gradients: int
    num_equal: int
    """Gradients equal to the last bit."""
    worst: Difference
    tolerance: float
    num_replicas: int = 1

    @property
    def holds(self) -> bool:
        """Whether loss and every gradient are within the tolerance (a NaN is not)."""
        return self.loss_difference <= self.tolerance and self.worst.relative <= self.tolerance


@dataclass(frozen=True)
class _Plain:
    """The plain run: its loss, and its gradients in a file."""

    loss: float
    num_parameters: int


def verify(
    model: str, plan: Plan, num_layers: int | None = None, report: Report = lambda text: None
) -> Verification:
    """Train one batch of a reduced copy of `model` pipelined as `plan` says and plainly, and compare.

    Args:
        model: reference of the model that the plan was made for.
        plan: at most two replicas of it are run.
        num_layers: of the copy; default one per stage, and at least two.
        report: told what is being done.

    Raises:
        InputError: the plan is for another model or predicted only, or the number of layers does not fit.
        RunError: a rank failed, or the model cannot be trained plainly.
    """
    refuse_what_is_not_run(plan, "the plan")
    original = resolve(model, plan.model.overrides)
    if original.digest != plan.model.digest:
        raise InputError(
            f"the plan was made for model '{plan.model.text}', and '{model}' differs from it: give that model, or plan again"
        )
    with tempfile.TemporaryDirectory(prefix="stagewright-verify-") as scratch:
        folder = Path(scratch)
        reduced, graph, plain = _train_plainly(original, plan, num_layers, folder, report)
        reduced.save(folder / "plan.json")
        report(f"training it pipelined by {reduced.num_ranks} processes")
        arguments = [str(folder / "plan.json"), "--out", str(folder)]
        start_ranks("stagewright.execution.verification_worker", arguments, range(reduced.num_ranks))
        outcome = json.loads((folder / OUTCOME).read_text(encoding="utf-8"))
    return _judged(reduced, graph, plain, outcome)


def _judged(reduced: Plan, graph: OperatorGraph, plain: _Plain, outcome: Mapping[str, Any]) -> Verification:
    dtype = reduced.job.torch_name
    found = _worst_of_each(outcome["differences"])
    missing = sorted(set(_trained(graph)) - found.keys())
    if missing:
        raise RunError(f"no rank holds the gradient of '{missing[0]}'")
    worst = max(found, key=lambda name: _order(found[name]))
    return Verification(
        model=reduced.model.name,
        num_layers=layers_of(resolve(reduced.model.text, reduced.model.overrides)),
        num_parameters=plain.num_parameters,
        dtype=dtype,
        sequence_length=reduced.job.sequence_length,
        num_stages=reduced.num_stages,
        num_ranks=reduced.pp * reduced.tp,
        num_replicas=reduced.dp,
        schedule=reduced.schedule,
        loss=plain.loss,
        loss_difference=abs(outcome["loss"] - plain.loss) / max(abs(plain.loss), 1e-30),
        num_gradients=len(found),
        num_equal=sum(difference == 0.0 for difference in found.values()),
        worst=Difference(worst, found[worst]),
        tolerance=TOLERANCES[dtype],
    )


def _worst_of_each(differences: list[tuple[str, float]]) -> dict[str, float]:
    """By parameter; several ranks may hold a tied one.

    >>> _worst_of_each([("a", 0.0), ("b", 0.5), ("a", float("nan")), ("a", 1.0)])
    {'a': nan, 'b': 0.5}
    """
    worst: dict[str, float] = {}
    for name, difference in differences:
        worst[name] = max(worst.get(name, 0.0), difference, key=_order)
    return worst


def _order(difference: float) -> float:
    """NaN is the worst of all."""
    return float("inf") if difference != difference else difference


def _train_plainly(
    original: ModelReference, plan: Plan, num_layers: int | None, folder: Path, report: Report
) -> tuple[Plan, OperatorGraph, _Plain]:
    """The reduced plan, its graph and the plain run: in float64, or in float32 where an operator lacks float64."""
    reference = reduced_model(original, plan.num_stages, num_layers)
    if plan.tp > 1:
        reference = without_dropout(reference)
    dtypes: tuple[Dtype, ...] = ("fp64", "fp32")
    for dtype in dtypes:
        try:
            reduced, graph = reduced_plan(plan, original, reference, dtype, report)
            return reduced, graph, _plain(reduced, reference, graph, folder, report)
        except (StagewrightError, RuntimeError) as error:
            if dtype != dtypes[-1]:
                continue  # an operator without a float64 kernel; whatever else it is comes again
            if isinstance(error, StagewrightError):
                raise
            raise RunError(f"model '{reference.name}' cannot be trained plainly: {error}") from error
    raise AssertionError("one of the precisions is tried last")


def _plain(
    plan: Plan, reference: ModelReference, graph: OperatorGraph, folder: Path, report: Report
) -> _Plain:
    """One batch under autograd, microbatch after microbatch; gradients go to a file, under every name they have."""
    job, count = plan.job, plan.num_microbatches * plan.dp
    built = build(reference, plan.microbatch_size, job.sequence_length, job.torch_name, seed=job.seed)
    num_parameters = sum(parameter.numel() for parameter in built.module.parameters())
    report(f"training {num_parameters:,} parameters in {job.torch_name} plainly")
    batches = SyntheticBatches(built.inputs, job.seed)
    total = 0.0
    for index in range(count):
        inputs = batches.microbatch(0, index * plan.microbatch_size, graph)
        with keyed(job.seed, 0, index):
            loss = built.module(**inputs)
        (loss * (1.0 / count)).backward()
        total += float(loss.detach()) / count
    named = built.module.named_parameters(remove_duplicate=True)
    gradients = {name: p.grad.contiguous() for name, p in named if p.grad is not None}
    save_file(gradients, folder / PLAIN)
    return _Plain(total, num_parameters)


def _trained(graph: OperatorGraph) -> list[str]:
    return [
        graph.values[value].name for value in graph.gradients if graph.values[value].origin == "parameter"
    ]


def largest_difference(found: torch.Tensor, wanted: torch.Tensor, least: float = 1e-30) -> float:
    """The largest difference of two elements over the largest of `wanted` (at least `least`); NaN where either has one."""
    if torch.equal(found, wanted):
        return 0.0
    scale = max(float(wanted.abs().max()), least)
    return float((found - wanted).abs().max()) / scale
