"""Replicas that share out optimizer state, gradients and parameters learn what plain training learns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist
from cells import SMALL_GPT2, SMALL_LLAMA, Cell, Outcome, expected_traffic, predicted, train

from multiprocess import run_ranks
from stagewright.cluster import load_cluster
from stagewright.execution.collectives import ReplicaGroup
from stagewright.execution.loading import StartingTensors
from stagewright.execution.metering import StorageMeter
from stagewright.execution.shards import Shards
from stagewright.execution.weights import Weights
from stagewright.graph.flat_buffers import flats
from stagewright.graph.split import split_graph
from stagewright.graph.tensor import ITEM_BYTES
from stagewright.planning.estimate import estimate
from stagewright.planning.job import Job
from stagewright.planning.plan import load_plan
from stagewright.tracing.cache import trace
from stagewright.tracing.models.build import DeferredModel
from stagewright.tracing.models.reference import resolve

TOLERANCE = 1e-12


def outcomes(cells: Sequence[Cell], folder: Path) -> dict[Cell, list[Outcome]]:
    """What every rank found for each cell; all cells take as many ranks."""
    paths = [str(cell.plan(folder)) for cell in cells]
    ranks = run_ranks(train, cells[0].dp * cells[0].pp, paths, timeout=60 + 20 * len(cells))
    return {cell: [rank[index] for rank in ranks] for index, cell in enumerate(cells)}


def check_equal(cell: Cell, ranks: Sequence[Outcome]) -> None:
    """Loss and gradients are those of the global batch: bit for bit, tied ones within their tolerance."""
    for outcome in ranks:
        assert outcome.loss == 0.0, f"{cell}: the loss differs"
        assert outcome.losses == ranks[0].losses
        for name, difference in outcome.gradients.items():
            allowed = TOLERANCE if name in outcome.reordered else 0.0
            assert difference <= allowed, f"{cell}: gradient of {name} is off by {difference}"


def check_memory(cell: Cell, ranks: Sequence[Outcome], folder: Path) -> None:
    """The bytes at the peak are those predicted."""
    wanted = predicted(cell.plan(folder))
    for rank, outcome in enumerate(ranks):
        assert outcome.peak_bytes == pytest.approx(wanted[rank // cell.dp], rel=0.01), f"{cell}, rank {rank}"


@pytest.mark.multiprocess
def test_replicas_of_a_whole_model(tmp_path: Path) -> None:
    cells = [Cell(sharding=level, pp=1, overrides=SMALL_LLAMA) for level in (0, 1, 2, 3)]
    found = outcomes(cells, tmp_path)
    for cell, ranks in found.items():
        check_equal(cell, ranks)
        check_memory(cell, ranks, tmp_path)
        assert ranks[0].losses == pytest.approx(found[cells[0]][0].losses, rel=1e-12)


@pytest.mark.multiprocess
def test_replicas_of_a_pipeline(tmp_path: Path) -> None:
    cells = [
        Cell(schedule="1f1b", sharding=1, overrides=SMALL_LLAMA),
        Cell(schedule="breadth-first", num_chunks=2, sharding=3, overrides=SMALL_LLAMA),
        Cell(schedule="zb-h1", sharding=3, overrides=SMALL_LLAMA),
    ]
    for cell, ranks in outcomes(cells, tmp_path).items():
        check_equal(cell, ranks)
        check_memory(cell, ranks, tmp_path)


@pytest.mark.multiprocess
def test_stages_gathered_and_reduced_in_units(tmp_path: Path) -> None:
    """Of one rank and of two, with split backwards, tied parameters, recomputation and offloading."""
    alone = [
        Cell(sharding=level, pp=1, num_microbatches=count, num_units=5, overrides=SMALL_LLAMA)
        for level in (2, 3)
        for count in (1, 3)
    ]
    tied = [
        Cell("tiny-gpt2", sharding=level, pp=1, num_units=3, overrides=SMALL_GPT2, policy=policy)
        for level, policy in ((2, "offload"), (3, "recompute"))
    ]
    for cells in (alone + tied, [
        Cell(schedule="1f1b", sharding=2, num_units=2, overrides=SMALL_LLAMA),
        Cell(schedule="zb-h1", sharding=3, num_units=3, overrides=SMALL_LLAMA),
        Cell(schedule="dualpipe-v", sharding=3, num_microbatches=4, num_units=2, overrides=SMALL_LLAMA),
    ]):  # fmt: skip
        for cell, ranks in outcomes(cells, tmp_path).items():
            check_equal(cell, ranks)
            check_memory(cell, ranks, tmp_path)
            traffic = expected_traffic(load_plan(cell.plan(tmp_path)))
            assert [outcome.traffic for outcome in ranks] == [one for one in traffic for _ in range(cell.dp)]


@pytest.mark.multiprocess
@pytest.mark.parametrize("zero", [2, 3])
def test_planned_units_take_what_was_planned(zero: int, tmp_path: Path) -> None:
    """A plan of the planner's own, in five units: plain losses, and the very bytes that it predicts."""
    job = Job(global_batch=8, sequence_length=16, dtype="fp64", num_steps=2)
    reference = resolve("tiny-llama", dict(SMALL_LLAMA))
    planned = estimate(
        reference, load_cluster("8x-h100"), job, dp=4, pp=1, microbatch=2, zero=zero, shard_units=5
    )
    assert planned.num_stages == 5
    planned.save(tmp_path / "plan.json")
    wanted = planned.predictions.ranks[0].tensor_peak_bytes
    for outcome in run_ranks(train, 4, [str(tmp_path / "plan.json")], timeout=90):
        assert outcome[0].loss < TOLERANCE
        assert max(outcome[0].gradients.values()) < TOLERANCE
        assert outcome[0].peak_bytes == wanted


@pytest.mark.multiprocess
def test_sharing_out_within_groups_of_copies(tmp_path: Path) -> None:
    """Two groups of two replicas each; depth-first order sums within a group several times, over the copies once."""
    cells = [
        Cell(schedule=schedule, sharding=level, dp=4, pp=1, num_chunks=chunks, shard_size=2, overrides=SMALL_LLAMA)
        for level, schedule, chunks in (
            (0, "gpipe", None), (1, "gpipe", None), (2, "interleaved-1f1b", 4), (3, "breadth-first", 2),
        )
    ]  # fmt: skip
    in_bf16 = Cell(sharding=2, dp=4, pp=1, shard_size=2, reduce_dtype="bf16", overrides=SMALL_LLAMA)
    found = outcomes([*cells, in_bf16], tmp_path)
    for cell, ranks in found.items():
        check_memory(cell, ranks, tmp_path)
        if cell is not in_bf16:
            check_equal(cell, ranks)
            traffic = expected_traffic(load_plan(cell.plan(tmp_path)))[0]
            assert traffic["num_copy_sums"] > 0
            assert all(outcome.traffic == traffic for outcome in ranks)
    assert all(0 < max(ranks.gradients.values()) < 0.05 for ranks in found[in_bf16])


class DeviceMeter(StorageMeter):
    """Counts live bytes of storages on one type of device; those of fake tensors, which are on another, are on none."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        super().__init__()

    def _count(self, tensor: torch.Tensor) -> None:
        if tensor.device.type == tensor.untyped_storage().device.type == self.device_type:
            super()._count(tensor)


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_a_start_takes_no_more_of_the_device_than_stays_there(level: int) -> None:
    """And of the host one flat buffer at a time where parameters are sharded, one parameter where they are not. The device
    is torch's meta device, whose tensors have sizes and no contents."""
    reference = resolve("tiny-llama", dict(SMALL_LLAMA))
    graph = trace(reference, 1, 16)
    num_operators = len(graph.forward_ids)
    stages = split_graph(graph, [num_operators // 3, 2 * num_operators // 3])
    layout = flats(stages, [level] * len(stages), num_shards=4)
    sizes = [flat.num_elements * ITEM_BYTES[flat.dtype] for flat in layout]
    parameters = [
        meta for stage in stages for meta in (stage.value(value).meta for value in stage.parameters)
    ]
    whole_bytes = sum(meta.storage_bytes for meta in parameters)
    largest = max(meta.storage_bytes for meta in parameters)
    starting = StartingTensors(DeferredModel(reference, 1, 16), stages)
    no_group = cast(dist.ProcessGroup, None)
    replicas = ReplicaGroup(1, 4, no_group, no_group)
    with DeviceMeter("meta") as on_device, DeviceMeter("cpu") as on_host:
        weights = Weights(stages, starting, torch.device("meta"), None, layout)
        shards = Shards(layout, weights, replicas, starting)
    stays = {
        t.untyped_storage()
        for t in (*weights.tensors.values(), *weights.gradients.values(), *shards.tensors())
    }
    resident = sum(storage.nbytes() for storage in stays)
    assert on_device.peak_bytes == on_device.live_bytes == resident
    assert (resident < whole_bytes / 3) == (level == 3)
    assert on_host.peak_bytes <= 2 * largest + (max(sizes) if level == 3 else 0) < whole_bytes
