"""Timelines of programs that ran elsewhere: built from given times instead of costs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stagewright.errors import InputError
from stagewright.schedule.program import Program
from stagewright.simulation.encoding import encode
from stagewright.simulation.memory import PatternBytes
from stagewright.simulation.streams import Contention
from stagewright.simulation.structure import structure_of
from stagewright.simulation.timeline import Timeline


def observed(
    program: Program,
    times: Sequence[Sequence[tuple[float, float]]],
    peak_bytes: Sequence[float] | None = None,
) -> Timeline:
    """The timeline of a compute-only `program` whose actions ran at known times.

    Args:
        times: per rank, the start and end in seconds of each of its actions, in program order.
        peak_bytes: per rank; only the peak is known, so the memory curves are flat.

    What an action makes counts as at hand when the action ends: how long it travelled was not observed apart
    from the waiting of who needs it.

    Raises:
        InputError: times of another number of ranks or actions.

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
