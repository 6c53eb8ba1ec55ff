"""A fake accelerator on CPU tensors that finds races: streams, events and lanes of messages as vector clocks.

Operators run at once, on the host, as always; what the fake keeps is what a device would be free to do. Every stream, every
lane of a process group and the host have a clock. A clock learns of another only through what orders them: work that is
issued, events, waits. Each access to a storage is compared with the accesses before it, and two of which one writes, and
neither is ordered before the other, are a race. It reports:

* use without a wait, and reuse of memory that another stream still uses: the allocator gives a freed block out again to the
  stream that it was allocated on, at once;
* what waits for the whole device (`synchronize`, allocation of pinned memory, the first launch of a kernel) while a receive
  is posted for which nothing waits yet: the receive may depend on what this host has not issued;
* streams that are one in the device, because torch's pool of 32 has wrapped around;
* drains: the host waits for a stream that has not done all it was given.

Use it as a context manager around what is to be watched, after `install`ing it for the host.

Source: Flanagan and Freund 2009, "FastTrack" (races by what happens before); "CUDA semantics" of the PyTorch documentation;
torch's `ProcessGroupNCCL`; lazy loading in the CUDA programming guide.
Ignores: how long anything takes; graphs; that torch's own process group keeps tensors it was lent (stricter than torch).
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

from stagewright.execution import checkpoint, collectives
from stagewright.execution.accelerator import Accelerator
from stagewright.tracing.tensor_parallel import operators

POOL_SIZE = 32
"""Streams that torch has for each priority, which it gives out in turn."""

_HOST, _DEVICE = "host", "device"
_READS_ON_HOST = frozenset({"tolist", "numpy", "cpu"})
_MOVES_NOTHING = frozenset(
    {torch.ops.aten.set_.source_Storage_storage_offset, torch.ops.aten._unsafe_view.default}
)
_ISSUED = ("all_reduce", "broadcast", "all_gather", "barrier", "isend", "irecv", "batch_isend_irecv")


class Timeline:
    """The order of what one stream, or the host, does; `clock` has how much of each timeline is known to be over by now."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock: dict[Timeline, int] = {self: 0}

    def learn(self, clock: dict[Timeline, int]) -> None:
        for timeline, epoch in clock.items():
            if self.clock.get(timeline, 0) < epoch:
                self.clock[timeline] = epoch

    def advance(self) -> int:
        self.clock[self] += 1
        return self.clock[self]

    def knows(self, clock: dict[Timeline, int]) -> bool:
        return all(self.clock.get(timeline, 0) >= epoch for timeline, epoch in clock.items())


@dataclass(frozen=True)
class Access:
    """One use of bytes `first` to `last` of a storage."""

    timeline: Timeline
    epoch: int
    is_write: bool
    first: int
    last: int
    what: str

    def is_before(self, timeline: Timeline) -> bool:
        return timeline.clock.get(self.timeline, 0) >= self.epoch

    def meets(self, other: Access) -> bool:
        overlaps = self.first < other.last and other.first < self.last
        return overlaps and (self.is_write or other.is_write)


@dataclass(eq=False)
class Block:
    """A storage: where it is, the stream it was allocated on, and its accesses that are not over for all."""

    home: Timeline
    place: str | None = None
    """`_DEVICE`, `_HOST`, or None while nothing tells."""
    is_pinned: bool = False
    accesses: list[Access] = field(default_factory=list)

    def adopt(self, place: str, host: Timeline) -> None:
        """Now it is known where this is."""
        self.place = place
        if place == _HOST:
            self.home, self.accesses = host, []


class FakeEvent:
    """An event; it has happened when the host has waited for it or for what came after."""

    def __init__(self, fake: FakeAccelerator) -> None:
        self._fake = fake
        self._at = 0.0
        self.clock: dict[Timeline, int] = {}

    def record(self, stream: FakeStream | None = None, /) -> None:
        self.clock = dict((stream or self._fake.current).timeline.clock)
        self._at = time.perf_counter()

    def query(self) -> bool:
        return self._fake.host.knows(self.clock)

    def synchronize(self) -> None:
        self._fake.host_waits(self.clock, "an event")

    def elapsed_time(self, other: FakeEvent, /) -> float:
        if not (self.query() and other.query()):
            raise RuntimeError("an event is asked for its time before the host has waited for it")
        return (other._at - self._at) * 1e3


class FakeStream:
    """A stream: one of the pool's, or the one that computes."""

    def __init__(self, fake: FakeAccelerator, timeline: Timeline) -> None:
        self._fake = fake
        self.timeline = timeline

    def wait_event(self, event: FakeEvent, /) -> None:
        self.timeline.learn(event.clock)

    def wait_stream(self, other: FakeStream, /) -> None:
        self.timeline.learn(other.timeline.clock)

    def record_event(self, event: FakeEvent | None = None, /) -> FakeEvent:
        event = event or FakeEvent(self._fake)
        event.record(self)
        return event

    def query(self) -> bool:
        return self._fake.host.knows(self.timeline.clock)

    def synchronize(self) -> None:
        self._fake.host_waits(self.timeline.clock, "a stream")

    def __enter__(self) -> FakeStream:
        self._fake.entered.append(self)
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> None:
        self._fake.entered.pop()


class FakeWork:
    """A transfer or collective on its lane: `wait` makes the current stream wait for it."""

    def __init__(self, fake: FakeAccelerator, work: Any, clock: dict[Timeline, int], receive: str) -> None:
        self._fake, self._work, self._clock = fake, work, clock
        if receive:
            fake.posted[self] = receive
        fake.unfinished.append(self)

    def wait(self, timeout: Any = None) -> bool:
        self.finish()
        self._fake.posted.pop(self, None)
        self._fake.current.timeline.learn(self._clock)
        return True

    def finish(self) -> None:
        """Until the bytes are there; no stream learns of it."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            self._fake.unfinished.remove(self)

    def is_completed(self) -> bool:
        return self._fake.host.knows(self._clock)


class FakeAccelerator(Accelerator):
    """The host as if it were a device that runs behind it.

    `hazards` are what was found, in words; `drains` where the host has waited for unfinished work.
    """

    is_asynchronous = True
    counts_bytes = False

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.hazards: list[str] = []
        self.drains: list[str] = []
        self.host = Timeline("the host")
        self.default = FakeStream(self, Timeline("the compute stream"))
        self.entered: list[FakeStream] = []
        self.posted: dict[FakeWork, str] = {}
        self.unfinished: list[FakeWork] = []
        self._blocks: weakref.WeakKeyDictionary[torch.UntypedStorage, Block] = weakref.WeakKeyDictionary()
        self._freed: list[Block] = []
        self._pools: dict[str, list[tuple[Timeline, str]]] = {"normal": [], "high": []}
        self._lanes: dict[tuple[Any, ...], FakeStream] = {}
        self._launched: set[Any] = set()
        self._modes = ExitStack()

    # -- the seam ---------------------------------------------------------------------------------------------------

    @property
    def current(self) -> FakeStream:
        return self.entered[-1] if self.entered else self.default

    def make_current(self) -> None:
        pass

    def current_stream(self) -> FakeStream:
        return self.current

    def new_stream(self) -> FakeStream:
        return self._from_pool("normal", f"a stream made by {_caller()}")

    def event(self, is_timed: bool = False) -> FakeEvent:
        return FakeEvent(self)

    def _drain(self) -> None:
        self._waits_for_device("the host waits for the device")
        clock: dict[Timeline, int] = {}
        for timeline in self._timelines():
            clock |= {timeline: timeline.clock[timeline]}
        self.host_waits(clock, "the device")

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        self._waits_for_device("pinned memory is allocated")
        tensor = torch.empty(shape, dtype=dtype)
        self._blocks[tensor.untyped_storage()] = Block(self.host, _HOST, is_pinned=True)
        return tensor

    def allocated_bytes(self) -> int:
        return 0

    def reserved_bytes(self) -> int:
        return 0

    def peak_allocated_bytes(self) -> int:
        return 0

    def peak_reserved_bytes(self) -> int:
        return 0

    def reset_peaks(self) -> None:
        pass

    def free_and_total_bytes(self) -> tuple[int, int]:
        return 1 << 30, 1 << 30

    def empty_cache(self) -> None:
        self._waits_for_device("the allocator returns memory")

    def allow_tf32(self, is_allowed: bool) -> None:
        pass

    # -- what is watched --------------------------------------------------------------------------------------------

    def __enter__(self) -> FakeAccelerator:
        self._modes = ExitStack()
        for name in _ISSUED:
            self._modes.enter_context(mock.patch.object(dist, name, self._issued(name, getattr(dist, name))))
        for module, names in (
            (collectives, ("all_gather", "reduce_scatter")),
            (operators, ("_all_gather_into", "_reduce_scatter_into")),
        ):
            for name in names:
                issued = self._issued(name, getattr(module, name))
                self._modes.enter_context(mock.patch.object(module, name, issued))
        write = checkpoint.write_tensors

        def written(path: Any, tensors: Any) -> Any:
            self.host_uses(tensors.values(), is_write=False)
            return write(path, tensors)

        self._modes.enter_context(mock.patch.object(checkpoint, "write_tensors", written))
        self._modes.enter_context(_Calls(self))
        self._modes.enter_context(_Operators(self))
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> None:
        self._modes.close()
        for work in tuple(self.unfinished):
            work.finish()

    def own(self, tensors: Iterable[torch.Tensor]) -> None:
        """These are on the device."""
        for tensor in tensors:
            block = self._block(tensor)
            if block.place is None:
                block.adopt(_DEVICE, self.host)

    def _timelines(self) -> Iterator[Timeline]:
        yield self.default.timeline
        for pool in self._pools.values():
            yield from (timeline for timeline, _ in pool)

    def _from_pool(self, priority: str, what: str) -> FakeStream:
        pool = self._pools[priority]
        if len(pool) < POOL_SIZE:
            timeline = Timeline(what)
        else:
            timeline, before = pool[len(pool) % POOL_SIZE]
            self.hazards.append(f"{what} is the same stream of the pool as {before}")
        pool.append((timeline, what))
        return FakeStream(self, timeline)

    # -- the host waits ---------------------------------------------------------------------------------------------

    def host_waits(self, clock: dict[Timeline, int], what: str) -> None:
        if not self.host.knows(clock):
            self.drains.append(f"{_caller()} waits for {what}")
            self.host.learn(clock)

    def _waits_for_device(self, what: str) -> None:
        if self.posted:
            receives = ", ".join(self.posted.values())
            self.hazards.append(f"{what} in {_caller()} while nothing waits yet for {receives}")

    def host_uses(self, tensors: Iterable[torch.Tensor], is_write: bool) -> None:
        """The host itself reads or writes memory of its own."""
        epoch = self.host.advance()
        for tensor in tensors:
            self._access(self.host, epoch, tensor, is_write, "the host")

    # -- lanes ------------------------------------------------------------------------------------------------------

    def _issued(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """A function of `torch.distributed` whose lane is watched."""

        def issue(*args: Any, **kwargs: Any) -> Any:
            if name == "batch_isend_irecv":
                return self._batch(args[0], call)
            with _apart():
                work = call(*args, **{**kwargs, "async_op": True} if _is_collective(name) else kwargs)
            if work is None:
                return None
            if name == "barrier":
                work.wait()
                self.host_waits(dict(self.current.timeline.clock), "a barrier")
                return None
            writes, reads, key = _uses(name, args, kwargs)
            wrapped = self._on_lane(work, key, writes, reads, name)
            if _is_collective(name) and not kwargs.get("async_op", False):
                wrapped.wait()
                return None
            return wrapped

        return issue

    def _batch(self, operations: Sequence[Any], call: Callable[..., Any]) -> list[FakeWork]:
        with _apart():
            works = call(operations)
        reads = [op.tensor for op in operations if op.op.__name__ == "isend"]
        writes = [op.tensor for op in operations if op.op.__name__ != "isend"]
        first, *others = works
        for work in others:
            work.wait()
        return [self._on_lane(first, ("all", operations[0].group), writes, reads, "batch_isend_irecv")]

    def _on_lane(
        self,
        work: Any,
        key: tuple[Any, ...],
        writes: list[torch.Tensor],
        reads: list[torch.Tensor],
        name: str,
    ) -> FakeWork:
        if key not in self._lanes:
            what = f"the lane of {name} of {_caller()}"
            self._lanes[key] = self._from_pool("high" if key[0] == "pair" else "normal", what)
        lane = self._lanes[key].timeline
        lane.learn(self.current.timeline.clock)
        lane.learn(self.host.clock)
        epoch = lane.advance()
        self.own([*writes, *reads])
        for tensor in writes:
            self._access(lane, epoch, tensor, True, name)
        for tensor in reads:
            self._access(lane, epoch, tensor, False, name)
        return FakeWork(self, work, dict(lane.clock), f"{name} of {_caller()}" if name == "irecv" else "")

    # -- operators --------------------------------------------------------------------------------------------------

    def operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator and note what it uses, where a device would."""
        if func in _MOVES_NOTHING or _is_view(func):
            return func(*args, **kwargs)
        given = [item for item in tree_iter((args, kwargs)) if isinstance(item, torch.Tensor)]
        blocks = [self._block(tensor) for tensor in given]
        if func is torch.ops.aten._local_scalar_dense.default:
            self.read_on_host(given[0])
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if func is torch.ops.aten.copy_.default and _may_go_on(
            args, kwargs
        ):  # which only a device's copies do
            self.own(tensor for tensor, block in zip(given, blocks, strict=True) if block.place is None)
        places = {block.place for block in blocks}
        place = _DEVICE if _DEVICE in places else _HOST if _HOST in places else None
        timeline = self.host if place == _HOST else self.current.timeline
        timeline.learn(self.host.clock)
        if place == _DEVICE and func not in self._launched:
            self._waits_for_device(f"{func} is launched for the first time")
            self._launched.add(func)
        epoch = timeline.advance()
        outputs = [item for item in tree_iter(result) if isinstance(item, torch.Tensor) and item.numel()]
        fresh = [tensor for tensor in outputs if tensor.untyped_storage() not in self._blocks]
        for tensor in fresh:
            self._allocate(tensor, timeline, epoch, place)
        if place is None:
            return result
        written = _written(func, args, kwargs)
        reads_nothing = func._schema.name.endswith("_like") or func._schema.name.startswith("aten::new_")
        for tensor, block in zip(given, blocks, strict=True):
            if block.place is None:
                block.adopt(place, self.host)
            is_write = any(tensor is other for other in written)
            if block.place == _HOST and place == _DEVICE and not tensor.dim():
                self._access(
                    self.host, self.host.advance(), tensor, False, func
                )  # a number, when it is launched
            elif is_write or not reads_nothing:
                self._access(timeline, epoch, tensor, is_write, func)
        for tensor in fresh:
            self._access(timeline, epoch, tensor, True, func)
        if place == _DEVICE and _HOST in places:
            self._copied(func, given, blocks, args, kwargs)
        return result

    def _copied(
        self, func: Any, given: list[torch.Tensor], blocks: list[Block], args: Any, kwargs: Any
    ) -> None:
        """Between host and device: the host waits unless the memory is pinned and it was told not to."""
        on_host = [
            block
            for tensor, block in zip(given, blocks, strict=True)
            if block.place == _HOST and tensor.dim()
        ]
        if not on_host:
            return
        if func is not torch.ops.aten.copy_.default:
            self.hazards.append(f"{func} in {_caller()} takes tensors of the host and of the device")
            return
        if not _may_go_on(args, kwargs) or not all(block.is_pinned for block in on_host):
            self.host_waits(dict(self.current.timeline.clock), "a copy")

    def read_on_host(self, tensor: torch.Tensor) -> None:
        """The host asks for the contents of a tensor."""
        block = self._block(tensor)
        if block.place == _DEVICE:
            stream = self.current.timeline
            self._access(stream, stream.advance(), tensor, False, "a read by the host")
            self.host_waits(dict(stream.clock), "a number")
        elif block.place == _HOST:
            self.host_uses([tensor], is_write=False)

    def moved_to_device(self, tensor: torch.Tensor, may_go_on: bool) -> None:
        """A tensor of the host becomes one of the device, as which it goes on."""
        block = self._block(tensor)
        if block.place == _DEVICE:
            return
        stream = self.current.timeline
        stream.learn(self.host.clock)
        epoch, is_pinned = stream.advance(), block.is_pinned
        block.place, block.is_pinned, block.home, block.accesses = _DEVICE, False, stream, []
        self._access(stream, epoch, tensor, True, "a copy to the device")
        if not (may_go_on and is_pinned):
            self.host_waits(dict(stream.clock), "a copy to the device")

    # -- memory -----------------------------------------------------------------------------------------------------

    def _block(self, tensor: torch.Tensor) -> Block:
        storage = tensor.untyped_storage()
        block = self._blocks.get(storage)
        if block is None:
            block = self._blocks[storage] = Block(self.default.timeline)
            weakref.finalize(storage, self._free, block)
        return block

    def _allocate(self, tensor: torch.Tensor, home: Timeline, epoch: int, place: str | None) -> None:
        """A block for `tensor`; whoever had it before may have used it on this stream until now."""
        block = self._block(tensor)
        block.home, block.place = home, place
        if place != _HOST:
            block.accesses.append(
                Access(home, epoch, True, 0, tensor.untyped_storage().nbytes(), "its allocation")
            )
            for freed in tuple(self._freed):
                if freed.home is home:
                    self._freed.remove(freed)
                    for access in freed.accesses:
                        if not access.is_before(home):
                            self.hazards.append(
                                f"memory is allocated again in {_caller()} while {access.what} on "
                                f"{access.timeline.name} may still use it"
                            )

    def _free(self, block: Block) -> None:
        if block.place == _DEVICE and not all(access.is_before(block.home) for access in block.accesses):
            self._freed.append(block)

    def _access(
        self, timeline: Timeline, epoch: int, tensor: torch.Tensor, is_write: bool, what: object
    ) -> None:
        if not tensor.numel():
            return
        block = self._block(tensor)
        size = tensor.element_size()
        first = int(tensor.storage_offset()) * size
        extent = 1 + sum(
            (length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True)
        )
        access = Access(timeline, epoch, is_write, first, first + extent * size, f"{what} in {_caller()}")
        kept = []
        for before in block.accesses:
            is_ordered = before.is_before(timeline)
            if not is_ordered and before.meets(access):
                self.hazards.append(
                    f"{access.what} on {timeline.name} {'writes' if is_write else 'reads'} what {before.what} on "
                    f"{before.timeline.name} {'writes' if before.is_write else 'reads'}, and does not wait for it"
                )
            covered = access.first <= before.first and before.last <= access.last
            if not (is_ordered and covered and (is_write or not before.is_write)):
                kept.append(before)
        block.accesses = [*kept, access]


class _Operators(TorchDispatchMode):
    def __init__(self, fake: FakeAccelerator) -> None:
        super().__init__()
        self._fake = fake

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self._fake.operator(func, args, kwargs or {})


class _Calls(TorchFunctionMode):
    """Sees what the host does without an operator: it reads, or moves what is on the device already."""

    def __init__(self, fake: FakeAccelerator) -> None:
        super().__init__()
        self._fake = fake

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _READS_ON_HOST and isinstance(args[0], torch.Tensor):
            self._fake.read_on_host(args[0])
        if func is torch.Tensor.to and any(
            isinstance(item, torch.device) for item in tree_iter((args, kwargs))
        ):
            self._fake.moved_to_device(args[0], (kwargs or {}).get("non_blocking", False))
        return func(*args, **(kwargs or {}))


@contextmanager
def _apart() -> Iterator[None]:
    """What torch does inside an operator or a collective is not looked at: modes see only what is called by others."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def _is_collective(name: str) -> bool:
    return name not in ("isend", "irecv", "batch_isend_irecv")


def _uses(
    name: str, args: Any, kwargs: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor], tuple[Any, ...]]:
    """What a call writes and reads, and its lane: of a pair of ranks for transfers, of the group for collectives."""
    group = kwargs.get("group")
    if name in ("isend", "irecv"):
        tensor, peer = args[0], args[1]
        group = args[2] if len(args) > 2 else group
        return (
            ([tensor], [], ("pair", group, peer))
            if name == "irecv"
            else ([], [tensor], ("pair", group, peer))
        )
    tensors = [item for item in tree_iter(args) if isinstance(item, torch.Tensor)]
    if name in ("all_reduce", "broadcast"):
        return tensors, [], ("all", group)
    return tensors[:-1], tensors[-1:], ("all", group)


def _may_go_on(args: Any, kwargs: Any) -> bool:
    """Whether a copy is told not to block."""
    return kwargs.get("non_blocking", args[2] if len(args) > 2 else False)


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Arguments that an operator changes, by its schema."""
    changed: list[torch.Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            changed += [item for item in tree_iter(value) if isinstance(item, torch.Tensor)]
    return changed


def _caller() -> str:
    """The nearest function of the executor."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if "stagewright/execution" in name or name.startswith("<stagewright"):
            place = name.rpartition("/")[2].removesuffix(".py").strip("<>")
            return f"{place}.{frame.f_code.co_name}"
        frame = frame.f_back
    return "a test"
