"""`verify`: the comparison of a plan's training with plain PyTorch, on a reduced copy of the user's model.

The copy has fewer layers and shorter samples, and float64 parameters where its operators have such kernels. A batch is
trained plainly in this process and then, with the plan's schedule, placement and number of stages, by one process per
pipeline rank (and by two replicas where the plan has more than one), each of which compares its gradients. Both train on
the same kind of device; on GPUs with deterministic kernels where these exist.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file

from stagewright.errors import InputError, PlanError, RunError, StagewrightError
from stagewright.estimation.memory import stage_edges
from stagewright.execution import first_comparison
from stagewright.execution.data.synthetic import SyntheticBatches
from stagewright.execution.device import kind_of
from stagewright.execution.preflight import refuse_what_is_not_run
from stagewright.execution.processes import start_ranks
from stagewright.execution.random import keyed
from stagewright.graph import OperatorGraph
from stagewright.graph.flat_buffers import PARAMETERS
from stagewright.graph.partition import Partition
from stagewright.graph.split import split_graph
from stagewright.planning.checks import check_transfers
from stagewright.planning.configuration import Configuration
from stagewright.planning.job import Job
from stagewright.planning.plan import ModelSection, Plan
from stagewright.planning.plan_stages import cut_names, stage_cuts, stage_program
from stagewright.planning.prediction.sharding import sharded_program, streamed_program, without_sharding
from stagewright.tracing.cache import trace
from stagewright.tracing.models.build import build
from stagewright.tracing.models.overrides import DROPOUT, of_text
from stagewright.tracing.models.reference import ModelReference, resolve

TOLERANCES = {"float64": 1e-12, "float32": 1e-4}
"""Largest difference, relative to the largest element, that rounding explains: sums over replicas, tied parameters and
tensor parallel ranks add in another order."""

PLAIN = "plain.safetensors"
OUTCOME = "outcome.json"


@dataclass(frozen=True)
class Verification:
    """The result of comparing a pipelined batch with the plain one."""

    model: str
    num_layers: int | None
    """Number of layers of the copy; None where the model could not be reduced."""
    num_parameters: int
    sequence_length: int
    dtype: str
    schedule: str
    num_ranks: int
    """Number of ranks of one replica."""
    num_replicas: int
    num_stages: int
    loss: float
    loss_difference: float
    """Relative difference of the loss."""
    num_gradients: int
    num_equal_gradients: int
    """Number of gradients that are equal to the last bit."""
    gradient_difference: float
    """Largest difference of an element relative to the largest element of its gradient, which is `worst_parameter`'s."""
    worst_parameter: str
    tolerance: float
    device: str = "cpu"
    """Kind of device on which both trained."""

    @property
    def holds(self) -> bool:
        """Whether the loss and all gradients are within the tolerance (NaN is not)."""
        return self.loss_difference <= self.tolerance and self.gradient_difference <= self.tolerance


def verify(
    model: str,
    plan: Plan,
    num_layers: int | None = None,
    report: Report = lambda text: None,
    device: str = "auto",
    compare: bool = True,
) -> Verification:
    """Train a batch of a reduced copy of `model`, pipelined by `plan` and plainly, and compare.

    Args:
        model: reference of the model that the plan was made for.
        plan: the plan, of which at most two replicas are run.
        num_layers: number of layers of the copy; default one per stage, and at least two.
        report: called with each phase.
        device: ``cpu``, ``cuda`` (NCCL, one GPU per rank) or ``auto``: CUDA where the plan is for GPUs and this machine has
            enough of them.
        compare: whether to compare the traced graph with the model first, as before a first run.

    Raises:
        TraceError: the traced graph differs from the model; names the differences.
        InputError: the plan is for another model or can only be predicted, the number of layers does not fit, or there are
            fewer GPUs than ranks.
        ScheduleError: the program is for GPUs and would deadlock there; names the cycle.
        RunError: a rank failed, or the model cannot be trained plainly.
    """
    refuse_what_is_not_run(plan, "the plan")
    original = resolve(model, plan.model.overrides).adapted(plan.model.lora)
    if change := plan.model.change(original):
        raise InputError(
            f"the plan was made for model '{plan.model.text}', and '{model}' differs from it ({change}): give that "
            "model, or plan again"
        )
    kind = _kind(device, plan, report)
    if compare:
        first_comparison.compare_once(plan, report)
    with tempfile.TemporaryDirectory(prefix="stagewright-verify-") as scratch:
        folder = Path(scratch)
        reduced, graph, loss, num_parameters = _train_plainly(
            original, plan, num_layers, folder, report, kind
        )
        if reduced.cluster.kind == "cuda":
            report("checking that its transfers cannot deadlock on GPUs")
            edges = tuple(stage_edges(split_graph(graph, stage_cuts(reduced, graph))))
            check_transfers(stage_program(reduced), edges, on_lanes=True)
        reduced.save(folder / "plan.json")
        report(f"training it pipelined by {reduced.num_ranks} processes")
        arguments = [str(folder / "plan.json"), str(folder), kind]
        start_ranks("stagewright.execution.verification_worker", arguments, range(reduced.num_ranks))
        outcome = json.loads((folder / OUTCOME).read_text(encoding="utf-8"))
    dtype = reduced.job.torch_name
    by_name = _worst_of_each(outcome["differences"])
    values = (graph.values[value] for value in graph.gradients)
    if missing := sorted({value.name for value in values if value.origin == "parameter"} - by_name.keys()):
        raise RunError(f"no rank holds the gradient of '{missing[0]}'")
    worst = max(by_name, key=lambda name: _order(by_name[name]))
    return Verification(
        model=reduced.model.name,
        num_layers=layers_of(reduced.model.reference()),
        num_parameters=num_parameters,
        dtype=dtype,
        sequence_length=reduced.job.sequence_length,
        num_stages=reduced.num_stages,
        num_ranks=reduced.pp * reduced.tp,
        num_replicas=reduced.dp,
        schedule=reduced.schedule,
        loss=loss,
        loss_difference=abs(outcome["loss"] - loss) / max(abs(loss), 1e-30),
        num_gradients=len(by_name),
        num_equal_gradients=sum(difference == 0.0 for difference in by_name.values()),
        gradient_difference=by_name[worst],
        worst_parameter=worst,
        tolerance=TOLERANCES[dtype],
        device=kind,
    )


def _kind(device: str, plan: Plan, report: Report) -> str:
    """Return the kind of device to verify on; with ``auto``, the CPU where there are fewer GPUs than ranks."""
    num_ranks = plan.pp * plan.tp * min(plan.dp, MAX_REPLICAS)
    try:
        return kind_of(device, plan, num_ranks)
    except InputError:
        if device != "auto":
            raise
        report(f"verifying on the CPU: there are fewer GPUs than the {num_ranks} ranks")
        return "cpu"


@contextmanager
def deterministic(kind: str) -> Iterator[None]:
    """Use deterministic kernels where a GPU has them, and no TF32, during the context."""
    if kind == "cpu":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    allows_tf32 = torch.backends.cudnn.allow_tf32
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.allow_tf32 = False
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic")
            yield
    finally:
        torch.use_deterministic_algorithms(was_deterministic, warn_only=warns_only)
        torch.backends.cudnn.allow_tf32 = allows_tf32


def _worst_of_each(differences: list[tuple[str, float]]) -> dict[str, float]:
    """Return the worst difference of each parameter; several ranks may hold a tied one.

    >>> _worst_of_each([("a", 0.0), ("b", 0.5), ("a", float("nan")), ("a", 1.0)])
    {'a': nan, 'b': 0.5}
    """
    worst: dict[str, float] = {}
    for name, difference in differences:
        worst[name] = max(worst.get(name, 0.0), difference, key=_order)
    return worst


def _order(difference: float) -> float:
    """Return a sort key that makes NaN the largest difference."""
    return float("inf") if difference != difference else difference


def _train_plainly(
    original: ModelReference, plan: Plan, num_layers: int | None, folder: Path, report: Report, kind: str
) -> tuple[Plan, OperatorGraph, float, int]:
    """Train the reduced model plainly, in float64 or, where an operator lacks float64, in float32; return the reduced plan,
    its graph, the loss and the number of trained parameters."""
    reference = reduced_model(original, plan.num_stages, num_layers)
    if reference.lora is not None:
        reference = with_drawn_adapters(reference)
    if plan.tp > 1:
        reference = without_dropout(reference)
    dtypes: tuple[Dtype, ...] = ("fp64", "fp32")
    for dtype in dtypes:
        try:
            reduced, graph = reduced_plan(plan, original, reference, dtype, report)
            with deterministic(kind):
                return reduced, graph, *_plain(reduced, reference, graph, folder, report, kind)
        except (StagewrightError, RuntimeError) as error:
            if dtype != dtypes[-1]:
                continue  # an operator without a float64 kernel; any other error recurs
            if isinstance(error, StagewrightError):
                raise
            raise RunError(f"model '{reference.name}' cannot be trained plainly: {error}") from error
    raise AssertionError("one of the precisions is tried last")


def _plain(
    plan: Plan, reference: ModelReference, graph: OperatorGraph, folder: Path, report: Report, kind: str
) -> tuple[float, int]:
    """Train a batch under autograd, microbatch after microbatch, and write the gradients by name; return the loss and the
    number of parameters."""
    job, count = plan.job, plan.num_microbatches * plan.dp
    built = build(reference, plan.microbatch_size, job.sequence_length, job.torch_name, seed=job.seed)
    num_parameters = sum(parameter.numel() for parameter in built.module.parameters())
    report(f"training {num_parameters:,} parameters in {job.torch_name} plainly")
    batches = SyntheticBatches(built.inputs, job.seed)
    module, total = built.module.to(kind), 0.0
    for index in range(count):
        drawn = batches.microbatch(0, index * plan.microbatch_size, graph)
        inputs = {name: tensor.to(kind) for name, tensor in drawn.items()}
        with keyed(job.seed, 0, index):
            loss = module(**inputs)
        (loss * (1.0 / count)).backward()
        total += float(loss.detach()) / count
    named = module.named_parameters(remove_duplicate=True)
    gradients = {name: p.grad.cpu().contiguous() for name, p in named if p.grad is not None}
    save_file(gradients, folder / PLAIN)
    return total, num_parameters


def largest_difference(gradient: torch.Tensor, wanted: torch.Tensor, least: float = 1e-30) -> float:
    """Return the largest difference of two elements over the largest of `wanted` (at least `least`); NaN where there is a
    NaN."""
    if torch.equal(gradient, wanted):
        return 0.0
    scale = max(float(wanted.abs().max()), least)
    return float((gradient - wanted).abs().max()) / scale


MAX_SEQUENCE_LENGTH, MAX_MICROBATCH_SIZE, MAX_REPLICAS = 64, 2, 2

Dtype = Literal["fp64", "fp32"]
Report = Callable[[str], None]


def reduced_model(original: ModelReference, num_stages: int, num_layers: int | None) -> ModelReference:
    """Return the model with `num_layers` layers, by default as many as stages and at least two; a factory is unchanged.
    Raises `InputError` where `num_layers` is given for a factory, or exceeds the model's layers."""
    have = layers_of(original)
    if have is None:
        if num_layers is not None:
            raise InputError(
                f"--layers {num_layers}: '{original.text}' is not a configuration with a number of layers; "
                "leave --layers out to verify the model as it is"
            )
        return original
    if num_layers is not None and not 1 <= num_layers <= have:
        raise InputError(
            f"--layers {num_layers}: model '{original.name}' has {have} layers; give 1 to {have}"
        )
    wanted = min(have, max(2, num_stages)) if num_layers is None else num_layers
    if wanted == have:
        return original
    return resolve(original.text, {**original.overrides, "num_hidden_layers": wanted}).adapted(original.lora)


def without_dropout(reference: ModelReference) -> ModelReference:
    """Return the model without dropout, whose draws differ for sharded tensors; a factory is unchanged."""
    if reference.config is None:
        return reference
    lora = reference.lora and reference.lora.model_copy(update={"dropout": 0.0})
    return resolve(reference.text, {**reference.overrides, DROPOUT: 0.0}).adapted(lora)


def with_drawn_adapters(reference: ModelReference) -> ModelReference:
    """Return the model with randomly drawn adapters, so that no part of them and of their gradients is zero."""
    lora = reference.lora and reference.lora.model_copy(update={"is_drawn": True})
    return resolve(reference.text, reference.overrides).adapted(lora)


def layers_of(reference: ModelReference) -> int | None:
    """Return the model's number of layers, or None where its configuration does not have it."""
    config = of_text(reference.config or {})
    counts = (config.get(key) for key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"))
    return next((layers for layers in counts if isinstance(layers, int)), None)


def reduced_plan(
    plan: Plan, original: ModelReference, reference: ModelReference, dtype: Dtype, report: Report
) -> tuple[Plan, OperatorGraph]:
    """Return `plan` for at most two replicas of the reduced model, with microbatches of at most two samples, and the model's
    graph. Raises `PlanError` where the reduced model cannot be cut into as many stages."""
    microbatch_size = min(plan.microbatch_size, MAX_MICROBATCH_SIZE)
    dp = min(plan.dp, MAX_REPLICAS)
    job = Job(
        global_batch=plan.num_microbatches * microbatch_size * dp,
        sequence_length=min(plan.job.sequence_length, MAX_SEQUENCE_LENGTH),
        dtype=dtype,
        seed=plan.job.seed,
        num_steps=1,
    )
    pieces = min(plan.loss_pieces, microbatch_size * job.sequence_length)
    shared = Configuration(
        tp=plan.tp, sequence_parallel=plan.sequence_parallel, loss_pieces=pieces
    ).trace_arguments
    graph = trace(reference, microbatch_size, report=report, **job.traced(plan.cluster.kind), **shared)
    if reference == original and plan.job.autocast is None:  # whose operators have other names
        names = plan.cuts
        stage_cuts(plan, graph)  # raises for a cut that the graph does not have
    else:
        names = cut_names(graph, scaled_cuts(_fractions(plan, original, report), graph))
        # Policies without operator names: a stage that recomputes some values recomputes all between its layers.
        policies = (
            policy if isinstance(policy, str) else "layers" if policy.recompute else "keep"
            for policy in plan.memory_policy
        )
        plan = _resharded(plan.model_copy(update={"memory_policy": tuple(policies)}), names, graph)
    changes = {"model": ModelSection.of(reference), "job": job, "dp": dp, "microbatch_size": microbatch_size, "cuts": names,
        "loss_pieces": pieces, "reduce_dtype": None, "shard_size": None, "shorter_lengths": (), "devices": ()}  # fmt: skip
    return Plan.model_validate(plan.model_copy(update=changes).model_dump()), graph


def _resharded(plan: Plan, names: tuple[str, ...], graph: OperatorGraph) -> Plan:
    """Return `plan` with the gathers of parameters that the weight gradients of another model's stages need."""
    program = stage_program(plan)
    levels = [level if plan.dp > 1 else 0 for level in plan.sharding]
    if not plan.streamed and not any(level >= PARAMETERS for level in levels):
        return plan
    position = {graph.nodes[node].name: index for index, node in enumerate(graph.forward_ids)}
    stages = split_graph(graph, [position[name] for name in names])
    plain = without_sharding(program)
    if plan.streamed:
        resharded = streamed_program(plain, stages, plan.updated_on_host)
    else:
        resharded = sharded_program(plain, stages, levels)
    return plan.model_copy(update={"program": tuple(tuple(map(str, ranks)) for ranks in resharded.ranks)})


def _fractions(plan: Plan, original: ModelReference, report: Report) -> list[float]:
    """Return the plan's cuts as fractions of the operators."""
    stages = plan.predictions.stages
    if stages:
        return [stage.start / stages[-1].stop for stage in stages[1:]]
    graph = trace(original, plan.microbatch_size, report=report, **plan.traced())
    return [cut / len(graph.forward_ids) for cut in stage_cuts(plan, graph)]


def scaled_cuts(fractions: list[float], graph: OperatorGraph) -> list[int]:
    """Return legal, increasing cut indices of `graph`, each as near as possible to its fraction of the operators. Raises
    `PlanError` where there are too few legal cuts."""
    size, cuts = len(graph.forward_ids), [0]
    for index, fraction in enumerate(fractions):
        last = size - (len(fractions) - index)  # leaves a place for each later cut
        places = sorted(range(cuts[-1] + 1, last + 1), key=lambda place: abs(place - fraction * size))
        chosen = next((place for place in places if _is_legal(graph, place)), None)
        if chosen is None:
            raise PlanError(
                f"the reduced model cannot be cut into {len(fractions) + 1} stages: verify with more --layers"
            )
        cuts.append(chosen)
    return cuts[1:]


def _is_legal(graph: OperatorGraph, cut: int) -> bool:
    try:
        Partition(graph, [cut])
    except PlanError:
        return False
    return True
