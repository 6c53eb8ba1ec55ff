"""The learning rate as a stateless function of the step number."""

from __future__ import annotations

import math
from typing import Literal, get_args

LearningRateSchedule = Literal["constant", "linear", "cosine", "wsd"]
SCHEDULES: tuple[LearningRateSchedule, ...] = get_args(LearningRateSchedule)

_WSD_DECAY = 10
"""Fraction of the steps in the decay by default: one in ten."""


def rate_fraction(
    step: int,
    num_steps: int,
    schedule: LearningRateSchedule = "constant",
    warmup_steps: int = 0,
    decay_steps: int | None = None,
    final_fraction: float = 0.0,
) -> float:
    """Return the learning rate of `step` of `num_steps`, counted from 0, as a fraction of its maximum.

    In the first `warmup_steps` it rises linearly, up to 1 at the last of them. From there it falls, linearly or as half a
    period of a cosine, towards `final_fraction`, which the step after the last would have. ``wsd`` (warm-up, stable, decay)
    falls linearly in the last `decay_steps` only, by default a tenth of all.

    Source: Loshchilov and Hutter 2017, "SGDR" (arXiv 1608.03983), for the cosine, without restarts; Hu et al. 2024,
    "MiniCPM" (arXiv 2404.06395), for ``wsd``.

    >>> [rate_fraction(step, 6, "linear", warmup_steps=2) for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    >>> [round(rate_fraction(step, 4, "cosine", final_fraction=0.1), 3) for step in (0, 2, 4)]
    [1.0, 0.55, 0.1]
    >>> [rate_fraction(step, 8, "wsd", warmup_steps=1, decay_steps=2) for step in (0, 1, 5, 6, 7)]
    [1.0, 1.0, 1.0, 1.0, 0.5]
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    first = warmup_steps
    if schedule == "wsd":
        first = max(warmup_steps, num_steps - (decay_steps or max(1, num_steps // _WSD_DECAY)))
    if schedule == "constant" or step <= first:
        return 1.0
    passed = min(1.0, (step - first) / max(1, num_steps - first))
    remaining = (1 + math.cos(math.pi * passed)) / 2 if schedule == "cosine" else 1 - passed
    return final_fraction + (1 - final_fraction) * remaining
