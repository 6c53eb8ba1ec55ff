"""Batches of several lengths under one plan: what each takes, and which plan is best over all of them.

The model is traced once per length. Its operators are the same, so that a plan's cuts and memory policy, which name
operators, hold for each; they are chosen for the longest, whose steps need the most memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stagewright.cluster import Cluster
from stagewright.errors import PlanError
from stagewright.estimation.stages import RangeCosts
from stagewright.graph import OperatorGraph, Origin
from stagewright.planning.plan import Plan
from stagewright.planning.planned_line import planned_line
from stagewright.planning.prediction.pipeline import body_costs
from stagewright.planning.prediction.predict import predict
from stagewright.planning.predictions import LengthPrediction, Predictions
from stagewright.planning.promises import usable_bytes
from stagewright.planning.ranking import ranked
from stagewright.units import format_bytes

Graphs = Callable[[Plan], OperatorGraph]
"""The graph of a plan's model for the job of the plan."""

MOST_PLANS = 8
"""How many of the best plans for the longest batches are judged over all lengths."""

_LASTING = (Origin.PARAMETER, Origin.BUFFER, Origin.CONSTANT)


def check_same_operators(longest: OperatorGraph, other: OperatorGraph, length: int) -> None:
    """Raises `PlanError` unless the model does with `length` tokens what it does with the most, on the same weights."""
    if _structure(longest) != _structure(other):
        raise PlanError(
            f"model '{longest.name}' has other operators or constants for samples of {length} tokens than for the "
            "longest: plan for one length, and pad shorter samples"
        )


def _structure(graph: OperatorGraph) -> tuple[list[str], list[tuple[int, str, str]]]:
    lasting = [
        (number, value.name, str(value.meta))
        for number, value in enumerate(graph.values)
        if value.origin in _LASTING
    ]
    return [node.name for node in graph.nodes], lasting


def with_lengths(plan: Plan, cluster: Cluster, graphs: Graphs) -> Plan:
    """`plan`, predicted for the longest, with what a step of each shorter length of its job takes on `cluster`.

    Raises:
        PlanError: the model has other operators at some length.
    """
    return _Judge(cluster, graphs).judged(plan)


def best_over_lengths(plans: Sequence[Plan], cluster: Cluster, graphs: Graphs) -> list[Plan]:
    """Of `plans`, best for the longest batches first, those that fit at every length, best over all lengths first.

    Ignores: cuts that are best for none but shorter batches.

    Raises:
        PlanError: the model has other operators at some length, or no plan fits at all of them.
    """
    judge = _Judge(cluster, graphs)
    judged = [judge.judged(plan) for plan in plans[:MOST_PLANS]]
    fitting = [plan for plan in judged if _excess_bytes(plan, cluster) <= 0]
    if not fitting:
        least = min(_excess_bytes(plan, cluster) for plan in judged)
        raise PlanError(
            f"no plan fits at all of the lengths {list(plans[0].job.shares)}: the best lacks "
            f"{format_bytes(least)}; leave lengths out or raise the memory limit"
        )
    return ranked(fitting)


def _excess_bytes(plan: Plan, cluster: Cluster) -> int:
    """Bytes by which a rank at some length is over what its device may use; negative for what is left."""
    limits = usable_bytes(plan, cluster)
    return max(
        rank.reserved_peak_bytes - limits[rank.rank] for one in plan.by_length.values() for rank in one.ranks
    )


class _Judge:
    """Predictions for lengths, with the costs of every traced model kept."""

    def __init__(self, cluster: Cluster, graphs: Graphs) -> None:
        self.cluster = cluster
        self.graphs = graphs
        self.bodies: dict[tuple[int, int, bool, int, int], RangeCosts] = {}

    def judged(self, plan: Plan) -> Plan:
        shorter = tuple(
            LengthPrediction(sequence_length=length, predictions=self._predictions(plan, length))
            for length in list(plan.job.shares)[:-1]
        )
        return plan.model_copy(update={"shorter_lengths": shorter})

    def _predictions(self, plan: Plan, length: int) -> Predictions:
        asked = plan.at_length(length)
        body = self._body(asked, plan)
        return predict(planned_line(asked, body, self.cluster), body)

    def _body(self, asked: Plan, plan: Plan) -> RangeCosts:
        length = asked.job.sequence_length
        key = asked.microbatch_size, asked.tp, asked.sequence_parallel, asked.loss_pieces, length
        if key not in self.bodies:
            graph = self.graphs(asked)
            check_same_operators(self.graphs(plan), graph, length)
            self.bodies[key] = body_costs(graph, self.cluster, asked.job)
        return self.bodies[key]
