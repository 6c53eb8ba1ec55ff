"""The joint search on published layer costs: what it finds, and what no one can beat."""

from time import sleep

import numpy as np
import pytest

from stagewright.planning.joint.anneal import makespan_of
from stagewright.planning.joint.bounds import lower_bound
from stagewright.planning.joint.layout import Layout, stage_costs, transfer_times
from stagewright.planning.joint.plan import DeadlinePolicy, judged, scheduled
from stagewright.planning.joint.problem import JointProblem, LayerTable
from stagewright.planning.joint.search import Effort, search
from stagewright.schedule import build, verify
from stagewright.schedule.automatic import StageTimes
from stagewright.schedule.list_scheduler.priorities import UNLIMITED
from stagewright.schedule.list_scheduler.terms import Rule
from stagewright.simulation import simulate

# Nemotron-Nano-v2-9B in ticks of 0.01 ms. Source: github.com/guojihu-hana/SimPipe, README and configuration.
PATTERN = "EM-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-L"
TICKS = {
    "E": (76, 287, 0),
    "M": (268, 430, 176),
    "-": (185, 191, 169),
    "*": (193, 245, 65),
    "L": (1422, 1571, 6),
}
SIZES = (3, 2, 2, 2, 2, 2, 2, 3, 2, 3, 2, 3, 2, 3, 3, 2, 3, 3, 2, 2, 2, 3, 3, 2)
STAGES_OF_RANK = (
    (0, 4, 8, 12, 16, 19, 20),
    (1, 5, 9, 13, 17, 21),
    (2, 6, 10, 14, 18, 22),
    (3, 7, 11, 15, 23),
)
GREEDY = Rule(1, False, False, np.inf, 0.0, UNLIMITED, False, 0.0)


def nemotron(num_microbatches=8, **options):
    columns = zip(*(TICKS[layer] for layer in PATTERN), strict=True)
    return JointProblem.of(LayerTable.of(*columns, saved_bytes=1.0), 4, num_microbatches, **options)


def published_layout():
    rank_of_stage = [next(r for r, held in enumerate(STAGES_OF_RANK) if s in held) for s in range(24)]
    return Layout(tuple(np.cumsum(SIZES).tolist()), tuple(rank_of_stage))


@pytest.mark.parametrize("holds_back", [False, True])
def test_the_list_scheduler_reproduces_the_published_makespan(holds_back):
    policy = DeadlinePolicy.of(GREEDY._replace(holds_back=holds_back), len(PATTERN))
    plan = scheduled("published", nemotron(), published_layout(), policy)
    assert plan is not None and plan.makespan_s == 89870
    assert plan.timeline.busy_s.tolist() == [86392, 84880, 84728, 84776]


def test_the_search_beats_the_published_makespan_and_not_the_bound():
    problem = nemotron()
    found = search(problem, Effort(rounds=4, gap=0.05, num_workers=1), seed=0)
    assert found.best.makespan_s <= 89870
    assert 85000 <= found.bound.seconds <= found.best.makespan_s
    assert found.best.makespan_s <= min(plan.makespan_s for plan in found.baselines)
    program = verify(found.best.program)
    layout = found.best.layout
    assert simulate(program, stage_costs(problem, layout)).makespan_s == found.best.makespan_s
    assert found.bound.seconds == lower_bound(problem).seconds


def test_the_kernel_and_the_greedy_family_give_the_same_times():
    rng = np.random.default_rng(3)
    for _ in range(10):
        table = LayerTable.of(*rng.integers(1, 9, (3, 9)), boundary_bytes=1.0)
        problem = JointProblem.of(table, 3, 5, latency_s=float(rng.integers(0, 2)))
        layout = Layout.of_layers([*rng.permutation(3), *rng.integers(0, 3, 6)])
        ours = scheduled("ours", problem, layout, DeadlinePolicy.of(GREEDY, 9))
        assert ours is not None
        verify(ours.program)
        assert transfer_times(problem, layout)[0, 1] == problem.latency_s
        costs = stage_costs(problem, layout)
        passes = costs.forward_s, costs.input_grad_s, costs.weight_grad_s
        nothing = np.zeros((2, layout.num_stages))
        times = StageTimes(*passes, np.full(layout.num_stages - 1, problem.latency_s), *nothing)
        program = build("greedy", 3, 5, placement=layout.placement, times=times, delays_unhidden=False)
        family = judged("family", problem, layout, program)
        assert ours.makespan_s == pytest.approx(family.makespan_s)


def test_a_memory_limit_is_kept_and_one_seed_gives_one_result():
    limited = nemotron(memory_bytes=60.0)
    found = [search(limited, Effort(rounds=1, num_workers=1), seed=5) for _ in range(2)]
    assert found[0].best.peak_bytes <= 60
    assert found[0].best.program == found[1].best.program
    assert found[0].bound.seconds <= found[0].best.makespan_s


def test_a_search_finds_the_same_with_any_number_of_threads():
    one, three = (search(nemotron(), Effort(rounds=3, num_workers=number), seed=5) for number in (1, 3))
    assert one.best.program == three.best.program
    assert [plan.makespan_s for plan in one.runners_up] == [plan.makespan_s for plan in three.runners_up]


def test_what_a_start_is_given_up_at_does_not_depend_on_threads(monkeypatch):
    problem = JointProblem.of(LayerTable.of(*np.tile([[1, 3], [2, 4], [1, 1]], 6), saved_bytes=1.0), 3, 6)
    limits = [[], []]
    for number, told in zip((1, 3), limits, strict=True):

        def timed(*arguments, told=told):
            told.append(float(arguments[-1]))
            sleep(0.001 * (len(told) % 3))  # so that threads overtake each other
            return makespan_of(*arguments)

        monkeypatch.setattr("stagewright.planning.joint.search.makespan_of", timed)
        search(problem, Effort(rounds=0, num_workers=number))
    assert len(limits[0]) > 20
    assert sorted(limits[0]) == sorted(limits[1])
