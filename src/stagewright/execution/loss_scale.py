"""Loss scaling: gradients of fp16 models are kept within what fp16 can say."""

from __future__ import annotations

from dataclasses import dataclass

GROWTH = 2.0
"""A power of two changes no digit of a gradient."""


@dataclass
class LossScale:
    """The factor on the loss, and so on every gradient: halved when one overflows, doubled after `window` steps without.

    Every rank has the same: whether a step overflowed is told from the norm over all of them.
    Source: Micikevicius et al. 2018, "Mixed Precision Training", section 3.2 (arXiv 1710.03740); the rule and its
    constants as in `torch.amp.GradScaler`.

    >>> scale = LossScale(8.0, window=2)
    >>> for overflowed in (True, False, False):
    ...     scale.update(overflowed)
    ...     print(scale.value)
    4.0
    4.0
    8.0
    """

    value: float
    window: int
    num_good: int = 0
    """Steps without an overflow since the value last changed."""

    def update(self, overflowed: bool) -> None:
        """After each step: did its gradients overflow, so that it changed no parameter?"""
        self.num_good = 0 if overflowed else self.num_good + 1
        if overflowed:
            self.value /= GROWTH
        elif self.num_good == self.window:
            self.value *= GROWTH
            self.num_good = 0
