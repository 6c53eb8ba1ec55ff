"""What planners of other systems are told of a configuration in place of their profiles: our times of its parts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from stagewright.arrays import Floats
from stagewright.cluster import Cluster, all_reduce_seconds
from stagewright.graph.tensor import ITEM_BYTES
from stagewright.planning.bounds.layer_costs import LayerCosts, stage_seconds, stage_sums
from stagewright.planning.configuration import Configuration
from stagewright.planning.job import Job


@dataclass(frozen=True)
class Account:
    """A configuration, and what its layers cost on one device for one microbatch: as it recomputes them, and `plain`."""

    configuration: Configuration
    costs: LayerCosts
    plain: LayerCosts
    cluster: Cluster
    job: Job

    @cached_property
    def forward_s(self) -> Floats:
        """Per stage."""
        return self._seconds(self.plain)[0]

    @cached_property
    def backward_s(self) -> Floats:
        """Per stage, with what is recomputed first."""
        return self._seconds(self.costs)[1]

    @cached_property
    def plain_backward_s(self) -> Floats:
        """Per stage, both gradients alone."""
        return self._seconds(self.plain)[1]

    def _seconds(self, costs: LayerCosts) -> tuple[Floats, Floats]:
        return stage_seconds([costs] * self.configuration.num_stages, self.configuration.layers_per_stage)

    @cached_property
    def parameters(self) -> Floats:
        """Of one rank, per layer and what is around them."""
        return self.costs.state_bytes / self.job.precision.bytes_per_parameter

    @property
    def transfer_s(self) -> float:
        """Of one microbatch between neighbouring stages, one way."""
        configuration = self.configuration
        if configuration.pp == 1:
            return 0.0
        width = configuration.num_holders * configuration.tp
        return self.cluster.blocks_seconds(self.costs.boundary_bytes, 0, width, width)

    @property
    def reduce_s(self) -> float:
        """Gradients over the replicas of the stage with most parameters."""
        configuration = self.configuration
        if configuration.num_holders == 1:
            return 0.0
        most = float(
            stage_sums([self.parameters] * configuration.num_stages, configuration.layers_per_stage).max()
        )
        ranks = range(0, configuration.num_holders * configuration.tp, configuration.tp)
        return all_reduce_seconds(self.cluster, most * ITEM_BYTES[self.job.precision.gradient], ranks)
