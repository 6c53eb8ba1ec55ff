"""The tests that are left to the night: those of `nightly.txt`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest


def nightly_tests() -> dict[str, int]:
    """Tests and single cases that only `make test-all` runs whole, and how many of their cases the gate runs."""
    lines = (Path(__file__).parent / "nightly.txt").read_text().splitlines()
    matches = (re.fullmatch(r"(.*?)(?: (\d+) cases?)?", line) for line in lines if line[:1] not in "#")
    return {match[1]: int(match[2] or 0) for match in matches if match}


def left_to_the_night(items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield the items that the gate leaves out. Cases that it runs of a longer list are spread evenly over it."""
    num_cases = nightly_tests()
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        name = item.nodeid.partition("[")[0]
        if item.nodeid in num_cases:
            yield item
        elif name in num_cases:
            cases.setdefault(name, []).append(item)
    for name, of_test in cases.items():
        kept = {index * len(of_test) // num_cases[name] for index in range(num_cases[name])}
        yield from (item for index, item in enumerate(of_test) if index not in kept)
