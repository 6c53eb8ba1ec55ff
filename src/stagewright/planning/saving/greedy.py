"""A choice by bytes per second, improved by letting one or two units change sides while others make up for it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator

from stagewright.planning.saving.problem import Choice, Problem
from stagewright.planning.saving.ways import Move, Way, Ways

_NOTHING = 1e-12
"""Seconds below which a unit counts as free; the larger of two free ones goes first."""

_MAX_EXCHANGES = 60
_NEIGHBOURS = 24
"""How many moves, by cost per byte, may be paired in an exchange."""


def choose(problem: Problem) -> Choice | None:
    """A choice that saves what is needed at nearly the least time, or None if there is none.

    Begins in several ways, from only recomputing to offloading as much as hides behind computation, improves each and
    takes the best.
    """
    if problem.needed <= 0:
        return Choice()
    found = [ways.choice for ways in _attempts(problem) if _completed(ways)]
    return min(found, key=lambda choice: choice.seconds(problem), default=None)


def _attempts(problem: Problem) -> Iterator[Ways]:
    yield Ways(problem)
    if problem.may_offload:
        for shared in (False, True):
            yield Ways(problem, _free_to_offload(problem, shared))
        yield Ways(problem, _largest(problem))


def _free_to_offload(problem: Problem, shared: bool) -> list[int]:
    """Units whose transfers fit the free time: those whose recomputation costs most per byte first."""
    room = problem.free_s / problem.link_s_per_byte
    users = Counter(node for unit in problem.units for node in unit.chain)

    def cost_per_byte(index: int) -> float:
        unit = problem.units[index]
        if not unit.recomputable:
            return math.inf
        own = sum(problem.seconds[n] / (users[n] if shared else 1) for n in unit.chain)
        return own / max(unit.num_bytes, 1)

    chosen: list[int] = []
    saved = 0.0
    for index in sorted(range(len(problem.units)), key=cost_per_byte, reverse=True):
        if saved >= problem.needed:
            break
        size = problem.units[index].num_bytes
        if size <= room and problem.parks(index) > 0:
            chosen.append(index)
            room -= size
            saved += problem.parks(index)
    return chosen


def _largest(problem: Problem) -> list[int]:
    """As few units as save enough by being offloaded, whatever the link needs for it."""
    chosen: list[int] = []
    saved = 0.0
    for index in sorted(range(len(problem.units)), key=problem.parks, reverse=True):
        if saved >= problem.needed or problem.parks(index) <= 0:
            break
        chosen.append(index)
        saved += problem.parks(index)
    return chosen


def _completed(ways: Ways) -> bool:
    """Makes `ways` save enough, if that is possible, and at the least time found."""
    if not _fill(ways):
        return False
    _drop_needless(ways)
    for _ in range(_MAX_EXCHANGES):
        if not _exchange(ways):
            break
        _drop_needless(ways)
    return True


def _fill(ways: Ways) -> bool:
    """Recomputes units, the most useful bytes per second first, until nothing is missing."""
    problem = ways.problem
    moves = {unit: Move(unit, Way.RECOMPUTE) for unit in ways.recomputable if problem.saves(unit) > 0}
    costs = {unit: ways.cost(move) for unit, move in moves.items()}
    touching: dict[int, list[int]] = {}
    for unit in costs:
        for node in problem.units[unit].chain:
            touching.setdefault(node, []).append(unit)

    def rate(unit: int) -> tuple[float, float]:
        useful = min(ways.gives(moves[unit]), ways.missing)
        return useful / max(costs[unit], _NOTHING), -costs[unit]

    while ways.missing > 0:
        left = [unit for unit in costs if ways.gives(moves[unit]) > 0]
        if not left:
            return False
        best = max(left, key=rate)
        fresh = [node for node in problem.units[best].chain if not ways.uses[node]]
        was_offloaded = ways.way[best] is Way.OFFLOAD
        ways.do(moves[best])
        del costs[best]
        stale = costs.keys() if was_offloaded else {u for n in fresh for u in touching[n]} & costs.keys()
        for other in list(stale):
            costs[other] = ways.cost(moves[other])
    return True


def _drop_needless(ways: Ways) -> None:
    """Keeps units without which enough is saved, the costliest first."""
    for move in sorted(ways.keeping(), key=ways.cost):
        if ways.missing - ways.gives(move) <= 0:
            ways.do(move)


def _exchange(ways: Ways) -> bool:
    """One group of moves that saves time, made up for by one or two others; false if none is found."""
    for leaving in _leaving(ways):
        before = [Move(move.unit, ways.way[move.unit]) for move in leaving]
        gained = -_do_all(ways, leaving)
        entering = _cheapest(ways, gained * (1 - 1e-9), {move.unit for move in leaving})
        if entering is not None:
            _do_all(ways, entering)
            return True
        _do_all(ways, before)
    return False


def _do_all(ways: Ways, moves: Iterable[Move]) -> float:
    seconds = 0.0
    for move in moves:
        seconds += ways.cost(move)
        ways.do(move)
    return seconds


def _leaving(ways: Ways) -> list[tuple[Move, ...]]:
    """Moves that save time, alone and in pairs of those that save most per byte."""
    costs = {move: ways.cost(move) for move in (*ways.keeping(), *ways.changing())}
    useful = [move for move, cost in costs.items() if cost < 0 or move.way is not Way.KEEP]
    useful.sort(key=lambda move: costs[move] / max(ways.problem.units[move.unit].num_bytes, 1))
    few = useful[: _NEIGHBOURS // 2]
    pairs = [(a, b) for place, a in enumerate(few) for b in few[place + 1 :] if a.unit != b.unit]
    return [*((move,) for move in useful), *pairs]


def _cheapest(ways: Ways, below: float, without: set[int]) -> tuple[Move, ...] | None:
    """No, one or two moves that save what is missing in less than `below` seconds."""
    if ways.missing <= 0:
        return () if below > _NOTHING else None
    moves = [move for move in ways.giving() if move.unit not in without]
    costs = {move: ways.cost(move) for move in moves}
    best, found = below, None
    for move, cost in costs.items():
        if cost < best and ways.gives(move) >= ways.missing:
            best, found = cost, (move,)
    near = sorted(costs, key=lambda move: costs[move] / ways.gives(move))[:_NEIGHBOURS]
    for place, first in enumerate(near):
        for second in near[place + 1 :]:
            cost = costs[first] + costs[second]
            if cost < best and ways.gives(first) + ways.gives(second) >= ways.missing:
                best, found = cost, (first, second)
    if found is not None and len(found) == 2 and not _is_true(ways, found, below):
        return None
    return found


def _is_true(ways: Ways, moves: tuple[Move, ...], below: float) -> bool:
    """Whether two moves together, sharing operators or the link, and for different units, cost less than `below`."""
    if len({move.unit for move in moves}) < len(moves):
        return False
    before = [Move(move.unit, ways.way[move.unit]) for move in moves]
    seconds = _do_all(ways, moves)
    _do_all(ways, before)
    return seconds < below
