"""What Megatron's layers run: products, streams over memory and collectives of every pass of a layer.

Sizes are those of one device: tensor parallelism splits products, sequence parallelism the streams between them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil
from typing import Literal, NamedTuple

KernelKind = Literal["matmul", "memory", "norm", "attention", "attention backward"]
CollectiveKind = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "dispatch", "exchange"]
Axis = Literal["tp", "cp", "ep"]


class Kernel(NamedTuple):
    """One kernel: arithmetic and bytes it moves; `num` equal ones in a row."""

    kind: KernelKind
    flop: float
    num_bytes: float
    num: int = 1
    in_half: bool = False
    """Whether a product stays in half precision where others are computed in eight bits."""
    rounds: int = 1
    """Equal parts of it that run back to back."""


class Collective(NamedTuple):
    """One collective along an axis of the layout; bytes as `stagewright.cluster.collectives` counts them.

    A ``dispatch`` brings every token to its experts, or its results back: bytes of the tokens, each counted once.
    """

    kind: CollectiveKind
    axis: Axis
    num_bytes: float
    hidden: bool = False
    """Whether it runs beside a product that does not need it; along ``ep``, beside passes of another microbatch."""


@dataclass(frozen=True)
class Pass:
    """What runs in one direction through a part of the model."""

    kernels: tuple[Kernel, ...] = ()
    collectives: tuple[Collective, ...] = ()
    waits_s: float = 0.0
    """Seconds for which the device stands still between kernels."""

    def __add__(self, other: Pass) -> Pass:
        return Pass(
            self.kernels + other.kernels, self.collectives + other.collectives, self.waits_s + other.waits_s
        )


@dataclass(frozen=True)
class Passes:
    """Forward, gradient of the input, gradients of the weights."""

    forward: Pass = Pass()
    input_grad: Pass = Pass()
    weight_grad: Pass = Pass()

    def __add__(self, other: Passes) -> Passes:
        return Passes(
            self.forward + other.forward,
            self.input_grad + other.input_grad,
            self.weight_grad + other.weight_grad,
        )


def together(parts: Iterable[Passes]) -> Passes:
    """All `parts` one after the other."""
    total = Passes()
    for part in parts:
        total = total + part
    return total


def product(
    tokens: float,
    given: float,
    made: float,
    count: int = 1,
    adds_up: float = 0.0,
    element_bytes: int = 2,
    casts: float = 0.0,
    in_half: bool = False,
    at_once: int = 1,
) -> Passes:
    """A linear layer, or `count` equal ones for `tokens` each of which `at_once` run beside each other (grouped); `adds_up`
    bytes are moved per weight to add its gradient to the others, `casts` per element of the input and of the output's
    gradient.

    The gradient of a weight costs as many FLOP as the product itself, and so does that of its input.
    """
    flop, weights = 2.0 * count * tokens * given * made, float(count * given * made)
    moved = float(element_bytes) * (count * tokens * (given + made) + weights)
    kernel = Kernel("matmul", flop, moved, in_half=in_half, rounds=ceil(count / at_once))
    adding = (Kernel("memory", 0.0, adds_up * weights),) if adds_up else ()
    linear = Passes(Pass((kernel,)), Pass((kernel,)), Pass((kernel, *adding)))
    return stream(casts * count * tokens * given, casts * count * tokens * made) + linear


def stream(forward: float, backward: float, kind: KernelKind = "memory", for_weights: float = 0.0) -> Passes:
    """Elementwise work: bytes moved in each direction; none for a direction that has no kernel."""

    def one(num_bytes: float) -> Pass:
        return Pass((Kernel(kind, 0.0, num_bytes),)) if num_bytes else Pass()

    return Passes(one(forward), one(backward), one(for_weights))


def collectives(forward: Iterable[Collective], backward: Iterable[Collective]) -> Passes:
    """Communication of each direction."""
    return Passes(Pass((), tuple(forward)), Pass((), tuple(backward)))
