"""The picture of a timeline: every computation where and as wide as it is long."""

from __future__ import annotations

import pytest

from stagewright.report.timelines import picture, segments, timeline_document
from stagewright.schedule import BUILDERS, build
from stagewright.simulation import StageCosts, simulate


@pytest.mark.parametrize("name", sorted(BUILDERS))
@pytest.mark.parametrize("width", [30, 200])
@pytest.mark.parametrize("colour", [False, True])
def test_every_row_has_the_same_width_and_fits(name: str, width: int, colour: bool) -> None:
    program = build(name, 4, 8)
    timeline = simulate(program, StageCosts.uniform(program.num_stages))
    *rows, axis = picture(timeline, width, colour)
    assert len(rows) == 4
    assert len({len(row.plain) for row in rows}) == 1
    assert max(len(row.plain) for row in [*rows, axis]) <= width


def test_segments_follow_the_times() -> None:
    program = build("1f1b", 2, 3)
    timeline = simulate(program, StageCosts.uniform(2, 1.0, 2.0, 1.0))
    found = {str(s.action): (s.start, s.stop) for s in segments(timeline, 0, 1.0)}
    events = {str(e.action): (e.start_s, e.end_s) for e in timeline.events(0)}
    assert found == events


def test_colours_make_do_with_less_room() -> None:
    timeline = simulate(build("gpipe", 2, 16), StageCosts.uniform(2))
    row = picture(timeline, 120, colour=True)[0].plain
    assert " ~ " not in row and row.startswith("rank 0 F0F1F2F3")
    assert " ~ " in picture(timeline, 120, colour=False)[0].plain


def test_a_long_batch_is_shown_by_its_ends() -> None:
    timeline = simulate(build("1f1b", 2, 100), StageCosts.uniform(2))
    first, second, axis = (row.plain for row in picture(timeline, 80, colour=False))
    assert first.startswith("rank 0 F0- F1- ........B0----- F2- ")
    assert " ~ " in first and first.endswith("B99---- ") and second.endswith("B99---- ........")
    assert axis.endswith("303 s")


def test_activations_are_counted_whatever_they_weigh() -> None:
    program = build("1f1b", 4, 8)
    costs = StageCosts.uniform(4, saved_bytes=[5, 6, 7, 8], base_bytes=100)
    document = timeline_document(program, simulate(program, costs))
    assert [rank["peak_activations"] for rank in document["ranks"]] == [4, 3, 2, 1]
    assert [rank["peak_bytes"] for rank in document["ranks"]] == [120, 118, 114, 108]
