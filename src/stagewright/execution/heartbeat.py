"""The board of a run: where every rank says how far it is, and the others and the launcher read who is still alive.

A post is sealed with the run's token, so that nobody who merely reaches the board can speak for a rank; what is not
sealed so is as if it were not there. Nothing here imports torch: a rank posts before it has imported it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch.distributed as dist

SILENCE_S = 10.0
"""Seconds without a sign of life after which a rank is taken for dead or frozen, unless it said that it may be longer."""

_SLOT_BYTES = 16 * 1024
_LONGEST_MESSAGE, _LONGEST_POSITION = 2_000, 200
_LENGTH_BYTES, _SEAL_BYTES = 4, 32


@dataclass(frozen=True)
class Failure:
    """Why a rank ended.

    `kind` is the name of the error's class; `is_consequence` where another rank's end was the cause; `time` that of the
    system's clock, by which the first of several failures is known.
    """

    kind: str
    message: str
    time: float
    is_consequence: bool = False


@dataclass(frozen=True)
class Post:
    """The latest word of a rank.

    `beat` counts the posts; `position` is the action or phase it is at; `num_steps` are done, counted from the first of all
    runs, None before training begins; it may be silent for `silence_s`.
    """

    beat: int
    position: str
    num_steps: int | None = None
    silence_s: float = SILENCE_S
    failure: Failure | None = None


class Seal:
    """Closes texts so that only who has the same `token` can make them; the name of what is closed is part of it."""

    def __init__(self, token: str) -> None:
        self._key = token.encode()

    def close(self, name: str, text: str) -> bytes:
        content = text.encode()
        return self._code(name, content) + content

    def open(self, name: str, sealed: bytes) -> str | None:
        """The text; None where it was not closed under this name with the same token."""
        code, content = sealed[:_SEAL_BYTES], sealed[_SEAL_BYTES:]
        return content.decode() if hmac.compare_digest(code, self._code(name, content)) else None

    def _code(self, name: str, content: bytes) -> bytes:
        return hmac.digest(self._key, name.encode() + b"\0" + content, hashlib.sha256)


class Board(Protocol):
    """Places for texts by name of the place; whoever writes to one replaces what was there."""

    def write(self, place: str, text: str) -> None:
        """Raises `OSError` or `RuntimeError` where the board is gone."""
        ...

    def read(self, place: str) -> str | None:
        """None where nothing was written, or nothing that can be trusted."""
        ...


class FileBoard:
    """A file with a slot of fixed size per place, for the processes of one machine; its folder is private.

    The slots have their bytes on the disk from the beginning, so that a post still succeeds when the disk is full.
    """

    def __init__(self, path: Path, places: tuple[str, ...], seal: Seal) -> None:
        self._seal = seal
        self._offsets = {place: number * _SLOT_BYTES for number, place in enumerate(places)}
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        size = len(places) * _SLOT_BYTES
        if os.fstat(self._file).st_size < size:
            os.pwrite(self._file, bytes(size), 0)

    def write(self, place: str, text: str) -> None:
        sealed = self._seal.close(place, text)
        assert len(sealed) <= _SLOT_BYTES - _LENGTH_BYTES, "posts are cut to the length of a slot"
        os.pwrite(self._file, len(sealed).to_bytes(_LENGTH_BYTES, "little") + sealed, self._offsets[place])

    def read(self, place: str) -> str | None:
        slot = os.pread(self._file, _SLOT_BYTES, self._offsets[place])
        length = int.from_bytes(slot[:_LENGTH_BYTES], "little")
        # A slot that is being written is not sealed right, and read again a moment later.
        return self._seal.open(place, slot[_LENGTH_BYTES : _LENGTH_BYTES + length]) if length else None

    def close(self) -> None:
        os.close(self._file)


class StoreBoard:
    """A board in the rendezvous store of a launcher, for the processes of several machines."""

    def __init__(self, store: dist.Store, seal: Seal) -> None:
        self._store, self._seal = store, seal

    def write(self, place: str, text: str) -> None:
        self._store.set(f"board/{place}", self._seal.close(place, text).hex())

    def read(self, place: str) -> str | None:
        try:
            if not self._store.check([f"board/{place}"]):
                return None
            return self._seal.open(place, bytes.fromhex(self._store.get(f"board/{place}").decode()))
        except (RuntimeError, ValueError):  # torch's DistError is a RuntimeError
            return None


LAUNCHER = "launcher"


def places(num_ranks: int) -> tuple[str, ...]:
    """All that a run on one machine has: one for each rank, and the launcher's.

    >>> places(2)
    ('rank 0', 'rank 1', 'launcher')
    """
    return (*map(rank_place, range(num_ranks)), LAUNCHER)


def rank_place(rank: int) -> str:
    return f"rank {rank}"


def write_post(board: Board, rank: int, post: Post) -> None:
    board.write(rank_place(rank), json.dumps(asdict(_cut(post)), ensure_ascii=False))


def read_post(board: Board, rank: int) -> Post | None:
    """The latest post of a rank; None where there is none."""
    text = board.read(rank_place(rank))
    if text is None:
        return None
    document: dict[str, Any] = json.loads(text)
    failure = document.pop("failure")
    return Post(**document, failure=None if failure is None else Failure(**failure))


def _cut(post: Post) -> Post:
    """`post` with texts that fit into a slot, whatever its characters take."""
    failure = post.failure
    if failure is not None:
        failure = replace(failure, message=_shortened(failure.message, _LONGEST_MESSAGE))
    return replace(post, position=_shortened(post.position, _LONGEST_POSITION), failure=failure)


def _shortened(text: str, length: int) -> str:
    """
    >>> _shortened("2F0", 9), _shortened("summing gradients", 7)
    ('2F0', 'summing [...]')
    """
    text = text.encode(errors="replace").decode()
    return text if len(text) <= length else f"{text[:length]} [...]"


FINISHED = "finished"


class Liveness:
    """Reads the posts of ranks again and again, and says which of them has failed, died or frozen.

    Time in which this process did not get to look (it was stopped, or the machine is busy) is held against nobody.

    `look` is called every `interval_s`.
    """

    def __init__(self, board: Board, interval_s: float) -> None:
        self._board = board
        self._interval_s = interval_s
        self.posts: dict[int, Post] = {}
        self._changed: dict[int, float] = {}
        self._looked = time.monotonic()

    def look(self, ranks: Iterable[int]) -> float:
        """Read the posts of `ranks`; returns the seconds for which this process could not look."""
        now = time.monotonic()
        missed = now - self._looked - self._interval_s
        missed = missed if missed > self._interval_s else 0.0
        self._looked = now
        for rank in self._changed:
            self._changed[rank] += missed
        for rank in ranks:
            post = read_post(self._board, rank)
            if post is None:
                continue
            if rank not in self.posts or self.posts[rank].beat != post.beat:
                self._changed[rank] = now
            self.posts[rank] = post
        return missed

    def problem(self, patience_s: float | None = None) -> str | None:
        """Which rank failed, died or froze, and where; None where all that posted have shown signs of life.

        `patience_s` takes the place of what each rank asked for.
        """
        now = time.monotonic()
        for rank, post in self.posts.items():
            if post.position == FINISHED:
                continue
            if post.failure is not None:
                return f"rank {rank} failed: {post.failure.message}"
            silent = now - self._changed[rank]
            if silent > (post.silence_s if patience_s is None else patience_s):
                return f"rank {rank} died or froze at {post.position} (no sign of life for {silent:.0f} s)"
        return None

    def others(self, problem: str = "") -> str:
        """Where the ranks that `problem` does not speak of were seen last, as the end of a message."""
        seen = [
            f"rank {rank} at {post.position}"
            for rank, post in sorted(self.posts.items())
            if f"rank {rank} " not in problem
        ]
        return f" [last seen: {', '.join(seen)}]" if seen else ""
