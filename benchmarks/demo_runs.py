"""How far the demo's own prediction is off, again and again, with the machine's part taken out.

    python benchmarks/demo_runs.py [--runs 10] [--json]

Runs `stagewright demo` as a user does, and compares the plan and the record that it leaves. What the reference computation
between the steps took longer than when the machine was probed is the machine's part; the bar is of what is left. Prints each
run, the load of the machine at its beginning and how many runs are within the bar.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from figures import machine

BAR = 0.10


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for number in range(options.runs):
        rows.append(_run())
        if not options.json:
            row = rows[-1]
            print(
                f"{number + 1:2}: predicted {row['predicted_s']:.2f} s, measured {row['measured_s']:.2f} s "
                f"({row['plain']:+.1%}), machine {row['slowdown']:.2f} times slower, {row['left']:+.1%} left; "
                f"load {row['load']:.1f}",
                flush=True,
            )
    within = sum(abs(row["left"]) <= BAR for row in rows)
    if options.json:
        print(json.dumps({"machine": machine(), "rows": rows, "within": within}, indent=1))
    else:
        print(f"{within} of {len(rows)} runs within {BAR:.0%}")


def _run() -> dict[str, Any]:
    """One demo, in a folder of its own."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        _stagewright("demo", "--out", folder)
        plan, record = (str(Path(folder) / name) for name in ("small.json", "record.json"))
        found = json.loads(_stagewright("compare", plan, record, "--json"))
    predicted, measured = (found["step_seconds"][side] for side in ("predicted", "measured"))
    slowdown = found["machine_slowdown"] or 1.0
    return {
        "predicted_s": predicted, "measured_s": measured, "plain": predicted / measured - 1, "slowdown": slowdown,
        "left": predicted * slowdown / measured - 1, "load": load,
    }  # fmt: skip


def _stagewright(*arguments: str) -> str:
    command = [sys.executable, "-m", "stagewright.cli", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
