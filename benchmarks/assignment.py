"""Assignment of hosts to places: against all orders, and against the published annealer in a tenth of its time."""

from __future__ import annotations

import argparse
import csv
import json
import math
import time
from pathlib import Path

import numpy as np
from numba import njit

from stagewright.planning.assignment.kernels import NUM_MOVES, cost, move
from stagewright.planning.assignment.problem import AssignmentProblem
from stagewright.planning.assignment.solve import assign, best_of_all

LINKS = Path(__file__).parents[1] / "validation" / "data" / "links"
THEIRS_S = 10.0
SHARE = 0.1


def measured() -> np.ndarray:
    """Bytes/s between 16 hosts, row to column."""
    with (LINKS / "a100_16_hosts_send_MBps_time0.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))[1:]
    return np.array([[float(text) for text in row[-16:]] for row in rows]) * 1e6


def grid(
    rate: np.ndarray, replicas: int, stages: int, boundary: float = 25e6, gradient: float = 1e9
) -> AssignmentProblem:
    """A configuration whose units are whole hosts."""
    seconds = 1 / rate
    np.fill_diagonal(seconds, 0.0)
    share = 2 * (replicas - 1) / replicas
    hop = 8 * boundary * (seconds + seconds.T)
    return AssignmentProblem(replicas, stages, hop, share * gradient * seconds, np.ones(stages))


def planted(units: int, seed: int, num_slow: int = 3) -> np.ndarray:
    """Links around 18 GB/s that differ by direction, some of them three times slower."""
    generator = np.random.default_rng(seed)
    rate = 18e9 * (1 + 0.05 * generator.standard_normal((units, units)))
    for _ in range(num_slow):
        a, b = generator.choice(units, 2, replace=False)
        rate[a, b] /= 3
    return rate


@njit(cache=True)
def published(start, num_steps, seed, temperature, factor, grid):
    """Pipette's rule: a worse order is taken with exp(-d/T), d scaled to between a tenth and one."""
    np.random.seed(seed)
    order, trial, best = start.copy(), start.copy(), start.copy()
    now = least = cost(order, grid)
    size = len(order)
    for _ in range(num_steps):
        a, b = np.random.randint(size), np.random.randint(size)
        move(order, np.random.randint(NUM_MOVES), a, b, np.random.randint(size), trial)
        found = cost(trial, grid)
        delta = found - now
        if delta > 0:
            delta = delta / 10.0 ** (int(math.log10(delta)) + 1)
        if delta <= 0 or np.random.random() < math.exp(-delta / max(temperature, 1e-300)):
            order[:] = trial
            now = found
            if now < least:
                least = now
                best[:] = order
        temperature *= factor
    return best


def theirs(one: AssignmentProblem, seconds: float) -> float:
    """The published annealer, compiled, for so many seconds."""
    start = np.random.default_rng(0).permutation(one.num_units)
    published(start, 10, 0, 1.0, 0.999, one.terms)
    ends, best, temperature, seed = time.perf_counter() + seconds, start, 1.0, 0
    while time.perf_counter() < ends:
        best = min(best, published(best, 20_000, seed, temperature, 0.999, one.terms), key=one.seconds)
        temperature, seed = temperature * 0.999**20_000, seed + 1
    return one.seconds(best)


def exact(num_clusters: int) -> dict[str, object]:
    """How often the annealer and its repairs alone reach the optimum of clusters of 4 to 8 hosts."""
    from stagewright.planning.assignment.kernels import anneal
    from stagewright.planning.assignment.solve import _repaired

    shapes = [(2, 2), (2, 3), (1, 7), (7, 1), (2, 4), (4, 2), (1, 8), (8, 1)]
    reached = 0
    for seed in range(num_clusters):
        replicas, stages = shapes[seed % len(shapes)]
        one = grid(planted(replicas * stages, seed), replicas, stages)
        generator = np.random.default_rng(seed)
        starts = [generator.permutation(one.num_units) for _ in range(4)]
        first = one.seconds(np.arange(one.num_units))
        made = [
            _repaired(one, anneal(start, 5_000, 0.05 * first, 1e-5 * first, seed, one.terms), generator, 16)
            for start in starts
        ]
        reached += min(map(one.seconds, made)) <= best_of_all(one).seconds * (1 + 1e-12)
    return {"clusters": num_clusters, "annealed to the optimum": reached}


def against(name: str, one: AssignmentProblem) -> dict[str, object]:
    """Both on one grid."""
    assign(one, num_steps=100)
    begun = time.perf_counter()
    ours = assign(one)
    took = time.perf_counter() - begun
    other = theirs(one, THEIRS_S)
    return {
        "grid": name, "in order": ours.seconds_by_default, "ours": ours.seconds, "seconds": took, "theirs": other,
        "no worse in a tenth": ours.seconds <= other * (1 + 1e-9) and took <= SHARE * THEIRS_S,
    }  # fmt: skip


def main() -> None:
    """Print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clusters", type=int, default=56)
    given = parser.parse_args()
    found = [exact(given.clusters)]
    for replicas, stages in ((4, 4), (2, 8), (8, 2), (1, 16)):
        found.append(against(f"measured {replicas}x{stages}", grid(measured(), replicas, stages)))
        found.append(against(f"planted {replicas}x{stages}", grid(planted(16, 7), replicas, stages)))
    found.append(against("planted 8x8", grid(planted(64, 9, 40), 8, 8)))
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
