"""Collectives: of tensors over the replicas of a stage (asynchronous, in place, counted), of documents over all ranks."""

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
class TrafficCounts:
    """Counters of this rank's collectives, and of the bytes that it sent in them on a ring."""

    num_gathers: int = 0
    num_reductions: int = 0
    gathered_bytes: int = 0
    reduced_bytes: int = 0
    num_copy_sums: int = 0
    copy_sum_bytes: int = 0


_LETTING_GO_S = 1.0
"""Seconds to wait for a backend to release the tensors of a finished collective; afterwards the waiter goes on anyway."""


class Pending:
    """A collective or transfer in progress, in which this rank waits for `peers`. Raises `RunError` where this process is
    not part of it.

    Args:
        lent: tensors that only `work` refers to. Gloo's threads report a collective as over before they release its
            tensors; `wait` returns after they have, so that its buffers are freed when the caller drops them and not when
            a thread gets to run.
    """

    def __init__(
        self,
        work: dist.Work | None,
        doing: str,
        peers: str = "the other replicas",
        lent: Sequence[torch.Tensor] = (),
    ) -> None:
        if work is None:
            raise RunError(f"{doing}: this process is not in the group that does it")
        self._work: dist.Work | None = work
        self._doing, self._peers = doing, peers
        self._lent = [tensor for tensor in lent if tensor.device.type == "cpu"]

    def wait(self) -> None:
        """Wait until its result may be used; on a GPU, by work that is issued from now on. Raises `RunError` where another
        rank is gone."""
        if self._work is None:
            return
        try:
            self._work.wait()
        except RuntimeError as error:
            text = str(error)
            closed = "closed by peer" in text or "reset by peer" in text
            reason = "its connection closed" if closed else text.splitlines()[0]
            raise RunError(f"{self._doing}: waited for {self._peers}, but {reason}") from error
        self._work = None
        last = time.monotonic() + _LETTING_GO_S
        while any(num_holders(tensor) > 1 for tensor in self._lent) and time.monotonic() < last:
            time.sleep(0)
        self._lent.clear()


@dataclass
class ReplicaGroup:
    """The ranks that the state of the same stages is sharded over; this one has number `index`.

    Gathers and sums each have a process group, so that neither queues after the other. Where other ranks hold copies of
    these shards, `copies` is the group of those that hold this rank's.
    """

    index: int
    size: int
    gathers: dist.ProcessGroup
    sums: dist.ProcessGroup
    copies: dist.ProcessGroup | None = None
    traffic: TrafficCounts = field(default_factory=TrafficCounts)

    def gather(self, whole: torch.Tensor, shard: torch.Tensor, doing: str) -> Pending:
        """Fill `whole` with every replica's `shard`, which may be a part of it."""
        self.traffic.num_gathers += 1
        self.traffic.gathered_bytes += (self.size - 1) * _num_bytes(shard)
        filled, sent = _lent(whole), _lent(shard)
        work = all_gather(filled, sent, group=self.gathers, async_op=True)
        return Pending(work, doing, lent=(filled, sent))

    def scatter_sum(self, whole: torch.Tensor, shard: torch.Tensor, doing: str) -> Pending:
        """Add up every replica's `whole` and leave this one's part in `shard`, a part of it; other parts are overwritten."""
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
        """Add up every replica's `part`, a number, in place and return it."""
        dist.all_reduce(part, group=self.sums)
        return part


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _lent(tensor: torch.Tensor) -> torch.Tensor:
    """Return a new tensor on the same memory, viewed as real numbers: backends do not support complex ones."""
    return (torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor).detach()


def is_ordered(group: dist.ProcessGroup | None = None) -> bool:
    """Return whether messages of a group match by their order alone, as NCCL's do; gloo's match by tag."""
    return dist.get_backend(group) != "gloo"


def backend_of(kind: str) -> str:
    """Return the backend for devices of a kind."""
    return "nccl" if kind == "cuda" else "gloo"


_timeout: timedelta | None = None
"""Timeout of every group of this process, as given to `join`; None is the backend's default."""


def join(backend: str, store: dist.Store, rank: int, num_ranks: int, timeout: timedelta) -> None:
    """Join the default group of all ranks, without a `device_id`: with one, NCCL would send all messages of a group one
    after another."""
    global _timeout
    _timeout = timeout
    options = _small_options() if backend == "nccl" else None
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=num_ranks, timeout=timeout, pg_options=options
    )


class ProcessGroups:
    """The process groups of a run, in the order of their creation; all processes create and destroy them in one order."""

    def __init__(self) -> None:
        self._own: list[tuple[dist.ProcessGroup, tuple[int, ...]]] = []

    def new(self, groups: Iterable[Sequence[int]], is_small: bool = False) -> dist.ProcessGroup | None:
        """Create a group for each of `groups`, lists of global ranks, and return the one that this process is in.

        Groups for transfers or for single numbers are `is_small`: their communicators take few of the device's
        multiprocessors and little of its memory.
        """
        options = _small_options() if is_small and dist.get_backend() == "nccl" else None
        joined: dist.ProcessGroup | None = None
        for ranks in groups:
            group = dist.new_group(list(ranks), timeout=_timeout, pg_options=options)
            if dist.get_rank() in ranks and isinstance(group, dist.ProcessGroup):
                joined = group
                self._own.append((group, tuple(ranks)))
        return joined

    def __iter__(self) -> Iterator[tuple[dist.ProcessGroup, tuple[int, ...]]]:
        """Iterate over this process's groups and their global ranks."""
        return iter(self._own)

    def destroy(self) -> None:
        """Destroy them in the order of their creation, which is the same on all ranks: NCCL communicates to do it."""
        for group, _ in self._own:
            dist.destroy_process_group(group)
        self._own.clear()


def _small_options() -> Any:
    """Return NCCL's options for a group of few channels, whose streams have priority over those of computations."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = LANE_CTAS
    if _timeout is not None:  # torch warns where the two differ
        options._timeout = _timeout
    return options


def _document_device() -> torch.device:
    """Return the device of tensors that the default group accepts: the host if it accepts host tensors."""
    kinds = [entry.partition(":")[0] for entry in dist.get_backend_config().split(",")]
    return torch.device("cpu" if "cpu" in kinds else kinds[0])


def from_first(text: str | None) -> str:
    """Return the first rank's text on all ranks; every rank must call this, the others with None."""
    device = _document_device()
    encoded = (
        torch.frombuffer(bytearray((text or "").encode()), dtype=torch.uint8)
        if text
        else torch.empty(0, dtype=torch.uint8)
    )
    size = torch.tensor([len(encoded)], dtype=torch.int64, device=device)
    dist.broadcast(size, 0)
    content = encoded.to(device) if len(encoded) else torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(content, 0)
    return content.cpu().numpy().tobytes().decode()


def check_same_graphs(stages: Sequence[Stage], plan: str = "") -> None:
    """Check that all ranks have the same plan, by its digest, and have traced and cut the same graph, so that every message
    has the layout that its receiver expects; every rank must call this.

    Raises:
        RunError: two ranks differ; names the first different operator.
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
            f"rank {other} has another plan than rank 0: let all hosts read the same file, and start the run again"
        )
    other = next((rank for rank, there in enumerate(ranks) if there["digest"] != ranks[0]["digest"]), None)
    if other is None:
        return
    first, second = (
        [f"'{name}' is {op}" for name, op in operators]
        for rank, operators in enumerate(
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


def check_same_weights(checksums: Mapping[str, int], groups: Mapping[str, Collection[str]]) -> None:
    """Check that all ranks that hold a tensor start with the same values of it; every rank must call this.

    Args:
        checksums: checksums of the tensors with which this rank starts, by name.
        groups: names among them, by a key that exactly those ranks have that start with these names.

    Raises:
        RunError: two ranks differ; names the first different tensor.
    """
    by_key = {
        key: zlib.crc32(repr([(name, checksums[name]) for name in sorted(names)]).encode())
        for key, names in groups.items()
    }
    if not any(_differing(exchange(by_key))):
        return
    for name, first, other in _differing(exchange(dict(checksums))):
        raise RunError(
            f"'{name}' starts with other values on rank {other} than on rank {first}, which has the same tensor: the model "
            "draws it from something that differs between processes (such as numpy.random.default_rng() or "
            "torch.Generator().seed() without a seed, the time, or the order of a set), or reads other files there. Give it "
            "a fixed seed, or the same files"
        )


def _differing(by_rank: Sequence[Mapping[str, int]]) -> Iterator[tuple[str, int, int]]:
    """Yield each name whose numbers differ between two ranks, with these ranks."""
    first: dict[str, int] = {}
    for rank, checksums in enumerate(by_rank):
        for name, checksum in checksums.items():
            if by_rank[first.setdefault(name, rank)][name] != checksum:
                yield name, first[name], rank


def exchange(document: Any) -> list[Any]:
    """Return every rank's JSON document, in the order of ranks; every rank must call this. Received bytes are parsed as
    JSON, never executed."""
    device = _document_device()
    encoded = torch.frombuffer(bytearray(json.dumps(document).encode()), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([encoded.numel()], dtype=torch.int64, device=device))
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: encoded.numel()] = encoded
    received = [torch.zeros_like(padded) for _ in sizes]
    dist.all_gather(received, padded)
    return [
        json.loads(item[: int(size)].cpu().numpy().tobytes())
        for item, size in zip(received, sizes, strict=True)
    ]
