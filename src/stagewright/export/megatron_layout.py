"""Megatron-LM's notation for the layers of pipeline stages: `Et*3|(t*4|)*6t*3L`.

Stages are separated by `|`; E is the embedding, t a decoder layer, m a layer of multi-token prediction, L the loss. `x*n`
repeats a letter, `(...)*n` a group; commas are ignored.

Source: Megatron-Core 0.19, megatron/core/transformer/pipeline_parallel_layer_layout.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

from stagewright.errors import InputError
from stagewright.limits import MOST_LAYERS, MOST_STAGES

_GROUP = re.compile(r"\(([^()]+)\)\*(\d+)")
_LETTER = re.compile(r"([A-Za-z])\*(\d+)")
_MOST_LETTERS = 4 * (MOST_LAYERS + MOST_STAGES)


def write_layout(counts: Sequence[int]) -> str:
    """Return the notation of stages of the given numbers of layers.

    >>> write_layout((1, 2, 2, 2, 2, 1)), write_layout((3, 2))
    ('Et|(t*2|)*4tL', 'Et*3|t*2L')
    """
    layers = [f"t*{count}" if count > 1 else "t" * count for count in counts]
    if len(layers) == 1:
        return f"E{layers[0]}L"
    first, *inner, last = layers
    middle = ""
    for drawn, group in groupby(inner):
        num = len(list(group))
        middle += f"({drawn}|)*{num}" if num > 1 else f"{drawn}|"
    return f"E{first}|{middle}{last}L"


def read_layout(text: str) -> tuple[int, ...]:
    """Return the layers of every stage.

    Raises:
        InputError: a letter or parenthesis in the wrong place, or layers other than those of a decoder.

    >>> read_layout("Ettt|(tt|)*3,t|L")
    (3, 2, 2, 2, 1, 0)
    >>> read_layout("Ett|mL")
    Traceback (most recent call last):
    stagewright.errors.InputError: layout 'Ett|mL': layers of multi-token prediction (m) are not predicted: leave them out
    """
    where = f"layout '{text}'"
    letters = _repeated(_repeated(text.replace(",", "").replace(" ", ""), _GROUP, where), _LETTER, where)
    if "m" in letters:
        raise InputError(f"{where}: layers of multi-token prediction (m) are not predicted: leave them out")
    if not re.fullmatch(r"E[t|]*L", letters):
        raise InputError(
            f"{where}: write E for the embedding first, t for layers, | between stages and L for the loss last, with "
            "repetitions as t*3 or (t*3|)*2"
        )
    return tuple(stage.count("t") for stage in letters.split("|"))


def _repeated(text: str, pattern: re.Pattern[str], where: str) -> str:
    """Return `text` with every match of `pattern` repeated by its count."""

    def written_out(match: re.Match[str]) -> str:
        what, number = match.groups()
        if len(what) * int(number[:9]) > _MOST_LETTERS:
            raise InputError(f"{where}: {match.group()} is more than any model has: give a smaller number")
        return what * int(number)

    return pattern.sub(written_out, text)
