"""How long estimates of a large model take, in units of what `torch.export` of Llama-3-8B takes in the same run.

    python benchmarks/large_estimates.py [--repeats 3] [--runtime NAME] [--json]

X is `torch.export` of Llama-3-8B, 8,192 tokens with labels, on fake tensors, imports left out.
Beside it the verb `estimate` for llama-3-405b at tp 8 x cp 2 x pp 16, from its start to its end: with nothing known of the
model (`new`), and with its trace kept by the run before (`kept`); and, in one process that has made such an estimate, a
hundred further ones with other schedules, microbatches and widths (`further`, from as many as --further says). Runs are
interleaved; medians are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

EXPORT = """
import time, torch, transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from stagewright.tracing.models.build import build
from stagewright.tracing.models.reference import resolve
built = build(resolve("llama-3-8b"), 1, 8192, "bfloat16", fake=True)
mode = next(built.module.parameters()).fake_mode
began = time.perf_counter()
with mode:
    torch.export.export(built.module, (), built.inputs, strict=False)
print(time.perf_counter() - began)
"""

_FURTHER = """
import sys, time
from stagewright.cluster import load_cluster
from stagewright.planning.estimate import estimate
from stagewright.planning.job import Job
from stagewright.tracing.models.reference import resolve
runtime, num_further = sys.argv[1], int(sys.argv[2])
cluster, reference = load_cluster("64x8x-h100"), resolve("llama-3-405b")
def asked(tp=8, cp=2, pp=16, microbatch=1, schedule="1f1b"):
    job = Job(global_batch=64, sequence_length=8192, runtime=runtime)
    estimate(reference, cluster, job, tp=tp, cp=cp, pp=pp, dp=1, sequence_parallel=True, zero=1, microbatch=microbatch,
             schedule=schedule)
asked()
widths = [(tp, cp, pp) for pp in (16, 8, 32) for tp, cp in ((8, 2), (8, 1), (4, 2))]
every = [(*one, size, how) for size in (1, 2) for how in ("1f1b", "gpipe", "zb-h1") for one in widths]
began = time.perf_counter()
for one in every[:num_further]:
    asked(*one)
print(100 * (time.perf_counter() - began) / max(1, min(num_further, len(every))))
"""

_VERB = [
    "-m", "stagewright.cli", "estimate", "llama-3-405b", "--cluster", "64x8x-h100", "--global-batch", "64",
    "--sequence-length", "8192", "--tp", "8", "--cp", "2", "--pp", "16", "--dp", "1", "--sequence-parallel",
    "--zero", "1", "--json", "--runtime",
]  # fmt: skip


def _seconds(cache: str, *arguments: str) -> tuple[float, float]:
    """What a new process takes, and what it prints, where that is a number."""
    environment = {**os.environ, "STAGEWRIGHT_CACHE": cache, "PYTHONWARNINGS": "ignore"}
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    taken = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(done.stderr.strip())
    return taken, 0.0 if done.stdout.startswith("{") else float(done.stdout)


def measured(repeats: int, runtime: str, num_further: int) -> dict[str, Any]:
    """Median seconds of each, and their ratios to X."""
    found: dict[str, list[float]] = {"X": [], "new": [], "kept": [], "further": []}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as cache:
            found["X"].append(_seconds(cache, "-c", EXPORT)[1])
            found["new"].append(_seconds(cache, *_VERB, runtime)[0])
            found["kept"].append(_seconds(cache, *_VERB, runtime)[0])
            if num_further:
                found["further"].append(_seconds(cache, "-c", _FURTHER, runtime, str(num_further))[1])
    seconds = {name: statistics.median(times) for name, times in found.items() if times}
    return {"seconds": seconds, "in_x": {name: taken / seconds["X"] for name, taken in seconds.items()}}


def main() -> None:
    """Print the medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--runtime", default="megatron-core+te")
    parser.add_argument("--further", type=int, default=12, metavar="N")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = measured(given.repeats, given.runtime, given.further)
    if given.json:
        print(json.dumps(found, indent=1))
        return
    for name, taken in found["seconds"].items():
        print(f"{name:<8}{taken:>9.2f} s{found['in_x'][name]:>9.2f} X")


if __name__ == "__main__":
    main()
