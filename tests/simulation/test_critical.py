"""The critical path explains the makespan: without a gap, and nothing of it can take longer without cost."""

from __future__ import annotations

import numpy as np
import pytest

from stagewright.schedule import Kind, build
from stagewright.schedule.sharding import insert_gathers, insert_reductions
from stagewright.simulation import StageCosts, Timeline, critical_path, simulate


def texts(timeline: Timeline) -> list[str]:
    return [str(timeline.encoded.action(index)) for index in critical_path(timeline)]


def test_the_path_of_gpipe_is_the_slow_stages() -> None:
    costs = StageCosts.of([1.0, 5.0], [1.0, 5.0], [0.0, 0.0])
    timeline = simulate(build("gpipe", 2, 3), costs)
    assert texts(timeline)[:4] == ["0F0", "1F0", "1F1", "1F2"]
    assert [one[0] for one in texts(timeline)] == ["0", *"111111", "0"]


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved-1f1b", "zb-h1"])
def test_seconds_of_the_path_and_its_transfers_are_the_makespan(name: str) -> None:
    program = build(name, 4, 8)
    stages = program.placement.num_stages
    costs = StageCosts.of(*(1.0 + np.arange(3 * stages).reshape(3, stages) % 5 / 3))
    transfer = 0.25
    timeline = simulate(program, costs, transfer)
    path = critical_path(timeline)
    assert timeline.start_s[path[0]] == 0 and timeline.end_s[path[-1]] == timeline.makespan_s
    ranks = np.searchsorted(timeline.encoded.offsets, path, side="right")
    waits = timeline.start_s[path[1:]] - timeline.end_s[path[:-1]]
    assert waits == pytest.approx(transfer * (ranks[1:] != ranks[:-1]), abs=1e-9)


@pytest.mark.parametrize("name", ["breadth-first", "interleaved-1f1b"])
@pytest.mark.parametrize(("ranks", "chunks"), [(1, 6), (2, 3), (4, 2)])
def test_of_parameters_that_are_gathered_again_the_gather_in_time_is_the_cause(
    name: str, ranks: int, chunks: int
) -> None:
    program = insert_reductions(insert_gathers(build(name, ranks, 4, chunks)))
    costs = StageCosts.uniform(ranks * chunks, gather_s=1.5, reduce_s=0.5)
    timeline = simulate(program, costs)
    path = critical_path(timeline)
    start, end = timeline.start_s[path], timeline.end_s[path]
    assert start[0] == 0 and end[-1] == timeline.makespan_s
    assert (start[1:] >= end[:-1] - 1e-9).all()
    # Nothing travels, so that on the path something always goes on.
    assert (end - start).sum() == pytest.approx(timeline.makespan_s)
    assert any(timeline.encoded.action(int(index)).kind is Kind.GATHER for index in path)
