"""How fast programs are simulated, beside PyTorch's own dry run of a pipeline program.

Run: ``python benchmarks/simulate.py [--repeat N] [--output FILE] [--json]``. One core; the first call of the engine is
timed in a fresh interpreter, with the compiled code on disk.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numba

import stagewright
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

BESIDE_TORCH = [
    ("1f1b", 8, 64),
    ("interleaved-1f1b", 4, 32, 4),
    ("interleaved-1f1b", 16, 256, 4),
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


def against_torch(program: Program, repeat: int) -> dict[str, Any]:
    """PyTorch's dry run of the program as PyTorch lowers it; it counts steps and knows neither time nor memory."""
    from torch.distributed.pipelining import schedules

    rank_of_stage = program.placement.rank_of_stage
    order: dict[int, list[Any]] = {
        rank: [schedules._Action.from_str(str(action)) for action in actions]
        for rank, actions in enumerate(program.ranks)
    }
    lowered = schedules._add_send_recv(order, lambda stage: rank_of_stage[stage], program.num_stages)

    def dry_run() -> object:
        return schedules._simulate_comms_compute(
            lowered, lambda stage: rank_of_stage[stage], program.num_stages
        )

    torch_s = best_seconds(dry_run, 3)
    encoded = encode(insert_communication(program))
    costs = StageCosts.uniform(program.num_stages, saved_bytes=1.0)
    ours_s = best_seconds(lambda: simulate(encoded, costs, 0.1).peak_bytes, repeat)
    return {
        "schedule": program.name,
        "ranks": program.num_ranks,
        "microbatches": program.num_microbatches,
        "actions": encoded.num_actions,
        "torch_s": torch_s,
        "simulate_s": ours_s,
        "factor": torch_s / ours_s,
    }


def processor() -> str:
    """The model of this machine's processor, as Linux names it."""
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        return next(names, platform.machine())


def report(results: dict[str, Any]) -> Iterator[str]:
    """The results as Markdown."""
    machine = results["machine"]
    yield "# How fast programs are simulated"
    yield ""
    yield f"Machine: one core of {machine['processor']} ({machine['num_cores']} cores), shared with other work."
    yield f"Versions: Stagewright {machine['stagewright']}, Python {machine['python']}, numba {machine['numba']},"
    yield f"torch {machine['torch']}. Date: {date.today().isoformat()}. Command: `{machine['command']}`."
    yield ""
    yield "## Simulations, with the peak memory of every rank"
    yield ""
    yield "| schedule | ranks | microbatches | chunks | actions | encode, s | simulate, ms | million actions/s |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for row in results["simulations"]:
        yield (
            f"| {row['schedule']} | {row['ranks']} | {row['microbatches']} | {row['chunks']} | {row['actions']} "
            f"| {row['encode_s']:.3f} | {1e3 * row['simulate_s']:.3f} | {row['actions_per_s'] / 1e6:.1f} |"
        )
    yield ""
    yield f"Slowest: {min(row['actions_per_s'] for row in results['simulations']) / 1e6:.1f} million actions a second."
    yield ""
    yield f"First simulation in a fresh interpreter, imports included: {results['cold_start_s']:.2f} s."
    yield ""
    yield "## Beside PyTorch's dry run `_simulate_comms_compute`, which counts steps and knows neither time nor memory"
    yield ""
    yield "| schedule | ranks | microbatches | actions with transfers | PyTorch, ms | this simulator, ms | factor |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for row in results["against_torch"]:
        yield (
            f"| {row['schedule']} | {row['ranks']} | {row['microbatches']} | {row['actions']} "
            f"| {1e3 * row['torch_s']:.1f} | {1e3 * row['simulate_s']:.3f} | {row['factor']:.0f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=10, help="runs per size, of which the shortest counts")
    parser.add_argument("--output", type=Path, help="also write the tables to this file")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    arguments = parser.parse_args()
    results = {
        "machine": {
            "processor": processor(),
            "num_cores": os.cpu_count(),
            "stagewright": stagewright.__version__,
            "python": platform.python_version(),
            "numba": numba.__version__,
            "torch": version("torch"),
            "command": f"python benchmarks/simulate.py --repeat {arguments.repeat}",
        },
        "simulations": [simulated(*size, arguments.repeat) for size in SIZES],
        "cold_start_s": cold_start_seconds(),
        "against_torch": [against_torch(build(*size), arguments.repeat) for size in BESIDE_TORCH],
    }
    lines = list(report(results))
    if arguments.output:
        arguments.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(json.dumps(results) if arguments.json else "\n".join(lines))


if __name__ == "__main__":
    main()
