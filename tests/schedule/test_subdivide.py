"""Stages divided into parts: the order of a program stays, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from stagewright.errors import ScheduleError
from stagewright.schedule import (
    Kind,
    Program,
    build,
    insert_communication,
    insert_gathers,
    insert_recomputation,
    insert_reductions,
    subdivided,
    verify,
)

SCHEDULES = [
    ("gpipe", None), ("1f1b", None), ("interleaved-1f1b", 2), ("breadth-first", 2), ("zb-h1", None), ("zb-v", None),
    ("hanayo", 2), ("dualpipe-v", None),
]  # fmt: skip


def undivided(program: Program, num_parts: Sequence[int]) -> list[list[str]]:
    """Per rank, the texts of what parts of stages do, as actions of the stages, without repeats in a row."""
    stage_of = [stage for stage, count in enumerate(num_parts) for _ in range(count)]
    found = []
    for actions in program.ranks:
        texts = [
            f"{stage_of[part.stage]}{part.kind}{part.microbatch}"
            for action in actions
            for part in action.parts
        ]
        found.append([text for index, text in enumerate(texts) if not index or texts[index - 1] != text])
    return found


@pytest.mark.parametrize(("name", "num_chunks"), SCHEDULES)
def test_divided_programs_run(name: str, num_chunks: int | None) -> None:
    program = build(name, 2, 6, num_chunks)
    rng = Random(name)
    parts = [rng.randint(1, 4) for _ in range(program.num_stages)]
    found = subdivided(program, parts)
    assert found.num_stages == sum(parts)
    saved = insert_recomputation(found, range(0, found.num_stages, 2))
    sharded = insert_reductions(insert_gathers(saved, weight_grads=range(found.num_stages)), 2)
    verify(insert_communication(sharded))
    if not any(action.overlapped for action in program):
        assert undivided(found, parts) == undivided(program, [1] * program.num_stages)


def test_what_is_recomputed_is_whole_one_part_at_a_time() -> None:
    program = insert_recomputation(build("1f1b", 1, 1), [0])
    assert subdivided(program, [3]).lines() == ["0F0 1F0 2F0 2R0 2B0 1R0 1B0 0R0 0B0"]


def test_an_early_recomputation_stays_where_it_is() -> None:
    early = Program.from_text("program early\nmicrobatches 2\nplacement 0\n0: 0F0 0F1 0R0 0R1 0B1 0B0\n")
    assert subdivided(early, [2]).lines() == ["0F0 1F0 0F1 1F1 1R0 0R0 1R1 1B1 0R1 0B1 1B0 0B0"]


def test_split_backwards_send_before_they_add_weight_gradients() -> None:
    split = Program.from_text("program split\nmicrobatches 1\nplacement 0\n0: 0F0 0I0 0W0\n")
    assert subdivided(split, [2]).lines() == ["0F0 1F0 1I0 0I0 1W0 0W0"]


def test_pairs_overlap_part_by_part() -> None:
    paired = Program.from_text(
        "program pair\nmicrobatches 2\nplacement 0 0\n0: 0F0 1F0 0F1&1B0 0B0 1F1 1B1 0B1\n"
    )
    found = subdivided(paired, [3, 2]).lines()[0].split()
    assert found[5:8] == ["0F1&4B0", "1F1&3B0", "2F1"]


def test_stages_of_one_rank_send_each_other_nothing() -> None:
    lowered = insert_communication(subdivided(build("1f1b", 2, 2), [3, 2]))
    sent = [str(action) for action in lowered if action.kind in (Kind.SEND_F, Kind.SEND_B)]
    assert sorted(sent) == ["2SEND_F0", "2SEND_F1", "3SEND_B0", "3SEND_B1"]


@pytest.mark.parametrize("parts", [[2], [2, 0], [1, 1, 1]])
def test_every_stage_has_a_number_of_parts(parts: list[int]) -> None:
    with pytest.raises(ScheduleError, match="give each of the 2 stages"):
        subdivided(build("1f1b", 2, 2), parts)


def test_lowered_programs_are_refused() -> None:
    for lowered in (insert_communication(build("1f1b", 2, 2)), insert_gathers(build("1f1b", 2, 2))):
        with pytest.raises(ScheduleError, match="divided before transfers, sharding and optimizer steps"):
            subdivided(lowered, [2, 2])
