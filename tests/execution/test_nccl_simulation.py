"""The simulated NCCL: programs that keep to NCCL's rules run, and every planted fault is said."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from nccl_simulation import BACKEND, SimulatedNccl, register, synchronize_device

from multiprocess import Failed, run_ranks, watch_ranks
from stagewright.execution.collectives import all_gather, reduce_scatter

pytestmark = pytest.mark.multiprocess


def join() -> None:
    register()
    dist.init_process_group(BACKEND)


def tensor(value: float, size: int = 4) -> torch.Tensor:
    return torch.full((size,), float(value))


def group_of_all() -> dist.ProcessGroup:
    group = dist.new_group()
    assert isinstance(group, SimulatedNccl)
    return group


def warm_up(group: dist.ProcessGroup | None, size: int) -> None:
    """Connect both directions of every pair, in one order."""
    rank = dist.get_rank()
    for low in range(size):
        for high in range(low + 1, size):
            for source, target in ((low, high), (high, low)):
                if rank == source:
                    dist.send(tensor(0), target, group)
                if rank == target:
                    dist.recv(tensor(0), source, group)


# -- right programs -------------------------------------------------------------------------------------------------


def transfers(rank: int, size: int) -> list[float]:
    """Around a ring: sends and receives, batched ones, and a lane for each direction that both ends use at once."""
    join()
    up, down = group_of_all(), group_of_all()
    warm_up(up, size)
    warm_up(down, size)
    following, preceding = (rank + 1) % size, (rank - 1) % size
    arrived = [tensor(-1) for _ in range(4)]
    works = [
        dist.isend(tensor(rank), following, up if rank < following else down, tag=1),
        dist.irecv(arrived[0], preceding, up if preceding < rank else down, tag=1),
    ]
    for work in works:
        work.wait()
        assert work.is_completed()
    assert works[0].get_future().wait() == []
    batch = [
        dist.P2POp(dist.irecv, arrived[1], preceding),
        dist.P2POp(dist.isend, tensor(rank + 10), following),
        dist.P2POp(dist.irecv, arrived[2], following),
        dist.P2POp(dist.isend, tensor(rank + 20), preceding),
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    dist.barrier()
    synchronize_device()
    dist.destroy_process_group()
    return [float(tensor[-1]) for tensor in arrived]


def collectives(rank: int, size: int) -> dict[str, list[float]]:
    join()
    group = group_of_all()
    results: dict[str, torch.Tensor] = {}
    for name in ("SUM", "AVG", "MAX"):
        results[name] = tensor(rank + 1.0)
        dist.all_reduce(results[name], op=getattr(dist.ReduceOp, name), group=group)
    results["broadcast"] = tensor(rank)
    dist.broadcast(results["broadcast"], size - 1)
    parts = [tensor(-1, 1) for _ in range(size)]
    dist.all_gather(parts, tensor(rank, 1), group=group)
    results["all_gather"] = torch.cat(parts)
    whole = torch.full((size,), -1.0)
    whole[rank] = rank
    all_gather(whole, whole[rank : rank + 1], group=group)
    results["all_gather in place"] = whole
    whole = torch.arange(size) + 10.0 * rank
    work = reduce_scatter(whole[rank : rank + 1], whole, group=group, async_op=True)
    assert work is not None and work.wait()
    results["reduce_scatter in place"] = whole[rank : rank + 1].clone()
    part = tensor(-1, 1)
    dist.reduce_scatter(part, list((torch.arange(size) + 10.0 * rank).split(1)), dist.ReduceOp.MAX, group)
    results["reduce_scatter"] = part
    results["all_to_all"] = torch.full((size,), -1.0)
    dist.all_to_all_single(results["all_to_all"], torch.arange(size) + 10.0 * rank, group=group)
    results["reduce"] = tensor(rank, 1)
    dist.reduce(results["reduce"], 0, group=group)
    dist.destroy_process_group(group)
    dist.destroy_process_group()
    return {name: result.tolist() for name, result in results.items()}


def test_transfers_arrive_in_order() -> None:
    assert run_ranks(transfers, 3) == [[2, 12, 21, -1], [0, 10, 22, -1], [1, 11, 20, -1]]


def test_collectives_give_what_nccl_gives() -> None:
    for rank, results in enumerate(run_ranks(collectives, 3)):
        assert results == {
            "SUM": [6] * 4,
            "AVG": [2] * 4,
            "MAX": [3] * 4,
            "broadcast": [2] * 4,
            "all_gather": [0, 1, 2],
            "all_gather in place": [0, 1, 2],
            "reduce_scatter in place": [30 + 3 * rank],
            "reduce_scatter": [20 + rank],
            "all_to_all": [rank, 10 + rank, 20 + rank],
            "reduce": [3 if rank == 0 else rank],
        }


# -- faults ---------------------------------------------------------------------------------------------------------


def first_receives_are_opposite(rank: int, size: int) -> None:
    """Both hosts connect another direction of the same lane."""
    join()
    works = [dist.irecv(tensor(0), 1 - rank), dist.isend(tensor(0), 1 - rank)]
    for work in works:
        work.wait()


def nothing_is_warmed_up(rank: int, size: int) -> None:
    """As 1F1B with a lane for values and one for cotangents: each host posts another one's receive first."""
    join()
    values, cotangents = group_of_all(), group_of_all()
    received = dist.irecv(tensor(0), 1 - rank, cotangents if rank == 0 else values)
    dist.send(tensor(0), 1 - rank, values if rank == 0 else cotangents)
    received.wait()


def directions_share_a_lane(rank: int, size: int) -> None:
    """The receive of both is behind a send that waits for the other's receive."""
    join()
    warm_up(None, size)
    dist.isend(tensor(0), 1 - rank)
    dist.recv(tensor(0), 1 - rank)


def receives_are_swapped(rank: int, size: int) -> None:
    join()
    for index in (0, 1):
        if rank == 0:
            dist.send(tensor(0), 1, tag=5 + index)
        else:
            dist.recv(tensor(0), 0, tag=6 - index)


def a_message_is_longer(rank: int, size: int) -> None:
    join()
    if rank == 0:
        dist.send(tensor(0), 1)
    else:
        dist.recv(tensor(0, size=6), 0)


def groups_are_destroyed_in_another_order(rank: int, size: int) -> None:
    join()
    groups = [group_of_all(), group_of_all()]
    for group in groups:
        dist.barrier(group)
    for group in groups if rank == 0 else reversed(groups):
        dist.destroy_process_group(group)


def a_collective_is_missing(rank: int, size: int) -> None:
    join()
    dist.all_reduce(tensor(0))
    if rank == 0:
        dist.all_reduce(tensor(0))
    dist.destroy_process_group()


def collectives_differ(rank: int, size: int) -> None:
    join()
    for _ in range(2):
        dist.all_reduce(tensor(0))
        dist.broadcast(tensor(0), 0)
    if rank == 0:
        dist.all_reduce(tensor(0))
    else:
        dist.broadcast(tensor(0), 0)


def one_waits_for_the_device_under_a_receive(rank: int, size: int) -> None:
    join()
    groups = [group_of_all(), group_of_all()]
    for group in groups:
        warm_up(group, size)
    if rank == 0:
        received = dist.irecv(tensor(0), 1, groups[1])
        synchronize_device()
        dist.send(tensor(0), 1, groups[0])
        received.wait()
    else:
        dist.recv(tensor(0), 0, groups[0])
        dist.send(tensor(0), 0, groups[1])


def lanes_of_a_group(rank: int, size: int, has_device: bool) -> None:
    """Rank 1 posts a receive whose send depends on what comes later on another of its lanes."""
    join()
    group = dist.new_group(device_id=torch.device("cuda", 0) if has_device else None)
    assert isinstance(group, SimulatedNccl)
    warm_up(group, size)
    if rank == 0:
        dist.send(tensor(0), 1, group)
        dist.recv(tensor(0), 1, group)
        dist.send(tensor(0), 2, group)
    elif rank == 1:
        from_last = dist.irecv(tensor(0), 2, group)
        dist.recv(tensor(0), 0, group)
        dist.send(tensor(0), 0, group)
        from_last.wait()
    else:
        dist.recv(tensor(0), 0, group)
        dist.send(tensor(0), 1, group)
    dist.destroy_process_group()


Program = Callable[..., None]
FAULTS: dict[Program, tuple[str, ...]] = {
    first_receives_are_opposite: ("rank 0 connects rank 1 to rank 0", "rank 1 connects rank 0 to rank 1"),
    nothing_is_warmed_up: (
        "rank 0 creates the communicator 0:1 of group 2",
        "rank 1 creates the communicator 0:1 of group 1",
    ),
    directions_share_a_lane: (
        "rank 0 waits for receive 1 from rank 1 to rank 0",
        "rank 1 waits for receive 1 from rank 0 to rank 1",
    ),
    receives_are_swapped: (
        "receive 0 from rank 0 to rank 1 (16 bytes, tag 6)",
        "order mismatch: it met a send of 16 bytes, tag 5",
    ),
    a_message_is_longer: (
        "receive 0 from rank 0 to rank 1 (24 bytes, tag 0)",
        "order mismatch: it met a send of 16 bytes, tag 0",
    ),
    groups_are_destroyed_in_another_order: ("rank 0 destroys group 1", "rank 1 destroys group 2"),
    a_collective_is_missing: ("rank 0 waits for collective 2, all_reduce", "rank 1 destroys group 0"),
    collectives_differ: ("collective 5, broadcast of 16 bytes", "is at another collective, of 16 bytes"),
    one_waits_for_the_device_under_a_receive: (
        "rank 0 waits for the whole device, which is at receive 1 from rank 1 to rank 0",
        "rank 1 waits for receive 1 from rank 0 to rank 1",
    ),
}


@pytest.mark.parametrize("program", FAULTS, ids=lambda program: program.__name__)
def test_a_fault_is_said(program: Program) -> None:
    last = watch_ranks(program, 2)[-1]
    assert isinstance(last, Failed)
    for text in FAULTS[program]:
        assert text in last.detail, last.detail


def test_all_transfers_of_a_group_with_a_device_share_a_communicator() -> None:
    run_ranks(lanes_of_a_group, 3, False)
    ends = watch_ranks(lanes_of_a_group, 3, True)
    assert all(isinstance(end, Failed) and "communicator 0:1:2 of group 1" in end.detail for end in ends)


def unknown_kinds(rank: int, size: int) -> None:
    join()
    with pytest.raises(ValueError, match="must be contiguous"):
        dist.all_reduce(torch.zeros(4, 4).t())
    with pytest.raises(TypeError, match="not supported"):
        dist.all_reduce(torch.zeros(4, dtype=torch.int16))
    with pytest.raises(ValueError, match="Cannot use"):
        dist.all_reduce(torch.zeros(4, dtype=torch.int32), op=dist.ReduceOp.BAND)


def test_what_nccl_does_not_take_is_refused() -> None:
    run_ranks(unknown_kinds, 1)
