"""What planners of other systems are told of a configuration in place of their profiles: our times of its parts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from stagewright.cluster import Cluster, all_reduce_seconds
from stagewright.estimation.stages import Floats
from stagewright.graph.tensor import ITEM_BYTES
from stagewright.planning.candidate import Choice
from stagewright.planning.configure.layers import LayerCosts, stage_sums
from stagewright.planning.job import Job


@dataclass(frozen=True)
class Account:
    """A configuration, and the costs of its layers on one device for one microbatch."""

    choice: Choice
    costs: LayerCosts
    cluster: Cluster
    job: Job

    @cached_property
    def forward_s(self) -> Floats:
        """Per stage."""
        return self._stages(self.costs.forward_seconds)

    @cached_property
    def backward_s(self) -> Floats:
        """Per stage, with what is recomputed first."""
        return self.plain_backward_s + self.choice.recompute * self._stages(self.costs.again_seconds)

    @cached_property
    def plain_backward_s(self) -> Floats:
        """Per stage, both gradients alone."""
        return self._stages(self.costs.seconds) - self.forward_s

    def _stages(self, column: Floats) -> Floats:
        return stage_sums(
            [column] * (self.choice.pp * (self.choice.num_chunks or 1)), self.choice.layers_per_stage
        )

    @cached_property
    def parameters(self) -> Floats:
        """Of one rank, per layer and what is around them."""
        return self.costs.state_bytes / self.job.precision.bytes_per_parameter

    @property
    def transfer_s(self) -> float:
        """Of one microbatch between neighbouring stages, one way."""
        choice = self.choice
        if choice.pp == 1:
            return 0.0
        width = choice.num_holders * choice.tp
        return self.cluster.blocks_seconds(self.costs.boundary_bytes, 0, width, width)

    @property
    def reduce_s(self) -> float:
        """Gradients over the replicas of the stage with most parameters."""
        choice = self.choice
        if choice.num_holders == 1:
            return 0.0
        most = float(self._stages(self.parameters).max())
        ranks = range(0, choice.num_holders * choice.tp, choice.tp)
        return all_reduce_seconds(self.cluster, most * ITEM_BYTES[self.job.precision.gradient], ranks)
