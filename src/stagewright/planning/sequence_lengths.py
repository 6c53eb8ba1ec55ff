"""Batches of several sequence lengths under one plan: predictions for each, and the best plan over all of them.

The model is traced once per length. Its operators are the same, so a plan's cuts and memory policy, which name operators,
are valid for each; they are chosen for the longest, whose steps need the most memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stagewright.cluster import Cluster
from stagewright.errors import PlanError
from stagewright.estimation.stages import RangeCosts
from stagewright.graph import OperatorGraph, Origin
from stagewright.planning.configuration import Configuration
from stagewright.planning.plan import Plan
from stagewright.planning.plan_stages import staged_by_plan
from stagewright.planning.prediction.predict import predict
from stagewright.planning.prediction.staged_model import costs_of_model
from stagewright.planning.predictions import LengthPrediction, Predictions
from stagewright.planning.ranking import ranked
from stagewright.units import format_bytes

Graphs = Callable[[Plan], OperatorGraph]
"""Returns the graph of a plan's model for the job of the plan."""

MOST_PLANS = 8
"""Number of the best plans for the longest batches that are judged over all sequence lengths."""

_LASTING = (Origin.PARAMETER, Origin.BUFFER, Origin.CONSTANT)


def check_same_operators(longest: OperatorGraph, other: OperatorGraph, length: int) -> None:
    """Raise `PlanError` unless the model has the same operators and weights for `length` tokens as for the longest."""
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
    """Return `plan`, predicted for the longest, with predictions on `cluster` for each shorter length of its job.

    Raises:
        PlanError: the model has other operators at some length.
    """
    return _Judge(cluster, graphs).judged(plan)


def best_over_lengths(plans: Sequence[Plan], cluster: Cluster, graphs: Graphs) -> list[Plan]:
    """Return those of `plans` that fit at every sequence length, the best over all lengths first; `plans` has the best for
    the longest batches first.

    Ignores: cuts that are best only for shorter batches.

    Raises:
        PlanError: the model has other operators at some length, or no plan fits at all of them.
    """
    judge = _Judge(cluster, graphs)
    judged = [judge.judged(plan) for plan in plans[:MOST_PLANS]]
    fitting = [plan for plan in judged if _excess_bytes(plan, cluster) <= 0]
    if not fitting:
        least = min(_excess_bytes(plan, cluster) for plan in judged)
        raise PlanError(
            f"no plan fits at all of the sequence lengths {list(plans[0].job.shares)}: the best is over by "
            f"{format_bytes(least)}; leave lengths out or raise the memory limit"
        )
    return ranked(fitting)


def _excess_bytes(plan: Plan, cluster: Cluster) -> int:
    """Return the maximum bytes, over ranks and lengths, by which a rank is over what its device may use; negative for
    headroom."""
    limits = plan.usable_bytes(cluster)
    return max(
        rank.reserved_peak_bytes - limits[rank.rank]
        for predictions in plan.by_length.values()
        for rank in predictions.ranks
    )


class _Judge:
    """A predictor for sequence lengths, which keeps the costs of every traced model."""

    def __init__(self, cluster: Cluster, graphs: Graphs) -> None:
        self.cluster = cluster
        self.graphs = graphs
        self.known_costs: dict[tuple[Configuration, int], RangeCosts] = {}

    def judged(self, plan: Plan) -> Plan:
        shorter = tuple(
            LengthPrediction(sequence_length=length, predictions=self._predictions(plan, length))
            for length in list(plan.job.shares)[:-1]
        )
        return plan.model_copy(update={"shorter_lengths": shorter})

    def _predictions(self, plan: Plan, length: int) -> Predictions:
        at_length = plan.at_length(length)
        model_costs = self._model_costs(at_length, plan)
        return predict(staged_by_plan(at_length, model_costs, self.cluster), model_costs)

    def _model_costs(self, at_length: Plan, plan: Plan) -> RangeCosts:
        length = at_length.job.sequence_length
        key = at_length.graph_key, length
        if key not in self.known_costs:
            graph = self.graphs(at_length)
            check_same_operators(self.graphs(plan), graph, length)
            self.known_costs[key] = costs_of_model(graph, self.cluster, at_length.job)
        return self.known_costs[key]
