"""Stages that are alike are carved once, and what follows for the others is what carving each of them gives."""

from __future__ import annotations

from dataclasses import fields
from random import Random
from typing import Any

import numpy as np
import pytest

from stagewright.cluster import load_cluster
from stagewright.estimation.liveness import FunctionMemory
from stagewright.estimation.stage_memory import StageMemory
from stagewright.estimation.stages import summarise
from stagewright.estimation.time import Costing
from stagewright.graph import OperatorGraph
from stagewright.graph.carving import Carving
from stagewright.graph.cuts import find_cuts
from stagewright.graph.layers import layer_begins
from stagewright.graph.policy import KEEP, RECOMPUTE_ALL, Policy
from stagewright.graph.stage import Stage
from stagewright.planning.saving.problem import operators_of, stage_units
from stagewright.tracing.cache import trace

CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("gpt2", {"n_layer": 8}, {}),
    ("llama-3-8b", {"num_hidden_layers": 8}, {"tp": 2, "splits_sequence": True}),
    ("gemma-2b", {"num_hidden_layers": 8}, {}),
    ("mixtral-8x7b", {"num_hidden_layers": 8}, {}),
    ("t5-large", {"num_layers": 6, "num_decoder_layers": 6}, {}),
    ("deepseek-v3", {"num_hidden_layers": 9}, {"ep": 4}),
]


def traced(model: str, sizes: dict[str, Any], options: dict[str, Any]) -> OperatorGraph:
    return trace(model, 1, 64, "bfloat16", sizes, target="cuda", **options)


def partitions(graph: OperatorGraph) -> list[list[int]]:
    """At every layer, at every second, and inside layers."""
    begins, legal = layer_begins(graph), {*find_cuts(graph).positions.tolist()}
    inside = [place + (begins[2] - begins[1]) // 2 for place in begins]
    found = (begins[1:], begins[2::2], inside)
    return [[cut for cut in cuts if cut in legal] for cuts in found]


def policies(stage: Stage, random: Random) -> list[Policy]:
    """To keep and to recompute everything, and by chance what is recomputed, offloaded and runs again."""
    units = stage_units(stage)
    dropped = [unit for unit in units if random.random() < 0.5]
    moved = [unit for unit in units if unit not in dropped and random.random() < 0.5]
    operators = [node.id for node in operators_of(stage)]
    again = tuple(sorted(random.sample(operators, min(3, len(operators)))))
    return [
        KEEP,
        RECOMPUTE_ALL,
        Policy(*(frozenset(v for u in one for v in u.values) for one in (dropped, moved)), fetch_ahead=10**6),
        Policy(reruns=((again[-1], again[:-1]),)),
    ]  # fmt: skip


def same(one: FunctionMemory, two: FunctionMemory) -> bool:
    return all(
        np.array_equal(getattr(one, field.name), getattr(two, field.name))
        if isinstance(getattr(one, field.name), np.ndarray)
        else getattr(one, field.name) == getattr(two, field.name)
        for field in fields(FunctionMemory)
        if field.name != "_peaks"
    )


@pytest.mark.parametrize(("model", "sizes", "options"), CASES)
def test_twins_are_what_carving_gives(model: str, sizes: dict[str, Any], options: dict[str, Any]) -> None:
    graph, random, num_twins = traced(model, sizes, options), Random(7), 0
    cluster = load_cluster("2x8x-h100")
    costing = Costing(graph, cluster.device, cluster)
    for cuts in partitions(graph):
        carving = Carving(graph, cuts)
        for index, kept in enumerate(carving.stages()):
            twin = carving.twin(index)
            if twin is None:
                continue
            num_twins += 1
            for policy in policies(kept, random):
                found, direct = carving.stage(index, policy), carving._at(*carving._carve(index, policy))
                assert found == direct
                like = StageMemory(carving.stage(twin.first, twin.policy_of_first(policy)))
                memories = StageMemory(found, twin, like), StageMemory(direct)
                for name in ("forward", "input_grad", "weight_grad", "backward", "rebuild"):
                    assert same(*(getattr(memory, name) for memory in memories)), name
                summary = summarise(like, costing).elsewhere(found.start, found.stop, twin.steps)
                assert summary == summarise(memories[1], costing)
    assert num_twins > 3


def test_stages_that_differ_are_no_twins() -> None:
    """The first and the last have embedding and head, and those that update a buffer stand alone."""
    graph = traced("gpt2", {"n_layer": 4}, {})
    carving = Carving(graph, layer_begins(graph)[1:])
    carving.stages()
    assert [carving.twin(index) is None for index in range(4)] == [True, True, False, True]
