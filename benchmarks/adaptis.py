"""The joint search on the layer costs of AdaPtis' table, beside every other method, in simulation.

    python benchmarks/adaptis.py [--part cells|speed|scaling|optimum|kernel] [--seconds 10] [--seed 0] [--only NAME]
        [--json]

`cells`: 18 cells, four microbatches per rank; ours with the memory peak of AdaPtis' tuner as its limit.
`speed`: large batches in limited time. `scaling`: one model on more and more ranks. `optimum`: small random
instances beside their true optimum. `kernel`: what one action of a list schedule takes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from adaptis_costs import FAMILIES, SIZES, cell, cells
from peers.exact.joint import optimum
from peers.plans.adaptis import tune
from stagewright.errors import PlanError
from stagewright.planning.joint.layout import stages_of
from stagewright.planning.joint.plan import DeadlinePolicy, JointPlan, judged
from stagewright.planning.joint.problem import JointProblem, LayerTable
from stagewright.planning.joint.search import Effort, search
from stagewright.planning.joint.starts import balanced, even
from stagewright.schedule import build
from stagewright.schedule.list_scheduler.kernels import list_schedule
from stagewright.schedule.list_scheduler.priorities import UNLIMITED, deadlines_of, window_of
from stagewright.schedule.list_scheduler.terms import Rule
from stagewright.schedule.placement import linear, loop

Row = dict[str, Any]
_SCHEDULES = 200
"""List schedules per round of `kernel`."""
METHODS = ("1F1B", "I-1F1B", "ZB", "Mist", "AdaPtis", "ours")


def one_layer_per_stage(problem: JointProblem) -> JointPlan:
    """Even interleaved 1F1B as the paper runs it; the head belongs to the last stage."""
    num_layers, ranks = problem.layers.num_layers - 1, problem.num_ranks
    chunks = max(1, num_layers // ranks)
    layout = even(problem, loop(ranks, chunks))
    name = "interleaved-1f1b" if chunks > 1 else "1f1b"
    program = build(name, ranks, problem.num_microbatches, chunks)
    return judged("I-1F1B", problem, layout, program)


def others(problem: JointProblem) -> dict[str, JointPlan]:
    """The methods that ours is compared with; Mist stands for balanced stages under 1F1B."""
    ranks, M = problem.num_ranks, problem.num_microbatches
    straight = even(problem, linear(ranks))
    fair = balanced(problem, linear(ranks))
    assert fair is not None
    return {
        "1F1B": judged("1F1B", problem, straight, build("1f1b", ranks, M)),
        "I-1F1B": one_layer_per_stage(problem),
        "ZB": judged("ZB", problem, straight, build("zb-h1", ranks, M)),
        "Mist": judged("Mist", problem, fair, build("1f1b", ranks, M)),
        "AdaPtis": tune(problem).best,
    }


def cell_name(family: str, sequence: int, size: int) -> str:
    """
    >>> cell_name("Gemma", 2048, 0)
    'Gemma 2k Small'
    """
    return f"{family} {sequence // 1024}k {SIZES[size]}"


def cell_row(family: str, sequence: int, size: int, seconds: float, seed: int) -> Row:
    """Makespans of all methods, the bound, and memory peaks of AdaPtis' tuner and ours."""
    plans = others(cell(family, sequence, size))
    limited = cell(family, sequence, size, memory_bytes=plans["AdaPtis"].peak_bytes)
    found = search(limited, Effort(seconds=seconds), seed=seed)
    plans["ours"] = found.best
    return {
        "cell": cell_name(family, sequence, size),
        **{method: plans[method].makespan_s for method in METHODS},
        "bound": found.bound.seconds,
        "share": found.bound.seconds / found.best.makespan_s,
        "gain": plans["I-1F1B"].makespan_s / found.best.makespan_s,
        "over AdaPtis": plans["AdaPtis"].makespan_s / found.best.makespan_s,
        "peak": found.best.peak_bytes / plans["AdaPtis"].peak_bytes,
        "seconds": found.seconds,
    }


def cell_part(seconds: float, seed: int, only: str = "") -> list[Row]:
    """Every cell whose name contains `only`, their mean and the worst of each column."""
    rows = [cell_row(*each, seconds, seed) for each in cells() if only in cell_name(*each)]
    mean: Row = {"cell": "mean"}
    for key in ("share", "gain", "over AdaPtis", "peak", "seconds"):
        mean[key] = float(np.mean([row[key] for row in rows]))
    worst: Row = {"cell": "worst"}
    worst |= {key: min(row[key] for row in rows) for key in ("share", "gain", "over AdaPtis")}
    worst |= {"peak": max(row["peak"] for row in rows), "seconds": max(row["seconds"] for row in rows)}
    return [*rows, mean, worst]


def speed_part(seconds: float, seed: int) -> list[Row]:
    """Wall time and share of the bound for 256 microbatches, and for 64 ranks."""
    rows = [
        _speed_row(f"{family} Large, M 256", cell(family, 4096, 2, 256), 5.0, seed) for family in FAMILIES
    ]
    rng = np.random.default_rng(seed)
    base = np.array([[1.0, 1.6, 0.4], [2.0, 3.3, 0.6]])[rng.integers(0, 2, 199)]
    table = LayerTable.of(*np.vstack([base, [[6.0, 2.0, 1.0]]]).T, saved_bytes=1.0)
    rows.append(_speed_row("64 ranks, 200 layers, M 512", JointProblem.of(table, 64, 512), 30.0, seed))
    return rows


def _speed_row(name: str, problem: JointProblem, seconds: float, seed: int) -> Row:
    began, cpu = time.monotonic(), time.process_time()
    # What is not search (the last simulation) takes about a tenth.
    found = search(problem, Effort(seconds=0.8 * seconds), seed=seed)
    wall, cpu = time.monotonic() - began, time.process_time() - cpu
    share = found.bound.seconds / found.best.makespan_s
    gain = one_layer_per_stage(problem).makespan_s / found.best.makespan_s
    return {"case": name, "limit": seconds, "wall": wall, "cpu": cpu, "share": share, "gain": gain}


def scaling_part(seconds: float, seed: int) -> list[Row]:
    """Nemotron-H Large at 4k with 64 microbatches on more and more ranks."""
    rows = []
    for ranks in (4, 8, 16, 28, 56):
        problem = cell("Nemotron-H", 4096, 2, 64, num_ranks=ranks)
        plans = others(problem)
        found = search(problem, Effort(seconds=seconds), seed=seed)
        plans["ours"] = found.best
        row: Row = {"ranks": ranks, **{method: plans[method].makespan_s for method in METHODS}}
        row |= {"share": found.bound.seconds / found.best.makespan_s}
        rows.append(row | {"gain": plans["I-1F1B"].makespan_s / found.best.makespan_s})
    return rows


def small_problem(rng: np.random.Generator) -> JointProblem:
    """Four to seven layers on two or three ranks, some with a heavy head, transfers or little memory."""
    layers, ranks, M = int(rng.integers(4, 8)), int(rng.integers(2, 4)), int(rng.integers(2, 6))
    passes = np.array([rng.integers(low, 10, layers) for low in (1, 1, 0)])
    if rng.random() < 0.5:
        passes[:, -1] *= 3
    memory = float(rng.integers(layers, layers * M + 1)) if rng.random() < 0.5 else np.inf
    table = LayerTable.of(*passes, saved_bytes=1.0)
    return JointProblem.of(table, ranks, M, latency_s=float(rng.integers(0, 3)), memory_bytes=memory)


def optimum_part(seconds: float, seed: int, wanted: int = 60) -> list[Row]:
    """Ours over the true optimum for as many instances as are proven."""
    rng = np.random.default_rng(seed)
    rows: list[Row] = []
    while len(rows) < wanted:
        problem = small_problem(rng)
        try:
            found = search(problem, Effort(rounds=round(seconds)), seed=seed)
        except PlanError:  # a memory limit below one microbatch
            continue
        best = optimum(problem, 60.0, at_most_s=found.best.makespan_s)
        if best.is_proven:
            size = (
                f"{problem.layers.num_layers} layers, {problem.num_ranks} ranks, M {problem.num_microbatches}"
            )
            loss = found.best.makespan_s / best.upper_s - 1
            rows.append(
                {"instance": size, "ours": found.best.makespan_s, "optimum": best.upper_s, "loss": loss}
            )
    losses = [row["loss"] for row in rows]
    rows.append({"instance": "mean", "loss": float(np.mean(losses))})
    return [*rows, {"instance": "worst", "loss": max(losses)}]


def kernel_part(seconds: float, seed: int) -> list[Row]:
    """Nanoseconds per action of the list schedule by deadlines, a layer per stage, in the fastest of `seconds` rounds."""
    rows = []
    for family in FAMILIES:
        problem = cell(family, 4096, 1)
        layout = even(problem, loop(problem.num_ranks, (problem.layers.num_layers - 1) // problem.num_ranks))
        rule = Rule(1, False, False, np.inf, 0.0, UNLIMITED, False, 3.0)
        stages, policy = stages_of(problem, layout), DeadlinePolicy.of(rule, problem.layers.num_layers)
        given = rule, window_of(stages, rule.depth), deadlines_of(stages, rule, policy.shifts), np.inf
        num_actions, best = 3 * layout.num_stages * problem.num_microbatches, np.inf
        for _ in range(1 + round(seconds)):
            began = time.perf_counter()
            for _ in range(_SCHEDULES):
                list_schedule(stages, problem.num_microbatches, *given)
            best = min(best, time.perf_counter() - began)
        name = cell_name(family, 4096, 1)
        rows.append({"cell": name, "actions": num_actions, "ns": 1e9 * best / _SCHEDULES / num_actions})
    return rows


PARTS: dict[str, Callable[[float, int], list[Row]]] = {
    "cells": cell_part,
    "speed": speed_part,
    "scaling": scaling_part,
    "optimum": optimum_part,
    "kernel": kernel_part,
}


def table_text(rows: list[Row]) -> str:
    """A Markdown table."""
    heads = list(rows[0])
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    lines += ["| " + " | ".join(_text(row.get(head, "")) for head in heads) + " |" for row in rows]
    return "\n".join(lines)


def _text(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--part", choices=PARTS, default="cells")
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="per search (rounds for `optimum` and `kernel`)"
    )
    parser.add_argument("--only", default="", help="with `cells`: those with this in their name")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    # Compile before anything is timed.
    search(JointProblem.of(LayerTable.of([1, 1], [1, 1], [1, 1]), 2, 2), Effort(rounds=4))
    given = arguments.seconds, arguments.seed
    rows = cell_part(*given, arguments.only) if arguments.part == "cells" else PARTS[arguments.part](*given)
    print(json.dumps(rows, indent=2) if arguments.json else table_text(rows))


if __name__ == "__main__":
    main()
