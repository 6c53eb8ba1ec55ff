"""Costs of the stages of a pipeline: seconds and bytes per stage and microbatch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from stagewright.arrays import Floats
from stagewright.errors import InputError, check_names
from stagewright.limits import MOST_PREDICTED
from stagewright.schedule.action import Kind

Transfers = float | Mapping[tuple[int, int], float] | Callable[[int, int], float]
"""Seconds to move a value or gradient from one stage to another: one number for all, by (source, target) stage, or a
function of the two. A mapping without (c, a) uses (a, c): a gradient is as large as its value."""

KIND_ROWS = {kind: row for row, kind in enumerate(Kind)}
CHECKPOINTED_FORWARD = len(KIND_ROWS)
"""Row of the forward of a recomputed stage in the cost tables, after one row per kind of action."""


@dataclass(frozen=True, eq=False)
class StageCosts:
    """Costs of one microbatch on each stage: arrays of one length, seconds and bytes.

    A forward saves `saved_bytes`; an input gradient frees all but `held_bytes`, which the weight gradient frees; a full
    backward frees all. A recomputed stage saves `checkpoint_bytes` in its forward and the remaining bytes in R. Transient
    bytes exist only while the action runs. A forward overlapped with a backward of another stage takes `overlap_saved_s`
    less than the two in a row. `base_bytes` (weights, gradients, optimizer) are always allocated.

    Missing arrays default to zero, except `backward_s` (input plus weight gradient), `recompute_s` (forward),
    `held_bytes` (`saved_bytes`), and `backward_transient_bytes` (the larger of its halves).

    Ignores: buffers of sends and receives; fragmentation.
    """

    forward_s: Floats
    input_grad_s: Floats
    weight_grad_s: Floats
    backward_s: Floats
    recompute_s: Floats
    gather_s: Floats
    reduce_s: Floats
    step_s: Floats
    overlap_saved_s: Floats
    saved_bytes: Floats
    held_bytes: Floats
    checkpoint_bytes: Floats
    gathered_bytes: Floats
    forward_transient_bytes: Floats
    input_grad_transient_bytes: Floats
    weight_grad_transient_bytes: Floats
    backward_transient_bytes: Floats
    base_bytes: Floats

    @classmethod
    def of(
        cls, forward_s: ArrayLike, input_grad_s: ArrayLike, weight_grad_s: ArrayLike, **more: ArrayLike
    ) -> StageCosts:
        """Return costs with one stage per entry of `forward_s`; `more` may name any other field, as array or scalar.

        >>> costs = StageCosts.of([1, 2], [1, 2], [1, 1], saved_bytes=8)
        >>> costs.backward_s.tolist(), costs.held_bytes.tolist()
        ([2.0, 3.0], [8.0, 8.0])
        """
        num_stages = len(np.atleast_1d(np.asarray(forward_s)))
        given = {"forward_s": forward_s, "input_grad_s": input_grad_s, "weight_grad_s": weight_grad_s, **more}
        names = [field.name for field in fields(cls)]
        check_names(given, names, "a table of stage costs")
        arrays = {name: _per_stage(name, value, num_stages) for name, value in given.items()}
        return cls(**_with_defaults(arrays, names, num_stages))

    @classmethod
    def uniform(
        cls,
        num_stages: int,
        forward_s: float = 1.0,
        input_grad_s: float = 1.0,
        weight_grad_s: float = 1.0,
        **more: ArrayLike,
    ) -> StageCosts:
        """Return equal stages, by default with one second per forward, input gradient and weight gradient."""
        ones = np.ones(num_stages)
        return cls.of(forward_s * ones, input_grad_s * ones, weight_grad_s * ones, **more)

    @property
    def num_stages(self) -> int:
        return len(self.forward_s)

    @cached_property
    def seconds(self) -> Floats:
        """Seconds that each kind of action keeps its stream busy, [row, stage]; posting a transfer takes no time."""
        return self._table(_SECONDS)

    @cached_property
    def bytes_at_start(self) -> Floats:
        """Bytes that an action allocates at its start and that outlive it, [row, stage]."""
        table = self._table({Kind.F: "saved_bytes", Kind.GATHER: "gathered_bytes"})
        table[CHECKPOINTED_FORWARD] = self.checkpoint_bytes
        table[KIND_ROWS[Kind.R]] = self.saved_bytes - self.checkpoint_bytes
        return table

    @cached_property
    def bytes_at_end(self) -> Floats:
        """Bytes that an action frees at its end, [row, stage]."""
        table = self._table({Kind.B: "saved_bytes", Kind.W: "held_bytes", Kind.RELEASE: "gathered_bytes"})
        table[KIND_ROWS[Kind.I]] = self.saved_bytes - self.held_bytes
        return table

    @cached_property
    def transient_bytes(self) -> Floats:
        """Bytes that exist only while an action runs, [row, stage]."""
        return self._table(_TRANSIENT)

    def _table(self, columns: Mapping[Kind, str]) -> Floats:
        """Return the named arrays in the rows of their kinds; the row of `Kind.F` also for checkpointed forwards."""
        table = np.zeros((len(KIND_ROWS) + 1, self.num_stages))
        for kind, name in columns.items():
            table[KIND_ROWS[kind]] = getattr(self, name)
        table[CHECKPOINTED_FORWARD] = table[KIND_ROWS[Kind.F]]
        return table


def transfer_seconds(transfers: Transfers, source: int, target: int) -> float:
    """Return the seconds of a transfer from stage `source` to stage `target`.

    >>> transfer_seconds({(0, 1): 0.5}, 1, 0)
    0.5
    """
    if callable(transfers):
        return float(transfers(source, target))
    if not isinstance(transfers, Mapping):
        return float(transfers)
    for edge in ((source, target), (target, source)):
        if edge in transfers:
            return float(transfers[edge])
    raise InputError(f"no transfer time for stages {source} -> {target}: add the key ({source}, {target})")


_SECONDS = {
    Kind.F: "forward_s",
    Kind.I: "input_grad_s",
    Kind.W: "weight_grad_s",
    Kind.B: "backward_s",
    Kind.R: "recompute_s",
    Kind.GATHER: "gather_s",
    Kind.REDUCE: "reduce_s",
    Kind.STEP: "step_s",
}
_TRANSIENT = {
    Kind.F: "forward_transient_bytes",
    Kind.I: "input_grad_transient_bytes",
    Kind.W: "weight_grad_transient_bytes",
    Kind.B: "backward_transient_bytes",
    Kind.R: "forward_transient_bytes",
}


def _per_stage(name: str, value: ArrayLike, num_stages: int) -> Floats:
    array = np.asarray(value, dtype=np.float64)
    array = np.full(num_stages, array) if array.ndim == 0 else array
    if array.shape != (num_stages,):
        raise InputError(f"{name} has {array.size} entries for {num_stages} stages; give one per stage")
    wrong = ~((array >= 0) & (array <= MOST_PREDICTED))
    if wrong.any():
        stage = int(wrong.argmax())
        raise InputError(
            f"{name} of stage {stage} = {float(array[stage])}: costs are not negative and at most {MOST_PREDICTED:g}"
        )
    return array


def _with_defaults(given: dict[str, Floats], names: Sequence[str], num_stages: int) -> dict[str, Any]:
    arrays = {name: given.get(name, np.zeros(num_stages)) for name in names}
    derived = {
        "backward_s": arrays["input_grad_s"] + arrays["weight_grad_s"],
        "recompute_s": arrays["forward_s"],
        "held_bytes": arrays["saved_bytes"],
        "backward_transient_bytes": np.maximum(
            arrays["input_grad_transient_bytes"], arrays["weight_grad_transient_bytes"]
        ),
    }
    return arrays | derived | given
