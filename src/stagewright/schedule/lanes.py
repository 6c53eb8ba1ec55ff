"""Lanes of transfers, and a check that a lowered program cannot hang on devices that run transfers in issue order.

With NCCL a transfer is a kernel on the stream of its communicator. It starts after the computations issued before it and
after the previous transfer on the same stream, and ends when its other end has run too; messages have no names, so both ends
must issue them in the same order. A lane is a communicator of two ranks with its stream.

Our lanes carry one kind of value in one direction, and are created and warmed up before the first step. Then a program that
runs even if each send waits for its receive (`verify.check_free_of_deadlock`), with sends and receives in the same order,
cannot hang: the order of that replay, with each transfer at its send, satisfies all conditions of `check_lanes`. Other
designs, which the check also accepts, do not have this property.

Source: `ProcessGroupNCCL::pointToPoint` (a communicator and a stream per pair of ranks and group, waits for the current
stream at issue); NVIDIA/nccl#783 (connections are made by the first exchange, per direction); NCCL user guide, "Using
multiple NCCL communicators concurrently" (kernels block, so a wait for the device waits for them).
Ignores: messages small enough for NCCL's buffers, whose sends end without their receives; shortage of multiprocessors.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, zip_longest
from typing import NamedTuple

from stagewright.errors import ScheduleError
from stagewright.schedule.action import COMPUTE, SEND_OF, SENDS, SENDS_IN_FLIGHT, TRANSFERS, Action, Kind
from stagewright.schedule.encoded import EncodedRules
from stagewright.schedule.program import Program
from stagewright.schedule.tokens import Edge, TokenRules

_CARRIES = {Kind.SEND_F: Kind.F, Kind.RECV_F: Kind.F, Kind.SEND_B: Kind.B, Kind.RECV_B: Kind.B}
_WHAT = {Kind.SEND_F: "values", Kind.SEND_B: "gradients"}
_COLLECTIVES = frozenset({Kind.GATHER, Kind.REDUCE})

LANE_CTAS = 4
"""Thread blocks, each on its own multiprocessor, that NCCL may use for one lane. Without a limit, a large message takes up
to 32 of an H100's 132 multiprocessors from computations while its send waits for a receiver that still computes; with 4 it
takes 3 % of them, and moves up to 130 GB/s over NVLink (`planning.prediction.transfers`)."""


class Lane(NamedTuple):
    """Transfers of forward values (F) or gradients (B) from one pipeline rank to another."""

    kind: Kind
    source: int
    target: int

    def __str__(self) -> str:
        return f"{self.kind} {self.source}>{self.target}"


def lane_of(transfer: Action, rank_of_stage: tuple[int, ...]) -> Lane:
    """Return the lane of a send or a receive."""
    assert transfer.peer is not None
    here, there = rank_of_stage[transfer.stage], rank_of_stage[transfer.peer]
    ends = (here, there) if transfer.kind in SENDS else (there, here)
    return Lane(_CARRIES[transfer.kind], *ends)


def lanes_of(program: Program) -> list[Lane]:
    """Return the lanes that a lowered program uses, sorted.

    >>> from stagewright.schedule import build, insert_communication
    >>> [str(lane) for lane in lanes_of(insert_communication(build("zb-v", 2, 4)))]
    ['B 0>1', 'B 1>0', 'F 0>1', 'F 1>0']
    """
    placed = program.placement.rank_of_stage
    ends = {
        (action.kind, action.stage, action.peer): action for action in program if action.kind in TRANSFERS
    }
    return sorted({lane_of(action, placed) for action in ends.values()})


def check_lanes(
    program: Program,
    edges: Iterable[Edge] | None = None,
    *,
    shares: Callable[[Lane], Hashable] = lambda lane: lane,
    is_warmed_up: bool = True,
    waits_for_device: bool = False,
) -> None:
    """Raise if a lowered program would hang on lanes that run transfers in issue order.

    Args:
        shares: lanes with equal results share a communicator and stream; by default every lane has its own.
        is_warmed_up: lanes are created before the first step; otherwise by their first transfer, where both hosts must meet.
        waits_for_device: before any computation hosts may wait for everything issued, as the first launch of a kernel, an
            allocation and a compiler do. Programs that post receives ahead of the computation before their use fail.

    Raises:
        ScheduleError: the ends of a lane have different orders, hosts block during the creation of lanes, or work on the
            devices waits in a cycle, which is named.
    """
    lanes = _lanes_by_edge(program, shares)
    _check_orders(program, lanes)
    if not is_warmed_up:
        _check_hosts(program, lanes)
    waits = _Waits(program, edges, lanes)
    for rank in range(program.num_ranks):
        waits.add_rank(rank, waits_for_device)
    if not (circle := waits.circle()):
        return
    listed = "\n".join(f"  {line}" for line in circle)
    if waits_for_device:
        raise ScheduleError(
            f"{program.name} can hang on GPUs: a host that waits for its device, as it may before any computation, closes a "
            f"circle:\n{listed}\npost every receive right before the computation that uses it (ahead=0)"
        )
    raise ScheduleError(
        f"{program.name} deadlocks on GPUs, where the transfers of a lane run in the order issued:\n{listed}\n"
        "lower its compute_only() program again, on lanes of one kind and direction between two ranks"
    )


@dataclass(frozen=True, slots=True)
class _Link:
    """Transfers of one kind between two stages: their lane, and the key of the communicator that it may share."""

    lane: Lane
    shared: Hashable


_Links = dict[tuple[Kind, int, int | None], _Link]


def _lanes_by_edge(program: Program, shares: Callable[[Lane], Hashable]) -> _Links:
    placed = program.placement.rank_of_stage
    links: _Links = {}
    for action in program:
        if action.kind in TRANSFERS and (key := (action.kind, action.stage, action.peer)) not in links:
            lane = lane_of(action, placed)
            links[key] = _Link(lane, shares(lane))
    return links


def _send_of(transfer: Action) -> Action:
    """Return the send of a transfer, which is a send or a receive."""
    if transfer.kind in SENDS:
        return transfer
    assert transfer.peer is not None
    return Action(SEND_OF[transfer.kind], transfer.peer, transfer.microbatch, transfer.stage)


# -- both ends ------------------------------------------------------------------------------------------------


def _check_orders(program: Program, links: _Links) -> None:
    """Check that receives have the order of the sends on every communicator."""
    orders: dict[tuple[Hashable, int, int], tuple[list[Action], list[Action]]] = defaultdict(lambda: ([], []))
    for action in program:
        if action.kind in TRANSFERS:
            link = links[action.kind, action.stage, action.peer]
            sends, receives = orders[link.shared, link.lane.source, link.lane.target]
            (sends if action.kind in SENDS else receives).append(action)
    for (_, source, target), (sends, receives) in orders.items():
        for send, receive in zip_longest(sends, receives):
            if send is None or receive is None:
                raise ScheduleError(
                    f"{send or receive} between ranks {source} and {target} has no other end: "
                    "send and receive every value once"
                )
            received = _send_of(receive)
            if send != received:
                raise ScheduleError(
                    f"rank {source} sends rank {target} the {_transferred(send)}, where rank {target} receives the "
                    f"{_transferred(received)}; receive in the order of the sends"
                )


def _transferred(send: Action) -> str:
    return f"{_WHAT[send.kind]} of stage {send.stage} for {send.peer}, microbatch {send.microbatch}"


# -- hosts ----------------------------------------------------------------------------------------------------


def _check_hosts(program: Program, links: _Links) -> None:
    """Check that hosts finish although first transfers wait for the other host: once for the communicator of the two ranks,
    and once for the connection in each direction."""
    transfers = [[action for action in actions if action.kind in TRANSFERS] for actions in program.ranks]
    reached = [0] * program.num_ranks
    arrived: dict[Hashable, set[int]] = defaultdict(set)

    def is_blocked(rank: int) -> bool:
        action = transfers[rank][reached[rank]]
        link = links[action.kind, action.stage, action.peer]
        ends = {link.lane.source, link.lane.target}
        for meeting in ((link.shared, *sorted(ends)), (link.shared, "connection", *link.lane[1:])):
            arrived[meeting].add(rank)
            if arrived[meeting] != ends:
                return True
        return False

    before = -1
    while before != (before := sum(reached) + sum(map(len, arrived.values()))):
        for rank, actions in enumerate(transfers):
            while reached[rank] < len(actions) and not is_blocked(rank):
                reached[rank] += 1
    blocked = [
        f"  rank {rank} is blocked at {actions[reached[rank]]}"
        for rank, actions in enumerate(transfers)
        if reached[rank] < len(actions)
    ]
    if blocked:
        raise ScheduleError(
            f"{program.name} blocks its hosts: the first transfer of a lane waits for the first one of the rank at its "
            "other end, and these wait for each other:\n" + "\n".join(blocked) + "\n"
            "create and warm up all lanes in one order before the first step"
        )


# -- devices --------------------------------------------------------------------------------------------------

_ORDER = "runs after"
_ISSUE = "is issued after"
_LANE = "is queued behind"
_NEED = "needs"
_FLIGHT = f"lets {SENDS_IN_FLIGHT} sends be on their way, so it waits for"
_DEVICE = "waits for all that was issued, also for"


@dataclass
class _Waits:
    """Work on the devices, numbered in the order of discovery, and its dependencies: computations, transfers (a send and its
    receive are one) and collectives, which all replicas run alike."""

    program: Program
    edges: Iterable[Edge] | None
    links: _Links
    names: list[tuple[int, Action, str]] = field(default_factory=list)
    """Rank, action and part of the action, by number."""
    awaited: list[list[tuple[int, str]]] = field(default_factory=list)
    """Dependencies and their reasons, by number."""

    def __post_init__(self) -> None:
        self.codes = EncodedRules(TokenRules.of(self.program, self.edges), self.program.num_microbatches)
        self.transfers: dict[Action, int] = {}
        self.sent: dict[int, int] = {}  # token that a transfer makes -> its number
        for rank, actions in enumerate(self.program.ranks):
            for action in actions:
                if action.kind in SENDS:
                    self.transfers[action] = number = self._new(rank, action, "")
                    self.sent.update(dict.fromkeys(self.codes.effects(action).makes, number))

    def _new(self, rank: int, action: Action, part: str) -> int:
        self.names.append((rank, action, part))
        self.awaited.append([])
        return len(self.names) - 1

    def add_rank(self, rank: int, waits_for_device: bool) -> None:
        """Add the work that a rank issues, in the order of `execution.transport`: before a send it waits until fewer than
        `SENDS_IN_FLIGHT` sends of the same kind are pending between the two stages."""
        stream = -1  # the last work on the stream of computations
        queues: dict[Hashable, int] = {}  # the last work on every other stream
        sending: dict[tuple[Kind, int, int | None], deque[int]] = defaultdict(deque)
        gathered: dict[int, int] = {}
        issued: list[int] = []

        def compute(action: Action, waits: Iterable[int], why: str, part: str = "") -> int:
            number = self._new(rank, action, part)
            if stream >= 0:
                self.awaited[number].append((stream, _ORDER))
            self.awaited[number] += [(other, why) for other in waits]
            return number

        def enqueue(number: int, queue: Hashable) -> None:
            if stream >= 0:
                self.awaited[number].append((stream, _ISSUE))
            if queue in queues:
                self.awaited[number].append((queues[queue], _LANE))
            queues[queue] = number
            issued.append(number)

        for action in self.program.ranks[rank]:
            kind = action.kind
            if kind in TRANSFERS:
                key = (kind, action.stage, action.peer)
                number = self.transfers[_send_of(action)]
                if kind in SENDS:
                    if len(sending[key]) == SENDS_IN_FLIGHT:
                        stream = compute(action, [sending[key].popleft()], _FLIGHT, "the wait before ")
                    sending[key].append(number)
                enqueue(number, self.links[key].shared)
            elif kind in _COLLECTIVES:
                if (
                    kind is Kind.REDUCE and kind in queues
                ):  # one sum at a time, as `estimation.flat_operations` says
                    stream = compute(action, [queues[kind]], _NEED, "the wait before ")
                number = self._new(rank, action, "")
                enqueue(number, kind)
                if kind is Kind.GATHER:
                    gathered.update(dict.fromkeys(self.codes.effects(action).makes, number))
            else:
                if waits_for_device and kind in COMPUTE and issued:
                    stream = compute(action, issued, _DEVICE, "the host's wait before ")
                    issued.clear()
                needs = self.codes.effects(action).needs
                waits = [tokens[code] for tokens in (self.sent, gathered) for code in needs if code in tokens]
                stream = compute(action, waits, _NEED)

    def circle(self) -> list[str]:
        """Return a description of work that waits for itself in a cycle; empty if there is none."""
        waiting: list[list[int]] = [[] for _ in self.awaited]
        counts = [len(awaited) for awaited in self.awaited]
        for number, awaited in enumerate(self.awaited):
            for other, _ in awaited:
                waiting[other].append(number)
        done = [number for number, count in enumerate(counts) if not count]
        for number in done:
            for other in waiting[number]:
                counts[other] -= 1
                if not counts[other]:
                    done.append(other)
        return [] if len(done) == len(counts) else list(self._circle([count > 0 for count in counts]))

    def _circle(self, stuck: Sequence[bool]) -> Iterator[str]:
        """Yield the steps of a shortest cycle through some of the work that is `stuck`."""
        start, seen = stuck.index(True), set[int]()
        while start not in seen:  # what is stuck may wait for a circle without being part of it
            seen.add(start)
            start = next(other for other, _ in self.awaited[start] if stuck[other])
        waiter_of: dict[int, tuple[int, str]] = {}
        reached = deque([start])
        while start not in waiter_of:
            number = reached.popleft()
            for other, why in self.awaited[number]:
                if stuck[other] and other not in waiter_of:
                    waiter_of[other] = number, why
                    reached.append(other)
        steps = [(*waiter_of[start], start)]
        while steps[-1][0] != start:
            steps.append((*waiter_of[steps[-1][0]], steps[-1][0]))
        for why, group in groupby(reversed(steps), key=lambda step: step[1]):
            run = list(group)
            if why is _ORDER:  # of many in a row, the first and the last
                run = [(run[0][0], why, run[-1][2])]
            for waiter, _, other in run:
                yield f"{self._text(waiter)} {why} {self._text(other)}"

    def _text(self, number: int) -> str:
        rank, action, part = self.names[number]
        if action.kind in SENDS and not part:
            return f"{action} ({self.links[action.kind, action.stage, action.peer].lane})"
        return f"{part}{action} on rank {rank}"
