"""What a notebook or a debugger shows of the long values: one line each."""

from __future__ import annotations

from typing import Any

import pytest

import stagewright
from stagewright.errors import InputError
from stagewright.planning.estimate import estimate
from stagewright.planning.search_result import SearchResult
from stagewright.schedule import build
from stagewright.simulation.costs import StageCosts


def test_long_values_are_shown_in_a_line() -> None:
    cluster = stagewright.load_cluster("2x-h100")
    job = stagewright.Job(global_batch=4, sequence_length=64, dtype="bf16")
    plan = estimate("tiny-llama", cluster, job, pp=2)
    timeline = stagewright.simulate(build("1f1b", 2, 4), StageCosts.uniform(2))
    graph = stagewright.trace("tiny-llama", 1, sequence_length=64)
    shown = {
        "plan": (plan, "<Plan of tiny-llama on 2x-h100: pp 2 x dp 1, 1f1b, 4 microbatches of size 1, "),
        "found": (SearchResult([plan], []), "<SearchResult 1 plans, the best <Plan of tiny-llama"),
        "cluster": (cluster, "<Cluster 2x-h100: 1 x 2 h100>"),
        "timeline": (timeline, "<Timeline of 2 ranks: "),
        "graph": (graph, "<OperatorGraph tiny-llama: "),
    }
    for value, beginning in shown.values():
        assert repr(value).startswith(beginning)
        assert len(repr(value)) < 200


def test_a_module_is_answered_with_what_to_give() -> None:
    class Module:
        pass

    made: Any = Module()
    with pytest.raises(InputError, match=r"not as Module: .*file\.py:function"):
        stagewright.plan(
            made, stagewright.load_cluster("2x-h100"), stagewright.Job(global_batch=4, sequence_length=64)
        )
