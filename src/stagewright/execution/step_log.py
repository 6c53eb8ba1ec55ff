"""What every step came to, said while a run goes on: lines on stderr, and a file that outlives a run that fails."""

from __future__ import annotations

import json
import math
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from stagewright.errors import StagewrightWarning
from stagewright.files import through_no_link

STEPS = "steps.jsonl"


class StepLog:
    """One line per step in ``steps.jsonl``, and one on stderr, there at most one a second when steps are many.

    Args:
        folder: where the file goes, beside ``record.json``.
        first: steps done before; a run that goes on from some adds its lines to those that are there.
        num_steps: steps there will be with them.
    """

    def __init__(self, folder: Path, first: int, num_steps: int) -> None:
        self.num_steps = num_steps
        self.printed = 0.0
        self.is_incomplete = False
        self.path = folder / STEPS
        if not first:
            self.path.unlink(missing_ok=True)

    def __call__(self, step: int, result: Any) -> None:
        """Step number `step`, counted from 0, is done."""
        line = {
            "step": step + 1,
            "loss": finite(result.loss),
            "gradient_norm": finite(result.gradient_norm),
            "seconds": result.seconds,
        }
        self._keep(json.dumps(line))
        now = time.monotonic()
        if 0 < step < self.num_steps - 1 and self.num_steps > 50 and now - self.printed < 1.0:
            return
        self.printed = now
        print(
            f"step {step + 1}/{self.num_steps}  loss {result.loss:.4f}  gradient norm {result.gradient_norm:.3f}  "
            f"{result.seconds:.3f} s",
            file=sys.stderr,
            flush=True,
        )

    def _keep(self, line: str) -> None:
        """A file that takes no more ends no training: that is said once, and tried again with every step."""
        try:
            with open(self.path, "a", encoding="utf-8", opener=through_no_link) as file:
                file.write(f"{line}\n")
        except OSError as error:
            if not self.is_incomplete:
                self.is_incomplete = True
                warnings.warn(
                    f"steps from {json.loads(line)['step']} on are missing in '{self.path}' ({error.strerror or error}); "
                    "the run goes on: make room there, or its record cannot be written either",
                    StagewrightWarning,
                    stacklevel=2,
                )


def finite(value: float) -> float | None:
    """None for what JSON has no number for."""
    return value if math.isfinite(value) else None
