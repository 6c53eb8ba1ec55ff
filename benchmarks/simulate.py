"""How fast programs are simulated, beside PyTorch's own dry run of a pipeline program.

Run: ``python benchmarks/simulate.py [--repeat N] [--json]``. One core; the first call of the engine is
timed in a fresh interpreter, with the compiled code on disk.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numba

from stagewright.schedule import Program, build, insert_communication
from stagewright.simulation import StageCosts, encode, simulate

SIZES = [
    # family, ranks, microbatches, chunks, lowered
    ("1f1b", 8, 64, 1, False),
    ("1f1b", 16, 4096, 1, False),
    ("interleaved-1f1b", 16, 1024, 4, False),
    ("zb-h1", 16, 2048, 1, False),
    ("1f1b", 16, 1024, 1, True),
    ("breadth-first", 64, 1024, 8, False),
    ("interleaved-1f1b", 64, 1024, 8, False),
]


def best_seconds(run: Callable[[], object], repeat: int) -> float:
    """The shortest of `repeat` runs after one to warm up."""
    run()
    times = []
    for _ in range(repeat):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)


def simulated(
    name: str, num_ranks: int, num_microbatches: int, num_chunks: int, lowered: bool, repeat: int
) -> dict[str, Any]:
    program = build(name, num_ranks, num_microbatches, num_chunks)
    program = insert_communication(program) if lowered else program
    begin = time.perf_counter()
    encoded = encode(program)
    encode_s = time.perf_counter() - begin
    costs = StageCosts.uniform(program.num_stages, saved_bytes=1.0)

    def run() -> object:
        timeline = simulate(encoded, costs, 0.1)
        return timeline.makespan_s, timeline.peak_bytes

    seconds = best_seconds(run, repeat)
    return {
        "schedule": name + (" lowered" if lowered else ""),
        "ranks": num_ranks,
        "microbatches": num_microbatches,
        "chunks": num_chunks,
        "actions": encoded.num_actions,
        "encode_s": encode_s,
        "simulate_s": seconds,
        "actions_per_s": encoded.num_actions / seconds,
    }


def cold_start_seconds() -> float:
    """First simulation in a fresh interpreter, imports of this project included, from the code compiled before."""
    code = (
        "import time; begin = time.perf_counter()\n"
        "from stagewright.schedule import build\n"
        "from stagewright.simulation import StageCosts, simulate\n"
        "simulate(build('1f1b', 4, 8), StageCosts.uniform(4)).peak_bytes\n"
        "print(time.perf_counter() - begin)"
    )
    command = [sys.executable, "-c", code]
    times = [
        float(subprocess.run(command, check=True, capture_output=True, text=True).stdout) for _ in range(3)
    ]
    return min(times)


def against_torch(program: Program) -> dict[str, Any]:
    """PyTorch's dry run of the program as PyTorch lowers it; it counts steps and knows neither time nor memory."""
    from torch.distributed.pipelining import schedules

    rank_of_stage = program.placement.rank_of_stage
    order = {
        rank: [schedules._Action.from_str(str(action)) for action in actions]
        for rank, actions in enumerate(program.ranks)
    }
    lowered = schedules._add_send_recv(order, lambda stage: rank_of_stage[stage], program.num_stages)
    begin = time.perf_counter()
    schedules._simulate_comms_compute(lowered, lambda stage: rank_of_stage[stage], program.num_stages)
    torch_s = time.perf_counter() - begin
    encoded = encode(insert_communication(program))
    costs = StageCosts.uniform(program.num_stages, saved_bytes=1.0)
    ours_s = best_seconds(lambda: simulate(encoded, costs, 0.1).peak_bytes, 5)
    return {
        "schedule": program.name,
        "ranks": program.num_ranks,
        "microbatches": program.num_microbatches,
        "actions": encoded.num_actions,
        "torch_s": torch_s,
        "simulate_s": ours_s,
        "factor": torch_s / ours_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=10, help="runs per size, of which the shortest counts")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    arguments = parser.parse_args()
    results = {
        "machine": {
            "processor": platform.machine(),
            "python": platform.python_version(),
            "numba": numba.__version__,
        },
        "simulations": [simulated(*size, arguments.repeat) for size in SIZES],
        "cold_start_s": cold_start_seconds(),
        "against_torch": [
            against_torch(build("1f1b", 8, 64)),
            against_torch(build("interleaved-1f1b", 4, 32, 4)),
        ],
    }
    if arguments.json:
        print(json.dumps(results))
        return
    print(
        f"{'schedule':22} {'ranks':>5} {'mb':>5} {'chunks':>6} {'actions':>9} {'encode s':>9} {'simulate s':>11} {'M/s':>6}"
    )
    for row in results["simulations"]:
        print(
            f"{row['schedule']:22} {row['ranks']:5} {row['microbatches']:5} {row['chunks']:6} {row['actions']:9} "
            f"{row['encode_s']:9.3f} {row['simulate_s']:11.5f} {row['actions_per_s'] / 1e6:6.1f}"
        )
    print(f"\nfirst simulation in a fresh interpreter, imports included: {results['cold_start_s']:.2f} s\n")
    for row in results["against_torch"]:
        print(
            f"{row['schedule']}, {row['ranks']} ranks, {row['microbatches']} microbatches, {row['actions']} actions: "
            f"PyTorch's dry run {row['torch_s']:.3f} s, this simulator {row['simulate_s']:.5f} s, "
            f"factor {row['factor']:.0f}"
        )


if __name__ == "__main__":
    main()
