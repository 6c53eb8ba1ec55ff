"""Simulation: an event engine that turns a program and its costs into a timeline."""

from stagewright.simulation.costs import StageCosts
from stagewright.simulation.critical import critical_path
from stagewright.simulation.encoding import EncodedProgram, encode
from stagewright.simulation.simulate import simulate
from stagewright.simulation.streams import Contention
from stagewright.simulation.timeline import Timeline, TransferTimes, transfer_times

__all__ = [
    "Contention",
    "EncodedProgram",
    "StageCosts",
    "Timeline",
    "TransferTimes",
    "critical_path",
    "encode",
    "simulate",
    "transfer_times",
]
