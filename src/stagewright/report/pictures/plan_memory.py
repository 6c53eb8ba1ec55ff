"""What the ranks of a plan hold over time: the bytes of the replay at the times of the simulation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stagewright.estimation.memory import replay_rank, stage_edges
from stagewright.estimation.profile import inner_bytes
from stagewright.planning.prediction.pipeline import Pipeline
from stagewright.report.pictures.scene import Curve
from stagewright.schedule import Action, insert_communication
from stagewright.schedule.action import COMPUTE
from stagewright.simulation import Timeline


def plan_curves(line: Pipeline, timeline: Timeline) -> list[Curve]:
    """Per rank the bytes that are alive before, inside and after each of its computations, and the peak.

    What transfers and moves change counts with the computation before them, where the program has them.
    Ignores: that operators of a computation take different times.
    """
    lowered = insert_communication(line.program, stage_edges(line.stages))
    curves = []
    for rank, actions in enumerate(lowered.ranks):
        memory = replay_rank(line.memories, lowered, rank, line.resident(rank))
        inside = inner_bytes(line.memories, lowered, rank)
        computes = _computations(actions)
        before_next = [*(index - 1 for index in computes[1:]), len(actions) - 1]
        held = np.array(memory.after_action, np.float64)
        first = held[computes[0] - 1] if computes[0] else held[0]
        own = timeline.encoded.rank_slice(rank)
        places = _computations(line.program.actions(rank))
        starts, ends = timeline.start_s[own][places], timeline.end_s[own][places]
        times, values = [np.zeros(1)], [np.full(1, first)]
        for index, following, start, end in zip(computes, before_next, starts, ends, strict=True):
            moments, above = inside[index]
            times += [start + moments * (end - start), np.full(1, end)]
            values += [held[index] - above[-1] + above, held[[following]]]
        curves.append(Curve(np.concatenate(times), np.concatenate(values), float(memory.peak_bytes)))
    return curves


def _computations(actions: Sequence[Action]) -> list[int]:
    return [index for index, action in enumerate(actions) if action.kind in COMPUTE]
