"""The joint search for the best configurations of a traced model."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from stagewright.cluster import load_cluster
from stagewright.errors import PlanError
from stagewright.estimation.stages import RangeCosts
from stagewright.graph.split import split_graph
from stagewright.planning.configuration import Configuration
from stagewright.planning.job import Job
from stagewright.planning.joint.problem import JointProblem, LayerTable
from stagewright.planning.joint.search import Effort, search
from stagewright.planning.joint.top_configurations import (
    Searches,
    _joint,
    _worth_judging,
    joint_candidate,
    top_configurations,
)
from stagewright.planning.memory.fitting import Entry, Fit
from stagewright.planning.plan_stages import stage_cuts, stage_policies, stage_program
from stagewright.planning.prediction.predict import run_timeline
from stagewright.planning.prediction.staged_model import StagedModel, costing, staged_model
from stagewright.planning.search import plan
from stagewright.planning.search_result import SearchResult
from stagewright.planning.space import JOINT, Space
from stagewright.tracing.cache import trace

CLUSTER = load_cluster("4x-h100")
SCHEDULES = ("1f1b", "gpipe", "interleaved-1f1b", "zb-h2", "zb-v", "dualpipe-v", "interleaved-zb")
JOB = Job(global_batch=8, sequence_length=32, dtype="fp32")


@cache
def found() -> SearchResult:
    return plan(
        "tiny-gemma", CLUSTER, JOB, schedules=(*SCHEDULES, JOINT), pp=4, microbatch=1, chunks=(1, 2), keep=20
    )


def test_the_joint_plan_is_first_and_no_family_is_faster() -> None:
    best, *others = found().plans
    assert best.schedule == JOINT
    assert {other.schedule for other in others} == set(SCHEDULES)
    seconds = best.predictions.step_seconds
    assert best.predictions.lower_bound_seconds <= seconds < others[0].predictions.step_seconds


def test_the_joint_plan_is_complete() -> None:
    best = found().plans[0]
    program = stage_program(best)
    assert program.num_ranks == 4 and program.num_microbatches == 8
    graph = trace("tiny-gemma", 1, **JOB.traced("cuda"))
    cuts = stage_cuts(best, graph)
    model_costs = RangeCosts(graph, costing(graph, CLUSTER, JOB))
    staged: StagedModel = staged_model(
        model_costs, cuts, program, CLUSTER, JOB, 1, stage_policies(best, graph)
    )
    assert run_timeline(staged).bubble_fraction == pytest.approx(best.predictions.bubble_fraction)
    assert len(split_graph(graph, cuts)) == best.num_stages


def test_top_configurations_are_pipelines_that_could_still_win() -> None:
    entry = Entry(Configuration(), CLUSTER)
    known = [Fit(plan, entry) for plan in found().plans if plan.schedule != JOINT]
    best_s = min(fit.step_seconds for fit in known)
    assert top_configurations(known, best_s) == [known[0]]
    slow = known[0].plan.predictions.model_copy(update={"lower_bound_seconds": 1.0})
    fit = Fit(known[0].plan.model_copy(update={"predictions": slow}), entry)
    assert top_configurations([fit], best_s) == []


def test_a_search_is_made_once_however_often_what_it_finds_is_made_to_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = found().plans[-1]
    graph = trace("tiny-gemma", 1, **JOB.traced("cuda"))
    searched: list[float] = []

    def nothing_fits(problem: JointProblem, *_: object, **__: object) -> None:
        searched.append(float(problem.memory_bytes.max()))
        raise PlanError("no plan fits")

    monkeypatch.setattr("stagewright.planning.joint.top_configurations.search", nothing_fits)
    model_costs = RangeCosts(graph, costing(graph, CLUSTER, JOB))
    configuration = Configuration(1, 4, 1, 8, known.schedule, recompute="auto")
    searches = Searches(known, model_costs, _joint(configuration, known, Space()), CLUSTER, float("inf"))
    assert [joint_candidate(searches, JOB, tight=tight) for tight in (False, True, True)] == [None] * 3
    assert len(searched) == 2 and searched[1] < searched[0] == float("inf")


def test_plans_that_differ_in_what_is_made_again_alone_are_judged_once() -> None:
    layers = LayerTable.of([2.0] * 4, [2.0] * 4, [2.0] * 4, saved_bytes=8.0)
    plain = search(JointProblem.of(layers, 2, 4), Effort(rounds=1))
    twin = replace(plain.best, layout=replace(plain.best.layout, recompute=(1, 1)))
    assert list(_worth_judging(replace(plain, runners_up=(twin,), baselines=()))) == [plain.best]


def test_ranks_recompute_what_the_joint_search_says_where_memory_is_short() -> None:
    limit = 120 << 20
    job = Job(global_batch=8, sequence_length=2048, dtype="fp32", memory_limit=limit)
    best, *others = plan("tiny-gemma", CLUSTER, job, schedules=("1f1b", JOINT), pp=4, microbatch=1).plans
    assert best.schedule == JOINT
    assert sum(stage.recomputed_bytes for stage in best.predictions.stages) > 0
    assert max(rank.reserved_peak_bytes for rank in best.predictions.ranks) <= limit
    assert best.predictions.step_seconds < min(other.predictions.step_seconds for other in others)
