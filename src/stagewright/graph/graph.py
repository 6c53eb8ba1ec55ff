"""The operator graph: one joint graph of forward, input-gradient and weight-gradient operators, free of torch.

Everything downstream derives from it: the estimator costs it, the planner cuts it and the executor runs it.

* A `Value` is a tensor; values that share a storage name the same root in `storage`.
* A `Node` is one operator call. Its `part` says when it runs; `forward` is the id of the forward node a
  backward node belongs to (its own id for any other node; -1 for the backward of a view of a parameter that was
  merged away).
* The order of `nodes` is an order of execution: first what depends on no input (static, derived), then prologue
  and forward as the model runs them, then the backward in reverse order of the forward nodes.

Gradients with respect to parameters (and values derived from one parameter alone) are not added up inside the
graph, because the additions depend on where it is cut: `contributions` lists, in the order in which autograd
would add them, what each use of such a value adds to its gradient. Cotangents of all other values are added by
ordinary nodes, the cotangent that a later stage passes on being the first addend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from stagewright.arrays import Ints
from stagewright.graph.tensor import TensorMeta


class Origin(StrEnum):
    """Where a value comes from."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    INPUT = "input"
    SEED = "seed"  # the cotangent of the loss
    GRADIENT = "gradient"  # the sum of the contributions to the gradient of a parameter or derived value
    NODE = "node"


class Part(IntEnum):
    """When a node runs."""

    STATIC = 0  # depends on constants and unchanging buffers only: once per run, on every stage that needs it
    DERIVED = 1  # a view, cast or elementwise map of one parameter: once per step
    PROLOGUE = 2  # depends on inputs but on no parameter: once per microbatch, on every stage that needs it
    FORWARD = 3
    INPUT_GRAD = 4
    WEIGHT_GRAD = 5


class Ref(NamedTuple):
    """A value used as an argument."""

    value: int


class Symbol(NamedTuple):
    """An argument that only torch can interpret: a dtype, device, layout or memory format, by name."""

    kind: str
    name: str


def renumbered(argument: Any, number: Callable[[int], int]) -> Any:
    """Return an argument of a node, or several of them, with every value replaced by its `number`.

    >>> renumbered((Ref(3), 2.0, (Ref(4), Ref(3)), Symbol("dtype", "float32")), {3: 0, 4: 1}.__getitem__)
    (Ref(value=0), 2.0, (Ref(value=1), Ref(value=0)), Symbol(kind='dtype', name='float32'))
    """
    if isinstance(argument, Ref):
        return Ref(number(argument.value))
    if isinstance(argument, tuple) and not isinstance(argument, Symbol):
        return tuple(renumbered(item, number) for item in argument)
    return argument


def short_name(op: str) -> str:
    """Return the name of an operator without library and overload.

    >>> short_name("aten.mm.default"), short_name("stagewright.accumulate")
    ('mm', 'accumulate')
    """
    return op.split(".")[1]


@dataclass(frozen=True, slots=True)
class Value:
    id: int
    meta: TensorMeta
    storage: int
    origin: Origin
    name: str = ""
    node: int = -1
    needs_grad: bool = False


@dataclass(frozen=True, slots=True)
class Node:
    """One operator call; `outputs` holds a value id, or None where an output is not a tensor or is never used."""

    id: int
    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    inputs: tuple[int, ...]
    outputs: tuple[int | None, ...]
    part: Part
    forward: int
    module: str
    ordinal: int
    signature: int
    draw: int = -1  # ordinal among the operators that draw random numbers, in the order of the model
    where: str = ""  # file and line of the model's source
    region: int = -1  # of `torch.utils.checkpoint`: the outermost one that a forward node is in
    is_kept: bool = False  # by selective checkpointing, though it is in a region

    @property
    def name(self) -> str:
        """Module path and ordinal: the same for the same operator in every trace of the model."""
        return f"{self.module}:{self.ordinal}"

    def renamed(self, names: Mapping[int, int]) -> Node:
        """Return the same call on other values; those not in `names` stay."""
        if not any(value in names for value in self.inputs):
            return self

        def name(value: int) -> int:
            return names.get(value, value)

        return replace(
            self,
            args=renumbered(self.args, name),
            kwargs=renumbered(self.kwargs, name),
            inputs=tuple(map(name, self.inputs)),
        )


def made_by(nodes: Iterable[Node]) -> set[int]:
    """Return the values that `nodes` compute."""
    return {value for node in nodes for value in node.outputs if value is not None}


def makers_of(nodes: Iterable[Node]) -> dict[int, Node]:
    """Map each value that `nodes` compute to its node."""
    return {value: node for node in nodes for value in node.outputs if value is not None}


UNPACKING = frozenset(f"stagewright.dequantise_{layout}.default" for layout in ("4bit", "rows", "blocks"))
"""Operators from a packed weight, their first argument, to the weight."""


class Spans(NamedTuple):
    """Values with the places in `OperatorGraph.forward_ids` where they are made and used; a gradient's are those of the
    forward operators it belongs to."""

    values: list[tuple[int, tuple[int, ...]]]
    """Value, and the places that use it, in order."""
    ends: Ints
    """Of each: the place that makes it, and the first and last that use it."""


@dataclass(frozen=True)
class OperatorGraph:
    name: str
    values: tuple[Value, ...]
    nodes: tuple[Node, ...]
    parameters: dict[str, int]  # every name a parameter has; tied names share a value
    buffers: dict[str, int]
    inputs: dict[str, int]
    loss: int
    seed: int
    gradients: dict[int, int]  # parameter or derived value -> its GRADIENT value
    contributions: dict[int, tuple[tuple[int, int], ...]]  # GRADIENT value -> (forward node, value) in order
    mutations: tuple[tuple[int, int], ...] = ()  # buffer value -> value it takes after each forward
    num_draws: int = 0
    constants: dict[str, bytes] = field(
        default_factory=dict
    )  # row-major contents of tensors the model's code makes
    facts: dict[str, Any] = field(default_factory=dict)  # microbatch, sequence, dtype, versions, tokens

    def __repr__(self) -> str:
        """Its name and size; the operators are many."""
        return f"<OperatorGraph {self.name}: {len(self.nodes)} operators, {len(self.parameters)} parameters>"

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    @cached_property
    def forward_ids(self) -> tuple[int, ...]:
        """Ids of the forward nodes in order: a cut at position i separates ``forward_ids[:i]`` from ``forward_ids[i:]``."""
        return tuple(node.id for node in self.nodes if node.part is Part.FORWARD)

    @cached_property
    def position(self) -> dict[int, int]:
        """Forward node id -> index in `forward_ids`."""
        return {node: index for index, node in enumerate(self.forward_ids)}

    @cached_property
    def roots(self) -> Ints:
        """The storage of every value."""
        return np.array([value.storage for value in self.values], np.int64)

    @cached_property
    def sizes(self) -> Ints:
        """Bytes of a storage of its own for every value."""
        return np.array([value.meta.storage_bytes for value in self.values], np.int64)

    @cached_property
    def late(self) -> int:
        """Index in `forward_ids` of the first operator that runs with the backward; their number where all run with F.

        A loss in pieces over tokens is such a tail: only the reported loss needs it before the backward does, and a piece
        whose gradients follow at once need not be saved.
        """
        return self.facts.get("late", len(self.forward_ids))

    @cached_property
    def consumers(self) -> dict[int, tuple[int, ...]]:
        """Value id -> ids of the nodes that use it, in order."""
        users: dict[int, list[int]] = {}
        for node in self.nodes:
            for value in dict.fromkeys(node.inputs):
                users.setdefault(value, []).append(node.id)
        return {value: tuple(nodes) for value, nodes in users.items()}

    @cached_property
    def spans(self) -> Spans:
        """Where values of the forward and of input gradients are made and used."""
        position, nodes = self.position, self.nodes
        at = [position.get(node.forward) if node.part >= Part.FORWARD else None for node in nodes]
        users: dict[int, set[int]] = {}
        for node, place in zip(nodes, at, strict=True):
            if place is not None:
                for value in node.inputs:
                    users.setdefault(value, set()).add(place)
        for node_id, value in (pair for pairs in self.contributions.values() for pair in pairs):
            if node_id in position:
                users.setdefault(value, set()).add(position[node_id])
        spans: list[tuple[int, tuple[int, ...]]] = []
        ends: list[tuple[int, int, int]] = []
        for value in self.values:
            if value.node < 0 or value.id not in users:
                continue
            place = at[value.node]
            if place is not None and nodes[value.node].part in (Part.FORWARD, Part.INPUT_GRAD):
                used = tuple(sorted(users[value.id]))
                spans.append((value.id, used))
                ends.append((place, used[0], used[-1]))
        return Spans(spans, np.array(ends, np.int64).reshape(len(ends), 3))

    @cached_property
    def made_by_part(self) -> dict[Part, set[int]]:
        """The values that operators of each part make."""
        return {part: made_by(node for node in self.nodes if node.part is part) for part in Part}

    @cached_property
    def storage_bytes(self) -> dict[int, int]:
        """Root value id -> bytes of its storage: the largest extent any value of that storage has."""
        sizes: dict[int, int] = {}
        for value in self.values:
            sizes[value.storage] = max(sizes.get(value.storage, 0), value.meta.storage_bytes)
        return sizes

    @cached_property
    def owners(self) -> dict[int, int]:
        """GRADIENT value -> the parameter or derived value whose gradient it is."""
        return {gradient: value for value, gradient in self.gradients.items()}

    @cached_property
    def parameter_values(self) -> tuple[int, ...]:
        """Distinct parameters, in order of first name; tied parameters once."""
        return tuple(dict.fromkeys(self.parameters.values()))

    @property
    def num_parameters(self) -> int:
        """Numbers that the parameters stand for: of a packed weight, those that it is dequantised to."""
        stands_for = {
            node.inputs[0]: output
            for node in self.nodes
            if node.op in UNPACKING
            for output in node.outputs
            if output is not None
        }
        values = (stands_for.get(value, value) for value in self.parameter_values)
        return sum(self.values[value].meta.num_elements for value in values)

    def describe(self, node: Node) -> str:
        """Return a description of a node for error messages."""
        place = f" at {node.where}" if node.where else ""
        return f"operator {node.op} of module '{node.module or '(model)'}'{place}"
