"""Plans and runs, and the ranks of a run, see where their graphs differ, and say at which operator."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from attending import ATTENDING, microbatch
from stagewright.errors import PlanError, RunError
from stagewright.execution import collectives
from stagewright.graph import OperatorGraph
from stagewright.graph.split import split_graph
from stagewright.planning.plan import GraphSection, Plan, StagePolicy
from stagewright.planning.plan_stages import cut_names, graph_section, stage_cuts, stage_policies
from stagewright.tracing.cache import trace
from stagewright.tracing.models.reference import resolve
from stagewright.tracing.trace import trace_module

CUT = 21


def traced(target: str) -> OperatorGraph:
    return trace_module(ATTENDING["dropout"]().double(), microbatch(), "attending", {"target": target})


@pytest.fixture(scope="module")
def graph() -> OperatorGraph:
    return traced("cuda")


@pytest.fixture(scope="module")
def of_cpu() -> OperatorGraph:
    return traced("cpu")


def plan_of(graph: OperatorGraph, section: GraphSection | None = None) -> Plan:
    """Of two stages, of which one recomputes its attention."""
    cuts = cut_names(graph, [CUT])
    attention = next(node for node in graph.nodes if "attention" in node.op)
    policies = (StagePolicy(recompute=(attention.name,)), "keep")
    fields: dict[str, Any] = {
        "cuts": cuts, "memory_policy": policies, "graph": section or graph_section(graph, cuts, policies),
    }  # fmt: skip
    return Plan.model_construct(**fields)


def with_other_operator(graph: OperatorGraph, place: int) -> OperatorGraph:
    nodes = list(graph.nodes)
    nodes[graph.forward_ids[place]] = replace(nodes[graph.forward_ids[place]], op="aten.sin.default")
    return replace(graph, nodes=tuple(nodes))


def test_a_plan_says_which_operators_it_names(graph: OperatorGraph) -> None:
    section = plan_of(graph).graph
    assert section is not None
    assert "stagewright.attention.default" in section.operators.values()
    assert section.operators[plan_of(graph).cuts[0]] == graph.nodes[graph.forward_ids[CUT]].op
    assert section.digest == graph_section(traced("cuda"), (), ()).digest
    assert set(section.packages) == {"torch", "transformers"}


def test_a_model_is_traced_on_a_machine_with_gpus_without_starting_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which takes memory of the GPU, and fails in a process that was forked from one that has asked for GPUs."""

    def start() -> None:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "_lazy_init", start)
    assert trace(resolve("tiny-llama", {"num_hidden_layers": 1}), 1, 16, target="cuda", use_cache=False).nodes
    assert torch.cuda.is_available()


def test_a_name_that_is_another_operator_here_is_refused_with_both(graph: OperatorGraph) -> None:
    plan = plan_of(graph)
    name, planned = plan.cuts[0], graph.nodes[graph.forward_ids[CUT]].op
    assert stage_cuts(plan, graph) == [CUT]
    with pytest.raises(
        PlanError, match=rf"'{name}', which is {planned} in the plan's graph and aten.sin.default in"
    ):
        stage_cuts(plan, with_other_operator(graph, CUT))


def test_a_policy_for_another_graph_says_what_its_operator_was(
    graph: OperatorGraph, of_cpu: OperatorGraph
) -> None:
    with pytest.raises(
        PlanError,
        match=r"which is stagewright\.attention\.default in the plan's graph and aten.* as traced here: plan again",
    ):
        stage_policies(plan_of(graph), of_cpu)


def test_other_versions_of_what_traces_are_named(graph: OperatorGraph) -> None:
    section = graph_section(graph, cut_names(graph, [CUT]), ())
    older = section.model_copy(update={"packages": {**section.packages, "torch": "2.0"}})
    with pytest.raises(
        PlanError, match=r"the plan was made with torch 2\.0, and here is torch .*: install the same"
    ):
        stage_cuts(plan_of(graph, older), with_other_operator(graph, CUT))


def test_plans_of_earlier_versions_name_operators_only(graph: OperatorGraph) -> None:
    plan = plan_of(graph).model_copy(update={"graph": None})
    assert stage_cuts(plan, with_other_operator(graph, CUT)) == [CUT]


def test_ranks_with_other_graphs_are_named_with_the_operator(
    graph: OperatorGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks in turn: the first sends what it has, and the second answers."""
    stages, others = (split_graph(one, [CUT]) for one in (graph, with_other_operator(graph, 5)))
    sent: list[Any] = []

    def alone(document: Any) -> list[Any]:
        sent.append(document)
        return (
            [document, {**document, "digest": "another"}]
            if isinstance(document, dict)
            else [document, document]
        )

    monkeypatch.setattr(collectives, "exchange", alone)
    with pytest.raises(
        RunError, match=r"rank 1 .* has traced another graph than rank 0 .*a message between stages"
    ):
        collectives.check_same_graphs(stages)
    first = iter(sent)
    monkeypatch.setattr(collectives, "exchange", lambda document: [next(first), document])
    planned = graph.nodes[graph.forward_ids[5]]
    wanted = f"on rank 0 operator '{planned.name}' is {planned.op}, and on rank 1 '{planned.name}' is aten.sin.default"
    with pytest.raises(RunError, match=wanted):
        collectives.check_same_graphs(others)


def test_ranks_with_the_same_graph_exchange_one_digest(
    graph: OperatorGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(
        collectives, "exchange", lambda document: sent.append(document) or [document, document]
    )
    collectives.check_same_graphs(split_graph(graph, [CUT]))
    assert len(sent) == 1


@pytest.mark.parametrize("is_tied", [False, True])
def test_ranks_that_start_with_other_values_are_named_with_the_tensor(
    is_tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks 0 and 1 are replicas, and rank 2 has the embedding too."""
    own: list[dict[str, int]] = [{"embed": 5, "first": 1}, {"embed": 5, "first": 1}, {"embed": 5, "last": 2}]
    groups: list[dict[str, list[str]]] = [
        {"embed": ["embed"], "0": ["embed", "first"]},
        {"embed": ["embed"], "0": ["embed", "first"]},
        {"embed": ["embed"], "1": ["embed", "last"]},
    ]

    def ranks() -> list[Any]:
        """What the ranks do, as they would at once."""
        meeting, told = threading.Barrier(len(own)), dict[int, Any]()
        place = threading.local()

        def exchange(document: Any) -> list[Any]:
            meeting.wait(10)
            told[place.rank] = json.loads(json.dumps(document))
            meeting.wait(10)
            return [told[rank] for rank in range(len(own))]

        monkeypatch.setattr(collectives, "exchange", exchange)

        def rank(number: int) -> str:
            place.rank = number
            try:
                collectives.check_same_weights(own[number], groups[number])
            except RunError as error:
                return str(error)
            return ""

        with ThreadPoolExecutor(len(own)) as pool:
            return list(pool.map(rank, range(len(own))))

    assert ranks() == ["", "", ""]
    own[2 if is_tied else 1]["embed" if is_tied else "first"] = 7
    messages = ranks()
    assert len(set(messages)) == 1
    name, other = ("embed", 2) if is_tied else ("first", 1)
    assert f"'{name}' starts with other values on rank {other} than on rank 0" in messages[0]
    assert "seed" in messages[0]
