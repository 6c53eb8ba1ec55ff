"""Simulation of a program with its costs, and timelines of programs that ran elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from stagewright.errors import InputError, ScheduleError
from stagewright.schedule.program import Program
from stagewright.schedule.tokens import Edge, TokenRules
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
    """Simulate `program`.

    A rank runs one computation at a time, in program order, as soon as its tokens are available. Transfers between ranks
    overlap with computations, one at a time per link, in the order of their sends: they start when the value exists in a
    compute-only program, and when both sides are posted in a lowered one. Weight gathers and gradient reductions have a
    separate stream on every rank.

    Links belong to a pair of ranks or to a sender, as `contention` says.

    Ignores: that transfers, collectives and computations slow each other down.

    Raises:
        InputError: the costs are for another number of stages, or a transfer time is missing.
        ScheduleError: the program deadlocks; the message says where every rank is blocked.

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
    token_s = np.empty(structure.num_tokens)
    actions = encoded.pattern, encoded.microbatch, encoded.offsets
    is_shared = contention is not Contention.NONE
    reached = run(*actions, tables, structure.num_links, is_shared, start, end, token_s)
    if (reached < encoded.offsets[1:]).any():
        raise ScheduleError(_deadlock(encoded, structure.rules, reached))
    held = PatternBytes.of(structure, costs)
    base = np.zeros(placement.num_ranks)
    np.add.at(base, list(placement.rank_of_stage), costs.base_bytes)
    return Timeline(encoded, start, end, held, base, structure, token_s, tables.slot_seconds)


def observed(
    program: Program,
    times: Sequence[Sequence[tuple[float, float]]],
    peak_bytes: Sequence[float] | None = None,
) -> Timeline:
    """Return the timeline of a compute-only `program` whose actions ran at known times.

    Args:
        times: per rank, start and end in seconds of each of its actions, in program order.
        peak_bytes: per rank; only the peak is known, so the memory curves are flat.

    Results count as available when their action ends: transfer times cannot be told from the waiting of their users.

    Raises:
        InputError: the times are for another number of ranks or actions.

    >>> from stagewright.schedule import Program
    >>> tiny = Program.from_text("program tiny\\nmicrobatches 1\\nplacement 0\\n0: 0F0 0B0")
    >>> timeline = observed(tiny, [[(0.0, 1.0), (1.5, 3.5)]])
    >>> timeline.makespan_s, timeline.idle_s.tolist()
    (3.5, [0.5])
    """
    sizes = [len(actions) for actions in program.ranks]
    if [len(rank) for rank in times] != sizes:
        raise InputError(
            f"times of {[len(rank) for rank in times]} actions per rank for program '{program.name}' of {sizes}"
        )
    encoded = encode(program)
    structure = structure_of(encoded, None, Contention.NONE)
    pairs = np.array([pair for rank in times for pair in rank], np.float64).reshape(-1, 2)
    token_s = np.zeros(structure.num_tokens)
    for index in range(encoded.num_actions):
        for token in structure.rules.makes(encoded.action(index)):
            token_s[structure.token_index(token)] = pairs[index, 1]
    nothing = np.zeros(len(encoded.patterns))
    held = PatternBytes(nothing, nothing, nothing, follows_program_order=True)
    base = np.zeros(encoded.num_ranks) if peak_bytes is None else np.asarray(peak_bytes, np.float64)
    slot_s = structure.tables.slot_seconds
    return Timeline(encoded, pairs[:, 0].copy(), pairs[:, 1].copy(), held, base, structure, token_s, slot_s)


def _with_seconds(
    structure: Structure, costs: StageCosts, transfers: Transfers, action_overhead_s: float
) -> Tables:
    """Return the tables of `structure` with the seconds of every action and transfer."""
    seconds = structure.per_pattern(costs.seconds)
    if action_overhead_s:
        seconds[structure.tables.stream == COMPUTE_STREAM] += action_overhead_s
    if len(structure.pairs):
        seconds[structure.pairs] -= costs.overlap_saved_s[structure.stage[structure.pairs]]
    slot_seconds = np.zeros(len(structure.tables.slot_link))
    if isinstance(transfers, int | float):
        slot_seconds[structure.sent_slots] = transfers
    else:
        for slot, source, target in structure.transfers:
            slot_seconds[slot] = transfer_seconds(transfers, source, target)
    return structure.tables._replace(seconds=seconds, slot_seconds=slot_seconds)


def _deadlock(encoded: EncodedProgram, rules: TokenRules, reached: Ints) -> str:
    lines = [f"{encoded.name} deadlocks:"]
    for rank, index in enumerate(reached):
        if index < encoded.offsets[rank + 1]:
            action = encoded.action(int(index))
            wanted = ", ".join(map(str, rules.needs(action)))
            lines.append(f"  rank {rank} is blocked at {action}, which needs {wanted}")
    return "\n".join(lines)
