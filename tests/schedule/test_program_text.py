import json
import re

import pytest

from stagewright.errors import ScheduleError
from stagewright.schedule import Action, Kind, Program, build, insert_communication
from stagewright.schedule.action import PER_STAGE, TRANSFERS


@pytest.mark.parametrize("kind", Kind)
def test_every_kind_round_trips(kind):
    microbatch = None if kind in PER_STAGE else 12
    for peer in (3, 5, 0) if kind in TRANSFERS else (None,):
        action = Action(kind, 4, microbatch, peer)
        assert Action.parse(str(action)) == action


def test_neighbours_are_left_out_of_the_text():
    assert str(Action(Kind.SEND_F, 0, 3, 1)) == "0SEND_F3"
    assert str(Action(Kind.RECV_B, 0, 3, 1)) == "0RECV_B3"
    assert str(Action(Kind.SEND_F, 0, 3, 2)) == "0SEND_F3>2"
    assert str(Action(Kind.RECV_F, 2, 3, 0)) == "2RECV_F3<0"


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "0GATHER1", "0F1>2", "0SEND_F3<2", "2F0 ,", "-1F0"])
def test_what_is_no_action_is_refused(text):
    with pytest.raises(ScheduleError):
        Action.parse(text)


def test_programs_round_trip_as_text_and_json():
    program = insert_communication(build("1f1b", 3, 4), [(0, 1), (1, 2), (0, 2)])
    assert Program.from_text(program.to_text()) == program
    assert Program.from_document(json.loads(json.dumps(program.to_document()))) == program


def test_a_program_without_a_rank_is_refused():
    with pytest.raises(ScheduleError, match="lists 1 ranks but its placement has 2"):
        Program.from_text("program x\nmicrobatches 1\nplacement 0 1\n0: 0F0 0B0\n")


def test_a_placement_with_an_empty_rank_is_refused():
    with pytest.raises(ScheduleError, match="without gaps"):
        Program.from_text("program x\nmicrobatches 1\nplacement 0 2\n0: 0F0 0B0\n1:\n2: 1F0 1B0\n")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rank_of_stage": 5}, "'rank_of_stage' of a program is a list of whole numbers, not 5"),
        ({"rank_of_stage": [0, 1.5]}, "list of whole numbers"),
        ({"ranks": [[1], ["1F0"]]}, "'ranks' of a program is a list of lists of actions"),
        ({"ranks": ["0F0", "1F0"]}, "list of lists of actions"),
        ({"num_microbatches": [1]}, "'num_microbatches' of a program is a whole number"),
        ({"num_microbatches": True}, "whole number, not true"),
        ({"name": None}, "'name' of a program is a text, not null"),
    ],
)
def test_a_document_of_other_types_is_refused_by_key(changes, text):
    with pytest.raises(ScheduleError, match=re.escape(text)):
        Program.from_document({**build("1f1b", 2, 1).to_document(), **changes})


@pytest.mark.parametrize("document", [[], 1, "1f1b", None])
def test_what_is_no_object_is_no_program(document):
    with pytest.raises(ScheduleError, match="an object"):
        Program.from_document(document)


def test_a_missing_key_is_named():
    with pytest.raises(ScheduleError, match="needs the key 'ranks'"):
        Program.from_document({"name": "p", "rank_of_stage": [0], "num_microbatches": 1})
