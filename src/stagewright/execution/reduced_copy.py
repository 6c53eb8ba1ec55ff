"""A reduced copy of a plan and its model, to verify the plan on: fewer layers, shorter samples, wider types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from stagewright.errors import InputError, PlanError
from stagewright.graph import OperatorGraph
from stagewright.graph.carving import carve
from stagewright.graph.cutting import Cutting
from stagewright.graph.flat import PARAMETERS
from stagewright.planning.job import Job
from stagewright.planning.loss_pieces import in_pieces
from stagewright.planning.plan import ModelSection, Plan, shared_layers
from stagewright.planning.plan_stages import cut_names, stage_cuts, stage_program
from stagewright.planning.sharding import sharded_program, without_sharding
from stagewright.tracing.cache import trace
from stagewright.tracing.models.overrides import DROPOUT
from stagewright.tracing.models.reference import ModelReference, resolve

MAX_SEQUENCE_LENGTH = 64
MAX_MICROBATCH_SIZE = 2
MAX_REPLICAS = 2

Dtype = Literal["fp64", "fp32"]
Report = Callable[[str], None]


def reduced_model(original: ModelReference, num_stages: int, num_layers: int | None) -> ModelReference:
    """The model with as many layers as there are stages, and at least two (or `num_layers`); a factory as it is.

    Raises:
        InputError: a factory is asked for another number of layers, or more layers are wanted than there are.
    """
    have = layers_of(original)
    if have is None:
        if num_layers is not None:
            raise InputError(
                f"--layers {num_layers}: '{original.text}' is no configuration with a number of layers; "
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
    return resolve(original.text, {**original.overrides, "num_hidden_layers": wanted})


def without_dropout(reference: ModelReference) -> ModelReference:
    """The model without dropout, which draws other numbers for what ranks share; a factory as it is."""
    if reference.config is None:
        return reference
    return resolve(reference.text, {**reference.overrides, DROPOUT: 0.0})


def layers_of(reference: ModelReference) -> int | None:
    """None where the model's configuration says no number of layers."""
    config = reference.config or {}
    found = (config.get(key) for key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"))
    return next((layers for layers in found if isinstance(layers, int)), None)


def reduced_plan(
    plan: Plan, original: ModelReference, reference: ModelReference, dtype: Dtype, report: Report
) -> tuple[Plan, OperatorGraph]:
    """`plan` for two replicas at most of the reduced model, with at most two samples a microbatch; and the model's graph.

    Raises:
        PlanError: the reduced model cannot be cut into as many stages.
    """
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
    shared = shared_layers(plan.tp, plan.sequence_parallel) | in_pieces(pieces)
    graph = trace(reference, microbatch_size, report=report, **job.traced(plan.cluster.kind), **shared)
    if reference == original and plan.job.autocast is None:  # whose operators have other names
        names = plan.cuts
        stage_cuts(plan, graph)  # raises for a cut that the graph does not have
    else:
        names = cut_names(graph, scaled_cuts(_fractions(plan, original, report), graph))
        plan = _resharded(_without_names(plan), names, graph)
    changes = {"model": ModelSection.of(reference), "job": job, "dp": dp, "microbatch_size": microbatch_size, "cuts": names,
        "loss_pieces": pieces, "reduce_dtype": None, "shard_size": None, "shorter_lengths": (), "devices": ()}  # fmt: skip
    return Plan.model_validate(plan.model_copy(update=changes).model_dump()), graph


def _without_names(plan: Plan) -> Plan:
    """`plan` with policies that name no operators: a stage that recomputes some values recomputes all between its layers."""
    policies = [
        policy if isinstance(policy, str) else "layers" if policy.recompute else "keep"
        for policy in plan.memory_policy
    ]
    return plan.model_copy(update={"memory_policy": tuple(policies)})


def _resharded(plan: Plan, names: tuple[str, ...], graph: OperatorGraph) -> Plan:
    """`plan` with parameters gathered for the weight gradients of the stages of another model."""
    program = stage_program(plan)
    levels = [level if plan.dp > 1 else 0 for level in plan.sharding]
    if not any(level >= PARAMETERS for level in levels):
        return plan
    position = {graph.nodes[node].name: index for index, node in enumerate(graph.body)}
    stages = carve(graph, [position[name] for name in names])
    resharded = sharded_program(without_sharding(program), stages, levels)
    return plan.model_copy(update={"program": tuple(tuple(map(str, ranks)) for ranks in resharded.ranks)})


def _fractions(plan: Plan, original: ModelReference, report: Report) -> list[float]:
    """Where the plan cuts, as shares of the operators."""
    stages = plan.predictions.stages
    if stages:
        return [stage.start / stages[-1].stop for stage in stages[1:]]
    graph = trace(original, plan.microbatch_size, report=report, **plan.traced())
    return [cut / len(graph.body) for cut in stage_cuts(plan, graph)]


def scaled_cuts(fractions: list[float], graph: OperatorGraph) -> list[int]:
    """Legal, increasing cut positions of `graph`, each as near as can be to its fraction of the body.

    Raises:
        PlanError: there are fewer legal cuts.
    """
    size, found = len(graph.body), [0]
    for index, fraction in enumerate(fractions):
        last = size - (len(fractions) - index)  # leaves a place for each cut to come
        places = sorted(range(found[-1] + 1, last + 1), key=lambda place: abs(place - fraction * size))
        chosen = next((place for place in places if _is_legal(graph, place)), None)
        if chosen is None:
            raise PlanError(
                f"the reduced model cannot be cut into {len(fractions) + 1} stages: verify with more --layers"
            )
        found.append(chosen)
    return found[1:]


def _is_legal(graph: OperatorGraph, cut: int) -> bool:
    try:
        Cutting(graph, [cut])
    except PlanError:
        return False
    return True
