"""Memory policies that recompute layers, cheap values, or what the model's own code checkpoints (`--recompute model`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Literal

from stagewright.cluster import Cluster
from stagewright.estimation.operators import KERNELS
from stagewright.estimation.runtime import runtime_of
from stagewright.estimation.stages import RangeCosts
from stagewright.graph import Node, OperatorGraph, Part
from stagewright.graph.graph import short_name
from stagewright.graph.layers import layer_inputs, layer_of
from stagewright.graph.policy import KEEP, Policy, attention_scores, region_policy
from stagewright.graph.stage import Stage
from stagewright.planning.job import Job
from stagewright.planning.plan import StagePolicy
from stagewright.planning.prediction.staged_model import StagedModel, staged_model
from stagewright.schedule import Program
from stagewright.schedule.lower import insert_recomputation


def layers_policy(graph: OperatorGraph) -> Policy:
    """Return the policy that keeps only the inputs of layers, and all of head and loss if the runtime of `graph` does."""
    kept = layer_inputs(graph)
    if not runtime_of(graph).recomputes_head:
        outside = (graph.nodes[node] for node in graph.forward_ids if not layer_of(graph.nodes[node].module))
        outputs = (value for node in outside for value in node.outputs if value is not None)
        kept |= {graph.values[value].storage for value in outputs}
    return Policy(everything=True, checkpoints=kept)


def kept_policy(graph: OperatorGraph, without: frozenset[int] = frozenset()) -> Policy:
    """Return the policy that keeps everything but the values `without` and what the runtime of `graph` always recomputes."""
    names = runtime_of(graph).recomputes
    recomputing = [
        graph.nodes[node] for node in graph.forward_ids if short_name(graph.nodes[node].op) in names
    ]
    recomputed = without | {value for node in recomputing for value in node.outputs if value is not None}
    inputs = frozenset(graph.values[value].storage for node in recomputing for value in node.inputs)
    return Policy(recompute=recomputed, checkpoints=inputs) if recomputed else KEEP


def selective_policy(graph: OperatorGraph) -> Policy:
    """Return the policy that recomputes cheap values: those that the runtime of `graph` names, else attention scores."""
    which = runtime_of(graph).selective
    if which is None:
        return kept_policy(graph, attention_scores(graph))
    kept, calls = set(layers_policy(graph).checkpoints), Counter[tuple[str, str]]()
    for node in map(graph.nodes.__getitem__, graph.forward_ids):
        name, layer = short_name(node.op), layer_of(node.module)
        name = KERNELS.get(name, name)
        calls[layer, name] += 1
        if name in which.keeps and not (name in which.every_second and calls[layer, name] % 2 == 0):
            kept.update(graph.values[value].storage for value in node.outputs if value is not None)
    return Policy(everything=True, checkpoints=frozenset(kept))


def default_policies(graph: OperatorGraph, cuts: Sequence[int]) -> list[Policy]:
    """Return, for every stage between `cuts`, the policy of the model's checkpointed regions, or `KEEP` if it has none."""
    policy = region_policy(graph)
    inside = [graph.nodes[node].region >= 0 for node in graph.forward_ids]
    return [policy if any(inside[start:stop]) else KEEP for start, stop in pairwise((0, *cuts, len(inside)))]


def as_model_says(
    model_costs: RangeCosts,
    cuts: Sequence[int],
    program: Program,
    cluster: Cluster,
    job: Job,
    num_holders: int,
) -> StagedModel:
    """Return the model cut at `cuts` under its `default_policies`, and under `program` with recomputation inserted; raises
    as `pipeline`."""
    policies = default_policies(model_costs.graph, cuts)
    staged = staged_model(model_costs, cuts, program, cluster, job, num_holders, policies)
    needed = [policies[stage.index] if _recomputed_nodes(stage) else KEEP for stage in staged.stages]
    if needed != policies:
        staged = staged_model(model_costs, cuts, program, cluster, job, num_holders, needed)
    return with_recomputation(staged, program)


def with_recomputation(staged: StagedModel, program: Program) -> StagedModel:
    """Return `staged` under `program`, which recomputes nothing yet, with the recomputation of its stages inserted."""
    stages = [stage.index for stage in staged.stages if _recomputed_nodes(stage)]
    return replace(staged, program=insert_recomputation(program, stages))


def named_policy(stage: Stage) -> Literal["keep"] | StagePolicy:
    """Return the policy of a stage of `as_model_says` as plans name it."""
    recomputed = _recomputed_nodes(stage)
    if not recomputed:
        return "keep"
    graph, policy = stage.graph, region_policy(stage.graph)
    gradient_nodes = (node for node in stage.backward.nodes if node.part > Part.FORWARD)
    needed = {
        graph.values[v].storage for node in gradient_nodes for v in node.inputs if v < len(graph.values)
    }
    entering = (
        value for value in (*stage.rebuild.inputs, *stage.recomputed.inputs) if value < len(graph.values)
    )
    makers = (graph.values[graph.values[value].storage].node for value in entering)
    inside = {node for node in makers if stage.start <= graph.position.get(node, -1) < stage.stop}
    return StagePolicy(
        recompute=_names(recomputed, policy.recompute & needed),
        checkpoints=_names([graph.nodes[node] for node in sorted(inside)], policy.checkpoints),
    )


def _recomputed_nodes(stage: Stage) -> list[Node]:
    """Return the operators that a stage recomputes, in the order of the model."""
    return sorted((*stage.rebuild.nodes, *stage.recomputed.nodes), key=lambda node: node.id)


def _names(nodes: Sequence[Node], storages: frozenset[int]) -> tuple[str, ...]:
    """Return the names of the nodes that produce some of `storages`."""
    return tuple(node.name for node in nodes if not storages.isdisjoint(node.outputs))
