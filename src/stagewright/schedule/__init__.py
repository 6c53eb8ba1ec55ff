"""Schedules: actions, programs and placements, and one pure function per schedule."""

from stagewright.schedule.action import Action, Kind
from stagewright.schedule.builders import BUILDERS, build
from stagewright.schedule.lower import insert_communication, insert_recomputation
from stagewright.schedule.placement import Placement
from stagewright.schedule.program import Program
from stagewright.schedule.sharding import insert_gathers, insert_microbatch_gathers, insert_reductions
from stagewright.schedule.subdivide import subdivided
from stagewright.schedule.tokens import TokenRules, chain
from stagewright.schedule.torch_csv import read_torch_csv, write_torch_csv
from stagewright.schedule.verify import verify

__all__ = [
    "BUILDERS",
    "Action",
    "Kind",
    "Placement",
    "Program",
    "TokenRules",
    "build",
    "chain",
    "insert_communication",
    "insert_gathers",
    "insert_microbatch_gathers",
    "insert_recomputation",
    "insert_reductions",
    "read_torch_csv",
    "subdivided",
    "verify",
    "write_torch_csv",
]
