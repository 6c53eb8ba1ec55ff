"""When each value and gradient was on its way between ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stagewright.simulation.timeline import Timeline

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class TransferTimes:
    """One entry per value or gradient that crosses ranks, in seconds from the start of the batch.

    A value goes to a higher stage, a gradient to a lower one.
    """

    source_stage: Ints
    target_stage: Ints
    microbatch: Ints
    start_s: Floats
    end_s: Floats


def transfer_times(timeline: Timeline) -> TransferTimes:
    """All transfers of `timeline`, edge by edge and in the order of microbatches.

    >>> from stagewright.schedule import build
    >>> from stagewright.simulation import StageCosts, simulate
    >>> found = transfer_times(simulate(build("1f1b", 2, 2), StageCosts.uniform(2), 0.5))
    >>> found.source_stage.tolist(), found.start_s.tolist(), found.end_s.tolist()
    ([1, 1, 0, 0], [4.5, 7.5, 1.0, 2.0], [5.0, 8.0, 1.5, 2.5])
    """
    structure, journeys = timeline.structure, timeline.structure.journeys
    slots = np.array([slot for slot, _, _ in journeys], np.int64)
    microbatches = np.arange(timeline.encoded.num_microbatches)
    tokens = structure.slot_base[slots][:, None] + microbatches * structure.slot_stride[slots][:, None]
    arrival = timeline.token_s[tokens]
    ends = np.array([ends for _, *ends in journeys], np.int64).reshape(-1, 2)
    each = len(microbatches)
    return TransferTimes(
        np.repeat(ends[:, 0], each),
        np.repeat(ends[:, 1], each),
        np.tile(microbatches, len(journeys)),
        (arrival - timeline.slot_s[slots][:, None]).ravel(),
        arrival.ravel(),
    )
