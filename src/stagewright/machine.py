"""What this machine has for processes, and how Python starts in one."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def num_cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command of another process that runs `module`. It imports nothing from the current folder (``-P``), where
    a file named like a library may lie."""
    return [sys.executable, "-P", "-m", module, *arguments]


def machine_bytes() -> int:
    """Memory of this machine, or of the container if that may use less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def free_bytes() -> float:
    """Memory that is free or holds copies of files; no limit where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return float("inf")
    amounts = (line.split() for line in lines if line.startswith("MemAvailable:"))
    return next((1024.0 * int(words[1]) for words in amounts), float("inf"))
