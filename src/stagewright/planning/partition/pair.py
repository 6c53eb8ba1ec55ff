"""The cut between two groups of neighbouring stages: where time, memory and overhead are balanced.

The theorem, for two neighbouring stages that share the range ``[start, stop)``: let E = T + O be the time of a stage, T its
computation and O the least time it adds to fit its memory. If T and O never fall when operators are added, and of two stages
the one that demands more memory has the larger overhead, then a cut of least max(E) lies between the cut at which the
times are equal and the cut at which the demands are. If the last assumption fails, it still lies between the cuts at which
the times and the overheads are equal.

Source: the abstract of DawnPiper (arXiv 2505.05856) names such a theorem; statement and proof here are a reconstruction
(`docs/design/0008-memory.md`).
"""

from __future__ import annotations

from collections.abc import Callable

from stagewright.planning.partition.leaves import Leaves
from stagewright.planning.partition.ranges import Ints

Group = tuple[int, int]
"""The first stage of a group, and the one behind its last."""


def time_balance(
    leaves: Leaves, ends: Ints, low: int, high: int, start: int, stop: int, x: Group, y: Group
) -> int:
    """Index into `ends`, from `low` to `high`, of the last cut at which the left group is no slower than the right."""
    left, right = _speed(leaves, x), _speed(leaves, y)
    seconds = leaves.ranges.seconds

    def is_left_faster(index: int) -> bool:
        cut = int(ends[index])
        return float(seconds[cut] - seconds[start]) / left <= float(seconds[stop] - seconds[cut]) / right

    return last_true(is_left_faster, low, high)


def memory_balance(
    leaves: Leaves, ends: Ints, low: int, high: int, start: int, stop: int, x: Group, y: Group
) -> int:
    """The same for the bytes that each rank of a group must find, in the mean, beyond its capacity."""

    def is_left_emptier(index: int) -> bool:
        cut = int(ends[index])
        return _demand(leaves, x, start, cut) <= _demand(leaves, y, cut, stop)

    return last_true(is_left_emptier, low, high)


def last_true(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The last of ``low..high`` for which `holds`, if it holds for all before; `low` if it holds for none.

    >>> last_true(lambda index: index < 5, 0, 9), last_true(lambda index: False, 2, 9)
    (4, 2)
    """
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _speed(leaves: Leaves, group: Group) -> float:
    return sum(1 / leaves.terms[stage].slowness for stage in range(*group))


def _demand(leaves: Leaves, group: Group, start: int, stop: int) -> float:
    """What a rank of `group` lacks if the range were shared out evenly: the demand of the mean stage over the range, by
    the number of stages, less the mean capacity."""
    stages = range(*group)
    count = len(stages)
    demands = sum(leaves.demand(stage, start, stop) for stage in stages) / count
    return demands / count - sum(leaves.terms[stage].capacity for stage in stages) / count
