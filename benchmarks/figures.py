"""What benchmarks say about their figures: intervals, the machine, and files as they are printed."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % percentile bootstrap of the median."""
    import numpy as np

    draws = np.random.default_rng(0).choice(values, (2000, len(values)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return float(low), float(high)


def machine() -> dict[str, str | int | None]:
    """Versions and cores, for documents."""
    import torch

    return {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()}


def write(lines: Iterable[str], output: Path | None) -> None:
    """Print a report, and write it to `output` if one is given."""
    text = "\n".join(lines) + "\n"
    if output:
        output.write_text(text, encoding="utf-8")
    sys.stdout.write(text)
