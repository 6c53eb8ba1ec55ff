"""Where the ticks of a time axis lie."""

from __future__ import annotations

import math


def ticks(extent: float, most: int) -> list[float]:
    """Round values from 0 to `extent`, at most `most` steps of 1, 2 or 5 times a power of ten apart.

    >>> ticks(33.0, 10)
    [0.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0]
    """
    if extent <= 0:
        return [0.0]
    rough = extent / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    return [step * index for index in range(int(extent / step + 1e-9) + 1)]


def byte_ticks(extent: float, most: int) -> list[float]:
    """Powers of two bytes apart, from 0 to `extent`, at most `most` steps.

    >>> byte_ticks(5 * 2**30, 4) == [0, 2 * 2**30, 4 * 2**30]
    True
    """
    if extent <= 0:
        return [0.0]
    step = 2.0 ** math.ceil(math.log2(extent / most))
    return [step * index for index in range(int(extent / step) + 1)]
