"""Scheduling policies, which turn a layout into a schedule."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stagewright.arrays import Floats
from stagewright.schedule.list_scheduler.terms import Rule


@dataclass(frozen=True, eq=False)
class DeadlinePolicy:
    """A rule and shifts of deadlines: seconds by which those of each layer's forwards (row 0) and input gradients (row 1)
    are shifted, and fractions of a cycle by which those of consecutive microbatches are further apart (rows 2 and 3)."""

    rule: Rule
    shifts: Floats

    @classmethod
    def of(cls, rule: Rule, num_layers: int) -> DeadlinePolicy:
        """Return the policy of a rule with no deadline shifted."""
        return cls(rule, np.zeros((4, num_layers)))
