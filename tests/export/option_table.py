"""Words of a command line as options with their values."""

from __future__ import annotations

from collections.abc import Iterable


def table(words: Iterable[str]) -> dict[str, str]:
    """Options with their values."""
    found: dict[str, str] = {}
    last = ""
    for word in words:
        if word.startswith("--"):
            found[word] = ""
            last = word
        else:
            found[last] = word
    return found
