"""What stages recompute and offload: the greedy choice against the integer program, and replayed against the limit.

Stages are quarters of traced models, with 1 to 7 further sets of saved values in flight, a random share of the bytes to
save, and for every other one a link to the host that hides a random share of them. Both choices solve the same problem
(`stagewright.planning.saving.problem`). Gaps are in added time, of the best choice's or of a thousandth of all chains where
that is larger (choices that cost next to nothing).

Then whole pipelines are made to fit limits between the least and the most they can take, and replayed.

Run: ``python benchmarks/saving.py [--seeds N ...] [--output FILE]`` (a few minutes on one core).
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Iterator, Sequence
from datetime import date
from functools import cache
from pathlib import Path

import numpy as np
import scipy

from figures import write
from stagewright.cluster import load_cluster
from stagewright.estimation.stages import BodyCosts
from stagewright.estimation.time import Costing
from stagewright.graph.carving import carve
from stagewright.planning.candidate import Choice, make_program
from stagewright.planning.job import Job
from stagewright.planning.pipeline import allocatable_bytes, pipeline
from stagewright.planning.predict import rank_memories
from stagewright.planning.saving.exact import choose_exactly
from stagewright.planning.saving.fit import fit
from stagewright.planning.saving.greedy import choose
from stagewright.planning.saving.problem import Problem, chain_seconds, stage_units
from stagewright.tracing.cache import trace

MODELS = ("tiny-llama", "tiny-bert", "tiny-gpt2", "tiny-t5", "tiny-mixtral", "tiny-nemotron-h")
NUM_STAGES = 4
FURTHER_SETS = (1, 2, 3, 5, 7)
SHARES = (0.1, 0.25, 0.4, 0.6, 0.8, 0.95)
SCHEDULES = ("1f1b", "gpipe", "interleaved-1f1b", "breadth-first")
CLUSTER = load_cluster("4x-h100")


@cache
def body_of(model: str) -> BodyCosts:
    graph = trace(model, 2, 64, "bfloat16")
    device = CLUSTER.device.model_copy(update={"host_overhead_s": 0.0})
    return BodyCosts(graph, Costing(graph, device))


def problems(seed: int) -> Iterator[tuple[str, Problem]]:
    draw = np.random.default_rng(seed)
    for model in MODELS:
        body = body_of(model)
        cuts = [body.size * stage // NUM_STAGES for stage in range(1, NUM_STAGES)]
        for stage in carve(body.graph, cuts):
            units = tuple(stage_units(stage))
            seconds = chain_seconds(stage, units, body.costing)
            sizes = np.array([unit.num_bytes for unit in units])
            able = float(sizes[[unit.recomputable for unit in units]].sum())
            for further in FURTHER_SETS:
                link = (
                    sum(seconds.values()) / sizes.sum() * draw.uniform(0.2, 2)
                    if draw.random() < 0.5
                    else float("inf")
                )
                free = draw.uniform(0, 0.5) * sizes.sum() * link if np.isfinite(link) else 0.0
                yield model, Problem(
                    units, seconds, float(draw.choice(SHARES)) * able * further, {stage.index: further},
                    {stage.index: further - 1}, float(link), float(free),
                )  # fmt: skip


def gap_table(seeds: Sequence[int]) -> Iterator[str]:
    found: dict[tuple[str, str], list[float]] = {}
    seconds = [0.0, 0.0]
    for model, problem in (one for seed in seeds for one in problems(seed)):
        begin = time.perf_counter()
        near = choose(problem)
        middle = time.perf_counter()
        best = choose_exactly(problem)
        seconds = [seconds[0] + middle - begin, seconds[1] + time.perf_counter() - middle]
        assert (near is None) == (best is None)
        if near is None or best is None:
            continue
        least = max(best.seconds(problem), 1e-3 * sum(problem.seconds.values()))
        gap = (near.seconds(problem) - best.seconds(problem)) / least
        found.setdefault((model, "with offloading" if problem.may_offload else "recompute only"), []).append(
            gap
        )
    yield "| model | ways | stages | mean gap | worst gap |"
    yield "| --- | --- | ---: | ---: | ---: |"
    for (model, ways), gaps in sorted(found.items()):
        yield f"| {model} | {ways} | {len(gaps)} | {np.mean(gaps):.2%} | {max(gaps):.1%} |"
    every = [gap for gaps in found.values() for gap in gaps]
    yield f"| **all** | | {len(every)} | {np.mean(every):.2%} | {max(every):.1%} |"
    yield ""
    yield f"Greedy {seconds[0]:.1f} s, integer program {seconds[1]:.1f} s."


def replay_table() -> Iterator[str]:
    yield "| model | schedule | limits tried | fitted | over the limit when replayed | least slack | mean slack |"
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: |"
    for model in MODELS:
        for schedule in SCHEDULES:
            yield replay_row(model, schedule)


def replay_row(model: str, schedule: str) -> str:
    body, limits = body_of(model), 6
    program = make_program(Choice(1, NUM_STAGES, 2, 8, schedule))
    cuts = [body.size * stage // program.num_stages for stage in range(1, program.num_stages)]
    job = Job(global_batch=16, sequence_length=64)
    kept = rank_memories(pipeline(body, cuts, program, CLUSTER, job, 1))
    most = max(memory.peak_bytes for memory in kept)
    saved = max(memory.categories["activations"] for memory in kept)
    slacks: list[float] = []
    over = 0
    for share in np.linspace(0.1, 0.9, limits):
        limit = int(most - share * saved) + CLUSTER.device.workspace_bytes
        asked = job.model_copy(update={"memory_limit": limit})
        line = pipeline(body, cuts, program, CLUSTER, asked, 1)
        found = fit(line, body)
        if found is None:
            continue
        spare = [allocatable_bytes(asked, CLUSTER.device) - m.peak_bytes for m in rank_memories(found.line)]
        over += min(spare) < 0
        slacks.append(min(spare) / (most - saved))
    listed = f"{min(slacks):.2%} | {np.mean(slacks):.2%}" if slacks else "- | -"
    return f"| {model} | {schedule} | {limits} | {len(slacks)} | {over} | {listed} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        default=[0],
        help="of the problems; the program was tuned on those of 0",
    )
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    seeds = " ".join(map(str, arguments.seeds))
    lines = [
        f"# Recomputing and offloading, {date.today()}",
        "",
        *(__doc__ or "").split("Run:")[0].strip().splitlines(),
        "",
        f"`python benchmarks/saving.py --seeds {seeds}` on {platform.machine()}, Python "
        f"{platform.python_version()}, numpy {np.__version__}, scipy {scipy.__version__}.",
        "",
        "## Greedy against integer program",
        "",
        *gap_table(arguments.seeds),
        "",
        "## Replayed",
        "",
        "Slack: what the fullest rank has left, of what it holds from step to step.",
        "",
        *replay_table(),
    ]
    write(lines, arguments.output)


if __name__ == "__main__":
    main()
