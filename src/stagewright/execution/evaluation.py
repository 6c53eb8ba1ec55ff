"""Evaluation: the forward half of a plan on the model in evaluation mode."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from stagewright.errors import PlanError
from stagewright.execution.rank_runner import RankRunner, stage_edges
from stagewright.execution.weights import Weights
from stagewright.graph import OperatorGraph
from stagewright.graph.added import MOVES
from stagewright.graph.carving import carve
from stagewright.graph.flat import PARAMETERS
from stagewright.graph.graph import made_by
from stagewright.graph.stage import Function, Stage
from stagewright.schedule.action import Kind
from stagewright.schedule.lower import insert_communication
from stagewright.schedule.program import Program
from stagewright.schedule.sharding import insert_gathers
from stagewright.tracing.arguments import from_contents
from stagewright.tracing.cache import trace

if TYPE_CHECKING:
    from stagewright.execution.session import Session


def evaluator(session: Session) -> RankRunner:
    """Runs this rank's forwards on the weights that it trains; every rank must call this.

    Raises:
        TraceError: the model cannot be traced in evaluation mode.
        PlanError: a stage has no operator in that mode.
    """
    plan, device, rank = session.plan, session.device, session.mesh.pipeline_rank
    session.watch("tracing for evaluation")
    size, traced = plan.microbatch_size, plan.traced()
    graph = trace(session.reference, size, device=device.type, training=False, **traced)
    stages = forward_stages(graph, session.graph, [stage.start for stage in session.stages[1:]])
    shared_out = plan.sharding if plan.dp > 1 else ()
    gathered = [stage for stage, level in enumerate(shared_out) if level >= PARAMETERS]
    forwards = insert_gathers(forward_program(session.program), stages=gathered)
    own = [stage for stage in stages if plan.placement[stage.index] == rank]
    forward = session.groups.forward
    return RankRunner(
        stages, insert_communication(forwards, stage_edges(stages)), rank, session.groups.pipeline,
        evaluation_weights(own, session.weights, device, session.shards.gathered_names()), device, 1.0,
        plan.job.seed, (forward, forward), session.watch, session.shards,
    )  # fmt: skip


def forward_program(program: Program) -> Program:
    """The forwards of a compute-only program, each rank's in its own order.

    >>> from stagewright.schedule import build
    >>> [" ".join(map(str, actions)) for actions in forward_program(build("1f1b", 2, 3)).ranks]
    ['0F0 0F1 0F2', '1F0 1F1 1F2']
    """
    plain = program.without_pairs()
    return plain.with_ranks((one for one in actions if one.kind is Kind.F) for actions in plain.ranks)


def forward_stages(graph: OperatorGraph, training: OperatorGraph, cuts: Sequence[int]) -> list[Stage]:
    """Stages of `graph` (the model in evaluation mode) that save nothing and update nothing.

    Args:
        training: the graph of the model in training mode.
        cuts: cut indices in `training`.

    Raises:
        PlanError: a stage has no operator in evaluation mode.
    """
    return [_forward_only(stage) for stage in carve(graph, _same_places(graph, training, cuts))]


def _same_places(graph: OperatorGraph, training: OperatorGraph, cuts: Sequence[int]) -> list[int]:
    """`cuts` as those of `graph`: in front of the same operator, or of the next that evaluation has too."""
    places = {graph.nodes[node].name: place for place, node in enumerate(graph.body)}
    names = [training.nodes[node].name for node in training.body]
    found = [next((places[name] for name in names[cut:] if name in places), None) for cut in cuts]
    wanted = [place for place in found if place is not None]
    if len(set(wanted)) < len(cuts):
        raise PlanError(
            f"model '{graph.name}' leaves out whole stages of the plan in evaluation mode: plan with fewer stages"
        )
    return wanted


def _forward_only(stage: Stage) -> Stage:
    """`stage` without its backward: F makes and leaves what other stages need and the loss, every other value is freed.

    Buffers that evaluation only reads may change between evaluations, so nothing is computed once and for all.
    """
    wanted = {value for transfer in stage.sends for value in transfer.values}
    if stage.computes_loss:
        wanted.add(stage.graph.loss)
    own = (*stage.forward.nodes, *stage.late)
    nodes = sorted((node for node in own if node.op not in MOVES), key=lambda node: node.id)
    made = {*stage.forward.inputs, *made_by(nodes), *stage.resident}
    outputs = tuple(sorted(wanted & made))
    nothing = Function((), (), ())
    return replace(
        stage, static=(), derived=(*stage.static, *stage.derived), late=(),
        forward=replace(stage.forward, nodes=tuple(nodes), outputs=outputs),
        input_grad=nothing, weight_grad=nothing, backward=nothing, rebuild=nothing, grad_receives=(), grad_sends=(),
        saved=(), offloaded=(), relayed=(), gradients=(), mutations=(),
    )  # fmt: skip


def evaluation_weights(
    stages: Sequence[Stage], trained: Weights, device: torch.device, absent: Collection[str] = ()
) -> Weights:
    """The tensors of a rank's evaluation stages: those that are trained, by name and without copies.

    Those named in `absent` are gathered when they are used.
    """
    tensors = {trained.names[value]: tensor for value, tensor in trained.tensors.items()}
    for stage in stages:
        for value in stage.constants:
            constant = stage.value(value)
            tensors[constant.name] = from_contents(stage.graph.constants[constant.name], constant.meta)
    return Weights(stages, tensors, device, absent=absent)
