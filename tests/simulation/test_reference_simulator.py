"""The engine against a slow simulator that is easy to believe: longest paths by recursion."""

import sys
from functools import lru_cache

import numpy as np
import pytest

from random_programs import random_program
from stagewright.schedule import Action, Kind, Program, insert_communication
from stagewright.simulation import Contention, StageCosts, simulate

sys.setrecursionlimit(20_000)
SENT = {Kind.SEND_F, Kind.SEND_B}
POSTS = SENT | {Kind.RECV_F, Kind.RECV_B}


class Reference:
    """Start and end of every action of a program; transfers of one pair of ranks, or all that one rank
    sends, go one at a time."""

    def __init__(
        self, program: Program, costs: StageCosts, transfer_s, edges, contention=Contention.PAIR
    ) -> None:
        self.program, self.costs, self.transfer_s, self.edges = program, costs, transfer_s, edges
        self.contention = contention
        self.rank_of = program.placement.rank_of_stage
        self.place = {a: (r, i) for r, actions in enumerate(program.ranks) for i, a in enumerate(actions)}
        self.end = lru_cache(maxsize=None)(self._end)
        self.arrival = lru_cache(maxsize=None)(self._arrival)

    def _end(self, action: Action) -> float:
        seconds = {Kind.F: "forward_s", Kind.I: "input_grad_s", Kind.W: "weight_grad_s", Kind.B: "backward_s"}
        duration = 0.0 if action.kind in POSTS else getattr(self.costs, seconds[action.kind])[action.stage]
        return self.start(action) + duration

    def start(self, action: Action) -> float:
        rank, index = self.place[action]
        before = [a for a in self.program.ranks[rank][:index] if a.kind not in POSTS]
        times = [0.0] + ([self.end(before[-1])] if before else [])
        s, m = action.stage, action.microbatch
        if action.kind is Kind.F:
            times += [self.arrival(Kind.F, a, s, m) for a, c in self.edges if c == s]
        elif action.kind in (Kind.I, Kind.B):
            times += [self.end(Action(Kind.F, s, m))]
            times += [self.arrival(Kind.B, c, s, m) for a, c in self.edges if a == s]
        elif action.kind is Kind.W:
            times += [self.end(Action(Kind.I, s, m))]
        return max(times)

    def produced(self, direction: Kind, stage: int, m: int) -> Action:
        kinds = [Kind.F] if direction is Kind.F else [Kind.I, Kind.B]
        return next(Action(k, stage, m) for k in kinds if Action(k, stage, m) in self.place)

    def departures(self, source: int, target: int | None) -> list[tuple[Kind, int, int, int]]:
        """What rank `source` sends rank `target`, or any rank, in the order of its sends."""
        found = []
        for a in self.program.ranks[source]:
            if self.program.is_lowered:
                if a.kind in SENT and target in (None, self.rank_of[a.peer]):
                    found.append((Kind.F if a.kind is Kind.SEND_F else Kind.B, a.stage, a.peer, a.microbatch))
            elif a.kind in (Kind.F, Kind.I, Kind.B):
                direction = Kind.F if a.kind is Kind.F else Kind.B
                ends = [(x, y) if direction is Kind.F else (y, x) for x, y in self.edges]
                users = sorted(
                    user
                    for maker, user in ends
                    if maker == a.stage
                    and self.rank_of[user] != source
                    and target in (None, self.rank_of[user])
                )
                found += [(direction, a.stage, user, a.microbatch) for user in users]
        return found

    def _arrival(self, direction: Kind, stage: int, user: int, m: int) -> float:
        made = self.end(self.produced(direction, stage, m))
        source, target = self.rank_of[stage], self.rank_of[user]
        if source == target:
            return made
        times = [made]
        if self.program.is_lowered:
            send, receive = (Kind.SEND_F, Kind.RECV_F) if direction is Kind.F else (Kind.SEND_B, Kind.RECV_B)
            times += [self.end(Action(send, stage, m, user)), self.end(Action(receive, user, m, stage))]
        if self.contention is Contention.NONE:
            return max(times) + self.transfer_s(stage, user)
        queue = self.departures(source, target if self.contention is Contention.PAIR else None)
        place = queue.index((direction, stage, user, m))
        if place:
            times.append(self.arrival(*queue[place - 1]))
        return max(times) + self.transfer_s(stage, user)


def costs_and_transfers(seed: int, num_stages: int):
    rng = np.random.default_rng(seed)
    costs = StageCosts.of(
        *rng.uniform(0.1, 3.0, (3, num_stages)), backward_s=rng.uniform(0.1, 6.0, num_stages)
    )
    table = rng.uniform(0.0, 4.0, (num_stages, num_stages))
    return costs, lambda source, target: float(table[source, target])


@pytest.mark.parametrize("contention", Contention)
@pytest.mark.parametrize("lowered", [False, True])
@pytest.mark.parametrize("seed", range(120))
def test_random_programs_take_the_same_time(seed, lowered, contention):
    program, edges = random_program(seed)
    if lowered:
        program = insert_communication(program, edges, ahead=seed % 3)
    costs, transfers = costs_and_transfers(seed, program.num_stages)
    reference = Reference(program, costs, transfers, edges, contention)
    timeline = simulate(program, costs, transfers, edges=edges, contention=contention)
    for rank in range(program.num_ranks):
        for event in timeline.events(rank):
            assert event.end_s == pytest.approx(reference.end(event.action), rel=1e-12, abs=1e-12)
            assert event.start_s == pytest.approx(reference.start(event.action), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("seed", range(40))
def test_the_makespan_is_at_least_each_lower_bound(seed):
    program, edges = random_program(seed)
    costs, transfers = costs_and_transfers(seed, program.num_stages)
    timeline = simulate(program, costs, transfers, edges=edges)
    free = simulate(program, costs, 0.0, edges=edges, contention=Contention.NONE)
    longest_chain = costs.forward_s.sum() + np.minimum(costs.input_grad_s, costs.backward_s).sum()
    assert timeline.makespan_s >= free.makespan_s - 1e-9
    assert free.makespan_s >= free.busy_s.max() - 1e-9
    assert free.makespan_s >= longest_chain - 1e-9


@pytest.mark.parametrize("seed", range(40))
def test_the_fast_peaks_are_those_of_the_curves(seed):
    program, edges = random_program(seed)
    rng = np.random.default_rng(seed)
    size = {
        name: rng.uniform(0, 9, program.num_stages) for name in ("saved_bytes", "forward_transient_bytes")
    }
    costs = StageCosts.uniform(program.num_stages, held_bytes=size["saved_bytes"] / 3, **size)
    timeline = simulate(program, costs, 0.3, edges=edges)
    curves = [timeline.memory_curve(rank) for rank in range(program.num_ranks)]
    assert np.allclose(timeline.peak_bytes, [curve.peak_bytes for curve in curves])
    assert np.allclose([curve.num_bytes[-1] for curve in curves], timeline.base_bytes)
