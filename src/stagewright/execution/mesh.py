"""The mesh of a run: the pipeline rank, replica and tensor rank of each process, and its process groups."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
import torch.distributed as dist

from stagewright.execution.collectives import (
    ProcessGroups,
    ReplicaGroup,
    all_gather,
    is_ordered,
    reduce_scatter,
)
from stagewright.execution.watchdog import Report, connecting
from stagewright.graph.tensor_parallel import GROUP
from stagewright.schedule.action import Kind
from stagewright.schedule.lanes import Lane
from stagewright.tracing.tensor_parallel.operators import use_group

STAGE, COPY, SHARD, TENSOR = range(4)
"""Axes of the array of ranks; replicas divide into copies and shards."""


@dataclass(frozen=True)
class Mesh:
    """The position of a process: tensor rank t of pipeline rank p of replica d is global rank ``(p * dp + d) * tp + t``.

    Tensor parallel ranks are consecutive, because they communicate the most. State is sharded over groups of `shard_size`
    consecutive replicas (None: all), and the groups are copies of each other.
    """

    pp: int
    dp: int
    rank: int
    tp: int = 1
    shard_size: int | None = None

    @property
    def num_shards(self) -> int:
        """Number of replicas that state is sharded over."""
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
        """Return groups of the global ranks that differ only along the axes `inside`: along `STAGE` those that exchange
        activations, by pipeline rank, along `STAGE` and `TENSOR` those that hold one copy of the model."""
        ranks = np.arange(self.size).reshape(self.pp, self.dp // self.num_shards, self.num_shards, self.tp)
        size = math.prod(ranks.shape[axis] for axis in inside)
        outside = [axis for axis in range(ranks.ndim) if axis not in inside]
        return ranks.transpose(*outside, *inside).reshape(-1, size).tolist()


@dataclass(frozen=True)
class Groups:
    """The process groups of a run that one process is in.

    * `pipeline`: the global ranks that exchange activations, by pipeline rank;
    * `lanes`: groups of them by kind of transfer, and by whether the target is a higher pipeline rank than the source. NCCL
      gives each pair of ranks in a group a separate communicator, which is a lane: it carries transfers in one direction;
    * `model`: the ranks that hold one copy of the model together;
    * `replicas`: the ranks that the state of the same stages is sharded over; None where there is one replica;
    * `all`: these and the groups created later, in the order of their creation.
    """

    pipeline: list[int]
    lanes: Mapping[tuple[Kind, bool], dist.ProcessGroup | None]
    model: dist.ProcessGroup | None
    replicas: ReplicaGroup | None
    all: ProcessGroups

    @classmethod
    def of(cls, mesh: Mesh) -> Self:
        """Create all groups, in the same order on every process; tensor parallel operators use theirs from now on."""
        groups = ProcessGroups()
        pipelines = mesh.groups(STAGE)
        pipeline = next(ranks for ranks in pipelines if mesh.rank in ranks)
        lanes = {
            (kind, up): groups.new(pipelines, is_small=True)
            for kind in (Kind.F, Kind.B)
            for up in (True, False)
        }
        if mesh.tp > 1:
            tensor_parallel = groups.new(mesh.groups(TENSOR))
            assert tensor_parallel is not None
            use_group(GROUP, tensor_parallel)
        model = groups.new(mesh.groups(STAGE, TENSOR), is_small=True)
        return cls(pipeline, lanes, model, _replicas(mesh, groups), groups)

    def lane(self, lane: Lane) -> dist.ProcessGroup | None:
        """Return the group whose communicator between two ranks is `lane`."""
        return self.lanes[lane.kind, lane.source < lane.target]

    def connect(self, lanes: Iterable[Lane], rank: int, device: torch.device, watch: Report) -> None:
        """Create the communicators of `lanes`, between pipeline ranks, and of all groups, with a message in each; every
        process must call this. `rank` is the pipeline rank of this one.

        NCCL creates a communicator, and connects each of its directions, at first use, and blocks the hosts of both ends
        meanwhile. Within a step, two hosts that wait for each other on different communicators would deadlock; here all of
        them follow one order.

        Source: Where NCCL blocks: `ncclCommInitRank` and the first exchange of a direction (NCCL issue 783).

        Raises:
            RunError: ranks cannot reach each other; names them.
        """
        byte = torch.zeros(1, dtype=torch.uint8, device=device)
        for lane in sorted(lanes, key=_round):
            if rank not in (lane.source, lane.target):
                continue
            ends = self.pipeline[lane.source], self.pipeline[lane.target]
            with connecting(ends, watch):
                if rank == lane.source:
                    work = dist.isend(byte, ends[1], self.lane(lane))
                else:
                    work = dist.irecv(byte, ends[0], self.lane(lane))
                if work is not None:
                    work.wait()
                byte.item()  # waits until a GPU has done it
        lanes_of_all = set(self.lanes.values())
        for group, ranks in self.all:
            if group not in lanes_of_all:
                with connecting(ranks, watch):
                    _use(group, len(ranks), byte)


def connect_everyone(device: torch.device, watch: Report) -> None:
    """Create the communicator of all ranks, which the first exchange of documents would create otherwise; every process
    must call this. Raises `RunError` where ranks cannot reach each other."""
    everyone = range(dist.get_world_size())
    with connecting(everyone, watch):
        _use(None, len(everyone), torch.zeros(1, dtype=torch.uint8, device=device))


def _use(group: dist.ProcessGroup | None, size: int, byte: torch.Tensor) -> None:
    """Connect a group of `size` ranks for every kind of collective: NCCL does so at the first use of each."""
    gathered = byte.new_zeros(size)
    dist.all_reduce(byte, group=group)
    all_gather(gathered, byte, group=group)
    if is_ordered(group):
        reduce_scatter(byte, gathered, group=group)
    byte.item()


def _round(lane: Lane) -> tuple[int, int, int, Lane]:
    """Return a sort key by which neighbours (0, 1), (2, 3) and so on connect at the same time, then (1, 2), (3, 4)..."""
    low, high = sorted((lane.source, lane.target))
    return low % 2, low, high, lane


def _replicas(mesh: Mesh, groups: ProcessGroups) -> ReplicaGroup | None:
    if mesh.dp == 1:
        return None
    sharded, size = mesh.groups(SHARD), mesh.num_shards
    gathers, sums = groups.new(sharded), groups.new(sharded)
    assert gathers is not None and sums is not None
    copies = groups.new(mesh.groups(COPY)) if size < mesh.dp else None
    return ReplicaGroup(mesh.replica % size, size, gathers, sums, copies)
