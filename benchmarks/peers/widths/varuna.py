"""Varuna's choice of microbatch and its time (EuroSys'22): pipelines and replicas, no tensor parallelism."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stagewright.errors import PlanError
from stagewright.schedule import build
from stagewright.schedule.lower import insert_recomputation
from stagewright.simulation import StageCosts, simulate


@dataclass(frozen=True)
class VarunaStage:
    """One stage; seconds and bytes per sample, but `state_bytes` of parameters, gradients and optimizer.

    `activation_bytes` are what it holds when it has recomputed, `boundary_bytes` what it keeps of every microbatch.
    """

    forward: float
    backward: float
    state_bytes: float
    activation_bytes: float
    boundary_bytes: float


def varuna_microbatch(stages: Sequence[VarunaStage], memory_bytes: float, largest: int) -> int:
    """The largest microbatch with which every stage fits, at most `largest`.

    Source: Athlur et al. 2022, "Varuna" (EuroSys), auto_config.py of github.com/microsoft/varuna: one microbatch's
    activations and the inputs that wait, with recomputation. Ignores: fragmentation; transient memory.

    Raises:
        PlanError: not even one sample fits.

    >>> varuna_microbatch([VarunaStage(1, 2, 10, 5, 1)], 40, 16)
    5
    """
    per_sample = (stage.activation_bytes + len(stages) * stage.boundary_bytes for stage in stages)
    rooms = [
        (memory_bytes - stage.state_bytes) / each for stage, each in zip(stages, per_sample, strict=True)
    ]
    size = min(math.floor(min(rooms)), largest)
    if size < 1:
        raise PlanError(
            f"no microbatch fits {len(stages)} stages in {memory_bytes:.3g} bytes: use more stages"
        )
    return size


def varuna_seconds(
    stages: Sequence[VarunaStage], microbatch_size: int, samples: int, transfer: float, all_reduce: float
) -> float:
    """Seconds of a step over `samples` of one replica: 1F1B with recomputation everywhere but on the last stage.

    Source: Varuna's event simulation, without its random jitter. Ignores: what an even number of microbatches saves;
    congestion of the network.

    Args:
        transfer: seconds of one microbatch between two stages.
    """
    num_microbatches = math.ceil(samples / microbatch_size)
    program = build("1f1b", len(stages), num_microbatches)
    program = insert_recomputation(program, set(range(len(stages) - 1)))
    forward = microbatch_size * np.array([stage.forward for stage in stages])
    backward = microbatch_size * np.array([stage.backward for stage in stages])
    costs = StageCosts.of(forward, backward, 0.0 * backward)
    return simulate(program, costs, transfer).makespan_s + all_reduce
