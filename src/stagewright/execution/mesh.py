"""Where each process of a run stands: its stages, its replica and its part of every layer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch.distributed as dist

from stagewright.execution.collectives import Replicas, own_group
from stagewright.graph.tensor_parallel import GROUP
from stagewright.tracing.tensor_parallel.operators import use_group

STAGE, COPY, SHARD, TENSOR = range(4)
"""Axes of the grid of ranks: the replicas are copies of shards."""


@dataclass(frozen=True)
class Mesh:
    """Tensor rank t of pipeline rank p of replica d is global rank ``(p * dp + d) * tp + t``.

    Tensor parallel ranks are neighbours, because they talk the most. Of the replicas, `shard_size` neighbours (None:
    all) shard the state that they have in common, and the others hold copies.
    """

    pp: int
    dp: int
    rank: int
    tp: int = 1
    shard_size: int | None = None

    @property
    def num_shards(self) -> int:
        """Replicas that state is sharded over."""
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

    def groups(self, *inside: int) -> list[list[int]]:
        """The global ranks that differ along the axes `inside` only, together: along `STAGE` those that pass activations on,
        by pipeline rank, along `STAGE` and `TENSOR` those that hold one copy of the model."""
        grid = np.arange(self.size).reshape(self.pp, self.dp // self.num_shards, self.num_shards, self.tp)
        size = math.prod(grid.shape[axis] for axis in inside)
        outside = [axis for axis in range(grid.ndim) if axis not in inside]
        return grid.transpose(*outside, *inside).reshape(-1, size).tolist()


@dataclass(frozen=True)
class Groups:
    """The process groups of a run that one process is in.

    * `pipeline`: the global ranks that pass activations on to each other, by pipeline rank;
    * `forward`, `backward`: groups of them, one for each direction;
    * `model`: the ranks that hold one copy of the model together;
    * `replicas`: the ranks that the state of the same stages is sharded over; None where there is one replica.
    """

    pipeline: list[int]
    forward: dist.ProcessGroup | None
    backward: dist.ProcessGroup | None
    model: dist.ProcessGroup | None
    replicas: Replicas | None
    sharing: dist.ProcessGroup | None = None
    """Of the ranks that share every layer; None where there is one."""

    @classmethod
    def of(cls, mesh: Mesh) -> Self:
        """Every process makes all of them, in the same order; the operators that ranks share from now on use theirs."""
        pipelines = mesh.groups(STAGE)
        pipeline = next(ranks for ranks in pipelines if mesh.rank in ranks)
        forward, backward = own_group(pipelines), own_group(pipelines)
        model, sharing = forward, None
        if mesh.tp > 1:
            sharing = own_group(mesh.groups(TENSOR))
            assert sharing is not None
            use_group(GROUP, sharing)
            model = own_group(mesh.groups(STAGE, TENSOR))
        return cls(pipeline, forward, backward, model, _replicas(mesh), sharing)

    def destroy(self) -> None:
        """Every process of a group must call this."""
        replicas = (
            () if self.replicas is None else (self.replicas.gathers, self.replicas.sums, self.replicas.copies)
        )
        for group in {self.forward, self.backward, self.model, self.sharing, *replicas} - {None}:
            dist.destroy_process_group(group)


def _replicas(mesh: Mesh) -> Replicas | None:
    if mesh.dp == 1:
        return None
    groups, size = mesh.groups(SHARD), mesh.num_shards
    gathers, sums = own_group(groups), own_group(groups)
    assert gathers is not None and sums is not None
    copies = own_group(mesh.groups(COPY)) if size < mesh.dp else None
    return Replicas(mesh.replica % size, size, gathers, sums, copies)
