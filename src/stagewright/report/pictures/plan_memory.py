"""Memory of the ranks of a plan over time: the bytes of the replay at the times of the simulation, or as measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from stagewright.arrays import Floats
from stagewright.estimation.memory import RankMemory, replay_rank, stage_edges
from stagewright.estimation.memory_curve import ActionCurve, action_curves
from stagewright.estimation.state import ResidentBytes
from stagewright.planning.prediction.staged_model import StagedModel
from stagewright.report.pictures.scene import Curve
from stagewright.schedule import Action, insert_communication
from stagewright.schedule.action import COMPUTE
from stagewright.simulation import Timeline

if TYPE_CHECKING:
    from stagewright.execution.record import RankRecord


def plan_curves(staged: StagedModel, timeline: Timeline) -> list[Curve]:
    """Return per rank the bytes before, inside and after each of its computations, by category, and the peak.

    Changes by transfers and offload count with the previous computation. Ignores: that operators of a computation take
    different times.
    """
    lowered = insert_communication(staged.program, stage_edges(staged.stages), ahead=staged.receives_ahead)
    curves = []
    for rank, actions in enumerate(lowered.ranks):
        resident = staged.resident(rank)
        memory = replay_rank(staged.memories, lowered, rank, resident)
        inside = action_curves(staged.memories, lowered, rank, resident.has_slots)
        actions_of_rank = timeline.encoded.rank_slice(rank)
        places = _computations(staged.program.actions(rank))
        spans = timeline.start_s[actions_of_rank][places], timeline.end_s[actions_of_rank][places]
        curves.append(_curve(memory, resident, inside, _computations(actions), spans))
    return curves


def measured_curves(ranks: Sequence[RankRecord], timeline: Timeline) -> list[Curve] | None:
    """Return per rank the peak inside each of its computations and the bytes after it, at the times of the `timeline` of the
    same run; None where the records have peaks alone, or are of a step with another order of computations, which an adapted
    run had. Changes by transfers count with the previous computation."""
    curves = []
    for number, rank in enumerate(ranks):
        events = [event for event in timeline.events(number) if event.action.kind in COMPUTE]
        wanted = [str(event.action) for event in events]
        texts = set(wanted)
        places = [index for index, (position, _, _) in enumerate(rank.memory) if position in texts]
        if [rank.memory[index][0] for index in places] != wanted:
            return None
        times, held = [0.0], [float(rank.memory[max(places[0] - 1, 0)][2])]
        for event, index, following in zip(events, places, [*places[1:], places[-1] + 1], strict=True):
            times += [event.start_s, event.end_s]
            held += [float(rank.memory[index][1]), float(rank.memory[following - 1][2])]
        peak = max(peak for _, peak, _ in rank.memory)
        curves.append(Curve(np.array(times), np.array(held), float(peak)))
    return curves


def _curve(
    memory: RankMemory,
    resident: ResidentBytes,
    inside: Sequence[ActionCurve],
    computes: Sequence[int],
    spans: tuple[Floats, Floats],
) -> Curve:
    """Return the curve of a rank whose lowered program has computations at `computes`, from `spans[0]` to `spans[1]`."""
    held, saved = np.array(memory.after_action, np.float64), np.array(memory.saved_after, np.float64)
    times, after = [np.zeros(1)], [max(computes[0] - 1, 0)]
    zero = np.zeros(1)
    above, kept, transient, again = [zero], [zero], [zero], [zero]
    before_next = [*(index - 1 for index in computes[1:]), len(held) - 1]
    for index, following, start, end in zip(computes, before_next, *spans, strict=True):
        inner = inside[index]
        times += [start + inner.moments * (end - start), np.full(1, end)]
        after += [*[index] * len(inner.moments), following]
        above += [inner.alive - inner.alive[-1], zero]
        kept += [inner.saved + (saved[index - 1] if index else 0.0) - saved[index], zero]
        transient += [inner.transient, zero]
        again += [inner.again, zero]
    totals = held[after] + np.concatenate(above)
    parts = {name: np.full(totals.shape, float(number)) for name, number in resident.categories.items()}
    for name in memory.flat_after[0] if memory.flat_after else ():
        parts[name] = np.array([flat[name] for flat in memory.flat_after], np.float64)[after]
    parts["inputs"] = np.full(totals.shape, float(memory.categories["inputs"]))
    parts["activations"] = saved[after] + np.concatenate(kept)
    parts["recomputed"] = np.concatenate(again)
    parts["transient"] = np.concatenate(transient) - parts["recomputed"]
    parts["boundary"] = totals - sum(parts.values(), np.zeros(1))
    shown = {name: values for name, values in parts.items() if values.any()}
    return Curve(np.concatenate(times), totals, float(memory.peak_bytes), shown)


def _computations(actions: Sequence[Action]) -> list[int]:
    return [index for index, action in enumerate(actions) if action.kind in COMPUTE]
