"""Trace time and size of every bundled model: a new process with an empty cache, then a new process with a full one.

    python benchmarks/trace.py [--sequence-length 2048] [--models llama-3-8b ...] [--json]

Prints a table, then the slowest trace. Imports of torch and transformers are part of the time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from typing import Any

LIMIT_S = 30.0

_ONE = """
import json, sys, time
began = time.perf_counter()
from stagewright.tracing.cache import trace
graph = trace(sys.argv[1], 1, int(sys.argv[2]), "bfloat16", json.loads(sys.argv[3]))
seconds = time.perf_counter() - began
print(json.dumps({
    "seconds": seconds, "nodes": len(graph.nodes), "forward": len(graph.forward_ids), "parameters": graph.num_parameters,
    "kinds_of_operators": len({node.signature for node in graph.nodes}), "imported_torch": "torch" in sys.modules,
}))
"""

SHORT = {"bert-large": 512, "t5-large": 512, "gpt2-xl": 1024, "gpt2": 1024, "vit-huge": 1}


def measure(
    model: str, sequence_length: int, cache: str, overrides: dict[str, Any] | None = None
) -> dict[str, Any]:
    """One trace in a process of its own."""
    environment = {**os.environ, "STAGEWRIGHT_CACHE": cache, "PYTHONWARNINGS": "ignore"}
    arguments = [sys.executable, "-c", _ONE, model, str(sequence_length), json.dumps(overrides or {})]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{model}: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequence-length", type=int, default=2048)
    parser.add_argument("--models", nargs="*")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    from stagewright.tracing.models.reference import bundled_names

    rows = []
    for model in options.models or bundled_names():
        longest = 64 if model.startswith("tiny-") else SHORT.get(model, options.sequence_length)
        length = min(longest, options.sequence_length)
        with tempfile.TemporaryDirectory() as cache:
            cold = measure(model, length, cache)
            warm = measure(model, length, cache)
        rows.append({"model": model, "sequence_length": length, **cold, "cached_seconds": warm["seconds"]})
        if not options.json:
            row = rows[-1]
            print(
                f"{model:18} {row['seconds']:6.1f} s  cached {row['cached_seconds']:5.2f} s  {row['nodes']:6} nodes  "
                f"{row['forward']:6} forward  {row['kinds_of_operators']:4} kinds  {row['parameters'] / 1e9:8.2f} B",
                flush=True,
            )
    worst = max(rows, key=lambda row: row["seconds"])
    if options.json:
        machine = {
            "python": platform.python_version(),
            "processor": platform.processor(),
            "cores": os.cpu_count(),
        }
        print(json.dumps({"machine": machine, "rows": rows, "worst": worst["model"]}, indent=1))
        return
    verdict = "within" if worst["seconds"] <= LIMIT_S else "OVER"
    print(f"slowest: {worst['model']} {worst['seconds']:.1f} s, {verdict} the limit of {LIMIT_S:.0f} s")


if __name__ == "__main__":
    main()
