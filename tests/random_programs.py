"""Random valid programs: any placement, skip connections, orders and mixtures of split and full backwards."""

from __future__ import annotations

import random

from stagewright.schedule import Action, Kind, Placement, Program, TokenRules
from stagewright.schedule.replay import Replay


def random_program(seed: int) -> tuple[Program, list[tuple[int, int]]]:
    """A program of up to 4 ranks, 8 stages and 4 microbatches, and the edges between its stages."""
    rng = random.Random(seed)
    num_ranks, num_microbatches = rng.randint(1, 4), rng.randint(1, 4)
    holders = [*range(num_ranks), *(rng.randrange(num_ranks) for _ in range(rng.randint(0, 4)))]
    rng.shuffle(holders)
    stages = range(len(holders))
    skips = [(a, c) for a in stages for c in stages if c > a + 1 and rng.random() < 0.2]
    edges = [(s, s + 1) for s in stages[:-1]] + skips
    todo: list[list[Action]] = [[] for _ in range(num_ranks)]
    for stage, rank in enumerate(holders):
        for m in range(num_microbatches):
            todo[rank] += [Action(Kind(kind), stage, m) for kind in rng.choice(["FB", "FIW"])]
    empty = Program(
        "random", Placement(tuple(holders)), num_microbatches, tuple(() for _ in range(num_ranks))
    )
    return empty.with_ranks(_random_order(empty, edges, todo, rng)), edges


def _random_order(
    empty: Program, edges: list[tuple[int, int]], todo: list[list[Action]], rng: random.Random
) -> list[list[Action]]:
    """The actions of `todo` in an order in which they could happen."""
    rules = TokenRules.of(empty, edges)
    replay = Replay(empty, rules)
    ranks: list[list[Action]] = [[] for _ in todo]
    while any(todo):
        rank, action = rng.choice(
            [
                (rank, action)
                for rank, actions in enumerate(todo)
                for action in actions
                if replay.held.issuperset(replay.codes.effects(action).needs)
            ]
        )
        replay.perform(action)
        todo[rank].remove(action)
        ranks[rank].append(action)
    return ranks
