"""A policy: everything that turns a layout into a schedule."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stagewright.arrays import Floats
from stagewright.schedule.list_scheduler.terms import Rule


@dataclass(frozen=True, eq=False)
class Policy:
    """A rule, and by how many seconds the deadlines of each layer's forwards (row 0) and input gradients
    (row 1) are shifted, and by which share of a cycle further apart those of two microbatches are (rows 2 and 3)."""

    rule: Rule
    shifts: Floats

    @classmethod
    def of(cls, rule: Rule, num_layers: int) -> Policy:
        """The rule with no deadline shifted."""
        return cls(rule, np.zeros((4, num_layers)))
