"""Placements of stages on ranks."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from stagewright.errors import ScheduleError


@dataclass(frozen=True, slots=True)
class Placement:
    """`rank_of_stage[s]` is the rank that holds stage `s`; every rank holds at least one stage.

    >>> Placement((0, 1, 1, 0)).stages_of(0)
    (0, 3)
    """

    rank_of_stage: tuple[int, ...]

    def __post_init__(self) -> None:
        ranks = set(self.rank_of_stage)
        if not ranks or ranks != set(range(len(ranks))):
            raise ScheduleError(
                f"placement {list(self.rank_of_stage)}: ranks must be 0 to P-1 and each hold a stage; "
                "number the ranks without gaps"
            )

    @property
    def num_stages(self) -> int:
        return len(self.rank_of_stage)

    @property
    def num_ranks(self) -> int:
        return max(self.rank_of_stage) + 1

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of `rank`, in increasing order."""
        return tuple(stage for stage, holder in enumerate(self.rank_of_stage) if holder == rank)

    def stages_on(self, ranks: Container[int]) -> frozenset[int]:
        """Return the stages of all `ranks`."""
        return frozenset(stage for stage, holder in enumerate(self.rank_of_stage) if holder in ranks)


def linear(num_ranks: int) -> Placement:
    """One stage per rank, in order.

    >>> linear(3).rank_of_stage
    (0, 1, 2)
    """
    return loop(num_ranks, 1)


def loop(num_ranks: int, num_chunks: int) -> Placement:
    """Stage `s` on rank ``s mod P``: the looped or interleaved placement.

    >>> loop(2, 2).rank_of_stage
    (0, 1, 0, 1)
    """
    _check_positive(num_ranks, num_chunks)
    return Placement(tuple(range(num_ranks)) * num_chunks)


def v(num_ranks: int) -> Placement:
    """Down the ranks and back up: rank 0 holds the first and the last stage.

    >>> v(2).rank_of_stage
    (0, 1, 1, 0)
    """
    return wave(num_ranks, 2)


def wave(num_ranks: int, num_chunks: int) -> Placement:
    """Down and up the ranks in turn, `num_chunks` times in all.

    >>> wave(3, 3).rank_of_stage
    (0, 1, 2, 2, 1, 0, 0, 1, 2)
    """
    _check_positive(num_ranks, num_chunks)
    down = tuple(range(num_ranks))
    return Placement(
        tuple(rank for chunk in range(num_chunks) for rank in (down[::-1] if chunk % 2 else down))
    )


def _check_positive(num_ranks: int, num_chunks: int) -> None:
    if num_ranks < 1 or num_chunks < 1:
        raise ScheduleError(
            f"a placement needs at least one rank and one chunk, not {num_ranks} and {num_chunks}"
        )
