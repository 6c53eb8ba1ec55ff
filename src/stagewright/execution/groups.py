"""The process groups of a run; every process takes part in making all of them, in the same order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch.distributed as dist

from stagewright.execution.collectives import Replicas
from stagewright.execution.mesh import Mesh
from stagewright.graph.tensor_parallel import GROUP
from stagewright.tracing.tensor_parallel.operators import use_group


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
