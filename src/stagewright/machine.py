"""Cores and memory of this machine, and the command that starts Python in a process."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def num_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command of a process that runs `module`. It imports nothing from the current folder (``-P``), where a file
    may have the name of a library."""
    return [sys.executable, "-P", "-m", module, *arguments]


def machine_bytes() -> int:
    """Return the bytes of memory of this machine, or of the container if it may use less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def free_bytes() -> float:
    """Return the bytes of memory that are free or cache files; infinity if the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return float("inf")
    amounts = (line.split() for line in lines if line.startswith("MemAvailable:"))
    return next((1024.0 * int(words[1]) for words in amounts), float("inf"))
