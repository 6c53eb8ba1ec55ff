"""Partitions that pay for memory with time against the exact program over all cuts, and the theorem they rest on.

Instances are random models of four kinds (alike operators; products among elementwise operators; transformer blocks with a
heavy embedding and head; blocks with offloading) and traced models, cut into 2 to 16 stages under 1F1B, GPipe, asynchronous
1F1B with weight versions, or two versions of the weights (2BW); with limits from tight to loose, ranks alike or unequal in
speed and memory, and boundaries that take time. A leaf is the cost of one stage over one range: its time, and the least time
it adds to fit (`stagewright.planning.partition.stage_ranges`); the exact program, the bisection and the halving share it.

For the theorem, pairs of neighbouring stages are cut at every position: is the best cut between the compute-balanced and the
memory-balanced one (or the overhead-balanced one), and what is lost by staying between them?

Run: ``python benchmarks/partition.py [--instances N] [--output FILE]`` (a few minutes on one core).
"""

from __future__ import annotations

import argparse
import math
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cache
from pathlib import Path

import numpy as np

from figures import write
from peers.exact.cuts import exact
from stagewright.arrays import Floats
from stagewright.cluster import load_cluster
from stagewright.estimation.stages import RangeCosts
from stagewright.estimation.time import Costing
from stagewright.planning.partition.binary import binary, memory_balance, time_balance
from stagewright.planning.partition.bisection import TimedCuts, bisect, last_true
from stagewright.planning.partition.ranges import Ranges, Recomputable, ranges_of
from stagewright.planning.partition.refine import best_partition
from stagewright.planning.partition.stage_ranges import StageRanges, StageTerms
from stagewright.tracing.cache import trace
from stagewright.tracing.models.reference import resolve

MIXES = ("alike", "products", "blocks", "offloading")
MODELS = ("tiny-llama", "tiny-bert", "tiny-gpt2", "tiny-mixtral", "tiny-nemotron-h")
SCHEDULES = ("1f1b", "gpipe", "async", "2bw")
NUM_STAGES = (2, 3, 4, 6, 8, 12, 16)
TIGHTNESS = (0.6, 0.7, 0.85, 1.0, 1.3)
SEARCHES: dict[str, Callable[[StageRanges], TimedCuts | None]] = {
    "bisection": bisect,
    "halving": binary,
    "both, moved": best_partition,
}


@dataclass
class Tally:
    """Gaps to the exact program, evaluations of leaves, and instances judged wrongly."""

    gaps: list[float] = field(default_factory=list)
    leaves: int = 0
    leaves_where_feasible: int = 0
    false_infeasible: int = 0
    seconds: float = 0.0


def sums(amounts: Floats) -> Floats:
    return np.concatenate([[0.0], np.cumsum(amounts)])


def random_ranges(draw: np.random.Generator, mix: str, size: int) -> Ranges:
    noise = [0.7 + 0.6 * draw.random(size) for _ in range(4)]
    product = draw.random(size) < 0.4
    match mix:
        case "alike":
            seconds, saved, weights = noise[0], noise[1], noise[2]
        case "products":
            seconds, saved = np.where(product, 4.0, 0.3) * noise[0], np.where(product, 0.7, 1.5) * noise[1]
            weights = np.where(product, 2.0, 0.01) * noise[2]
        case _:
            tiled = [np.tile(row, size // 6 + 1)[:size] for row in (
                (3.0, 0.2, 1.0, 0.2, 4.0, 0.3), (1.0, 1.0, 0.5, 2.0, 1.0, 2.0), (2.0, 0.0, 1.0, 0.0, 4.0, 0.0),
            )]  # fmt: skip
            seconds, saved, weights = (row * one for row, one in zip(tiled, noise, strict=False))
            weights[0] += 15
            seconds[-1], saved[-1], weights[-1] = 8, 6, 15
    again = seconds / 3 * (0.1 + 0.9 * draw.random(size))
    boundary = np.concatenate([[0.0], draw.random(size - 1), [0.0]])
    legal = 1 + np.flatnonzero(draw.random(size - 1) < 0.9)
    recomputable = Recomputable.sorted(list(range(size)), saved.tolist(), again.tolist())
    return Ranges(
        sums(seconds), sums(seconds / 3), sums(4 * weights), sums(weights), sums(saved), noise[3], boundary, legal,
        recomputable,
    )  # fmt: skip


@cache
def traced_ranges(model: str) -> Ranges:
    graph = trace(
        resolve(model, {"num_hidden_layers": 2} if "nemotron" not in model else {}), 2, 64, "bfloat16"
    )
    device = load_cluster("8x-h100").device.model_copy(update={"host_overhead_s": 0.0})
    return ranges_of(RangeCosts(graph, Costing(graph, device)))


def random_terms(
    draw: np.random.Generator, ranges: Ranges, count: int, schedule: str, offloads: bool
) -> list[StageTerms]:
    copies = [2 * count] * count if schedule == "gpipe" else [count - stage for stage in range(count)]
    versions = {"async": copies, "2bw": [2] * (count - 1) + [1]}.get(schedule, [1] * count)
    demand = (
        sum(
            k * ranges.saved_bytes[-1] + ranges.state_bytes[-1] + (v - 1) * ranges.parameter_bytes[-1]
            for k, v in zip(copies, versions, strict=True)
        )
        / count**2
    )
    tight = draw.choice(TIGHTNESS)
    uneven = draw.random() < 0.3
    link = ranges.seconds[-1] / ranges.saved_bytes[-1] * draw.uniform(0.1, 2) if offloads else math.inf
    wide = 0.5 * draw.random() * ranges.seconds[-1] / count / max(1.0, float(ranges.boundary_bytes.max()))
    return [
        StageTerms(
            copies=copies[stage],
            capacity=float(tight * demand * (1 + uneven * draw.uniform(-0.3, 0.5))),
            versions=versions[stage],
            inverse_speed=float(1 + uneven * draw.random()),
            link_s_per_byte=float(link),
            boundary_s_per_byte=float(wide),
        )
        for stage in range(count)
    ]


def instances(number: int) -> Iterator[tuple[str, Ranges, list[StageTerms]]]:
    """One of eight traced, the others random."""
    for seed in range(number):
        draw = np.random.default_rng(seed)
        count, schedule = int(draw.choice(NUM_STAGES)), str(draw.choice(SCHEDULES))
        if seed % 8 == 3:
            name = MODELS[seed // 8 % len(MODELS)]
            ranges, offloads = traced_ranges(name), bool(draw.random() < 0.5)
        else:
            name = MIXES[seed % 4]
            ranges, offloads = random_ranges(draw, name, int(draw.integers(48, 96))), name == "offloading"
        yield name, ranges, random_terms(draw, ranges, count, schedule, offloads)


# -- searches against the exact program -----------------------------------------------------------------------


def judged(number: int) -> tuple[dict[str, dict[str, Tally]], int]:
    """Kind of instance -> search -> tally; and how many instances have no feasible partition."""
    found: dict[str, dict[str, Tally]] = {}
    infeasible = 0
    for name, ranges, terms in instances(number):
        tallies = found.setdefault(name, {search: Tally() for search in ("exact", *SEARCHES)})
        best = timed(exact, StageRanges(ranges, terms), tallies["exact"])
        infeasible += best is None
        for search, run in SEARCHES.items():
            tally = tallies[search]
            got = timed(run, StageRanges(ranges, terms), tally)
            if best is None:
                assert got is None
            elif got is None:
                tally.false_infeasible += 1
            else:
                tally.gaps.append(got.seconds / best.seconds - 1)
    return found, infeasible


def timed(
    run: Callable[[StageRanges], TimedCuts | None], leaves: StageRanges, tally: Tally
) -> TimedCuts | None:
    begin = time.perf_counter()
    found = run(leaves)
    tally.seconds += time.perf_counter() - begin
    tally.leaves += leaves.num_evaluated
    tally.leaves_where_feasible += leaves.num_evaluated * (found is not None)
    return found


# -- the theorem ----------------------------------------------------------------------------------------------


@dataclass
class Share:
    """Pairs with a feasible cut: optimum inside the interval, interval without a feasible cut, losses inside, widths."""

    num_pairs: int = 0
    num_inside: int = 0
    num_barred: int = 0
    losses: list[float] = field(default_factory=list)
    widths: list[float] = field(default_factory=list)


def theorem(number: int) -> dict[str, tuple[Share, Share]]:
    """Kind of instance -> shares for the memory-balanced and for the overhead-balanced interval."""
    found: dict[str, tuple[Share, Share]] = {}
    for seed, (name, ranges, terms) in enumerate(instances(number)):
        shares = found.setdefault(name, (Share(), Share()))
        stage = int(np.random.default_rng(seed).integers(len(terms) - 1))
        size = ranges.size
        low, high = size * stage // len(terms), size * (stage + 2) // len(terms)
        ends = ranges.legal[(ranges.legal > low) & (ranges.legal < high)]
        if len(ends) < 3:
            continue
        pair = [replace(one, boundary_s_per_byte=0.0) for one in terms[stage : stage + 2]]
        judge_pair(StageRanges(ranges, pair), ends, low, high, shares)
    return found


def judge_pair(leaves: StageRanges, ends: np.ndarray, low: int, high: int, shares: Sequence[Share]) -> None:
    costs = np.array([max(leaves.cost(0, low, cut), leaves.cost(1, cut, high)) for cut in ends])
    best = float(costs.min())
    if not math.isfinite(best):
        return
    sides = (leaves, ends, 0, len(ends) - 1, low, high, (0, 1), (1, 2))
    by_time = time_balance(*sides)

    def overhead(stage: int, start: int, stop: int) -> float:
        return leaves.cost(stage, start, stop) - leaves.seconds(stage, start, stop)

    by_overhead = last_true(
        lambda i: overhead(0, low, int(ends[i])) <= overhead(1, int(ends[i]), high), 0, len(ends) - 1
    )
    for share, other in zip(shares, (memory_balance(*sides), by_overhead), strict=True):
        first, last = sorted((by_time, other))
        inside = float(costs[first : last + 2].min())  # a balance lies between two cuts
        share.num_pairs += 1
        share.num_inside += inside <= best * (1 + 1e-9)
        share.num_barred += not math.isfinite(inside)
        share.widths.append((last - first + 1) / len(ends))
        if math.isfinite(inside):
            share.losses.append(inside / best - 1)


# -- report ---------------------------------------------------------------------------------------------------


def report(number: int) -> Iterator[str]:
    begin = time.perf_counter()
    found, infeasible = judged(number)
    yield from ("## Against the exact program", "")
    yield "| instances | search | feasible | mean gap | worst gap | false infeasible | leaves | fewer than exact | seconds |"
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    total = {search: Tally() for search in ("exact", *SEARCHES)}
    for name, tallies in found.items():
        for search in SEARCHES:
            yield row(name, search, tallies[search], tallies["exact"])
        for search, tally in tallies.items():
            add(total[search], tally)
    for search in SEARCHES:
        yield row("**all**", search, total[search], total["exact"])
    yield ""
    yield f"{number} instances, of which {infeasible} have no feasible partition and no search found one."
    yield f"The exact program evaluated {total['exact'].leaves:,} leaves in {total['exact'].seconds:.0f} s."
    yield from ("", "## The theorem", "")
    yield "| instances | interval | pairs | best inside | no feasible cut inside | mean loss | worst loss | share of cuts |"
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for name, shares in theorem(3 * number).items():
        for interval, share in zip(("compute to memory", "compute to overhead"), shares, strict=True):
            yield theorem_row(name, interval, share)
    yield ""
    yield f"{time.perf_counter() - begin:.0f} s in all."


def add(total: Tally, tally: Tally) -> None:
    total.gaps += tally.gaps
    total.leaves += tally.leaves
    total.false_infeasible += tally.false_infeasible
    total.seconds += tally.seconds


def row(name: str, search: str, tally: Tally, best: Tally) -> str:
    gaps = tally.gaps or [0.0]
    return (
        f"| {name} | {search} | {len(tally.gaps)} | {np.mean(gaps):.3%} | {max(gaps):.2%} | "
        f"{tally.false_infeasible} | {tally.leaves:,} | {best.leaves / tally.leaves:.0f}x | {tally.seconds:.2f} |"
    )


def theorem_row(name: str, interval: str, share: Share) -> str:
    return (
        f"| {name} | {interval} | {share.num_pairs} | {share.num_inside / share.num_pairs:.1%} | {share.num_barred} | "
        f"{np.mean(share.losses):.3%} | {max(share.losses):.2%} | {np.mean(share.widths):.0%} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--instances", type=int, default=480)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    lines = [
        f"# Partitions within memory, {date.today()}",
        "",
        *(__doc__ or "").split("Run:")[0].strip().splitlines(),
        "",
        f"`python benchmarks/partition.py --instances {arguments.instances}` on {platform.machine()}, "
        f"Python {platform.python_version()}, numpy {np.__version__}.",
        "",
        *report(arguments.instances),
    ]
    write(lines, arguments.output)


if __name__ == "__main__":
    main()
