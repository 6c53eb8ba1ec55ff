"""Stages: what is left of the joint graph between two cuts, as functions with explicit inputs, outputs and saved values.

Nothing is traced again. A stage's functions are

* `static`, once per run: values that depend on constants only (positions, masks, rotary tables);
* `derived`, once per step: views and casts of parameters;
* `forward` (F), `input_grad` (I), `weight_grad` (W), and `backward` (B: I and W interleaved), once per microbatch;
* `rebuild` (R): what the backward recomputes and fetches first, where it waits for a cotangent: R can run while the rank
  waits;
* `remade`: what the backward recomputes on its way, part of `input_grad` and `backward`;
* `late`: operators of the model's forward that run with the backward, part of `input_grad` and `backward`: the pieces of a
  loss in pieces, each right before its gradients. F leaves what they need, and the loss is what I or B returns.

`rebuild` and `remade` are operators of F a second time, on the same inputs and with the same random numbers, so that I and
W cannot tell the difference. Each runs right before the first operator that needs it, from what the policy keeps, and its
results go after their last use: of what is recomputed only what lies between two checkpoints is alive.

What the policy offloads leaves inside F and comes back inside R, I, W and B (see `moving`); in between a handle without
bytes is saved in its place. I and W each fetch what they use.

A value that several stages need travels along the chain of its consumers; its cotangent travels back along the same
chain, so that every stage adds its contributions to the relayed cotangent in the order in which autograd would. The
cotangent of the loss does not travel: it is a constant, resident on every stage that uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby

from stagewright.graph.graph import Node, OperatorGraph, Value, made_by


@dataclass(frozen=True)
class Function:
    """Nodes in running order; `inputs` arrive from outside (resident values excepted), `outputs` stay alive."""

    nodes: tuple[Node, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Transfer:
    """Values that travel from this stage to `stage`, or arrive from it, as one message group per microbatch."""

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
    ]  # values that differ from the graph's: made by carving, or lying in a received storage
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
    saved: tuple[int, ...]  # what F leaves for R, I and W, handles of what is offloaded included
    offloaded: tuple[int, ...]  # what the handles stand for
    relayed: tuple[int, ...]  # what I leaves for W, kept values of F included
    gradients: tuple[tuple[int, int], ...]  # parameter -> its gradient for one microbatch
    mutations: tuple[tuple[int, int], ...]
    computes_loss: bool
    local_bytes: dict[int, int] = field(default_factory=dict)  # storages the graph does not know -> bytes
    remade: Function = Function((), (), ())  # what B and I recompute on their way
    late: tuple[Node, ...] = ()  # of the model's forward, in running order, what B and I run

    def value(self, index: int) -> Value:
        return self.extra[index] if index in self.extra else self.graph.values[index]

    @cached_property
    def after_rebuild(self) -> frozenset[int]:
        """What F saves and R makes is there from then on if it is among these: the backward uses it, whole or split."""
        return frozenset((*self.backward.inputs, *self.input_grad.inputs, *self.relayed))

    @cached_property
    def resident(self) -> frozenset[int]:
        """Values alive between actions: parameters, buffers, constants, static and derived values, the loss's cotangent."""
        made = made_by((*self.static, *self.derived))
        return frozenset({*self.parameters, *self.buffers, *self.constants, *made, self.graph.seed})

    def held_bytes(self, values: Iterable[int]) -> int:
        """Bytes of the distinct storages behind `values`, none of them resident, as this stage holds them."""
        roots = {self.value(value).storage for value in values}
        return sum(
            self.local_bytes[root] if root in self.local_bytes else self.graph.storage_bytes[root]
            for root in roots
        )


def part(nodes: Sequence[Node], resident: Collection[int], used: Iterable[int]) -> Function:
    """`nodes` as a function beside values that are `resident`; `used` are values that others use, in order."""
    made = made_by(nodes)
    inputs = dict.fromkeys(
        value for node in nodes for value in node.inputs if value not in made and value not in resident
    )
    return Function(tuple(nodes), tuple(inputs), tuple(value for value in used if value in made))


def parted(function: Function, resident: Iterable[int], kind: Callable[[Node], bool]) -> list[Function]:
    """`function` as runs of nodes of one kind each; what a part makes and a later one uses is among its outputs."""
    runs = [tuple(nodes) for _, nodes in groupby(function.nodes, kind)]
    there = {*resident} - {*function.inputs}
    later = {*function.outputs}
    parts: list[Function] = []
    for nodes in reversed(runs):
        parts.append(part(nodes, there, sorted(later)))
        later |= {*parts[-1].inputs}
    return parts[::-1]
