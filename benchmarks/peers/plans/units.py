"""Saved values as units, among which other planners choose what to recompute.

The cost of a unit is the chain of operators back to the next values that the backward needs, each of which is kept or
recomputed on its own, and the time of a choice is that of the union of its chains.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from stagewright.estimation.memory import RankMemory
from stagewright.estimation.time import Costing
from stagewright.graph import Node, OperatorGraph, Part
from stagewright.graph.stage import Stage
from stagewright.planning.checkpointing.chain import narrow_places
from stagewright.planning.checkpointing.choice import SavingChoice, operator_seconds, saved_roots
from stagewright.planning.checkpointing.proposals import Proposal, Proposals, Propose, copies_of

_WINDOWS = (6, 12, 24, 48, 96)
"""Operators on either side among which a cut must be the narrowest; windows grow until few enough bytes are chosen."""

_MOST_SHARE = 0.3
"""Maximum fraction of the saved bytes at checkpoint boundaries."""


@dataclass(frozen=True)
class Unit:
    """Saved values that are treated alike, because one operator allocated their storages.

    `values` are values of the graph, `num_bytes` the bytes of their storages for one microbatch. `chain` are the operators
    (ids) that recompute them; empty with ``recomputable=False``, for values that arrived from another stage.
    """

    stage: int
    operator: str
    values: tuple[int, ...]
    num_bytes: int
    chain: frozenset[int] = frozenset()
    recomputable: bool = True
    node: int = -1
    """Node of `operator` in the graph."""


@dataclass(frozen=True)
class SavingProblem:
    """The problem of which units of a rank to recompute for the least added time per microbatch.

    * `seconds`: of every operator of a chain;
    * `needed`: bytes that must be freed;
    * `copies`: per stage, sets of saved values alive at the peak: how often the bytes of a recomputed unit count.

    Ignores: recomputed values that are alive while they are used, what recomputation keeps in addition (values received only
    for the forward), and that the peak may move elsewhere. The replay that follows every choice counts them all.
    """

    units: tuple[Unit, ...]
    seconds: Mapping[int, float]
    needed: float
    copies: Mapping[int, float]

    def saves(self, unit: int) -> float:
        """Return the bytes that recomputing a unit frees."""
        return self.units[unit].num_bytes * self.copies.get(self.units[unit].stage, 0.0)


Chooser = Callable[[SavingProblem], Collection[int] | None]
"""Returns the units to recompute, by index, that free enough, or None if there are none."""


def recompute_seconds(problem: SavingProblem, units: Iterable[int]) -> float:
    """Return the seconds to recompute `units`: every operator of any chain once."""
    nodes = frozenset[int]().union(*(problem.units[unit].chain for unit in units))
    return sum(problem.seconds[node] for node in nodes)


def choice_of(units: Sequence[Unit], recomputed: Iterable[int]) -> SavingChoice:
    """Return the choice to recompute some of the units, by index."""
    return SavingChoice(frozenset((units[index].stage, units[index].node) for index in recomputed))


def stage_units(stage: Stage) -> list[Unit]:
    """Return the units of a stage that was split to keep everything."""
    return _Units(stage).units()


def chain_seconds(stage: Stage, units: Iterable[Unit], costing: Costing) -> dict[int, float]:
    """Return the seconds of every operator in the chains of `units` of `stage`."""
    wanted = frozenset[int]().union(*(unit.chain for unit in units))
    nodes = [node for node in stage.forward.nodes if node.id in wanted]
    return dict(zip((node.id for node in nodes), operator_seconds(stage, nodes, costing), strict=True))


def by_units(proposals: Proposals, kept: RankMemory, chooser: Chooser) -> Propose:
    """Return the proposals of `chooser`, which chooses among saved values; those at checkpoint boundaries are kept."""
    numbers, costing = proposals.stages_of(kept), proposals.costing_of(kept)
    stages = [proposals.staged.stages[number] for number in numbers]
    units = _with_boundaries_kept(proposals, [unit for stage in stages for unit in stage_units(stage)])
    seconds: dict[int, float] = {}
    for stage in stages:
        seconds |= chain_seconds(stage, (unit for unit in units if unit.stage == stage.index), costing)
    problem = SavingProblem(tuple(units), seconds, 0.0, copies_of(kept, numbers))

    def proposal(recomputed: Collection[int] | None) -> Proposal | None:
        if recomputed is None:
            return None
        return Proposal(choice_of(units, recomputed), recompute_seconds(problem, recomputed))

    everything = [index for index, unit in enumerate(units) if unit.chain]
    return Propose(
        lambda needed: proposal(chooser(replace(problem, needed=needed))), lambda: proposal(everything)
    )


def _with_boundaries_kept(proposals: Proposals, units: Sequence[Unit]) -> list[Unit]:
    graph = proposals.model_costs.graph
    roots = {root: graph.values[root].storage for unit in units for root in unit.values}
    boundaries = checkpoint_boundaries(
        graph, proposals.model_costs.cuts.value_bytes, sorted({*roots.values()})
    )
    return [
        replace(unit, recomputable=False) if boundaries & {roots[root] for root in unit.values} else unit
        for unit in units
    ]


def checkpoint_boundaries(
    graph: OperatorGraph, widths: NDArray[np.number], saved: Sequence[int]
) -> frozenset[int]:
    """Return those of the storages `saved` (root values) that the forward carries across narrow cuts.

    `widths` are the bytes that cross each cut index. If these storages were recomputed, everything from the start of the
    stage would be recomputed at once.
    """
    place = {root: graph.position.get(graph.values[root].node, -1) for root in saved}
    last = _last_forward_use(graph)
    total = sum(graph.storage_bytes[root] for root in saved)
    chosen: frozenset[int] = frozenset()
    for window in _WINDOWS:
        narrow = narrow_places(widths, window)
        after = {root: np.searchsorted(narrow, place[root], side="right") for root in saved}
        chosen = frozenset(
            root for root in saved if after[root] < len(narrow) and narrow[after[root]] <= last.get(root, -1)
        )
        if sum(graph.storage_bytes[root] for root in chosen) <= _MOST_SHARE * total:
            break
    return chosen


def _last_forward_use(graph: OperatorGraph) -> dict[int, int]:
    """Return root -> index of the last forward operator that uses its storage."""
    last: dict[int, int] = {}
    for node in graph.nodes:
        if node.part is Part.FORWARD:
            for value in node.inputs:
                last[graph.values[value].storage] = graph.position[node.id]
    return last


class _Units:
    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.graph = stage.graph
        self.maker: dict[int, Node] = {
            output: node for node in stage.forward.nodes for output in node.outputs if output is not None
        }
        self.needed = frozenset(stage.saved)
        self.resident = stage.resident

    def units(self) -> list[Unit]:
        values: dict[int, list[int]] = {}
        for value in self.stage.saved:
            values.setdefault(self.stage.value(value).storage, []).append(value)
        return [
            self._unit(self.graph.nodes[node], roots, [v for root in roots for v in values[root]])
            for (_, node), roots in sorted(saved_roots([self.stage]).items())
        ]

    def _unit(self, node: Node, roots: Sequence[int], values: Sequence[int]) -> Unit:
        num_bytes = sum(self.stage.value(root).meta.storage_bytes for root in roots)
        here = all(value in self.maker for value in values)
        chain = self._chain(values) if here else frozenset[int]()
        return Unit(self.stage.index, node.name, tuple(roots), num_bytes, chain, here, node.id)

    def _chain(self, values: Sequence[int]) -> frozenset[int]:
        """Return the operators that recompute `values` from values that the backward needs, are resident or arrived."""
        chain: set[int] = set()
        stack = [self.maker[value] for value in values]
        while stack:
            node = stack.pop()
            if node.id in chain:
                continue
            chain.add(node.id)
            missing = (v for v in node.inputs if v not in self.resident and v not in self.needed)
            stack.extend(self.maker[value] for value in missing if value in self.maker)
        return frozenset(chain)
