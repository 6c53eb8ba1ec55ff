"""Seconds to configure large models on large clusters, in a fresh process each."""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

CASES = (
    ("llama-3-405b", "2048x8x-h100", 2048, 60.0),
    ("llama-3-70b", "64x8x-h100", 1024, 10.0),
)
"""Model, cluster, global batch and the bar in seconds of the whole command."""


def once(model: str, cluster: str, global_batch: int) -> dict[str, object]:
    """One run of `stagewright configure`: wall seconds, processor seconds and the best configuration."""
    command = [
        sys.executable, "-m", "stagewright.cli", "configure", model, "--cluster", cluster,
        "--global-batch", str(global_batch), "--sequence-length", "8192", "--json",
    ]  # fmt: skip
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    found = subprocess.run(command, capture_output=True, check=True, text=True)
    wall = time.perf_counter() - begun
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    best = json.loads(found.stdout)["sizes"][0]["configurations"][0]
    return {"wall_s": round(wall, 2), "processor_s": round(used, 2), "best": best}


def main() -> None:
    """Print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=2, help="the first run compiles what is not cached")
    given = parser.parse_args()
    found = []
    for model, cluster, batch, bar in CASES:
        runs = [once(model, cluster, batch) for _ in range(given.repeats)]
        met = all(float(str(run["wall_s"])) <= bar for run in runs)
        found.append({"model": model, "cluster": cluster, "bar_s": bar, "met": met, "runs": runs})
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
