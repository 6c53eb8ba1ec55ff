"""A process group with NCCL's rules of ordering, over gloo, for tests on CPUs.

Call `register` in each process, then ``dist.init_process_group(BACKEND)``. The rules:

* An unbatched send or receive uses the communicator of the two ranks and the group, which is created at its first use: the
  host blocks until the other host is there too. Then the first transfer of each direction connects it, which blocks both
  hosts once more.
* A communicator has a single stream: its operations run one after the other in the order in which they were issued,
  whatever their direction.
* Transfers of a direction match by order, never by tag. Here a pair that differs in size or tag is an error that names both;
  NCCL would hang or mix the tensors up.
* A send ends when its receive has, whatever its size: small messages that NCCL buffers are no exception here.
* Collectives and ``batch_isend_irecv`` use the communicator of the whole group, which all its ranks create together.
* A group that is given a ``device_id`` creates that communicator at once, and all its transfers use it.
* Destroying a group waits for the other ranks of its communicators.
* ``Work.wait`` makes the compute stream wait. On a CPU that stream is the host, so the host waits.

A hang becomes a `Hang`, which says what every rank waits for: as soon as all ranks wait and nothing moves, and at the latest
after NCCLSIM_LIMIT seconds.

Source: PyTorch 2.13, `ProcessGroupNCCL::pointToPoint`, `getKeySendRecv`, `shutdown`; NCCL 2.29, `ncclTransportP2pSetup`,
`NCCL_RUNTIME_CONNECT`; its user guide, "Using multiple NCCL communicators concurrently". Ignores: hosts that run ahead of
their device, a shortage of multiprocessors, memory, speed.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import chain
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from patience import patient

BACKEND = "ncclsim"
LIMIT_S = float(os.environ.get("NCCLSIM_LIMIT", "60"))
"""Seconds that a host waits at most."""
STILL_S = 2.0
"""Seconds in which all ranks wait and nothing moves: they wait for each other."""
_SHOWN_AFTER_S = 0.3
"""Seconds that a host waits before it tells the other ranks what for."""
_TYPES = {
    torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
}  # fmt: skip
"""Element types that NCCL has."""
_REFUSED_OPERATIONS = {dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR}


def register() -> None:
    """Make the backend known to torch in this process."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, SimulatedNccl, extended_api=True, devices=["cpu"])
        dist.batch_isend_irecv = dist.distributed_c10d.batch_isend_irecv = _batched  # type: ignore[assignment]


class Hang(RuntimeError):
    """This rank would never go on."""


class Board:
    """What every rank of the run waits for, in a store that all of them read."""

    def __init__(self, store: dist.Store, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self.num_completed = 0
        """Operations that the streams of this rank have done, and waits that ended."""
        self._store = store
        self._store.set(str(rank), "")

    def wait(self, is_over: Callable[[float], bool], what: str) -> None:
        """Block this host until `is_over`, which itself waits for as many seconds as it is given.

        Raises:
            Hang: all ranks wait and nothing moves, or this one has for too long.
        """
        began = still_since = time.monotonic()
        is_shown, seen = False, [b""]
        while not is_over(_SHOWN_AFTER_S):
            is_shown = True
            self._store.set(str(self.rank), json.dumps([self.num_completed, what]))
            now = self._texts()
            if now != seen or not all(now):
                seen, still_since = now, time.monotonic()
            if time.monotonic() - still_since > patient(STILL_S):
                self._give_up()
                raise Hang(f"no rank goes on: {self.said(now)}")
            if time.monotonic() - began > patient(LIMIT_S):
                raise Hang(f"{LIMIT_S:.0f} s have passed: {self.said(now)}")
        self.num_completed += 1
        if is_shown:
            self._store.set(str(self.rank), "")

    def leave(self, why: str) -> None:
        """Tell the others that this rank has stopped for good."""
        self._store.set(str(self.rank), json.dumps([self.num_completed, why]))
        self._store.set(f"{self.rank} gives up", "")

    def _give_up(self) -> None:
        """Block this host until the others see the hang too: once a rank has ended, they would see a closed connection."""
        self._store.set(f"{self.rank} gives up", "")
        wanted = [f"{rank} gives up" for rank in range(self.num_ranks)]
        began = time.monotonic()
        while not self._store.check(wanted) and time.monotonic() - began < patient(LIMIT_S):
            time.sleep(0.01)

    def said(self, texts: Iterable[bytes] | None = None) -> str:
        """What every rank waits for, now or by `texts`."""
        whats = [json.loads(text)[1] if text else "does not wait" for text in texts or self._texts()]
        return "; ".join(f"rank {rank} {what}" for rank, what in enumerate(whats))

    def _texts(self) -> list[bytes]:
        keys = [str(rank) for rank in range(self.num_ranks)]
        return [self._store.get(key) if self._store.check([key]) else b"" for key in keys]


class SimulatedWork(dist.distributed_c10d.Work):
    """An operation on its way."""

    def __init__(self, board: Board, what: str) -> None:
        super().__init__()
        self.what = what
        self.error: str | None = None
        self._board = board
        self._over = threading.Event()
        self._future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()

    def end(self, error: str | None = None) -> None:
        self.error = error
        self._over.set()
        self._future.set_result([])

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._board.wait(self._over.wait, f"waits for {self.what}")
        if self.error is not None:
            self._board.leave(f"has failed: {self.error}")
            raise RuntimeError(f"{self.error}; {self._board.said()}")
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._over.is_set()

    def is_success(self) -> bool:
        return self._over.is_set() and self.error is None

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return self._future


class Stream:
    """A stream of the device: a thread that does one operation after the other."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._waiting: queue.SimpleQueue[tuple[SimulatedWork, Callable[[], None]] | None] = (
            queue.SimpleQueue()
        )
        self._last: SimulatedWork | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, work: SimulatedWork, operation: Callable[[], None]) -> None:
        self._last = work
        self._waiting.put((work, operation))

    def wait(self, why: str) -> None:
        """Block this host until all operations issued so far are done."""
        last = self._last
        if last is not None:
            self._board.wait(lambda seconds: last._over.wait(seconds), f"{why} {last.what}")

    def close(self) -> None:
        self._waiting.put(None)

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            work, operation = item
            del item
            error = None
            try:
                operation()
            except Exception as problem:
                error = f"{work.what}: {problem}"
            del operation  # and with it the tensors, before anybody learns that they are free
            self._board.num_completed += 1
            work.end(error)
            del work


@dataclass
class Communicator:
    """Some ranks of a group and the stream of their operations."""

    name: str
    is_whole: bool
    """Whether it is that of the whole group."""
    stream: Stream
    connected: set[str] = field(default_factory=set)
    """Directions, and kinds of collectives, that have been used before."""
    numbers: dict[tuple[int, int], int] = field(default_factory=dict)
    """Transfers issued so far, by source and target."""
    num_collectives: int = 0

    def number(self, source: int, target: int) -> int:
        self.numbers[source, target] = self.numbers.get((source, target), -1) + 1
        return self.numbers[source, target]


@dataclass(frozen=True)
class Transfer:
    """One tensor on its way between this rank and `peer`, a rank of the group."""

    tensor: torch.Tensor
    peer: int
    tag: int
    is_send: bool
    direction: str
    number: int = 0

    @property
    def head(self) -> list[int]:
        return [self.tensor.numel() * self.tensor.element_size(), self.tag]

    def gloo_tag(self, own: int, is_whole: bool) -> int:
        """Of what both ends say first; the next is that of the tensor."""
        is_up = self.is_send == (own < self.peer)
        return ((self.number * 2 + is_up) * 2 + is_whole) * 2

    def __str__(self) -> str:
        verb = "send" if self.is_send else "receive"
        return f"{verb} {self.number} from {self.direction} ({self.head[0]} bytes, tag {self.tag})"


class SimulatedNccl(dist.ProcessGroup):
    """What ``init_process_group(BACKEND)`` and ``new_group`` make."""

    board: ClassVar[Board]
    live: ClassVar[list[SimulatedNccl]] = []
    supports_splitting = True
    """So that torch connects groups with a `device_id` at once, as it does with NCCL's."""

    def __init__(self, options: Any, _: object = None) -> None:
        super().__init__(options.group_rank, options.group_size)
        self._own, self._size = options.group_rank, options.group_size
        self._is_default = not options.global_ranks_in_group
        self._ranks = tuple(options.global_ranks_in_group) or tuple(range(self._size))
        if self._is_default:
            SimulatedNccl.board = Board(dist.PrefixStore("waits", options.store), self._own, self._size)
        self._name = options.group_id
        self._label = f"group {self._name} of ranks {', '.join(map(str, self._ranks))}"
        self._store = dist.PrefixStore("points", options.store)
        gloo = dist.PrefixStore("gloo", options.store)
        self._gloo = dist.ProcessGroupGloo(gloo, self._own, self._size, timedelta(hours=1))
        self._communicators: dict[tuple[int, ...], Communicator] = {}
        self._is_eager = False
        self._batch: list[Transfer] | None = None
        SimulatedNccl.live.append(self)

    def getBackendName(self) -> str:
        return BACKEND

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._own

    @property
    def group_name(self) -> str:
        return self._name

    def _get_backend(self, device: torch.device) -> SimulatedNccl:
        return self

    def _set_sequence_number_for_group(self) -> None:
        pass

    def eager_connect_single_device(self, device: torch.device) -> None:
        """The group was given a device: create its communicator now and use it for everything."""
        self._is_eager = True
        self._whole()

    # -- hosts that block -------------------------------------------------------------------------------------------

    def _meet(self, points: Mapping[str, Iterable[int]], what: str) -> None:
        """Block this host until the ranks of each of `points` are at it too."""
        for point in points:
            self._store.set(f"{point}/{self._own}", "")
        wanted = [f"{point}/{rank}" for point, ranks in points.items() for rank in ranks if rank != self._own]

        def are_there(seconds: float) -> bool:
            last = time.monotonic() + seconds
            while not (is_there := not wanted or self._store.check(wanted)) and time.monotonic() < last:
                time.sleep(0.001)
            return is_there

        self.board.wait(are_there, what)

    def _communicator(self, ranks: tuple[int, ...], is_whole: bool) -> Communicator:
        key = ranks if not is_whole else ()
        if key not in self._communicators:
            name = f"communicator {':'.join(str(self._ranks[rank]) for rank in ranks)} of {self._label}"
            self._meet({f"created {key}": ranks}, f"creates the {name}")
            self._communicators[key] = Communicator(name, is_whole, Stream(self.board))
        return self._communicators[key]

    def _whole(self) -> Communicator:
        return self._communicator(tuple(range(self._size)), is_whole=True)

    def _connect(self, communicator: Communicator, uses: Mapping[str, Iterable[int]]) -> None:
        """Connect the ranks of each direction, or of each kind of collective, that has not been used before."""
        new = {use: ranks for use, ranks in uses.items() if use not in communicator.connected}
        if new:
            points = {f"connected {communicator.name} {use}": ranks for use, ranks in new.items()}
            self._meet(points, f"connects {', '.join(new)} for the first time on the {communicator.name}")
            communicator.connected |= new.keys()

    # -- transfers --------------------------------------------------------------------------------------------------

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> SimulatedWork | None:
        return self._transfer(tensors[0], dst, tag, is_send=True)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> SimulatedWork | None:
        return self._transfer(tensors[0], src, tag, is_send=False)

    def _transfer(self, tensor: torch.Tensor, peer: int, tag: int, is_send: bool) -> SimulatedWork | None:
        _check([tensor])
        source, target = (self._own, peer) if is_send else (peer, self._own)
        direction = f"rank {self._ranks[source]} to rank {self._ranks[target]}"
        transfer = Transfer(tensor, peer, tag, is_send, direction)
        if self._batch is not None:
            self._batch.append(transfer)
            return None
        pair = (min(source, target), max(source, target))
        return self._issue(self._whole() if self._is_eager else self._communicator(pair, False), [transfer])

    def _start_coalescing(self, device: torch.device) -> None:
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> SimulatedWork:
        batch, self._batch = self._batch, None
        return self._issue(self._whole(), batch or [])

    def _issue(self, communicator: Communicator, transfers: list[Transfer]) -> SimulatedWork:
        """Put transfers that run at the same time into a stream, as one operation."""
        self._connect(
            communicator, {transfer.direction: (self._own, transfer.peer) for transfer in transfers}
        )
        numbered = []
        for transfer in transfers:
            ends = (self._own, transfer.peer) if transfer.is_send else (transfer.peer, self._own)
            numbered.append(replace(transfer, number=communicator.number(*ends)))
        what = f"{', '.join(map(str, numbered)) or 'no transfer'} on the {communicator.name}"
        work = SimulatedWork(self.board, what)
        communicator.stream.put(work, lambda: self._exchange(communicator.is_whole, numbered))
        return work

    def _exchange(self, is_whole: bool, transfers: list[Transfer]) -> None:
        """Do transfers at the same time: both ends say what they have, and if that is the same it travels."""
        heads = [torch.zeros(2, dtype=torch.int64) for _ in transfers]
        works = []
        for transfer, head in zip(transfers, heads, strict=True):
            tag = transfer.gloo_tag(self._own, is_whole)
            works.append(self._gloo.send([torch.tensor(transfer.head)], transfer.peer, tag))
            works.append(self._gloo.recv([head], transfer.peer, tag))
        for work in works:
            work.wait()
        works = []
        for transfer, head in zip(transfers, heads, strict=True):
            if head.tolist() != transfer.head:
                size, tag = head.tolist()
                other = "receive" if transfer.is_send else "send"
                raise RuntimeError(f"order mismatch: it met a {other} of {size} bytes, tag {tag}")
            if transfer.tensor.numel():
                call = self._gloo.send if transfer.is_send else self._gloo.recv
                works.append(
                    call([transfer.tensor], transfer.peer, transfer.gloo_tag(self._own, is_whole) + 1)
                )
        for work in works:
            work.wait()

    # -- collectives ------------------------------------------------------------------------------------------------

    def _collective(
        self, name: str, tensors: Iterable[torch.Tensor], call: Callable[[], object]
    ) -> SimulatedWork:
        tensors = list(tensors)
        _check(tensors)
        communicator = self._whole()
        self._connect(communicator, {name: tuple(range(self._size))})
        communicator.num_collectives += 1
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        work = SimulatedWork(
            self.board,
            f"collective {communicator.num_collectives}, {name} of {size} bytes, on the {communicator.name}",
        )

        def run() -> None:
            head = torch.tensor([zlib.crc32(name.encode()), size])
            heads = [torch.zeros_like(head) for _ in range(self._size)]
            self._gloo.allgather([heads], [head]).wait()
            for rank, other in enumerate(heads):
                if not torch.equal(head, other):
                    raise RuntimeError(
                        f"order mismatch: rank {self._ranks[rank]} is at another collective, of {int(other[1])} bytes"
                    )
            call()

        communicator.stream.put(work, run)
        return work

    def _reduce(self, tensor: torch.Tensor, operation: Any) -> None:
        """Reduce over the ranks, in place and in gloo's order."""
        is_mean = operation == dist.ReduceOp.AVG
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM if is_mean else operation
        self._gloo.allreduce([tensor], options).wait()
        if is_mean:
            tensor.div_(self._size)

    def _reduced_part(self, part: torch.Tensor, whole: torch.Tensor, operation: Any) -> None:
        """Only `part` is written, which may be a part of `whole`."""
        total = whole.clone()
        self._reduce(total, operation)
        part.copy_(total.view(self._size, -1)[self._own].view_as(part))

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> SimulatedWork:
        operation = _operation(opts)
        return self._collective(
            "all_reduce", tensors, lambda: [self._reduce(tensor, operation) for tensor in tensors]
        )

    allreduce_coalesced = allreduce

    def barrier(self, opts: Any = None) -> SimulatedWork:
        """An all-reduce for which the host waits."""
        work = self.allreduce([torch.zeros(1)])
        work.wait()
        return work

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> SimulatedWork:
        return self._collective("broadcast", tensors, lambda: self._gloo.broadcast(tensors, opts).wait())

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> SimulatedWork:
        operation, root = _operation(opts), opts.rootRank

        def run() -> None:
            for tensor in tensors:
                total = tensor.clone()
                self._reduce(total, operation)
                if self._own == root:
                    tensor.copy_(total)

        return self._collective("reduce", tensors, run)

    def allgather(
        self, output_tensors: list[list[torch.Tensor]], input_tensors: list[torch.Tensor], opts: Any = None
    ) -> SimulatedWork:
        def run() -> None:
            self._gloo.allgather(output_tensors, input_tensors).wait()

        return self._collective("all_gather", input_tensors, run)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> SimulatedWork:
        return self.all_gather_single_coalesced([output], [input])

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> SimulatedWork:
        _check(outputs)

        def run() -> None:
            for whole, part in zip(outputs, inputs, strict=True):
                parts = list(whole.view(self._size, -1).unbind())
                self._gloo.allgather([parts], [part.reshape(-1).clone()]).wait()

        return self._collective("all_gather", inputs, run)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> SimulatedWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> SimulatedWork:
        _check(outputs)
        operation = _operation(opts)

        def run() -> None:
            for part, whole in zip(outputs, inputs, strict=True):
                self._reduced_part(part, whole, operation)

        return self._collective("reduce_scatter", inputs, run)

    def reduce_scatter(
        self, output_tensors: list[torch.Tensor], input_tensors: list[list[torch.Tensor]], opts: Any = None
    ) -> SimulatedWork:
        operation = _operation(opts)

        def run() -> None:
            for part, parts in zip(output_tensors, input_tensors, strict=True):
                self._reduced_part(part, torch.stack(parts), operation)

        return self._collective("reduce_scatter", chain.from_iterable(input_tensors), run)

    def alltoall(
        self, output_tensors: list[torch.Tensor], input_tensors: list[torch.Tensor], opts: Any = None
    ) -> SimulatedWork:
        """Transfers of all pairs at the same time."""
        output_tensors[self._own].copy_(input_tensors[self._own])
        self._start_coalescing(torch.device("cpu"))
        for peer in range(self._size):
            if peer != self._own:
                self._transfer(input_tensors[peer], peer, 0, is_send=True)
                self._transfer(output_tensors[peer], peer, 0, is_send=False)
        return self._end_coalescing(torch.device("cpu"))

    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, output_split_sizes: list[int], input_split_sizes: list[int],
        opts: Any = None,
    ) -> SimulatedWork:  # fmt: skip
        def parts(tensor: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
            return list(tensor.split(sizes or [tensor.shape[0] // self._size] * self._size))

        return self.alltoall(parts(output, output_split_sizes), parts(input, input_split_sizes))

    # Names that torch had before 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # -- the end ----------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Wait for the other ranks of each communicator to destroy it too."""
        if self not in SimulatedNccl.live:
            return
        for communicator in self._communicators.values():
            communicator.stream.wait(f"destroys {self._label}, before which it waits for")
        partners = set(chain.from_iterable(key or range(self._size) for key in self._communicators))
        self._meet({"destroyed": partners}, f"destroys {self._label}")
        self.abort()
        if self._is_default:
            self.board.leave("has ended")

    def abort(self) -> None:
        for communicator in self._communicators.values():
            communicator.stream.close()
        with contextlib.suppress(ValueError):
            SimulatedNccl.live.remove(self)


def synchronize_device() -> None:
    """Wait for all streams, as CUDA does where it allocates or loads kernels."""
    for group in SimulatedNccl.live:
        for communicator in group._communicators.values():
            communicator.stream.wait("waits for the whole device, which is at")


def num_communicators() -> int:
    """Of this rank, in all groups that are not destroyed."""
    return sum(len(group._communicators) for group in SimulatedNccl.live)


def _operation(opts: Any) -> Any:
    """The reduction of the options of a collective, which NCCL must have."""
    operation = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    if any(operation == refused for refused in _REFUSED_OPERATIONS):
        raise ValueError(f"Cannot use {operation} with NCCL")
    return operation


def _check(tensors: Iterable[torch.Tensor]) -> None:
    """What NCCL asks of tensors."""
    for tensor in tensors:
        if not tensor.is_contiguous():
            raise ValueError("Tensors must be contiguous")
        if tensor.dtype not in _TYPES:
            raise TypeError(f"Input tensor data type is not supported for NCCL process group: {tensor.dtype}")


_unbatched = dist.batch_isend_irecv


def _batched(p2p_op_list: list[dist.P2POp]) -> list[Any]:
    """``batch_isend_irecv`` of a simulated group: one operation of its own communicator."""
    group = p2p_op_list[0].group or dist.distributed_c10d._get_default_group()
    if not isinstance(group, SimulatedNccl):
        return _unbatched(p2p_op_list)
    device = p2p_op_list[0].tensor.device
    group._start_coalescing(device)
    for transfer in p2p_op_list:
        transfer.op(transfer.tensor, transfer.peer, transfer.group, transfer.tag)
    return [group._end_coalescing(device)]
