"""The least time a stage must spend on recomputing within a limit, by Checkmate's integer program.

A phase for every operator of the backward that uses a value of the forward: in front of it any operators of the forward may
run again, in their order, each as often as there are phases. A storage is alive from where it is made until nothing later
wants it from this making; the forward runs once as it is; the backward's order is fixed. Views take nothing and stand for
their storage, as everywhere here, and an operator makes all its results.

The variables differ from the paper's: instead of what is freed after which operator, they say what is there before each,
which needs no products of variables and allows the same.

Source: Jain et al. 2020, "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization" (arXiv 1910.02653).
Ignores: running an operator twice in front of the same operator of the backward, or in another order than the forward's.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import scipy.sparse
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp

from stagewright.estimation.liveness import FREED
from stagewright.estimation.stage_memory import StageMemory
from stagewright.estimation.time import Costing
from stagewright.graph.stage import Stage

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Operator:
    """Of the forward: seconds, and the storages (indices) it reads and makes."""

    seconds: float
    reads: frozenset[int]
    makes: frozenset[int]


@dataclass(frozen=True)
class Phase:
    """An operator of the backward: the storages of the forward it uses, and the bytes of the backward's own values alive in
    front of it, while it runs, and at most from then to the next phase."""

    uses: frozenset[int]
    before: int
    during: int
    after: int


@dataclass(frozen=True)
class Problem:
    """What recomputing within a limit may choose from. `sizes` are bytes of the forward's storages, `lasting` those of the
    loss, which stays; `in_forward[i]` are the storages alive while operator i of the forward runs whatever is kept, and
    those made before it that are alive only if they are kept."""

    sizes: tuple[int, ...]
    operators: tuple[Operator, ...]
    phases: tuple[Phase, ...]
    in_forward: tuple[tuple[frozenset[int], frozenset[int]], ...]
    lasting: frozenset[int]

    @property
    def kept_peak(self) -> int:
        """Most bytes alive when everything that a phase uses is kept from the forward to its last use."""
        last = {storage: t for t, phase in enumerate(self.phases) for storage in phase.uses}
        peaks = [self._bytes(alive | (made & (set(last) | self.lasting))) for alive, made in self.in_forward]
        for t, phase in enumerate(self.phases):
            held = self._bytes({s for s in last if last[s] >= t} | self.lasting)
            later = self._bytes({s for s in last if last[s] > t} | self.lasting)
            peaks += [held + phase.before, held + phase.during, later + phase.after]
        return max(peaks)

    def _bytes(self, storages: Iterable[int]) -> int:
        return sum(self.sizes[storage] for storage in storages)


@dataclass(frozen=True)
class Optimum:
    """The least seconds found, at least `bound`; `recomputed` are (phase, operator)."""

    seconds: float
    bound: float
    recomputed: tuple[tuple[int, int], ...]

    @property
    def is_proved(self) -> bool:
        return bool(self.seconds - self.bound <= 1e-4 * max(self.seconds, 1e-30))


def problem_of(stage: Stage, costing: Costing) -> Problem:
    """The problem of a stage that was split to keep everything and waits for no other."""
    resident = stage.resident | set(stage.inputs)
    made: dict[int, int] = {}
    operators: list[Operator] = []
    positions: list[int] = []
    for position, node in enumerate(stage.forward.nodes):
        fresh = [v for v in node.outputs if v is not None and stage.value(v).storage == v]
        reads = frozenset(made[root] for v in node.inputs if (root := stage.value(v).storage) in made)
        makes = frozenset(made.setdefault(root, len(made)) for root in fresh)
        if makes:
            positions.append(position)
            operators.append(Operator(costing.of(node, stage.value).device_s, reads, makes))
    assert not set(made) & resident
    sizes = tuple(stage.value(root).meta.storage_bytes for root in made)
    sizes = tuple(max(size, stage.graph.storage_bytes.get(root, 0)) if root < len(stage.graph.values) else size
                  for root, size in zip(made, sizes, strict=True))  # fmt: skip
    loss = (
        frozenset({made[stage.value(stage.graph.loss).storage]}) if stage.computes_loss else frozenset[int]()
    )
    return Problem(sizes, tuple(operators), tuple(_phases(stage, made)),
                   tuple(_in_forward(stage, made, loss)), loss)  # fmt: skip


def _in_forward(
    stage: Stage, made: dict[int, int], loss: frozenset[int]
) -> Iterator[tuple[frozenset[int], frozenset[int]]]:
    birth: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, node in enumerate(stage.forward.nodes):
        for value in (*node.inputs, *node.outputs):
            storage = made.get(stage.value(value).storage) if value is not None else None
            if storage is not None:
                birth.setdefault(storage, position)
                last[storage] = position
    last |= dict.fromkeys(loss, len(stage.forward.nodes))
    for position in range(len(stage.forward.nodes)):
        born = {storage for storage in birth if birth[storage] <= position}
        alive = frozenset(storage for storage in born if last[storage] >= position)
        yield alive, frozenset(born - alive)


def _phases(stage: Stage, made: dict[int, int]) -> Iterator[Phase]:
    memory = StageMemory(stage).backward
    before, during = _backward_bytes(memory.events, len(stage.backward.nodes))
    uses = [
        frozenset(made[root] for v in node.inputs if (root := stage.value(v).storage) in made)
        for node in stage.backward.nodes
    ]
    starts = [index for index, used in enumerate(uses) if used]
    assert not starts or starts[0] == 0 or max(during[: starts[0]]) <= during[starts[0]]
    for start, stop in zip(starts, [*starts[1:], len(uses)], strict=True):
        yield Phase(uses[start], before[start], during[start], max([0, *during[start + 1 : stop]]))


def _backward_bytes(events: Iterable[tuple[int, int, int]], count: int) -> tuple[list[int], list[int]]:
    """Bytes that a function itself has made and not freed, in front of each statement and while it runs."""
    sizes: dict[int, int] = {}
    by_statement: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for index, storage, num_bytes in events:
        by_statement[index].append((storage, num_bytes))
    live, before, during = 0, [], []
    for index in range(count):
        before.append(live)
        most = live
        for storage, num_bytes in by_statement[index]:
            if num_bytes == FREED:
                live -= sizes.pop(storage)
            else:
                sizes[storage] = num_bytes
                live += num_bytes
                most = max(most, live)
        during.append(most)
    return before, during


def solve(problem: Problem, limit: int, time_limit: float = 60.0) -> Optimum | None:
    """The least seconds of recomputing with at most `limit` bytes alive; None if there is no way (or none was found)."""
    found = _Program(problem).least_seconds(limit, time_limit)
    if found is None:
        return None
    (chosen, bound), costs = found, [operator.seconds for operator in problem.operators]
    return Optimum(sum(costs[o] for _, o in chosen), bound, chosen)


def least_bytes(problem: Problem, time_limit: float = 60.0) -> int:
    """The least limit that can be met, at whatever cost."""
    return _Program(problem).least_bytes(time_limit)


class _Program:
    """Variables: `again[t, o]`, whether operator o runs in front of phase t; `there[t, o, v]`, whether storage v is alive in
    front of operator o of phase t, with one more o for the phase's own operator; and the limit. Given the first, the second
    can be whole numbers, so only the first must be. Bytes are in units of the peak without recomputing."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.num_operators, self.num_storages = len(problem.operators), len(problem.sizes)
        self.num_phases = len(problem.phases)
        self.num_again = self.num_phases * self.num_operators
        self.limit = self.num_again + self.num_phases * (self.num_operators + 1) * self.num_storages
        self.rows: list[dict[int, float]] = []
        self.most: list[float] = []
        self.lower = np.zeros(self.limit + 1)
        self.unit = float(problem.kept_peak)
        self._forward()
        for t in range(self.num_phases):
            self._phase(t)

    def again(self, t: int, o: int) -> int:
        return t * self.num_operators + o

    def there(self, t: int, o: int, v: int) -> int:
        return self.num_again + (t * (self.num_operators + 1) + o) * self.num_storages + v

    def _at_most(self, row: dict[int, float], bound: float) -> None:
        self.rows.append(row)
        self.most.append(bound)

    def _memory(self, row: dict[int, float], others: int) -> None:
        """What `row` counts, in bytes, and `others` stay within the limit."""
        scaled = {column: size / self.unit for column, size in row.items()}
        self._at_most(scaled | {self.limit: -1.0}, -others / self.unit)

    def _alive(self, t: int, o: int) -> dict[int, float]:
        return {self.there(t, o, v): float(self.problem.sizes[v]) for v in range(self.num_storages)}

    def _forward(self) -> None:
        sizes = self.problem.sizes
        for alive, made in self.problem.in_forward:
            row = {self.there(0, 0, v): float(sizes[v]) for v in made}
            self._memory(row, sum(sizes[v] for v in alive))

    def _phase(self, t: int) -> None:
        problem, phase = self.problem, self.problem.phases[t]
        for o, operator in enumerate(problem.operators):
            makes = float(sum(problem.sizes[v] for v in operator.makes))
            self._memory(self._alive(t, o) | {self.again(t, o): makes}, phase.before)
            for v in operator.reads:
                self._at_most({self.again(t, o): 1.0, self.there(t, o, v): -1.0}, 0.0)
            for v in range(self.num_storages):
                row = {self.there(t, o + 1, v): 1.0, self.there(t, o, v): -1.0}
                if v in operator.makes:
                    row[self.again(t, o)] = -1.0
                self._at_most(row, 0.0)
        self._memory(self._alive(t, self.num_operators), phase.during)
        self.lower[[self.there(t, self.num_operators, v) for v in phase.uses]] = 1.0
        for o in range(self.num_operators + 1):
            self.lower[[self.there(t, o, v) for v in problem.lasting]] = 1.0
        if t + 1 == self.num_phases:
            self._memory({}, sum(problem.sizes[v] for v in problem.lasting) + phase.after)
            return
        self._memory(self._alive(t + 1, 0), phase.after)
        for v in range(self.num_storages):
            last = self.there(t, self.num_operators, v)
            self._at_most({self.there(t + 1, 0, v): 1.0, last: -1.0}, 0.0)

    def least_seconds(
        self, limit: int, time_limit: float
    ) -> tuple[tuple[tuple[int, int], ...], float] | None:
        """What runs again, as (phase, operator), and what it takes at least."""
        costs = np.array([operator.seconds for operator in self.problem.operators])
        scale = costs.sum() or 1.0
        objective = np.zeros(self.limit + 1)
        objective[: self.num_again] = np.tile(costs / scale, self.num_phases)
        fixed = (limit / self.unit, limit / self.unit)
        found = self._solved(objective, fixed, time_limit)
        if found.x is None:
            return None
        chosen = np.flatnonzero(np.round(found.x[: self.num_again]))
        pairs = tuple(divmod(int(index), self.num_operators) for index in chosen)
        return pairs, scale * (found.mip_dual_bound or 0.0)

    def least_bytes(self, time_limit: float) -> int:
        objective = np.zeros(self.limit + 1)
        objective[self.limit] = 1.0
        found = self._solved(objective, (0.0, 1.0), time_limit)
        return math.ceil(found.fun * self.unit - 1e-6)

    def _solved(self, objective: Floats, limit: tuple[float, float], time_limit: float) -> OptimizeResult:
        columns = [column for row in self.rows for column in row]
        numbers = [number for number, row in enumerate(self.rows) for _ in row]
        data = [entry for row in self.rows for entry in row.values()]
        shape = (len(self.rows), len(objective))
        matrix = scipy.sparse.csr_array((data, (numbers, columns)), shape=shape)
        whole = np.zeros(len(objective))
        whole[: self.num_again] = 1
        lower, upper = self.lower.copy(), np.ones(len(objective))
        lower[self.limit], upper[self.limit] = limit
        return milp(
            objective, constraints=LinearConstraint(matrix, -np.inf, np.array(self.most) + 1e-12),  # type: ignore[arg-type]
            bounds=Bounds(lower, upper),  # type: ignore[arg-type]
            integrality=whole,
            options={"time_limit": time_limit, "mip_rel_gap": 1e-5},
        )  # fmt: skip
