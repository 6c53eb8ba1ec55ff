"""Stages: the part of the joint graph between two cuts, as functions with explicit inputs, outputs and saved values.

Nothing is traced again. A stage's functions are

* `static`, once per run: values that depend on constants only (positions, masks, rotary tables);
* `derived`, once per step: views and casts of parameters;
* `forward` (F), `input_grad` (I), `weight_grad` (W), and `backward` (B: I and W interleaved), once per microbatch;
* `rebuild` (R): recomputation and fetches at the beginning of the backward, if that waits for a cotangent: R can run while
  the rank waits;
* `recomputed`: recomputation in the course of the backward, part of `input_grad` and `backward`;
* `late`: operators of the model's forward that run with the backward, part of `input_grad` and `backward`: the pieces of a
  loss in pieces, each right before its gradients. F saves what they need, and I or B returns the loss.

`rebuild` and `recomputed` run operators of F a second time, on the same inputs and with the same random numbers, so results
are equal. Each runs right before the first operator that needs it, from values that the policy keeps, and its results are
freed after their last use: of the recomputed values only those between two checkpoints are alive.

Values that the policy offloads are copied to the host inside F and back inside R, I, W and B (see `offload`); in between a
handle without bytes is saved in their place. I and W each fetch what they use.

A value that several stages need is sent along the chain of its consumers; its cotangent goes back along the same chain, so
that every stage adds its contributions to the forwarded cotangent in the order in which autograd would. The cotangent of
the loss is not sent: it is a constant, resident on every stage that uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby

import numpy as np

from stagewright.arrays import Ints
from stagewright.graph.graph import Node, OperatorGraph, Value, made_by


@dataclass(frozen=True)
class Function:
    """Nodes in running order; `inputs` come from outside (except resident values), `outputs` stay alive."""

    nodes: tuple[Node, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Transfer:
    """Values that are sent to `stage`, or received from it, as one message group per microbatch."""

    stage: int
    values: tuple[int, ...]


@dataclass(frozen=True)
class Stage:
    index: int
    start: int
    stop: int
    graph: OperatorGraph
    extra: dict[
        int, Value
    ]  # values that differ from the graph's: added by splitting, or in a received storage
    parameters: tuple[int, ...]
    buffers: tuple[int, ...]
    constants: tuple[int, ...]
    inputs: tuple[int, ...]  # user inputs this stage reads
    static: tuple[Node, ...]
    derived: tuple[Node, ...]
    forward: Function
    input_grad: Function
    weight_grad: Function
    backward: Function
    rebuild: Function
    receives: tuple[Transfer, ...]
    sends: tuple[Transfer, ...]
    grad_receives: tuple[Transfer, ...]
    grad_sends: tuple[Transfer, ...]
    saved: tuple[int, ...]  # what F saves for R, I and W, including handles of offloaded values
    offloaded: tuple[int, ...]  # the values that the handles stand for
    saved_for_weight_grad: tuple[int, ...]  # what I saves for W, including values of F
    gradients: tuple[tuple[int, int], ...]  # parameter -> its gradient for one microbatch
    mutations: tuple[tuple[int, int], ...]
    computes_loss: bool
    local_bytes: dict[int, int] = field(default_factory=dict)  # storages that are not in the graph -> bytes
    recomputed: Function = Function((), (), ())  # what B and I recompute
    late: tuple[Node, ...] = ()  # nodes of the model's forward that B and I run, in running order

    def value(self, index: int) -> Value:
        return self.extra[index] if index in self.extra else self.graph.values[index]

    @cached_property
    def roots(self) -> Ints:
        """The storage of every value."""
        return self._of_values(self.graph.roots, lambda value: value.storage)

    @cached_property
    def sizes(self) -> Ints:
        """Bytes of a storage of its own for every value."""
        return self._of_values(self.graph.sizes, lambda value: value.meta.storage_bytes)

    def _of_values(self, of_graph: Ints, number_of: Callable[[Value], int]) -> Ints:
        numbers = np.zeros(max(len(of_graph), max(self.extra, default=-1) + 1), np.int64)
        numbers[: len(of_graph)] = of_graph
        if self.extra:
            numbers[list(self.extra)] = list(map(number_of, self.extra.values()))
        return numbers

    @cached_property
    def after_rebuild(self) -> frozenset[int]:
        """Values that the backward uses after R, whole or split: of those that F saves and R computes only these stay
        alive."""
        return frozenset((*self.backward.inputs, *self.input_grad.inputs, *self.saved_for_weight_grad))

    @cached_property
    def resident(self) -> frozenset[int]:
        """Values alive between actions: parameters, buffers, constants, static and derived values, the loss's cotangent."""
        computed = made_by((*self.static, *self.derived))
        return frozenset({*self.parameters, *self.buffers, *self.constants, *computed, self.graph.seed})

    def held_bytes(self, values: Iterable[int]) -> int:
        """Bytes of the distinct storages of `values`, none of them resident, as this stage holds them."""
        roots = {self.value(value).storage for value in values}
        return sum(
            self.local_bytes[root] if root in self.local_bytes else self.graph.storage_bytes[root]
            for root in roots
        )


def part(nodes: Sequence[Node], resident: Collection[int], used: Iterable[int]) -> Function:
    """Return `nodes` as a function, given `resident` values; `used` are values that others use, in order."""
    results = made_by(nodes)
    inputs = dict.fromkeys(
        value for node in nodes for value in node.inputs if value not in results and value not in resident
    )
    return Function(tuple(nodes), tuple(inputs), tuple(value for value in used if value in results))


def parted(function: Function, resident: Iterable[int], kind: Callable[[Node], bool]) -> list[Function]:
    """Divide `function` into runs of nodes of one kind each; values that a later part uses are among a part's outputs."""
    runs = [tuple(nodes) for _, nodes in groupby(function.nodes, kind)]
    there = {*resident} - {*function.inputs}
    later = {*function.outputs}
    parts: list[Function] = []
    for nodes in reversed(runs):
        parts.append(part(nodes, there, sorted(later)))
        later |= {*parts[-1].inputs}
    return parts[::-1]
