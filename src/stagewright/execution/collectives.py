"""Collectives: over the replicas of a stage, asynchronous, in place and counted; and of documents, over all ranks."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from stagewright.errors import RunError
from stagewright.graph.document import graph_digest
from stagewright.graph.stage import Stage
from stagewright.schedule.lanes import LANE_CTAS
from stagewright.tracing.private import num_holders

# torch 2.13 renamed both; the old names stay, with a warning.
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass
class Traffic:
    """What this rank has moved: numbers of collectives, and bytes that left it on a ring."""

    num_gathers: int = 0
    num_reductions: int = 0
    gathered_bytes: int = 0
    reduced_bytes: int = 0
    num_copy_sums: int = 0
    copy_sum_bytes: int = 0


_LETTING_GO_S = 1.0
"""For a backend to let go of tensors whose collective is over; beyond, who waits goes on all the same."""


class Pending:
    """A collective or transfer on its way, in which this rank waits for `others`. Raises `RunError` where this process has
    no part in it.

    Args:
        lent: tensors that nothing but `work` refers to. Gloo's threads say that a collective is over before they let go of
            its tensors; whoever waits goes on when they have, so that its buffers are freed when it drops them and not
            when a thread comes to run.
    """

    def __init__(
        self,
        work: dist.Work | None,
        doing: str,
        others: str = "the other replicas",
        lent: Sequence[torch.Tensor] = (),
    ) -> None:
        if work is None:
            raise RunError(f"{doing}: this process is not of the group that does it")
        self._work: dist.Work | None = work
        self._doing, self._others = doing, others
        self._lent = [tensor for tensor in lent if tensor.device.type == "cpu"]

    def wait(self) -> None:
        """Until its result may be used; on a GPU, by what is asked for from now on. Raises `RunError` where another is
        gone."""
        if self._work is None:
            return
        try:
            self._work.wait()
        except RuntimeError as error:
            text = str(error)
            closed = "closed by peer" in text or "reset by peer" in text
            reason = "its connection closed" if closed else text.splitlines()[0]
            raise RunError(f"{self._doing}: waited for {self._others}, but {reason}") from error
        self._work = None
        last = time.monotonic() + _LETTING_GO_S
        while any(num_holders(tensor) > 1 for tensor in self._lent) and time.monotonic() < last:
            time.sleep(0)
        self._lent.clear()


@dataclass
class ReplicaGroup:
    """The ranks that the state of the same stages is sharded over, of which this one has number `index`.

    Gathers and sums have a process group each, so that neither queues behind the other. Where other ranks hold copies of
    these shards, `copies` has those of this rank's.
    """

    index: int
    size: int
    gathers: dist.ProcessGroup
    sums: dist.ProcessGroup
    copies: dist.ProcessGroup | None = None
    traffic: Traffic = field(default_factory=Traffic)

    def gather(self, whole: torch.Tensor, shard: torch.Tensor, doing: str) -> Pending:
        """Fill `whole` with every replica's `shard`, which may be a part of it."""
        self.traffic.num_gathers += 1
        self.traffic.gathered_bytes += (self.size - 1) * _num_bytes(shard)
        filled, own = _lent(whole), _lent(shard)
        work = all_gather(filled, own, group=self.gathers, async_op=True)
        return Pending(work, doing, lent=(filled, own))

    def scatter_sum(self, whole: torch.Tensor, shard: torch.Tensor, doing: str) -> Pending:
        """Add up every replica's `whole` and leave this one's part in `shard`, a part of it; the others are lost."""
        self.traffic.num_reductions += 1
        self.traffic.reduced_bytes += (self.size - 1) * _num_bytes(shard)
        summed = _lent(whole)
        if is_ordered(self.sums):
            work = reduce_scatter(_lent(shard), summed, group=self.sums, async_op=True)
        else:  # gloo would sum all of a copy of `whole`
            work = dist.all_reduce(summed, group=self.sums, async_op=True)
        return Pending(work, doing, lent=(summed,))

    def sum(self, whole: torch.Tensor, doing: str) -> Pending:
        """Add up every replica's `whole` in place."""
        self.traffic.num_reductions += 1
        self.traffic.reduced_bytes += 2 * (self.size - 1) * _num_bytes(whole) // self.size
        return self._all_reduce(whole, self.sums, doing)

    def sum_copies(self, part: torch.Tensor, doing: str) -> Pending:
        """Add up every copy of this rank's `part` in place."""
        size = dist.get_world_size(self.copies)
        self.traffic.num_copy_sums += 1
        self.traffic.copy_sum_bytes += 2 * (size - 1) * _num_bytes(part) // size
        return self._all_reduce(part, self.copies, doing)

    @staticmethod
    def _all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None, doing: str) -> Pending:
        summed = _lent(tensor)
        return Pending(dist.all_reduce(summed, group=group, async_op=True), doing, lent=(summed,))

    def total(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of every replica's `part`, a number, in place."""
        dist.all_reduce(part, group=self.sums)
        return part


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _lent(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of its own on the same memory, as backends take it: they do not know complex numbers."""
    return (torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor).detach()


def is_ordered(group: dist.ProcessGroup | None = None) -> bool:
    """Whether messages of a group match by their order alone, as NCCL's do; gloo's match by tag."""
    return dist.get_backend(group) != "gloo"


def backend_of(kind: str) -> str:
    """The backend between devices of a kind."""
    return "nccl" if kind == "cuda" else "gloo"


_timeout: timedelta | None = None
"""Of every group of this process; None, the backend's own, unless `join` was given one."""


def join(backend: str, store: dist.Store, rank: int, num_ranks: int, timeout: timedelta) -> None:
    """Join the default group of all ranks, without a `device_id`: given one, NCCL would send all messages of a group one
    after the other."""
    global _timeout
    _timeout = timeout
    options = _small_options() if backend == "nccl" else None
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=num_ranks, timeout=timeout, pg_options=options
    )


class ProcessGroups:
    """The process groups of a run, in the order of their creation; every process creates and destroys them alike."""

    def __init__(self) -> None:
        self._own: list[tuple[dist.ProcessGroup, tuple[int, ...]]] = []

    def new(self, groups: Iterable[Sequence[int]], is_small: bool = False) -> dist.ProcessGroup | None:
        """Create a group of each of `groups`, lists of global ranks. Returns the one that this process is in.

        A group for transfers or for single numbers `is_small`: its communicators take few of the device's multiprocessors,
        and little of its memory.
        """
        options = _small_options() if is_small and dist.get_backend() == "nccl" else None
        own: dist.ProcessGroup | None = None
        for ranks in groups:
            group = dist.new_group(list(ranks), timeout=_timeout, pg_options=options)
            if dist.get_rank() in ranks and isinstance(group, dist.ProcessGroup):
                own = group
                self._own.append((group, tuple(ranks)))
        return own

    def __iter__(self) -> Iterator[tuple[dist.ProcessGroup, tuple[int, ...]]]:
        """This process's groups and their global ranks."""
        return iter(self._own)

    def destroy(self) -> None:
        """Destroy them in the order of their creation, which is the same on all ranks: NCCL communicates to do it."""
        for group, _ in self._own:
            dist.destroy_process_group(group)
        self._own.clear()


def _small_options() -> Any:
    """NCCL's options for a group of few channels, whose streams come before those of computations."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = LANE_CTAS
    if _timeout is not None:  # torch warns where the two differ
        options._timeout = _timeout
    return options


def _document_device() -> torch.device:
    """The device of tensors that the default group takes: the host if it takes those, whatever its backend is called."""
    kinds = [entry.partition(":")[0] for entry in dist.get_backend_config().split(",")]
    return torch.device("cpu" if "cpu" in kinds else kinds[0])


def from_first(text: str | None) -> str:
    """The text that the first rank gives; every rank must call this, the others with None."""
    device = _document_device()
    own = (
        torch.frombuffer(bytearray((text or "").encode()), dtype=torch.uint8)
        if text
        else torch.empty(0, dtype=torch.uint8)
    )
    size = torch.tensor([len(own)], dtype=torch.int64, device=device)
    dist.broadcast(size, 0)
    content = own.to(device) if len(own) else torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(content, 0)
    return content.cpu().numpy().tobytes().decode()


def check_same_graphs(stages: Sequence[Stage], plan: str = "") -> None:
    """See that all ranks have the same plan, known by its digest, and have traced and cut the same graph, so that every
    message has the layout that its receiver expects; every rank must call this.

    Raises:
        RunError: two ranks differ; names the first operator that does.
    """
    graph = stages[0].graph
    boundaries = [
        stage.value(value).meta
        for stage in stages
        for transfer in (*stage.sends, *stage.receives, *stage.grad_sends, *stage.grad_receives)
        for value in transfer.values
    ]
    traced = {"digest": graph_digest(graph, boundaries), "by": f"torch {torch.__version__}", "plan": plan}
    ranks = exchange(traced)
    if (
        other := next((rank for rank, there in enumerate(ranks) if there["plan"] != ranks[0]["plan"]), None)
    ) is not None:
        raise RunError(
            f"rank {other} has another plan than rank 0: see that all hosts read the same file, and start the run again"
        )
    other = next((rank for rank, there in enumerate(ranks) if there["digest"] != ranks[0]["digest"]), None)
    if other is None:
        return
    first, second = (
        [f"'{name}' is {op}" for name, op in told]
        for rank, told in enumerate(
            exchange([(graph.nodes[node].name, graph.nodes[node].op) for node in graph.forward_ids])
        )
        if rank in (0, other)
    )
    pairs = zip_longest(first, second, fillvalue="it has no more operators")
    differs = next((pair for pair in pairs if pair[0] != pair[1]), None)
    where = "a message between stages has another layout"
    if differs is not None:
        where = f"on rank 0 operator {differs[0]}, and on rank {other} {differs[1]}"
    raise RunError(
        f"rank {other} ({ranks[other]['by']}) has traced another graph than rank 0 ({ranks[0]['by']}): {where}. Install the "
        "same versions of torch and transformers on all hosts"
    )


def check_same_weights(own: Mapping[str, int], groups: Mapping[str, Collection[str]]) -> None:
    """See that all ranks that start with a tensor start with the same; every rank must call this.

    Args:
        own: checksums of what this rank starts with, by name.
        groups: names among them, by a key that all ranks that start with these names have, and no others.

    Raises:
        RunError: two ranks differ; names the first tensor that does.
    """
    told = {
        key: zlib.crc32(repr([(name, own[name]) for name in sorted(names)]).encode())
        for key, names in groups.items()
    }
    if not any(_differing(exchange(told))):
        return
    for name, first, other in _differing(exchange(dict(own))):
        raise RunError(
            f"'{name}' starts with other values on rank {other} than on rank {first}, which has the same tensor: the model "
            "draws it from what differs between processes (such as numpy.random.default_rng() or torch.Generator().seed() "
            "without a seed, the time, or the order of a set), or reads other files there. Give it a fixed seed, or the "
            "same files"
        )


def _differing(told: Sequence[Mapping[str, int]]) -> Iterator[tuple[str, int, int]]:
    """Names with other numbers in what two ranks have told, with these ranks."""
    first: dict[str, int] = {}
    for rank, checksums in enumerate(told):
        for name, checksum in checksums.items():
            if told[first.setdefault(name, rank)][name] != checksum:
                yield name, first[name], rank


def exchange(document: Any) -> list[Any]:
    """Every rank's JSON document, in the order of ranks, which all must call this: what arrives is data and never code."""
    device = _document_device()
    own = torch.frombuffer(bytearray(json.dumps(document).encode()), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([own.numel()], dtype=torch.int64, device=device))
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: own.numel()] = own
    received = [torch.zeros_like(padded) for _ in sizes]
    dist.all_gather(received, padded)
    return [
        json.loads(item[: int(size)].cpu().numpy().tobytes())
        for item, size in zip(received, sizes, strict=True)
    ]
