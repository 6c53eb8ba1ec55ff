"""The problem of a joint search: costs per layer, the ranks, and the number of microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from stagewright.arrays import Floats
from stagewright.errors import PlanError


@dataclass(frozen=True, eq=False)
class LayerTable:
    """Seconds and bytes of one microbatch per layer, in the order of the model.

    A forward saves `saved_bytes`; the input gradient frees all but `held_bytes`, which the weight gradient frees.
    `boundary_bytes` are sent to the next layer (and return as a gradient); `parameter_bytes` (weights, gradients, optimizer)
    are always alive.
    """

    forward_s: Floats
    input_grad_s: Floats
    weight_grad_s: Floats
    parameter_bytes: Floats
    saved_bytes: Floats
    held_bytes: Floats
    boundary_bytes: Floats

    @classmethod
    def of(
        cls,
        forward_s: ArrayLike,
        input_grad_s: ArrayLike,
        weight_grad_s: ArrayLike,
        parameter_bytes: ArrayLike = 0.0,
        saved_bytes: ArrayLike = 0.0,
        held_bytes: ArrayLike | None = None,
        boundary_bytes: ArrayLike = 0.0,
    ) -> LayerTable:
        """Return a table with one layer per entry of `forward_s`; by default everything is saved for weight gradients.

        Raises:
            PlanError: no layer, or a cost that is negative or not finite.

        >>> LayerTable.of([1, 2], [1, 2], [1, 1], saved_bytes=8).held_bytes.tolist()
        [8.0, 8.0]
        """
        num_layers = len(np.atleast_1d(np.asarray(forward_s)))
        held = saved_bytes if held_bytes is None else held_bytes
        columns = (
            forward_s,
            input_grad_s,
            weight_grad_s,
            parameter_bytes,
            saved_bytes,
            held,
            boundary_bytes,
        )
        arrays = [np.broadcast_to(np.asarray(column, np.float64), num_layers).copy() for column in columns]
        if not num_layers or not all(np.isfinite(array).all() and (array >= 0).all() for array in arrays):
            raise PlanError(
                "a cost table needs at least one layer, and costs that are finite and not negative: check its rows"
            )
        return cls(*arrays)

    @property
    def num_layers(self) -> int:
        return len(self.forward_s)

    @property
    def backward_s(self) -> Floats:
        """Seconds of both gradients of each layer."""
        return self.input_grad_s + self.weight_grad_s

    @cached_property
    def seconds(self) -> Floats:
        """Seconds of forward, input gradient and weight gradient of each layer."""
        return self.forward_s + self.backward_s

    @cached_property
    def sums(self) -> Floats:
        """Prefix sums over the layers, one row per column of a stage: forward, input gradient, weight gradient, parameter
        bytes, saved bytes, held bytes."""
        rows = (
            self.forward_s,
            self.input_grad_s,
            self.weight_grad_s,
            self.parameter_bytes,
            self.saved_bytes,
            self.held_bytes,
        )
        return np.array([np.concatenate([[0.0], np.cumsum(row)]) for row in rows])


class ProblemCosts(NamedTuple):
    """The costs of a problem: prefix sums by table and column, both rows of `JointProblem.moves`, speed and memory per rank,
    and the overhead of a computation."""

    sums: Floats
    moves: Floats
    speed: Floats
    memory_bytes: Floats
    overhead_s: float


@dataclass(frozen=True, eq=False)
class JointProblem:
    """The problem of placing layers on ranks.

    The `speed` of a rank divides the seconds of the table; `memory_bytes` is its memory for parameters and saved values. A
    transfer takes `latency_s` plus the boundary bytes over `bytes_per_s`. Every computation costs `overhead_s` more than its
    layers. `recomputing` are tables of the same layers on a rank that recomputes more and more of its saved values: fewer
    bytes, more seconds. Each rank uses `layers` or one of these.
    """

    layers: LayerTable
    num_ranks: int
    num_microbatches: int
    speed: Floats
    memory_bytes: Floats
    latency_s: float = 0.0
    bytes_per_s: float = np.inf
    overhead_s: float = 0.0
    recomputing: tuple[LayerTable, ...] = ()
    receivers_wait: bool = False
    """Whether a rank waits for the transfers it receives before using them, instead of overlapping them with compute."""

    @classmethod
    def of(
        cls,
        layers: LayerTable,
        num_ranks: int,
        num_microbatches: int,
        *,
        speed: float | Sequence[float] | Floats = 1.0,
        memory_bytes: float | Sequence[float] | Floats = np.inf,
        **more: Any,
    ) -> JointProblem:
        """Return a problem with one speed and memory for all ranks or one for each; `more` are other fields by name.

        Raises:
            PlanError: more ranks than layers, or figures that make no sense, such as recomputation that takes less time or
                more bytes.

        >>> layers = LayerTable.of([1, 2], [1, 2], [1, 1])
        >>> JointProblem.of(layers, 2, 4, speed=[1, 0.5]).speed.tolist()
        [1.0, 0.5]
        """
        if num_ranks < 1 or num_microbatches < 1:
            raise PlanError(
                f"a pipeline needs at least one rank and one microbatch, not {num_ranks} and {num_microbatches}"
            )
        if layers.num_layers < num_ranks:
            raise PlanError(
                f"{num_ranks} ranks need at least {num_ranks} layers, but the cost table has {layers.num_layers}: "
                "use fewer ranks"
            )
        speeds = per_rank("speed", speed, num_ranks)
        memory = per_rank("memory_bytes", memory_bytes, num_ranks)
        return cls(layers, num_ranks, num_microbatches, speeds, memory, **more)

    def __post_init__(self) -> None:
        speed, tables = self.speed, self.recomputing
        if not (np.isfinite(speed).all() and (speed > 0).all()) or not (self.memory_bytes > 0).all():
            raise PlanError("speeds and memory of ranks must be positive")
        if min(self.latency_s, self.overhead_s) < 0 or not self.bytes_per_s > 0:
            raise PlanError("latency and overhead cannot be negative, and a bandwidth must be positive")
        if not all(map(_recomputes_more, (self.layers, *tables), tables)):
            raise PlanError(
                "each recomputing table must take no fewer seconds and save no more bytes than the one before, on every "
                "layer, with parameters of the same size"
            )

    @cached_property
    def transfer_s(self) -> Floats:
        """Seconds of the overlapped transfer at each cut index; index 0 is the start of the model."""
        return self.moves[0]

    @cached_property
    def moves(self) -> Floats:
        """`transfer_s`, and in a second row the seconds for which the receiving rank waits at each cut index."""
        moved = self.latency_s + self.layers.boundary_bytes / self.bytes_per_s
        moves = np.zeros((2, len(moved)))
        moves[int(self.receivers_wait), 1:] = moved[:-1]
        return moves

    @cached_property
    def costs(self) -> ProblemCosts:
        """The costs for the kernels."""
        return ProblemCosts(self.sums, self.moves, self.speed, self.memory_bytes, self.overhead_s)

    @cached_property
    def sums(self) -> Floats:
        """Prefix sums (see `LayerTable.sums`) of `layers`, then of every recomputing table."""
        return np.array([table.sums for table in (self.layers, *self.recomputing)])


def _recomputes_more(more: LayerTable, less: LayerTable) -> bool:
    """Return whether `less` keeps less and takes no less time than `more`, so that bounds for `more` hold for it too.

    On every layer, neither forward, input gradient nor whole backward is shorter, no more is saved or held, and the
    parameters have the same size.
    """
    rows = ("forward_s", "input_grad_s", "backward_s")
    slower = all((getattr(less, row) >= getattr(more, row) * (1 - 1e-9)).all() for row in rows)
    kept = ("saved_bytes", "held_bytes")
    leaner = all((getattr(less, row) <= getattr(more, row) * (1 + 1e-9)).all() for row in kept)
    return slower and leaner and np.array_equal(less.parameter_bytes, more.parameter_bytes)


def per_rank(name: str, value: float | Sequence[float] | Floats, num_ranks: int) -> Floats:
    """Return `value` as one figure per rank; raises `PlanError` for another number of figures."""
    array = np.asarray(value, np.float64)
    if array.ndim == 0:
        return np.full(num_ranks, array)
    if array.shape != (num_ranks,):
        raise PlanError(f"{name} has {array.size} figures for {num_ranks} ranks: give one per rank")
    return array
