"""Schedule files of `torch.distributed.pipelining`: one line of comma-separated actions per rank.

Source: PyTorch 2.13, torch/distributed/pipelining/schedules.py (`_Action`, `_dump_csv`, `_load_csv`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import count

from stagewright.errors import ScheduleError
from stagewright.schedule.action import COMPUTE, Action, Kind, pair
from stagewright.schedule.placement import Placement
from stagewright.schedule.program import Program, check_name, check_size

_OVERLAPPED = re.compile(r"\((.*);(.*)\)OVERLAP_F_B")
_NAMES = {"UNSHARD": Kind.GATHER, "RESHARD": Kind.RELEASE, "REDUCE_GRAD": Kind.REDUCE}


def read_torch_csv(text: str, name: str = "file") -> Program:
    """Read the program in a file of PyTorch, compute-only or with transfers.

    Empty cells are ignored: they only show where a rank waits. Placement and number of microbatches follow from the
    actions.

    Raises:
        ScheduleError: a cell is not an action, or a stage is on two ranks or on none.

    >>> print(read_torch_csv("0F0,0F1,,0B0,0B1\\n,1F0,1B0,1F1,1B1\\n").to_text())
    program file
    microbatches 2
    placement 0 1
    0: 0F0 0F1 0B0 0B1
    1: 1F0 1B0 1F1 1B1
    <BLANKLINE>
    """
    check_name(name)
    lines = [line for line in text.splitlines() if line.strip()]
    ranks = tuple(tuple(_cells(line)) for line in lines)
    holders: dict[int, int] = {}
    for rank, actions in enumerate(ranks):
        for part in (part for action in actions for part in action.parts):
            if holders.setdefault(part.stage, rank) != rank:
                raise ScheduleError(
                    f"stage {part.stage} is on the lines of ranks {holders[part.stage]} and {rank}"
                )
    missing = next(stage for stage in count() if stage not in holders)
    if missing < len(holders):
        raise ScheduleError(f"no line has stage {missing}, but one has stage {max(holders)}")
    placement = Placement(tuple(holders[stage] for stage in range(len(holders))))
    parts = (part for actions in ranks for action in actions for part in action.parts)
    last = max((part.microbatch for part in parts if part.microbatch is not None), default=-1)
    check_size(name, placement.num_stages, last + 1)
    return Program(name, placement, last + 1, ranks)


def write_torch_csv(program: Program) -> str:
    """Return the compute-only file of `program`, which PyTorch's runtime loads and lowers itself.

    Raises:
        ScheduleError: the program has computations PyTorch does not know (recomputation).
    """
    for action in program:
        if action.kind is Kind.R:
            raise ScheduleError(
                f"{action}: PyTorch's schedule files have no recomputation; recompute inside the stage"
            )
    rows = ([_cell(action) for action in actions if action.kind in COMPUTE] for actions in program.ranks)
    return "".join(",".join(row) + "\n" for row in rows)


def _cells(line: str) -> Iterator[Action]:
    for cell in line.split(","):
        text = cell.strip().strip('"')
        overlapped = _OVERLAPPED.fullmatch(text)
        if overlapped:
            yield pair(*map(read_torch_action, overlapped.groups()))
        elif text:
            yield read_torch_action(text)


def _cell(action: Action) -> str:
    parts = ";".join(map(str, action.parts))
    return f"({parts})OVERLAP_F_B" if action.overlapped else parts


def read_torch_action(text: str) -> Action:
    """Read one action as PyTorch writes it.

    >>> str(read_torch_action("0UNSHARD"))
    '0GATHER'
    """
    for torch_name, kind in _NAMES.items():
        if text.endswith(torch_name):
            return Action.parse(text.removesuffix(torch_name) + kind)
    return Action.parse(text)
