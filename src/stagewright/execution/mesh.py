"""Where each process of a run stands: its stages, its replica and its part of every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch.distributed as dist

from stagewright.execution.collectives import Replicas
from stagewright.graph.tensor_parallel import GROUP
from stagewright.tracing.tensor_parallel.operators import use_group


@dataclass(frozen=True)
class Mesh:
    """Tensor rank t of pipeline rank p of replica d is global rank ``(p * dp + d) * tp + t``.

    The ranks that share layers are neighbours, because they talk the most. Of the replicas, `shard_size` neighbours (None:
    all) share out what they hold alike, and the others hold copies.
    """

    pp: int
    dp: int
    rank: int
    tp: int = 1
    shard_size: int | None = None

    @property
    def num_shards(self) -> int:
        """Replicas that share out among each other."""
        return self.shard_size or self.dp

    @property
    def size(self) -> int:
        return self.pp * self.dp * self.tp

    @property
    def pipeline_rank(self) -> int:
        return self.rank // (self.dp * self.tp)

    @property
    def replica(self) -> int:
        return self.rank // self.tp % self.dp

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.tp

    def global_rank(self, pipeline_rank: int, replica: int, tensor_rank: int) -> int:
        return (pipeline_rank * self.dp + replica) * self.tp + tensor_rank

    def pipelines(self) -> list[list[int]]:
        """For each replica and tensor rank, the ranks that pass activations on, by pipeline rank."""
        return [
            [self.global_rank(stage, replica, part) for stage in range(self.pp)]
            for replica in range(self.dp)
            for part in range(self.tp)
        ]

    def replica_groups(self) -> list[list[int]]:
        """The ranks that share out the same stages, for each pipeline and tensor rank and each copy."""
        return [
            [self.global_rank(stage, first + index, part) for index in range(self.num_shards)]
            for stage in range(self.pp)
            for part in range(self.tp)
            for first in range(0, self.dp, self.num_shards)
        ]

    def copy_groups(self) -> list[list[int]]:
        """The ranks that hold copies of the same part, for each pipeline and tensor rank and each part."""
        return [
            [self.global_rank(stage, replica, part) for replica in range(index, self.dp, self.num_shards)]
            for stage in range(self.pp)
            for part in range(self.tp)
            for index in range(self.num_shards)
        ]

    def tensor_groups(self) -> list[list[int]]:
        """The ranks that share the layers of the same stages, for each pipeline rank and replica."""
        return [
            [self.global_rank(stage, replica, part) for part in range(self.tp)]
            for stage in range(self.pp)
            for replica in range(self.dp)
        ]

    def whole_models(self) -> list[list[int]]:
        """The ranks that hold one copy of the model together, for each replica."""
        return [
            [self.global_rank(stage, replica, part) for stage in range(self.pp) for part in range(self.tp)]
            for replica in range(self.dp)
        ]

    def group(self, groups: list[list[int]]) -> dist.ProcessGroup | None:
        """A process group for each of `groups`, in the making of which every process takes part. Returns its own."""
        own: dist.ProcessGroup | None = None
        for ranks in groups:
            made = dist.new_group(ranks)
            if self.rank in ranks and isinstance(made, dist.ProcessGroup):
                own = made
        return own

    def own(self, groups: list[list[int]]) -> list[int]:
        """The one of `groups` that this process is in."""
        return next(ranks for ranks in groups if self.rank in ranks)


@dataclass(frozen=True)
class Groups:
    """Those of one process.

    * `pipeline`: the global ranks that pass activations on to each other, by pipeline rank;
    * `forward`, `backward`: groups of them, one for each direction;
    * `model`: the ranks that hold one copy of the model together;
    * `replicas`: the ranks that share out the same stages; None where there is one replica.
    """

    pipeline: list[int]
    forward: dist.ProcessGroup | None
    backward: dist.ProcessGroup | None
    model: dist.ProcessGroup | None
    replicas: Replicas | None

    @classmethod
    def of(cls, mesh: Mesh) -> Self:
        """Make them; the operators that ranks share from now on use theirs."""
        pipelines = mesh.pipelines()
        forward, backward = mesh.group(pipelines), mesh.group(pipelines)
        model = forward if mesh.tp == 1 else _sharing_layers(mesh)
        return cls(mesh.own(pipelines), forward, backward, model, _replicas(mesh))


def _sharing_layers(mesh: Mesh) -> dist.ProcessGroup | None:
    """Make the groups that share layers; returns that of the whole model."""
    group = mesh.group(mesh.tensor_groups())
    assert group is not None
    use_group(GROUP, group)
    return mesh.group(mesh.whole_models())


def _replicas(mesh: Mesh) -> Replicas | None:
    if mesh.dp == 1:
        return None
    groups = mesh.replica_groups()
    gathers, sums = mesh.group(groups), mesh.group(groups)
    assert gathers is not None and sums is not None
    size = mesh.num_shards
    copies = mesh.group(mesh.copy_groups()) if size < mesh.dp else None
    return Replicas(mesh.replica % size, size, gathers, sums, copies)
