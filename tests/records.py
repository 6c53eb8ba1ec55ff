"""Records of runs that never were."""

from __future__ import annotations

from stagewright.execution.record import RankRecord, Record
from stagewright.planning.plan import Plan
from stagewright.planning.plan_stages import stage_program
from stagewright.schedule import insert_communication
from stagewright.simulation import Timeline


def record_of(plan: Plan, timeline: Timeline, clocks: list[float]) -> Record:
    """What ranks whose clocks are off would record of a simulated batch, transfers included."""
    lowered = insert_communication(stage_program(plan))
    ranks = []
    for rank, actions in enumerate(lowered.ranks):
        times = {str(e.action): (e.start_s, e.end_s) for e in timeline.events(rank)}
        ranks.append(
            RankRecord(
                rank=rank,
                pipeline_rank=rank,
                replica=0,
                allocated_peak_bytes=100 + rank,
                busy_seconds=1.0,
                sent_bytes=0,
                actions=tuple(
                    (str(action), *(t - clocks[rank] for t in times.get(str(action), (0.0, 0.0))))
                    for action in actions
                ),
                began_seconds=50.0 + clocks[rank],
                clock_error_seconds=0.001 * rank,
            )
        )
    return Record(
        stagewright="0",
        model="m",
        device="cpu",
        losses=(1.0,),
        gradient_norms=(1.0,),
        step_seconds=(1.0,),
        metered_steps=(),
        predicted_step_seconds=1.0,
        ranks=tuple(ranks),
    )
