"""Damage by chance: a little of it in every run of the tests, much with STAGEWRIGHT_TORTURE=1 (``make torture``).

Tests that do damage are marked `torture`. In the gate chance is the same each time; in torture it is drawn anew, from the
seed in the last line, which STAGEWRIGHT_SEED sets.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

TEST_ALL = os.environ.get("STAGEWRIGHT_TEST_ALL") == "1"
"""Whether slow tests run too (``make test-all``)."""
TORTURE = os.environ.get("STAGEWRIGHT_TORTURE") == "1"
FUZZES = os.environ.get("STAGEWRIGHT_FUZZ") == "1"
"""Whether random models are tried by the thousand (``make fuzz-models``)."""
# Kept in the environment, so that the workers of one session share it.
SEED = os.environ.setdefault(
    "STAGEWRIGHT_SEED", str(random.SystemRandom().randrange(10**6) if TORTURE or FUZZES else 0)
)
FLIPS = 1000 if TORTURE else 300
"""Bits flipped in files of one kind."""


def chance(name: str) -> random.Random:
    """For the test `name`."""
    return random.Random(f"{SEED} {name}")


def flipped(content: bytes, bit: int) -> bytes:
    """`content` with one bit changed."""
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def summary(properties: Iterable[tuple[str, Any]]) -> str | None:
    """In a line, what tests say they did: ``damage`` of a kind so many times, and ``seconds`` until the victim had ended."""
    done: Counter[str] = Counter()
    seconds = []
    for name, value in properties:
        if name == "damage":
            done[value[0]] += value[1]
        elif name == "seconds":
            seconds.append(value)
    if not done:
        return None
    counts = ", ".join(f"{number:,} {what}" for what, number in sorted(done.items()))
    longest = f"; the longest took {max(seconds):.1f} s to end" if seconds else ""
    return f"torture: {counts}{longest} (STAGEWRIGHT_SEED={SEED})"
