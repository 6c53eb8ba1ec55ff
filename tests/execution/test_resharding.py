"""Checkpoints under another plan: whatever plan wrote one, any plan of the same model goes on from it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import nccl_simulation
import numpy as np
import pytest
from cells import SMALL_GPT2, SMALL_LLAMA
from hypothesis import given
from hypothesis import strategies as st
from plans import make_plan

from multiprocess import run_ranks
from stagewright.execution.regions import Region, in_whole, memory_ranges
from stagewright.graph.tensor import TensorMeta
from stagewright.graph.tensor_parallel import TensorShard
from stagewright.planning.plan import load_plan
from stagewright.tracing.models.lora import Lora
from torture import TEST_ALL

MICROBATCHES = 4
TOLERANCE = 1e-13
"""Of losses in float64, relative: sums over replicas and parts of layers are added up in another order."""

llama = partial(make_plan, overrides=dict(SMALL_LLAMA), sequence_length=16, dtype="fp64", num_steps=6)
# Of all dropout, attention's draws other numbers where ranks share out the heads.
gpt2 = partial(llama, model="tiny-gpt2", overrides={**dict(SMALL_GPT2), "attn_pdrop": 0.0})


# -- regions ------------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(1, 4), min_size=0, max_size=4),
    st.randoms(use_true_random=False),
    st.data(),
)
def test_memory_ranges_are_where_the_elements_lie(shape: list[int], chance: Any, data: st.DataObject) -> None:
    """Of any dense layout and any range of it: together they are the range, each a box in one range of memory."""
    order = list(range(len(shape)))
    chance.shuffle(order)
    memory = np.arange(int(np.prod(shape)))
    inverse = [order.index(dim) for dim in range(len(shape))]
    tensor = memory.reshape([shape[dim] for dim in order]).transpose(inverse)
    meta = TensorMeta(tuple(shape), tuple(step // memory.itemsize for step in tensor.strides), "int64")
    first = data.draw(st.integers(0, memory.size))
    stop = data.draw(st.integers(first, memory.size))
    found = []
    for one in memory_ranges(meta, first, stop):
        size = one.region.num_elements
        ordered = memory[first + one.offset : first + one.offset + size].reshape(
            [one.region.shape[dim] for dim in one.order]
        )
        box = ordered.transpose([one.order.index(dim) for dim in range(len(shape))])
        assert np.array_equal(box, tensor[one.region.within(Region.whole(shape))])
        found += ordered.ravel().tolist()
    assert found == list(range(first, stop))


@given(st.sampled_from([((6, 4, 4), 0), ((5,), 1), ((7,), 3), ((8,), 0)]), st.sampled_from([1, 2]), st.data())
def test_parts_of_all_ranks_are_the_whole(
    case: tuple[tuple[int, ...], int], dim: int, data: st.DataObject
) -> None:
    """Fused blocks, padding, and ranks that hold nothing but padding; regions of a part as well as all of it."""
    blocks, padding = case
    num_ranks = 2 if (sum(blocks) + padding) % 4 else data.draw(st.sampled_from([2, 4]))
    num_ranks = (
        2 if any(size % num_ranks for size in TensorShard(dim, blocks, padding).padded_blocks) else num_ranks
    )
    shard = TensorShard(dim, blocks, padding)
    shape = [3, 3, 3]
    shape[dim] = shard.whole_size
    seen = np.zeros(shape, dtype=int)
    part_shape = list(shape)
    part_shape[dim] = sum(shard.padded_blocks) // num_ranks
    cut = data.draw(st.integers(0, part_shape[dim]))
    for rank in range(num_ranks):
        for start, size in ((0, cut), (cut, part_shape[dim] - cut)):
            begin, extent = [0, 0, 0], list(part_shape)
            begin[dim], extent[dim] = start, size
            for whole, own in in_whole(Region(tuple(begin), tuple(extent)), shard, num_ranks, rank):
                assert whole.shape == own.shape
                assert own.overlap(Region(tuple(begin), tuple(extent))) == own
                seen[whole.within(Region.whole(shape))] += 1
    assert (seen == 1).all()


# -- pairs of plans -----------------------------------------------------------------------------------------------------


WAYS: dict[str, dict[str, Any]] = {
    "one": {},
    "pp2": {"pp": 2},
    "interleaved": {"pp": 2, "schedule": "interleaved-1f1b", "num_chunks": 2},
    "zb-h1": {"pp": 2, "schedule": "zb-h1"},
    "dp2": {"dp": 2, "sharding": 0},
    "zero1": {"dp": 2, "sharding": 1},
    "zero3": {"dp": 2, "sharding": 3, "schedule": "breadth-first", "num_chunks": 2},
    "tp2": {"tp": 2},
    "pp3": {"pp": 3},
    "tp2-zero2": {"tp": 2, "dp": 2, "sharding": 2},
    "pp2-zero1": {"pp": 2, "dp": 2, "sharding": 1},
    "pp2-tp2": {"pp": 2, "tp": 2},
    "half-shards": {"dp": 4, "sharding": 3, "shard_size": 2},
}
OF_GPT2 = ("pp2", "zero1", "tp2-zero2", "one")
"""Tied weights, and queries, keys and values in one matrix."""
OF_ADAPTERS = ("pp2", "zero3", "tp2")
"""Frozen weights, which each rank reads anew."""


def plans_of(folder: Path) -> dict[int, dict[str, list[str]]]:
    """Plans that take the same samples in each step: by number of processes, then by model."""
    found: dict[int, dict[str, list[str]]] = {}
    adapted = partial(llama, lora=Lora(rank=4, alpha=8, targets="all-linear", is_drawn=True))
    kinds = (("llama", llama, WAYS), ("gpt2", gpt2, OF_GPT2), ("adapted", adapted, OF_ADAPTERS))
    for model, make, names in kinds:
        for name in names:
            way = {"pp": 1, "dp": 1, **WAYS[name]}
            plan = make(folder / f"{model}-{name}.json", num_microbatches=MICROBATCHES // way["dp"], **way)
            found.setdefault(plan.num_ranks, {}).setdefault(model, []).append(f"{model}-{name}")
    return found


@pytest.mark.multiprocess
def test_any_plan_goes_on_from_any_other(tmp_path: Path) -> None:
    """Every plan writes a checkpoint after two steps, and others go on from it for one: with the loss and the norm of the
    plan that never stopped, and then its weights, as the loss of one more batch shows. `make test-all` takes every pair."""
    found = plans_of(tmp_path)
    for num_ranks, models in found.items():
        run_ranks(
            write,
            num_ranks,
            str(tmp_path),
            [name for names in models.values() for name in names],
            timeout=300,
        )
    chosen = pairs_of(list(WAYS), "llama") | pairs_of(OF_GPT2, "gpt2") | pairs_of(OF_ADAPTERS, "adapted")
    num_pairs = 0
    for num_ranks, models in found.items():
        plans = {name for names in models.values() for name in names}
        wanted = sorted(pair for pair in chosen if pair[1] in plans)
        for differences in run_ranks(go_on, num_ranks, str(tmp_path), wanted, timeout=600):
            assert {pair: by for pair, by in differences.items() if by > TOLERANCE} == {}
        num_pairs += len(wanted)
    assert num_pairs == len(chosen)


def pairs_of(names: Sequence[str], model: str) -> set[tuple[str, str]]:
    """Plans that write and plans that go on: all pairs, or each plan with two others in both places."""
    plans = [f"{model}-{name}" for name in names]
    if TEST_ALL:
        return set(itertools.product(plans, plans))
    return {(plan, plans[(place + step) % len(plans)]) for place, plan in enumerate(plans) for step in (1, 5)}


def write(rank: int, num_ranks: int, folder: str, names: list[str]) -> None:
    """Train two steps of each plan, write a checkpoint, and go on for one step, of which the outcome is kept."""
    import torch
    import torch.distributed as dist

    from stagewright.execution.checkpoint import save

    dist.init_process_group("gloo")
    for name in names:
        session = new_session(f"{folder}/{name}.json")
        for step in range(2):
            session.train_step(step)
        save(session, Path(folder) / f"{name}-checkpoints", 2)
        outcome = one_step(session, 2)
        if rank == 0:
            torch.save(outcome, f"{folder}/{name}.outcome")
        dist.barrier()
    dist.destroy_process_group()


def go_on(rank: int, num_ranks: int, folder: str, pairs: list[tuple[str, str]]) -> dict[str, float]:
    """By pair of plans, how far the step after a checkpoint of the first is under the second from that of the first."""
    import torch
    import torch.distributed as dist

    from stagewright.execution.checkpoint import restore

    dist.init_process_group("gloo")
    sessions: dict[str, Any] = {}
    found = {}
    for was, now in pairs:
        if now not in sessions:
            sessions[now] = new_session(f"{folder}/{now}.json")
        assert restore(sessions[now], Path(folder) / f"{was}-checkpoints") == 2
        got = one_step(sessions[now], 2)
        if rank == 0:
            wanted = torch.load(f"{folder}/{was}.outcome")
            found[f"{was} > {now}"] = max(
                abs(one - other) / abs(one) for one, other in zip(wanted, got, strict=True)
            )
        dist.barrier()
    dist.destroy_process_group()
    return found


def one_step(session: Any, step: int) -> list[float]:
    """The loss and the norm of a step, and the loss of a batch after it."""
    result = session.train_step(step)
    return [result.loss, result.gradient_norm, session.accumulate(step + 1)]


def new_session(path: str) -> Any:
    import torch

    from stagewright.execution.session import Session

    return Session(load_plan(path), torch.device("cpu"), None, random_weights=True)


# -- without a disk -----------------------------------------------------------------------------------------------------


@pytest.mark.multiprocess
@pytest.mark.parametrize(("num_ranks", "stays"), [(2, "pp2"), (4, "pp2-zero1")])
def test_a_run_goes_on_under_other_plans_without_a_disk(tmp_path: Path, num_ranks: int, stays: str) -> None:
    """From plan to plan in the same processes, a step under each: the losses and norms are those of a run that stays."""
    names = plans_of(tmp_path)[num_ranks]["llama"]
    losses = run_ranks(adopt, num_ranks, str(tmp_path), [f"llama-{stays}", *names], timeout=120)
    stayed = run_ranks(adopt, num_ranks, str(tmp_path), [f"llama-{stays}"] * (len(names) + 1), timeout=120)
    assert losses[0] == pytest.approx(stayed[0], rel=TOLERANCE)
    assert all(of_rank == losses[0] for of_rank in losses)


def adopt(rank: int, num_ranks: int, folder: str, names: list[str]) -> list[float]:
    """Losses and norms of a step under each of some plans, one after the other."""
    import os

    from stagewright.errors import InputError
    from stagewright.execution.trainer import Trainer

    os.environ["LOCAL_RANK"] = str(rank)
    found = []
    plans = [load_plan(f"{folder}/{name}.json") for name in names]
    with Trainer(plans[0], out=f"{folder}/adopting", device="cpu", random_weights=True) as trainer:
        other = plans[0].model_copy(update={"job": plans[0].job.model_copy(update={"seed": 3})})
        with pytest.raises(InputError, match=r"cannot continue under this plan: job.seed was 0, is 3"):
            trainer.adopt(other)
        for plan in plans:
            if plan is not plans[0]:
                trainer.adopt(plan)
            result = trainer.step()
            found += [result.loss, result.gradient_norm]
    return found


@pytest.mark.multiprocess
def test_state_moves_in_chunks(tmp_path: Path) -> None:
    """The very numbers, from plan to plan; no rank has more in transit than a chunk each way. Under NCCL's rules."""
    names = ("pp2-zero1", "half-shards", "pp2-tp2", "pp2-zero1")
    for name in {*names}:
        way = {"pp": 1, "dp": 1, **WAYS[name]}
        llama(tmp_path / f"{name}.json", num_microbatches=MICROBATCHES // way["dp"], **way)
    sizes = [2000, 256, 1 << 20]
    of_ranks = run_ranks(hand_over, 4, str(tmp_path), names, sizes, timeout=200)
    for _, in_transit in of_ranks:
        assert all(0 < most <= 2 * chunk_bytes for most, chunk_bytes in zip(in_transit, sizes, strict=True))
    states = [_whole([region for states, _ in of_ranks for region in states[number]]) for number in range(4)]
    assert len(states[0]) > 100 and all(state.keys() == states[0].keys() for state in states)
    for state in states[1:]:
        assert all(np.array_equal(state[name], array) for name, array in states[0].items())


def _whole(regions: list[tuple[str, Region, np.ndarray]]) -> dict[str, np.ndarray]:
    """Tensors of the whole model by name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, region, _ in regions:
        stop = Region.whole(tuple(map(sum, zip(region.start, region.shape, strict=True)))).shape
        shapes[name] = tuple(map(max, stop, shapes.get(name, stop)))
    arrays = {name: np.full(shape, np.nan) for name, shape in shapes.items()}
    for name, region, numbers in regions:
        arrays[name][region.within(Region.whole(shapes[name]))] = numbers
    return arrays


def hand_over(
    rank: int, num_ranks: int, folder: str, names: list[str], sizes: list[int]
) -> tuple[list[list[tuple[str, Region, np.ndarray]]], list[int]]:
    """What this rank stands for under each plan, after a step under the first, and the most bytes in transit on each way."""
    import torch
    import torch.distributed as dist

    from stagewright.execution import handover
    from stagewright.execution.metering import StorageMeter

    meters: list[StorageMeter] = []

    class Metered(handover._Moving):
        def __init__(self, device: torch.device, rank: int, taken: handover.Taken, *others: Any) -> None:
            lasting = [tensor for _, _, tensor in taken.regions.values()]
            meters.append(StorageMeter(elsewhere=[*lasting, *others[1]]))
            with meters[-1]:
                super().__init__(device, rank, taken, *others)

        def between(self, other: int) -> None:
            with meters[-1]:
                super().between(other)

    handover._Moving = Metered  # type: ignore[misc]
    nccl_simulation.register()
    dist.init_process_group(nccl_simulation.BACKEND)
    session = new_session(f"{folder}/{names[0]}.json")
    session.train_step(0)
    states = []
    for name, chunk_bytes in [*zip(names[1:], sizes, strict=True), (None, 0)]:
        taken = handover.take(session)
        states.append([(own, region, tensor.numpy()) for own, region, tensor in taken.regions.values()])
        session.close()
        if name is not None:
            session = new_session(f"{folder}/{name}.json")
            handover.give(session, taken, chunk_bytes)
    dist.destroy_process_group()
    return states, [meter.peak_bytes for meter in meters]
