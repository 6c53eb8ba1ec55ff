"""Who of a run's ranks is still alive, told from their posts on the board."""

from __future__ import annotations

import time
from collections.abc import Iterable

from stagewright.execution.board import Board, Post, read_post

FINISHED = "finished"


class Liveness:
    """Reads the posts of ranks again and again, and says which of them has failed, died or frozen.

    Time in which this process did not get to look (it was stopped, or the machine is busy) is held against nobody.

    Args:
        board: where the ranks post.
        interval_s: how often `look` is called.
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
