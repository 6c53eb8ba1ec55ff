"""Actions, programs and placements, and one pure function per schedule family."""

from stagewright.schedule.action import Action, Kind
from stagewright.schedule.families import FAMILIES, build
from stagewright.schedule.lower import insert_communication
from stagewright.schedule.placement import Placement
from stagewright.schedule.program import Program
from stagewright.schedule.tokens import Rules, chain
from stagewright.schedule.verify import verify

__all__ = [
    "FAMILIES",
    "Action",
    "Kind",
    "Placement",
    "Program",
    "Rules",
    "build",
    "chain",
    "insert_communication",
    "verify",
]
