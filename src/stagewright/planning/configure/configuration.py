"""One configuration that fits, and what is predicted of it."""

from __future__ import annotations

from dataclasses import dataclass

from stagewright.cluster import Cluster, Device
from stagewright.estimation.megatron import Layout
from stagewright.planning.configure.assignment import Assignment
from stagewright.planning.configure.fitting import Memory
from stagewright.planning.configure.iteration import StepTime
from stagewright.planning.configure.lineup import devices_of_ranks


@dataclass(frozen=True)
class Configuration:
    """One configuration that fits, and what is predicted of it."""

    layout: Layout
    time: StepTime
    memory: Memory
    tokens_per_second: float
    mfu: float
    bound_s: float
    """What the step takes at least."""
    numbered: Cluster
    """As Megatron numbers the devices."""
    cluster: Cluster
    """As the ranks of this configuration number them."""
    assignment: Assignment | None = None
    """The units of `numbered` that take the places; None where nothing was weighed."""

    @property
    def devices(self) -> tuple[tuple[Device, ...], ...]:
        """The kinds of devices of every pipeline rank."""
        return devices_of_ranks(self.cluster, self.layout.pp)

    @property
    def step_s(self) -> float:
        return self.time.seconds
