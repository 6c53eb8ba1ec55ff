"""The measured timeline: a record's times as the same type that the simulator makes."""

from __future__ import annotations

from stagewright.errors import InputError
from stagewright.execution.record import RankRecord, Record
from stagewright.planning.plan import Plan
from stagewright.planning.plan_stages import stage_program
from stagewright.schedule.program import Program
from stagewright.simulation import Timeline
from stagewright.simulation.observed import observed


def timeline_of(record: Record, plan: Plan, replica: int = 0) -> Timeline:
    """When the computations of a run's last step, of its longest length, took place on the ranks of one replica.

    Seconds by the first rank's clock, from the start of the first computation; between ranks they are wrong by at
    most `clock_error_seconds`. An action starts when what it needs has arrived, so waiting is idle time.

    Raises:
        InputError: the record is not of a run of `plan`, or of none of its steps.
    """
    if not record.timed_steps:
        raise InputError("the record has no step, so nothing was measured: run the plan for 3 steps or more")
    program = stage_program(plan)
    ranks = _ranks_of(record, plan, replica)
    times = [_times(rank, program) for rank in ranks]
    first = min((start for rank in times for start, _ in rank), default=0.0)
    shifted = [[(start - first, end - first) for start, end in rank] for rank in times]
    return observed(program, shifted, [rank.timed_peak_bytes for rank in ranks])


def clock_error_seconds(record: Record) -> float:
    """How far the clocks of any two ranks may be apart after correction."""
    errors = sorted((rank.clock_error_seconds for rank in record.ranks), reverse=True)
    return sum(errors[:2])


def _ranks_of(record: Record, plan: Plan, replica: int) -> list[RankRecord]:
    wanted = {plan.global_rank(rank, replica): rank for rank in range(plan.pp)}
    found = {rank.rank: rank for rank in record.ranks if rank.rank in wanted}
    is_placed = all(rank.pipeline_rank == wanted[number] for number, rank in found.items())
    if len(record.ranks) != plan.num_ranks or len(found) != plan.pp or not is_placed:
        raise InputError(
            f"the record is of {len(record.ranks)} ranks, and not of the {plan.num_ranks} that the plan has "
            f"(pp {plan.pp} x dp {plan.dp} x tp {plan.tp}): give the plan that was run"
        )
    return [found[rank] for rank in wanted]


def _times(rank: RankRecord, program: Program) -> list[tuple[float, float]]:
    """Start and end of the computations of one rank, in program order."""
    wanted = [str(action) for action in program.actions(rank.pipeline_rank)]
    known = set(wanted)
    ran = [(text, start, end) for text, start, end in rank.actions if text in known]
    if [text for text, _, _ in ran] != wanted:
        raise InputError(
            f"rank {rank.rank} of the record did not run the plan's actions in the plan's order: "
            "give the plan that was run"
        )
    return [(rank.began_seconds + start, rank.began_seconds + end) for _, start, end in ran]
