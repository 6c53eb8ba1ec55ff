"""Annealing over what a stage keeps and when operators of its forward are recomputed, several times if necessary.

The operators of the backward that use values of the forward are phases. The storages that are present before each phase
decide everything else: what a phase, or the next one, needs and is missing is recomputed before it, from what is present.
So a value may be kept for its first uses, freed, and recomputed for later ones.

Source: the phases are those of Jain et al. 2020, "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization"
(arXiv 1910.02653), whose integer program takes seconds for tens of operators and more for hundreds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from stagewright.arrays import Bools
from stagewright.estimation.liveness import FREED
from stagewright.estimation.stage_memory import StageMemory
from stagewright.estimation.time import Costing
from stagewright.graph import Node, Part
from stagewright.graph.policy import Reruns
from stagewright.graph.stage import Stage
from stagewright.planning.checkpointing import rerun_kernels as kernels
from stagewright.planning.checkpointing.choice import operator_seconds, operators_of
from stagewright.planning.checkpointing.rerun_kernels import Arrays

_STARTS = (
    (0.3, 20.0), (0.1, 50.0), (0.1, 20.0), (0.03, 50.0), (0.03, 20.0), (0.03, 5.0), (0.01, 50.0), (0.01, 20.0),
)  # fmt: skip
"""Annealings that start with nothing recomputed: initial temperatures, and weights of bytes above the limit."""
_COLD = 1e-4

_STEPS, _MORE_STEPS = 60_000, 200_000
_LONGER = 4
"""Factor on the number of steps where nothing was found."""
_SMALL = 2_000
"""Operators times phases up to which a search starts with nothing recomputed, and takes fewer steps."""

_WARM = ((0.003, 5.0), (0.0005, 20.0))
"""Annealings that start from a given choice: initial temperatures, and weights of bytes above the limit."""
_WARM_COLD = 1e-6


@dataclass(frozen=True)
class RerunStage:
    """A stage that was split to keep everything, as phases; `copies` sets of its saved values are alive at the peak.

    Ignores: values from other stages, or computed from inputs alone, that are kept for recomputation only.
    """

    memory: StageMemory
    costing: Costing
    copies: float

    @property
    def stage(self) -> Stage:
        return self.memory.stage

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """The operators that can be recomputed: the forward operators of the model that allocate a storage."""
        return tuple(
            node
            for node in operators_of(self.stage)
            if any(v is not None and self._root(v) == v for v in node.outputs)
        )

    @cached_property
    def storages(self) -> dict[int, int]:
        """Root -> number of its storage."""
        roots = [v for node in self.nodes for v in node.outputs if v is not None and self._root(v) == v]
        loss = {self._root(self.stage.graph.loss)} if self.stage.computes_loss else set[int]()
        return {root: number for number, root in enumerate(root for root in roots if root not in loss)}

    @cached_property
    def groups(self) -> tuple[int, ...]:
        """The forward operator to whose backward each phase belongs."""
        return tuple(group for _, group in self._phases)

    @cached_property
    def arrays(self) -> Arrays:
        """The arguments of the kernels."""
        stage, number = self.stage, self.storages
        makes = [[number[v] for v in node.outputs if v in number] for node in self.nodes]
        reads = [self._numbers(node.inputs) for node in self.nodes]
        uses = [self._numbers(stage.backward.nodes[place].inputs) for place, _ in self._phases]
        maker = np.full(len(number), -1, np.int64)
        for operator, outputs in enumerate(makes):
            maker[outputs] = operator
        before, during, after = self._backward_bytes()
        base, if_kept = self._forward()
        return Arrays(
            np.array([stage.value(root).meta.storage_bytes for root in number], np.float64),
            maker,
            _last_of_use(len(number), makes, reads, uses),
            np.array(operator_seconds(stage, self.nodes, self.costing)),
            *_flat(reads),
            *_flat(makes),
            *_flat(uses),
            base,
            if_kept,
            before,
            during,
            after,
            self.copies - 1,
        )

    @property
    def size(self) -> int:
        """Operators times phases."""
        return len(self.nodes) * len(self.groups)

    @property
    def is_small(self) -> bool:
        return self.size <= _SMALL

    @cached_property
    def all_kept(self) -> Bools:
        """The storages present before every phase if nothing is recomputed."""
        present = np.zeros((len(self.groups) + 1, len(self.storages)), np.bool_)
        for phase, (place, _) in enumerate(self._phases):
            for storage in self._numbers(self.stage.backward.nodes[place].inputs):
                present[: phase + 1, storage] = True
        return present

    def under(self, stage: Stage) -> Bools:
        """Return the storages present before every phase of `stage`, this stage under a policy that recomputes each value
        once."""
        present = np.zeros_like(self.all_kept)
        phases = {self.stage.backward.nodes[place].id: phase for phase, (place, _) in enumerate(self._phases)}
        recomputed_in: dict[int, int] = {}
        phase = 0
        for node in (*stage.rebuild.nodes, *stage.backward.nodes):
            for storage in self._numbers(node.inputs, stage):
                present[recomputed_in.get(storage, -1) + 1 : phase + 1, storage] = True
            if node.part is Part.FORWARD:
                outputs = [value for value in node.outputs if value is not None]
                recomputed_in |= dict.fromkeys(self._numbers(outputs, stage), phase)
            phase = phases.get(node.id, phase - 1) + 1
        return present

    def reruns(self, present: Bools) -> Reruns:
        """Return when operators are recomputed, in the form of policies."""
        by_group: dict[int, dict[int, None]] = {}
        for phase, operators in enumerate(kernels.reruns_of(present, self.arrays)):
            for operator in np.flatnonzero(operators).tolist():
                by_group.setdefault(self.groups[phase], {})[self.nodes[operator].id] = None
        return tuple((group, tuple(sorted(again))) for group, again in by_group.items())

    # -- inner ------------------------------------------------------------------------------------------------------

    def _root(self, value: int) -> int:
        return self.stage.value(value).storage

    def _numbers(self, values: Iterable[int], stage: Stage | None = None) -> list[int]:
        """Return the numbers of the storages of values of `stage`, which is this stage under a policy."""
        roots = dict.fromkeys((stage or self.stage).value(value).storage for value in values)
        return [self.storages[root] for root in roots if root in self.storages]

    @cached_property
    def _phases(self) -> list[tuple[int, int]]:
        """Places in the backward of operators that use a storage, each with the forward operator it belongs to."""
        model_costs, nodes = self.stage.graph.position, self.stage.backward.nodes
        phases: list[tuple[int, int]] = []
        group = next((node.forward for node in nodes if node.forward in model_costs), -1)
        for place, node in enumerate(nodes):
            group = node.forward if node.forward in model_costs else group
            if self._numbers(node.inputs):
                phases.append((place, group))
        return phases

    def _backward_bytes(self) -> tuple[kernels.Floats, ...]:
        """Return the bytes of the backward's own results: before every phase, with its operator, and the maximum from then
        to the next phase."""
        during = self.memory.backward.allocated.astype(np.float64)
        in_front = during.copy()
        for place, _, num_bytes in self.memory.backward.events.tolist():
            in_front[place] -= num_bytes if num_bytes != FREED else 0
        places = [place for place, _ in self._phases]
        ends = [*places[1:], len(during)]
        after = [during[place + 1 : end].max(initial=0.0) for place, end in zip(places, ends, strict=True)]
        return in_front[places], during[places], np.array(after)

    def _forward(self) -> tuple[kernels.Floats, Bools]:
        """Return the bytes alive at every operator of the forward in any case, and the storages alive only if kept."""
        nodes, number = self.stage.forward.nodes, self.storages
        born: dict[int, int] = {}
        last: dict[int, int] = {}
        for place, node in enumerate(nodes):
            for storage in self._numbers([*node.inputs, *(v for v in node.outputs if v is not None)]):
                born.setdefault(storage, place)
                last[storage] = place
        sent = (value for transfer in self.stage.sends for value in transfer.values)
        last |= dict.fromkeys(self._numbers(sent), len(nodes))
        alive = np.zeros((len(nodes), len(number)), np.bool_)
        if_kept = np.zeros_like(alive)
        for storage, place in born.items():
            alive[place : last[storage] + 1, storage] = True
            if_kept[last[storage] + 1 :, storage] = True
        sizes = np.array([self.stage.value(root).meta.storage_bytes for root in number], np.float64)
        return alive @ sizes, if_kept


def _last_of_use(
    count: int, makes: Sequence[list[int]], reads: Sequence[list[int]], uses: Sequence[list[int]]
) -> kernels.Ints:
    """Return the last phase in which each storage can be of use, directly or to recompute others."""
    last = np.full(count, -1, np.int64)
    for phase, used in enumerate(uses):
        last[used] = phase
    for outputs, inputs in zip(reversed(makes), reversed(reads), strict=True):
        for storage in inputs:
            last[storage] = max(last[storage], *last[outputs]) if outputs else last[storage]
    return last


def _flat(lists: Sequence[list[int]]) -> tuple[kernels.Ints, kernels.Ints]:
    starts = np.cumsum([0, *map(len, lists)])
    return np.array([number for numbers in lists for number in numbers], np.int64), starts.astype(np.int64)


@dataclass(frozen=True)
class Annealed:
    """The storages present before every phase, and the seconds that recomputing the others adds to a microbatch."""

    seconds: float
    present: Bools


class RerunSearch:
    """A search for the fastest recomputation of a stage within a limit."""

    def __init__(self, stage: RerunStage, initial: Iterable[Bools] = (), below_s: float = math.inf) -> None:
        self.stage = stage
        self.initial = list(initial)
        """Storages present before every phase, in choices to start from."""
        self.below_s = below_s
        """Seconds that a useful result must stay below."""

    @property
    def most_bytes(self) -> float:
        """Bytes at the peak if everything is kept."""
        return float(kernels.peak_of(self.stage.all_kept, self.stage.arrays))

    def within(self, limit: float) -> Annealed | None:
        """Return the fastest result whose peak stays within `limit`, or None if it takes too long."""
        if limit <= 0:
            return None
        if not self.stage.is_small:
            best = self._annealed(limit, [], _MORE_STEPS)
        else:
            best = self._annealed(limit, _STARTS, _STEPS)
            if best.seconds == math.inf:
                best = self._annealed(limit, _STARTS, _LONGER * _STEPS)
        return best if best.seconds < self.below_s else None

    def _annealed(self, limit: float, starts: Iterable[tuple[float, float]], steps: int) -> Annealed:
        """Return the best result from `starts` with nothing recomputed, and from the initial choices."""
        tries = [(self.stage.all_kept, hot, _COLD, weight) for hot, weight in starts]
        tries += [(present, hot, _WARM_COLD, weight) for present in self.initial for hot, weight in _WARM]
        arrays = self.stage.arrays

        def annealed(seed: int) -> Annealed:
            present, hot, cold, weight = tries[seed]
            result = kernels.anneal(present.copy(), arrays, float(limit), steps, seed, hot, cold, weight)
            return Annealed(*result)

        with ThreadPoolExecutor() as pool:
            return min(pool.map(annealed, range(len(tries))), key=lambda annealed_plan: annealed_plan.seconds)
