"""The least and the most that a figure can be.

What is outside is no cluster, model or job that exists or is likely to: it is a slip, refused by name, not computed with.
"""

from __future__ import annotations

from stagewright.errors import InputError

MOST_BYTES = 2**60
"""Of one device, host or tensor: an exbibyte, above the memory of the largest machines taken together."""
LEAST_RATE, MOST_RATE = 1.0, 2.0**60
"""Bytes, elements or random numbers per second: from a byte to an exbibyte a second."""
LEAST_FLOPS, MOST_FLOPS = 1.0, 1e21
"""Per second and device: the largest machines reach 1e19 over all their devices, in fp8."""
LEAST_SECONDS, MOST_SECONDS = 1e-12, 1e9
"""Of a pass, a message or an overhead, unless it is exactly 0: a clock's cycle takes 1e-10 s, and 1e9 s are 32 years."""
MOST_SPEED_RATIO = 1e6
"""How many times faster one rank or device can be than another."""
MOST_PRICE = 1e6
"""Dollars per hour and device."""
MOST_DEVICES = 2**17
"""Devices, ranks or nodes: 131,072, as many as the largest jobs that have been published."""
MOST_TOKENS = 2**26
"""Of one sample: 67 million, several times the longest contexts that models have been trained with."""
MOST_SAMPLES = 2**24
"""Of an optimizer step, and of a microbatch: 16 million, a hundred times the largest batches that models converge with."""
MOST_STEPS = 2**53
"""Of a run; counters of floating point lose count beyond."""
MOST_ACTIONS = 2**21
"""Forwards and backwards of a program, over all its ranks: twice what 64 ranks of 8 stages do for 1,024 microbatches."""
MOST_STAGES = 2**14
"""Of one pipeline; there are no models with as many layers."""
MOST_LAYERS = 2**10
"""Of a model: the deepest transformers that have been trained have 1,000."""
MOST_ROWS = 2**12
"""Of a table of costs, which may have several for a layer."""
MOST_SIZE = 2**20
"""Of a dimension in a model's configuration, and of counts such as that of experts: the widest layers have 2**17 columns."""
MOST_ENTRIES = 2**26
"""Of a vocabulary or a table of positions: the largest vocabularies have 2**18 entries; of positions, as many as tokens."""
MOST_PARAMETERS = 2**50
"""Of a model, all experts counted: a quadrillion, some hundred times the largest."""
MOST_PREDICTED = 10**30
"""Of seconds and bytes that a plan says or a run measured: sums over much of the above."""
LEAST_FRACTION = 1e-6
"""Of a peak or bandwidth that is attained."""


def check_seconds(seconds: float, what: str) -> float:
    """`seconds`, if something can take so long.

    Raises:
        InputError: too short, too long, negative or no number; names `what`.

    >>> check_seconds(0.25, "forward"), check_seconds(0.0, "forward")
    (0.25, 0.0)
    >>> check_seconds(5e-324, "forward")
    Traceback (most recent call last):
    stagewright.errors.InputError: forward = 5e-324: give seconds, 0 or from 1e-12 to 1e+09
    """
    if seconds == 0 or LEAST_SECONDS <= seconds <= MOST_SECONDS:
        return seconds
    raise InputError(f"{what} = {seconds!r}: give seconds, 0 or from {LEAST_SECONDS:g} to {MOST_SECONDS:g}")


def check_bytes(num_bytes: float, what: str) -> float:
    """`num_bytes`, if there can be as many; raises `InputError` that names `what` else.

    >>> check_bytes(1e308, "parameters")
    Traceback (most recent call last):
    stagewright.errors.InputError: parameters = 1e+308: give bytes, from 0 to 2**60
    """
    if 0 <= num_bytes <= MOST_BYTES:
        return num_bytes
    raise InputError(f"{what} = {num_bytes!r}: give bytes, from 0 to 2**60")


def check_count(count: int, most: int, what: str, remedy: str) -> int:
    """`count`, if it is from 1 to `most`; raises `InputError` that names `what` and the `remedy` else.

    >>> check_count(10**9, MOST_DEVICES, "--ranks", "give fewer")
    Traceback (most recent call last):
    stagewright.errors.InputError: --ranks is 1,000,000,000, from 1 to 131,072 are possible: give fewer
    """
    if 1 <= count <= most:
        return count
    shown = f"{count:,}" if abs(count) < 10**30 else "a number of more than 30 digits"
    raise InputError(f"{what} is {shown}, from 1 to {most:,} are possible: {remedy}")
