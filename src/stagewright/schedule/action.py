"""Actions: the smallest pieces of work in a schedule, with a one-line text form that round-trips."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum

from stagewright.errors import ScheduleError


class Kind(StrEnum):
    """The kind of an action; the value is its text form."""

    F = "F"  # forward
    B = "B"  # full backward: input gradient and weight gradient in one piece
    I = "I"  # input gradient  # noqa: E741
    W = "W"  # weight gradient
    R = "R"  # recomputation, and fetches from the host, at the beginning of a backward
    SEND_F = "SEND_F"  # forward value to a consumer stage on another rank
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"  # gradient back to a producer stage on another rank
    RECV_B = "RECV_B"
    GATHER = "GATHER"  # all-gather of the sharded weights of a stage
    RELEASE = "RELEASE"  # gathered weights of a stage freed
    REDUCE = "REDUCE"  # gradients of a stage reduced over data-parallel replicas
    STEP = "STEP"  # optimizer step of a stage

    __hash__ = str.__hash__  # the enum's own runs Python code, and actions are hashed by the million


COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W, Kind.R})
BACKWARDS = frozenset({Kind.I, Kind.B})
"""Kinds with which a backward begins."""
SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})
RECEIVES = frozenset({Kind.RECV_F, Kind.RECV_B})
TRANSFERS = SENDS | RECEIVES
SEND_OF = {Kind.RECV_F: Kind.SEND_F, Kind.RECV_B: Kind.SEND_B}
"""The other end of a receive."""
RECEIVE_OF = {send: receive for receive, send in SEND_OF.items()}
RECEIVED_BY = {Kind.F: Kind.RECV_F, Kind.B: Kind.RECV_B, Kind.I: Kind.RECV_B}
"""Receive of the input that an action takes from another rank."""
SENDS_IN_FLIGHT = 2
"""Transfers from one stage to another that may be pending while the sender continues; it waits before it sends more. With
1, a sender waits for a receiver that is a microbatch late; each further one keeps another boundary alive."""
PER_STAGE = frozenset({Kind.GATHER, Kind.RELEASE, Kind.REDUCE, Kind.STEP})
"""Kinds that concern a whole stage and have no microbatch."""

_NEIGHBOUR = {Kind.SEND_F: 1, Kind.RECV_F: -1, Kind.SEND_B: -1, Kind.RECV_B: 1}
_KINDS = "|".join(sorted(Kind, key=len, reverse=True))
_PATTERN = re.compile(rf"([0-9]{{1,9}})({_KINDS})([0-9]{{1,9}})?(?:([<>])([0-9]{{1,9}}))?")
_MOVED = re.compile(r"[0-9]+(OFFLOAD|FETCH)[0-9]+")
"""Actions of earlier versions."""


@dataclass(frozen=True, slots=True)
class Action:
    """One action of one rank.

    `microbatch` is None for kinds that concern a whole stage (`PER_STAGE`). `peer` is the stage at the other end of a
    transfer and None for every other kind; a transfer's text omits it if it is the neighbour stage.

    `overlapped` is a full backward of another stage that runs overlapped with this forward: both start when both can, and
    both are done when the pair is.

    >>> Action.parse("2F0")
    Action(kind=<Kind.F: 'F'>, stage=2, microbatch=0, peer=None, overlapped=None)
    >>> [str(part) for part in Action.parse("2F5&5B1").parts]
    ['2F5', '5B1']
    >>> [str(Action.parse(text)) for text in ("0SEND_F3>1", "0SEND_F3>2", "2RECV_F3<0", "1GATHER")]
    ['0SEND_F3', '0SEND_F3>2', '2RECV_F3<0', '1GATHER']
    """

    kind: Kind
    stage: int
    microbatch: int | None = None
    peer: int | None = None
    overlapped: Action | None = None

    def __str__(self) -> str:
        microbatch = "" if self.microbatch is None else self.microbatch
        overlapped = "" if self.overlapped is None else f"&{self.overlapped}"
        return f"{self.stage}{self.kind}{microbatch}{self._peer_text()}{overlapped}"

    @property
    def parts(self) -> tuple[Action, ...]:
        """Return the action itself, or the forward and the backward of an overlapped pair."""
        if self.overlapped is None:
            return (self,)
        return (replace(self, overlapped=None), self.overlapped)

    def _peer_text(self) -> str:
        if self.peer is None or self.peer == self.stage + _NEIGHBOUR[self.kind]:
            return ""
        return f"{'>' if self.kind in SENDS else '<'}{self.peer}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Return the action written as `text`; raise `ScheduleError` if it is not one."""
        first, ampersand, second = text.partition("&")
        if ampersand:
            return pair(cls.parse(first), cls.parse(second))
        match = _PATTERN.fullmatch(text.strip())
        if _MOVED.fullmatch(text.strip()):
            raise ScheduleError(
                f"'{text}': values go to the host inside F and come back inside the backward and R, so programs have no "
                "OFFLOAD and FETCH any more; plan again"
            )
        if not match:
            raise ScheduleError(
                f"'{text}' is not an action: write stage, kind and microbatch, e.g. 2F0 or 0SEND_F3>2"
            )
        stage, kind, microbatch, arrow, peer = match.groups()
        return _checked(text, int(stage), Kind(kind), microbatch, arrow, peer)


def pair(forward: Action, backward: Action) -> Action:
    """Return `forward` overlapped with the full backward `backward` of another stage."""
    if forward.kind is not Kind.F or backward.kind is not Kind.B or forward.stage == backward.stage:
        raise ScheduleError(
            f"'{forward}&{backward}': a pair is a forward and a full backward of another stage, e.g. 2F5&5B1"
        )
    return replace(forward, overlapped=backward)


def transfer(kind: Kind, stage: int, microbatch: int, peer: int | None = None) -> Action:
    """Return a send or receive of `stage`; `peer` defaults to the neighbour stage.

    >>> str(transfer(Kind.SEND_B, 3, 1)), transfer(Kind.SEND_B, 3, 1).peer
    ('3SEND_B1', 2)
    """
    return Action(kind, stage, microbatch, stage + _NEIGHBOUR[kind] if peer is None else peer)


def _checked(
    text: str, stage: int, kind: Kind, microbatch: str | None, arrow: str | None, peer: str | None
) -> Action:
    if (microbatch is None) != (kind in PER_STAGE):
        problem = "takes no microbatch" if microbatch is not None else "needs a microbatch"
        raise ScheduleError(f"'{text}': {kind} {problem}")
    if peer is not None and kind not in TRANSFERS:
        raise ScheduleError(f"'{text}': only sends and receives have a peer stage")
    if microbatch is None:
        return Action(kind, stage)
    if kind not in TRANSFERS:
        return Action(kind, stage, int(microbatch))
    if arrow is not None and arrow != (">" if kind in SENDS else "<"):
        raise ScheduleError(f"'{text}': a send names its peer with '>', a receive with '<'")
    return transfer(kind, stage, int(microbatch), None if peer is None else int(peer))
