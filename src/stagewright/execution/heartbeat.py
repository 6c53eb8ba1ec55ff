"""The board of a run: every rank posts its progress, and the other ranks and the launcher read who is alive.

A post is sealed with the run's token, so that access to the board alone does not suffice to post for a rank; posts without
a valid seal are ignored. Nothing here imports torch: a rank posts before it has imported it.
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
"""Seconds without a post after which a rank counts as dead or frozen, unless it announced a longer silence."""

_SLOT_BYTES = 16 * 1024
_LONGEST_MESSAGE, _LONGEST_POSITION = 2_000, 200
_LENGTH_BYTES, _SEAL_BYTES = 4, 32


@dataclass(frozen=True)
class Failure:
    """The reason why a rank ended.

    `kind` is the name of the error's class; `is_consequence` is true where another rank's end was the cause; `time` is of
    the system's clock and identifies the first of several failures.
    """

    kind: str
    message: str
    time: float
    is_consequence: bool = False


@dataclass(frozen=True)
class Post:
    """The latest message of a rank.

    `beat` counts the posts; `position` is the rank's action or phase; `num_steps` is the number of steps done, counted from
    the start of the first run, None before training begins; `silence_s` is how long the rank may be silent.
    """

    beat: int
    position: str
    num_steps: int | None = None
    silence_s: float = SILENCE_S
    failure: Failure | None = None


class Seal:
    """A signature for texts that only holders of the same `token` can make; it covers the text's name too."""

    def __init__(self, token: str) -> None:
        self._key = token.encode()

    def close(self, name: str, text: str) -> bytes:
        content = text.encode()
        return self._code(name, content) + content

    def open(self, name: str, sealed: bytes) -> str | None:
        """Return the text, or None where it was not sealed under this name with the same token."""
        code, content = sealed[:_SEAL_BYTES], sealed[_SEAL_BYTES:]
        return content.decode() if hmac.compare_digest(code, self._code(name, content)) else None

    def _code(self, name: str, content: bytes) -> bytes:
        return hmac.digest(self._key, name.encode() + b"\0" + content, hashlib.sha256)


class Board(Protocol):
    """A set of named places for texts; writing to a place replaces its text."""

    def write(self, place: str, text: str) -> None:
        """Write to a place. Raises `OSError` or `RuntimeError` where the board is gone."""
        ...

    def read(self, place: str) -> str | None:
        """Return the text of a place, or None where nothing was written or its seal is not valid."""
        ...


class FileBoard:
    """A file with a slot of fixed size per place, for the processes of one machine; its folder is private.

    The bytes of the slots are allocated on the disk at the start, so that posts succeed even when the disk is full.
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
        # A slot that is being written has no valid seal, and is read again a moment later.
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
    """Return the places of a run on one machine: one for each rank, and the launcher's.

    >>> places(2)
    ('rank 0', 'rank 1', 'launcher')
    """
    return (*map(rank_place, range(num_ranks)), LAUNCHER)


def rank_place(rank: int) -> str:
    return f"rank {rank}"


def write_post(board: Board, rank: int, post: Post) -> None:
    board.write(rank_place(rank), json.dumps(asdict(_cut(post)), ensure_ascii=False))


def read_post(board: Board, rank: int) -> Post | None:
    """Return the latest post of a rank, or None."""
    text = board.read(rank_place(rank))
    if text is None:
        return None
    document: dict[str, Any] = json.loads(text)
    failure = document.pop("failure")
    return Post(**document, failure=None if failure is None else Failure(**failure))


def _cut(post: Post) -> Post:
    """Return `post` with texts shortened to fit into a slot, whatever the size of their characters."""
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
    """A monitor of the posts of ranks that detects which of them has failed, died or frozen.

    Time in which this process could not look (it was stopped, or the machine is busy) does not count as silence.

    `look` is called every `interval_s`.
    """

    def __init__(self, board: Board, interval_s: float) -> None:
        self._board = board
        self._interval_s = interval_s
        self.posts: dict[int, Post] = {}
        self._changed: dict[int, float] = {}
        self._looked = time.monotonic()

    def look(self, ranks: Iterable[int]) -> float:
        """Read the posts of `ranks` and return the seconds for which this process could not look."""
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
        """Return which rank failed, died or froze, and where; None where all ranks that have posted are alive.

        `patience_s` replaces the silence that each rank announced.
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
        """Return the last positions of the ranks that `problem` does not mention, as the end of a message."""
        seen = [
            f"rank {rank} at {post.position}"
            for rank, post in sorted(self.posts.items())
            if f"rank {rank} " not in problem
        ]
        return f" [last seen: {', '.join(seen)}]" if seen else ""
