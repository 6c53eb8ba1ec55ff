"""The saved values of a rank's stages, choices to recompute or offload them, and the pipelines that result.

Planners that choose only among saved values work with units: the cost of one is the chain of operators back to the next
values that the backward needs, each of which is kept or recomputed on its own, and the time of a choice is that of the union
of its chains.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from stagewright.estimation.time import Costing
from stagewright.graph import Node, Part
from stagewright.graph.policy import Policy, Reruns
from stagewright.graph.stage import Stage
from stagewright.planning.prediction.pipeline import Pipeline, Variants
from stagewright.schedule import Program
from stagewright.schedule.lower import insert_recomputation

_AHEAD = 4
"""Values to fetch ahead, in sizes of the largest offloaded value: with two, a decoder waits for the link at the end of each
block although the link has time on average; with eight nothing more is gained."""


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


@dataclass(frozen=True)
class SavingChoice:
    """The units of a problem that are recomputed, by index; and, as pairs of a stage and an operator (id) of its forward,
    the values kept to recompute from and those offloaded, units or not. `reruns` are the reruns of some stages, as in their
    policies."""

    recomputed: frozenset[int] = field(default_factory=frozenset)
    checkpoints: frozenset[tuple[int, int]] = field(default_factory=frozenset)
    moved: frozenset[tuple[int, int]] = field(default_factory=frozenset)
    reruns: frozenset[tuple[int, Reruns]] = field(default_factory=frozenset)

    def saved_bytes(self, problem: SavingProblem) -> float:
        return sum(map(problem.saves, self.recomputed))

    def seconds(self, problem: SavingProblem) -> float:
        """Return the seconds that this choice adds to every microbatch."""
        return recompute_seconds(problem, self.recomputed)


def recompute_seconds(problem: SavingProblem, units: Iterable[int]) -> float:
    """Return the seconds to recompute `units`: every operator of any chain once."""
    nodes = frozenset[int]().union(*(problem.units[unit].chain for unit in units))
    return sum(problem.seconds[node] for node in nodes)


def policies(units: Sequence[Unit], choice: SavingChoice, stages: Sequence[Stage]) -> list[Policy]:
    """Return the policy of every stage under a choice among `units`."""
    chosen: list[tuple[set[int], set[int], set[int]]] = [(set(), set(), set()) for _ in stages]
    for index in choice.recomputed:
        chosen[units[index].stage][0].update(units[index].values)
    for stage, operator in choice.checkpoints:
        outputs = stages[stage].graph.nodes[operator].outputs
        chosen[stage][2].update(value for value in outputs if value is not None)
    for stage, operator in choice.moved:
        outputs = stages[stage].graph.nodes[operator].outputs
        chosen[stage][1].update(value for value in outputs if value is not None)
    reruns = dict(choice.reruns)
    return [
        Policy(
            frozenset(recompute),
            frozenset(offload),
            checkpoints=frozenset(checkpoints),
            fetch_ahead=fetch_ahead(choice, stages[stage]),
            reruns=reruns.get(stage, ()),
        )
        for stage, (recompute, offload, checkpoints) in enumerate(chosen)
    ]


def with_choice(
    variants: Variants, units: Sequence[Unit], choice: SavingChoice, program: Program | None = None
) -> Pipeline:
    """Return the partition with the policies of a choice and the program for them; `program`, by default that of the
    partition, keeps everything."""
    kept = program or variants.line.program
    stage_policies = policies(units, choice, variants.line.stages)
    return variants.under(recomputing_program(kept, units, choice), stage_policies)


def recomputing_program(program: Program, units: Sequence[Unit], choice: SavingChoice) -> Program:
    """Return `program` with the recomputation that a choice needs."""
    stages = {units[index].stage for index in choice.recomputed}
    other_stages = {stage for stage, _ in (*choice.moved, *choice.reruns)}
    return insert_recomputation(program, stages | other_stages)


def fetch_ahead(choice: SavingChoice, stage: Stage) -> int:
    """Return the bytes of a few offloaded values, so that the link stays busy where several are used, or freed, at once."""
    sizes: list[int] = []
    for at, operator in choice.moved:
        if at == stage.index:
            outputs = [value for value in stage.graph.nodes[operator].outputs if value is not None]
            sizes += [stage.value(value).meta.storage_bytes for value in outputs]
    return _AHEAD * max(sizes, default=0)


def stage_units(stage: Stage) -> list[Unit]:
    """Return the units of a stage that was split to keep everything.

    Plans name only forward operators of the model, so what depends only on inputs (masks, positions) is kept.
    """
    return _Units(stage).units()


def chain_seconds(stage: Stage, units: Iterable[Unit], costing: Costing) -> dict[int, float]:
    """Return the seconds of every operator in the chains of `units` of `stage`."""
    wanted = frozenset[int]().union(*(unit.chain for unit in units))
    nodes = [node for node in stage.forward.nodes if node.id in wanted]
    return dict(zip((node.id for node in nodes), operator_seconds(stage, nodes, costing), strict=True))


def operators_of(stage: Stage) -> tuple[Node, ...]:
    """Return the forward operators of a stage, without those that depend only on inputs and copies of buffers."""
    return tuple(node for node in stage.forward.nodes if node.part is Part.FORWARD and node.id >= 0)


def operator_seconds(stage: Stage, nodes: Iterable[Node], costing: Costing) -> list[float]:
    """Return the seconds of operators of a stage's forward: of the device, or of the host if the whole forward keeps it
    busier."""
    costs = [costing.of(node, stage.value) for node in stage.forward.nodes]
    by_device = sum(cost.device_s for cost in costs) >= sum(cost.host_s for cost in costs)
    wanted = (costing.of(node, stage.value) for node in nodes)
    return [cost.device_s if by_device else cost.host_s for cost in wanted]


class _Units:
    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.graph = stage.graph
        self.maker: dict[int, Node] = {
            output: node for node in stage.forward.nodes for output in node.outputs if output is not None
        }
        self.needed = frozenset(stage.saved)
        self.resident = stage.resident
        self.inputs = frozenset(stage.inputs)

    def units(self) -> list[Unit]:
        values: dict[int, list[int]] = {}
        for value in self.stage.saved:
            values.setdefault(self.stage.value(value).storage, []).append(value)
        by_operator: dict[int, list[int]] = {}
        for root in values:
            if root < len(self.graph.values) and root not in self.inputs and self._operator(root) is not None:
                by_operator.setdefault(self.graph.values[root].node, []).append(root)
        return [
            self._unit(self.graph.nodes[node], roots, [v for root in roots for v in values[root]])
            for node, roots in sorted(by_operator.items())
        ]

    def _operator(self, root: int) -> Node | None:
        """Return the forward operator that allocated a storage, on any stage, or None."""
        number = self.graph.values[root].node
        node = self.graph.nodes[number] if number >= 0 else None
        return node if node is not None and node.part is Part.FORWARD else None

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
