"""A choice by bytes per second, improved by letting one or two units change sides while others make up for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from stagewright.planning.saving.problem import Choice, Problem
from stagewright.planning.saving.ways import KEEP, OFFLOAD, RECOMPUTE, Ints, Ways

_NOTHING = 1e-12
"""Seconds below which a move counts as free; the larger of two free ones goes first."""

_MAX_EXCHANGES = 60
_IMPROVED = 2
"""How many beginnings are improved, the best first."""
_KICKS = 10
"""How often the best is thrown into disorder and improved again, where there are few enough units for that to be quick."""
_MOST_KICKED = 100
_DISORDER = 0.7
"""The part of what is given up that a kick takes back."""
_LEAVING = 10
"""How many moves, by seconds saved per byte, are tried in pairs before others make up for them."""
_ENTERING = 40
"""How many moves, by seconds per byte, may make up for them in pairs."""


def choose(problem: Problem) -> Choice | None:
    """A choice that saves what is needed at nearly the least time, or None if there is none.

    Begins in several ways, from only recomputing to offloading as much as hides behind computation, improves the best
    of them and takes the best of these.
    """
    if problem.needed <= 0:
        return Choice()
    ways = Ways(problem)

    def seconds(way: Ints) -> float:
        ways.restore(way)
        return ways.total_seconds

    begun = [way for begin in _beginnings(problem) if (way := _begun(ways, begin)) is not None]
    if not begun:
        return None
    begun.sort(key=seconds)
    best = min((_improved(ways, way) for way in begun[:_IMPROVED]), key=seconds)
    draw = np.random.default_rng(0)
    for _ in range(_KICKS if problem.may_offload and ways.size <= _MOST_KICKED else 0):
        kicked = _begun(ways, lambda ways, best=best: _kick(ways, best, draw))
        best = best if kicked is None else min(best, _improved(ways, kicked), key=seconds)
    ways.restore(best)
    return ways.choice


def _begun(ways: Ways, begin: Callable[[Ways], object]) -> Ints | None:
    """The ways of all units after a beginning that saves enough, or None."""
    ways.restore(np.zeros(ways.size, np.int64))
    begin(ways)
    if not _fill(ways):
        return None
    _drop_needless(ways)
    return ways.way.copy()


def _improved(ways: Ways, way: Ints) -> Ints:
    """`way` with units exchanged as long as that saves time."""
    ways.restore(way)
    for _ in range(_MAX_EXCHANGES):
        if not _exchange(ways):
            break
        _drop_needless(ways)
    return ways.way.copy()


def _beginnings(problem: Problem) -> Iterator[Callable[[Ways], object]]:
    yield _fill
    if problem.may_offload:
        yield _offload_freely
        yield _convert
        yield _offload_largest


def _offload_freely(ways: Ways) -> None:
    """Offloads units as long as it hides: those whose recomputation costs most per byte first."""
    shares = np.maximum(ways.chains.sum(axis=0), 1.0)
    cost = np.where(ways.allowed[RECOMPUTE], ways.chains @ (ways.seconds / shares), np.inf)
    room = ways.problem.free_s / ways.problem.link_s_per_byte
    for unit in np.argsort(-cost / np.maximum(ways.bytes, 1.0)).tolist():
        if ways.missing <= 0:
            break
        if ways.allowed[OFFLOAD, unit] and ways.moved + ways.bytes[unit] <= room:
            ways.do(OFFLOAD * ways.size + unit)


def _kick(ways: Ways, best: Ints, draw: np.random.Generator) -> None:
    """The ways of `best`, most of what it gives up kept, and others offloaded at random as long as that hides."""
    ways.restore(best)
    given_up = np.flatnonzero(best != KEEP)
    for unit in draw.choice(given_up, round(_DISORDER * len(given_up)), replace=False).tolist():
        ways.do(KEEP * ways.size + unit)
    room = ways.problem.free_s / ways.problem.link_s_per_byte
    for unit in draw.permutation(ways.size).tolist():
        if ways.missing <= 0:
            break
        if ways.way[unit] == KEEP and ways.allowed[OFFLOAD, unit] and ways.moved + ways.bytes[unit] <= room:
            ways.do(OFFLOAD * ways.size + unit)


def _convert(ways: Ways) -> None:
    """Recomputes enough, then offloads instead where that saves most time per byte moved, and so on."""
    if not _fill(ways):
        return
    for _ in range(ways.size):
        gains = -ways.costs()[OFFLOAD * ways.size :] * (ways.way == RECOMPUTE) * ways.allowed[OFFLOAD]
        rate = gains / np.maximum(ways.bytes, 1.0)
        best = int(np.argmax(rate))
        if gains[best] <= _NOTHING:
            return
        ways.do(OFFLOAD * ways.size + best)
        if not _fill(ways):
            return


def _offload_largest(ways: Ways) -> None:
    """Offloads as few units as save enough, whatever the link needs for it."""
    for unit in np.argsort(-ways.saved[OFFLOAD]).tolist():
        if ways.missing <= 0 or not ways.allowed[OFFLOAD, unit]:
            break
        ways.do(OFFLOAD * ways.size + unit)


def _fill(ways: Ways) -> bool:
    """Recomputes units, the most useful bytes per second first, until nothing is missing; false if that is impossible."""
    own = slice(RECOMPUTE * ways.size, (RECOMPUTE + 1) * ways.size)
    while ways.missing > 0:
        gives = np.where(ways.is_move()[own], ways.gives()[own], 0.0)
        if not np.any(gives > 0):
            return False
        costs = np.maximum(ways.costs()[own], _NOTHING)
        rate = np.minimum(gives, ways.missing) / costs
        best = np.flatnonzero(rate >= rate.max() * (1 - 1e-9))
        ways.do(own.start + int(best[np.argmin(costs[best])]))
    return True


def _drop_needless(ways: Ways, *, per_byte: bool = False) -> None:
    """Keeps units without which enough is saved, the costliest first, or the costliest per byte."""
    while True:
        gives = ways.gives()[: ways.size]
        costs = ways.costs()[: ways.size] / (np.maximum(-gives, 1.0) if per_byte else 1.0)
        costs = np.where((gives >= ways.missing) & (ways.way != KEEP), costs, np.inf)
        best = int(np.argmin(costs)) if ways.size else 0
        if not ways.size or costs[best] == np.inf:
            return
        ways.do(best)


def _exchange(ways: Ways) -> bool:
    """One or two moves that save time, made up for by at most two others; false if none are found."""
    before, seconds = ways.way.copy(), ways.total_seconds
    for leaving in _leaving(ways):
        ways.do_all(leaving)
        gained = seconds - ways.total_seconds
        entering = _cheapest(ways, gained * (1 - 1e-9), leaving) if gained > _NOTHING else None
        if entering is not None:
            ways.do_all(entering)
            return True
        ways.restore(before)
    return _replace_many(ways)


def _replace_many(ways: Ways) -> bool:
    """One unit given up, in place of all that are needless then, if that saves time: many small ones are cheaper per byte,
    and the last of them dearer than a large one. The few that give most per second are tried."""
    before, seconds = ways.way.copy(), ways.total_seconds
    adds = np.flatnonzero(ways.is_move() & (ways.gives() > 0))
    costs = np.maximum(ways.costs()[adds], _NOTHING)
    for move in adds[np.argsort(costs / ways.gives()[adds])][:_ENTERING].tolist():
        ways.do(move)
        _drop_needless(ways, per_byte=True)
        if ways.total_seconds < seconds * (1 - 1e-9):
            return True
        ways.restore(before)
    return False


def _leaving(ways: Ways) -> list[tuple[int, ...]]:
    """Moves that save time, alone and in pairs of those that save most per byte."""
    costs = np.where(ways.is_move(), ways.costs(), np.inf)
    useful = np.flatnonzero(costs < -_NOTHING)
    lost = np.maximum(-ways.gives()[useful], 1.0)
    useful = useful[np.argsort(costs[useful] / lost)].tolist()
    few = useful[:_LEAVING]
    pairs = [(a, b) for place, a in enumerate(few) for b in few[place + 1 :] if ways.unit(a) != ways.unit(b)]
    return [*((move,) for move in useful), *pairs]


def _cheapest(ways: Ways, below: float, without: tuple[int, ...]) -> tuple[int, ...] | None:
    """No, one or two moves that save what is missing in less than `below` seconds.

    Two moves may share operators, so that what is found costs at most what it is thought to.
    """
    if ways.missing <= 0:
        return ()
    gives = ways.gives()
    usable = ways.is_move() & (gives > 0)
    for move in without:
        usable[ways.unit(move) :: ways.size] = False
    moves = np.flatnonzero(usable)
    if not len(moves):
        return None
    gives, chain, moved = gives[moves], ways.chain_costs()[moves], ways.moved_bytes()[moves]
    now = ways.link_seconds(np.array(0.0))
    costs = chain + ways.link_seconds(moved) - now
    alone = np.where(gives >= ways.missing, costs, np.inf)
    best = int(np.argmin(alone))
    below, found = (float(alone[best]), (int(moves[best]),)) if alone[best] < below else (below, None)
    near = np.argsort(costs / gives)[:_ENTERING]
    both = chain[near][:, None] + chain[near] + ways.link_seconds(moved[near][:, None] + moved[near]) - now
    enough = gives[near][:, None] + gives[near] >= ways.missing
    units = moves[near] % ways.size
    both[~enough | (units[:, None] == units)] = np.inf
    first, second = divmod(int(np.argmin(both)), len(near))
    if both[first, second] < below:
        return int(moves[near[first]]), int(moves[near[second]])
    return found
