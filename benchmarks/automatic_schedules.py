"""How long automatic zero-bubble schedules take, in units of what `torch.export` of Llama-3-8B takes in the same run.

    python benchmarks/automatic_schedules.py [--repeats 3] [--beside SRC] [--json]

X is `torch.export` of Llama-3-8B, 8,192 tokens with labels, on fake tensors, imports left out. Beside it the verb
`schedule zb-auto` from its start to its end, with the compiled code on disk, and in further processes the search alone.
Costs are equal passes, those published for a GPT of 14.6 B parameters (Qi et al. 2023, arXiv 2401.10241, table 9), or uneven
ones with a heavy last stage. `--beside` times the searches of another source tree in turns with this one, and compares
bubbles. Seconds are processor time of the one thread that all of them use, so that other programs disturb less.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from large_estimates import EXPORT

VERBS = (
    ("--ranks", "32", "--microbatches", "96", "--memory-limit", "32"),
    ("--ranks", "32", "--microbatches", "96", "--memory-limit", "31"),
    ("--ranks", "32", "--microbatches", "256", "--memory-limit", "32"),
    ("--ranks", "8", "--microbatches", "24", "--memory-limit", "8", "--set", "by_span=true"),
)
COSTS = ("equal", "14.6B", "uneven")
SEARCHES = [
    # ranks, microbatches, limit in microbatches of the largest stage, costs, by span
    *((8, 24, limit, costs, by_span) for limit in (4, 8, 12, 16) for costs in COSTS for by_span in (0, 1)),
    *((16, 48, limit, costs, by_span) for limit in (8, 16, 32) for costs in COSTS for by_span in (0, 1)),
    *((32, 96, limit, costs, 0) for limit in (16, 32, 64) for costs in COSTS),
    (32, 256, 32, "14.6B", 1),
    (32, 256, 32, "uneven", 1),
]  # fmt: skip

_SEARCH = """
import json, sys, time
import numpy as np
from stagewright.schedule.automatic import SearchSettings, StageTimes, automatic
from stagewright.schedule.placement import linear
from stagewright.simulation import Contention, StageCosts, simulate
def searched(ranks, microbatches, limit, costs, by_span):
    if costs == "uneven":
        rng = np.random.default_rng(ranks)
        weight = rng.uniform(0.8, 1.2, ranks)
        weight[-1] *= 1.3
        input_grad, saved = 1.1 * weight * rng.uniform(0.9, 1.1, ranks), rng.uniform(0.9, 1.1, ranks)
        times = StageTimes(weight, input_grad, 0.8 * weight, np.full(ranks - 1, 0.05), saved, np.full(ranks, 0.5))
    elif costs == "equal":
        times = StageTimes.uniform(ranks, held=1.0)
    else:
        times = StageTimes.uniform(ranks, 11.347, 11.248, 8.132, 0.377, 0.4326171875)
    limit = limit * times.saved.max()
    began = time.process_time()
    program = automatic(linear(ranks), microbatches, times, limit, SearchSettings(by_span=bool(by_span), num_moves=2000))
    seconds = time.process_time() - began
    passes = times.forward_s, times.input_grad_s, times.weight_grad_s
    stages = StageCosts.of(*passes, saved_bytes=times.saved, held_bytes=times.held)
    edges = {(s, s + 1): hop for s, hop in enumerate(times.transfer_s)}
    timeline = simulate(program, stages, edges, contention=Contention.NONE)
    assert (timeline.peak_bytes <= limit + 1e-9).all()
    length = timeline.span_s.max() if by_span else timeline.makespan_s
    return seconds, 1 - microbatches * sum(passes).max() / length
searched(4, 4, 4, "equal", 0), searched(4, 4, 3, "uneven", 1)
print(json.dumps(searched(*json.loads(sys.argv[1]))))
"""


def _run(source: str | None, *arguments: str) -> tuple[float, str]:
    """Processor seconds of a new process, and what it prints."""
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    if source is not None:
        environment["PYTHONPATH"] = source
    before = os.times()
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    after = os.times()
    if done.returncode:
        raise SystemExit(done.stderr.strip())
    return (
        after.children_user + after.children_system - before.children_user - before.children_system,
        done.stdout,
    )


def measured(repeats: int, beside: str | None) -> dict[str, Any]:
    """Median seconds of X, of the verbs, and of every search with its bubble; with those of `beside`."""
    export = EXPORT.replace("perf_counter", "process_time")
    taken: dict[str, list[float]] = {"X": []}
    searches: list[dict[str, Any]] = []
    for repeat in range(repeats + 1):
        x_s = float(_run(None, "-c", export)[1])
        verbs = {
            " ".join(verb): _run(None, "-m", "stagewright.cli", "schedule", "zb-auto", *verb)[0]
            for verb in VERBS
        }
        if repeat:  # the first compiles
            for name, seconds in {"X": x_s, **verbs}.items():
                taken.setdefault(name, []).append(seconds)
    seconds = {name: statistics.median(times) for name, times in taken.items()}
    for search in SEARCHES:
        row: dict[str, Any] = {"search": search}
        for name, source in (("here", None), ("beside", beside)):
            if name == "here" or source is not None:
                row[name] = json.loads(_run(source, "-c", _SEARCH, json.dumps(search))[1])
        searches.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
    return {
        "seconds": seconds,
        "in_x": {name: s / seconds["X"] for name, s in seconds.items()},
        "searches": searches,
    }


def main() -> None:
    """Print the medians and the searches."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--beside", metavar="SRC", help="the source tree of another version")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = measured(given.repeats, given.beside and str(Path(given.beside).resolve()))
    if given.json:
        print(json.dumps(found, indent=1))
        return
    for name, seconds in found["seconds"].items():
        print(f"{name:<68}{seconds:>8.2f} s{found['in_x'][name]:>8.2f} X")
    for row in found["searches"]:
        ranks, microbatches, limit, costs, by_span = row["search"]
        what = f"{ranks} ranks, {microbatches} microbatches, limit {limit}, {costs}{', by span' if by_span else ''}"
        line = f"{what:<68}{row['here'][0]:>8.2f} s{row['here'][0] / found['seconds']['X']:>8.2f} X{row['here'][1]:>10.4%}"
        if "beside" in row:
            line += f"   beside:{row['beside'][0]:>8.2f} s{row['beside'][1]:>10.4%}"
        print(line)


if __name__ == "__main__":
    main()
