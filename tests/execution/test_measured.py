"""The measured timeline: one clock for all ranks, and the same type as the simulated one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from plans import make_plan

from multiprocess import run_ranks
from records import record_of
from stagewright.errors import InputError
from stagewright.execution.record import clock_error_seconds, timeline_of
from stagewright.planning.plan import Plan
from stagewright.planning.plan_stages import stage_program
from stagewright.simulation import StageCosts, simulate
from stagewright.simulation.simulate import observed


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return make_plan(tmp_path_factory.mktemp("plan") / "plan.json", num_microbatches=3)


def test_recorded_times_come_back_as_the_timeline(plan: Plan) -> None:
    """Ranks that begin the step at different times, by one clock, give the timeline that was recorded."""
    wanted = simulate(stage_program(plan), StageCosts.uniform(2, 1.0, 2.0, 1.0), 0.25)
    found = timeline_of(record_of(plan, wanted, [0.0, 3.5]), plan)
    assert found.start_s == pytest.approx(wanted.start_s)
    assert found.end_s == pytest.approx(wanted.end_s)
    assert found.makespan_s == pytest.approx(wanted.makespan_s)
    assert found.bubble_fraction == pytest.approx(wanted.bubble_fraction)
    assert found.peak_bytes.tolist() == [100, 101]


def test_the_clocks_may_be_apart_by_the_two_largest_errors(plan: Plan) -> None:
    timeline = simulate(stage_program(plan), StageCosts.uniform(2))
    assert clock_error_seconds(record_of(plan, timeline, [0.0, 0.0])) == pytest.approx(0.001)


def test_a_record_of_another_plan_is_refused(plan: Plan, tmp_path: Path) -> None:
    record = record_of(plan, simulate(stage_program(plan), StageCosts.uniform(2)), [0.0, 0.0])
    other = make_plan(tmp_path / "other.json", schedule="gpipe", num_microbatches=3)
    with pytest.raises(InputError, match="in the plan's order"):
        timeline_of(record, other)
    with pytest.raises(InputError, match="the record has 1 ranks"):
        timeline_of(record.model_copy(update={"ranks": record.ranks[:1]}), plan)


def test_times_must_be_given_for_every_action(plan: Plan) -> None:
    with pytest.raises(InputError, match="actions per rank"):
        observed(stage_program(plan), [[(0.0, 1.0)], []])


@pytest.mark.multiprocess
def test_the_offset_of_a_clock_is_found_within_its_error() -> None:
    """Clocks of processes of one machine agree; one that is put forward by a second is seen to be."""
    results = run_ranks(measure_offset, 2, timeout=30)
    assert results[0] == (0.0, 0.0)
    offset, error = results[1]
    assert abs(offset + 1.0) <= error < 0.1


def measure_offset(rank: int, num_ranks: int) -> Any:
    from stagewright.execution.clock import clock_offset

    if rank == 1:
        true = time.perf_counter
        time.perf_counter = lambda: true() + 1.0
    found = clock_offset(rank, num_ranks)
    return found.seconds, found.error_seconds
