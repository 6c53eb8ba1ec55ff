"""Lower and upper limits of figures.

No cluster, model or job outside them exists or is likely to: such a figure is a slip, rejected by name, not computed with.
"""

from __future__ import annotations

from stagewright.errors import InputError

MOST_BYTES = 2**60
"""Bytes of one device, host or tensor: an exbibyte, more than all memory of the largest machines."""
LEAST_RATE, MOST_RATE = 1.0, 2.0**60
"""Bytes, elements or random numbers per second: from a byte to an exbibyte a second."""
LEAST_FLOPS, MOST_FLOPS = 1.0, 1e21
"""FLOP per second and device: the largest machines reach 1e19 over all their devices, in fp8."""
LEAST_SECONDS, MOST_SECONDS = 1e-12, 1e9
"""Seconds of a pass, a message or an overhead, unless exactly 0: a clock cycle takes 1e-10 s, and 1e9 s are 32 years."""
MOST_SPEED_RATIO = 1e6
"""Maximum ratio of the speeds of two ranks or devices."""
MOST_PRICE = 1e6
"""Dollars per device-hour."""
MOST_DEVICES = 2**17
"""Devices, ranks or nodes: 131,072, as many as in the largest published jobs."""
MOST_TOKENS = 2**26
"""Tokens of one sample: 67 million, several times the longest contexts that models have been trained with."""
MOST_SAMPLES = 2**24
"""Samples of an optimizer step or a microbatch: 16 million, a hundred times the largest useful batches."""
MOST_STEPS = 2**53
"""Steps of a run; floating-point counters are inexact beyond."""
MOST_ACTIONS = 2**21
"""Forwards and backwards of a program over all ranks: twice those of 64 ranks of 8 stages with 1,024 microbatches."""
MOST_STAGES = 2**14
"""Stages of one pipeline; no model has as many layers."""
MOST_LAYERS = 2**10
"""Layers of a model: the deepest transformers trained so far have 1,000."""
MOST_ROWS = 2**12
"""Rows of a cost table, which may have several per layer."""
MOST_SIZE = 2**20
"""Size of a dimension, or a count such as that of experts, in a configuration: the widest layers have 2**17 columns."""
MOST_ENTRIES = 2**26
"""Entries of a vocabulary or a table of positions: the largest vocabularies have 2**18; positions, as many as tokens."""
MOST_PARAMETERS = 2**50
"""Parameters of a model, including all experts: a quadrillion, about a hundred times the largest."""
MOST_PREDICTED = 10**30
"""Seconds or bytes that a plan predicts or a run measured: sums over many of the above."""
LEAST_FRACTION = 1e-6
"""Attained fraction of a peak or bandwidth."""


def check_seconds(seconds: float, what: str) -> float:
    """Return `seconds` if they are possible.

    Raises:
        InputError: too short, too long, negative or not a number; names `what`.

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
    """Return `num_bytes` if they are possible. Raises `InputError`, which names `what`, otherwise.

    >>> check_bytes(1e308, "parameters")
    Traceback (most recent call last):
    stagewright.errors.InputError: parameters = 1e+308: give bytes, from 0 to 2**60
    """
    if 0 <= num_bytes <= MOST_BYTES:
        return num_bytes
    raise InputError(f"{what} = {num_bytes!r}: give bytes, from 0 to 2**60")


def check_count(count: int, most: int, what: str, remedy: str) -> int:
    """Return `count` if it is from 1 to `most`. Raises `InputError`, which names `what` and the `remedy`, otherwise.

    >>> check_count(10**9, MOST_DEVICES, "--ranks", "give fewer")
    Traceback (most recent call last):
    stagewright.errors.InputError: --ranks is 1,000,000,000, but must be from 1 to 131,072: give fewer
    """
    if 1 <= count <= most:
        return count
    shown = f"{count:,}" if abs(count) < 10**30 else "a number of more than 30 digits"
    raise InputError(f"{what} is {shown}, but must be from 1 to {most:,}: {remedy}")
