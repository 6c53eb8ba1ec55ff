"""Simulation: from a program and its costs to a timeline."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from stagewright.errors import InputError, ScheduleError
from stagewright.schedule.program import Program
from stagewright.schedule.tokens import Edge, Rules
from stagewright.simulation.costs import StageCosts, Transfers, transfer_seconds
from stagewright.simulation.encoding import EncodedProgram, encode
from stagewright.simulation.engine import Ints, Tables, run
from stagewright.simulation.memory import PatternBytes
from stagewright.simulation.streams import COMPUTE_STREAM, Contention
from stagewright.simulation.structure import Structure, structure_of
from stagewright.simulation.timeline import Timeline


def simulate(
    program: Program | EncodedProgram,
    costs: StageCosts,
    transfer_s: Transfers = 0.0,
    *,
    edges: Iterable[Edge] | None = None,
    contention: Contention = Contention.PAIR,
    action_overhead_s: float = 0.0,
) -> Timeline:
    """When every action of `program` runs.

    One computation at a time per rank, in program order, as soon as what it needs is there. Transfers
    between ranks run beside computations, one at a time per link, in the order of their sends: from the
    moment the value exists in a compute-only program, from the moment both sides are posted in a lowered
    one. Weight gathers and gradient reductions have a stream of their
    own on every rank.

    Links belong to a pair of ranks or to a sender, as `contention` says.

    Ignores: that transfers, collectives and computations slow each other down.

    Raises:
        InputError: costs of another number of stages, or a missing transfer time.
        ScheduleError: the program deadlocks; the text says what every rank is blocked at.

    >>> from stagewright.schedule import build
    >>> timeline = simulate(build("1f1b", 4, 8), StageCosts.uniform(4, saved_bytes=1))
    >>> timeline.makespan_s, round(timeline.bubble_fraction, 5), timeline.peak_bytes.tolist()
    (33.0, 0.27273, [4.0, 3.0, 2.0, 1.0])
    """
    encoded = program if isinstance(program, EncodedProgram) else encode(program)
    placement = encoded.placement
    if costs.num_stages != placement.num_stages:
        raise InputError(f"costs of {costs.num_stages} stages for a program of {placement.num_stages} stages")
    structure = structure_of(encoded, edges, contention)
    tables = _with_seconds(structure, costs, transfer_s, action_overhead_s)
    start, end = np.empty(encoded.num_actions), np.empty(encoded.num_actions)
    known = np.empty(structure.num_tokens)
    actions = encoded.pattern, encoded.microbatch, encoded.offsets
    is_shared = contention is not Contention.NONE
    reached = run(*actions, tables, structure.num_links, is_shared, start, end, known)
    if (reached < encoded.offsets[1:]).any():
        raise ScheduleError(_deadlock(encoded, structure.rules, reached))
    held = PatternBytes.of(structure, costs)
    base = np.zeros(placement.num_ranks)
    np.add.at(base, list(placement.rank_of_stage), costs.base_bytes)
    return Timeline(encoded, start, end, held, base, structure, known, tables.slot_seconds)


def _with_seconds(
    structure: Structure, costs: StageCosts, transfers: Transfers, action_overhead_s: float
) -> Tables:
    """The tables of `structure` with the seconds of every action and transfer."""
    seconds = structure.per_pattern(costs.seconds)
    if action_overhead_s:
        seconds[structure.tables.stream == COMPUTE_STREAM] += action_overhead_s
    if len(structure.pairs):
        seconds[structure.pairs] -= costs.overlap_saved_s[structure.stage[structure.pairs]]
    slot_seconds = np.zeros(len(structure.tables.slot_link))
    if isinstance(transfers, int | float):
        slot_seconds[structure.travelling] = transfers
    else:
        for slot, source, target in structure.journeys:
            slot_seconds[slot] = transfer_seconds(transfers, source, target)
    return structure.tables._replace(seconds=seconds, slot_seconds=slot_seconds)


def _deadlock(encoded: EncodedProgram, rules: Rules, reached: Ints) -> str:
    lines = [f"{encoded.name} deadlocks:"]
    for rank, index in enumerate(reached):
        if index < encoded.offsets[rank + 1]:
            action = encoded.action(int(index))
            wanted = ", ".join(map(str, rules.needs(action)))
            lines.append(f"  rank {rank} is blocked at {action}, which needs {wanted}")
    return "\n".join(lines)
