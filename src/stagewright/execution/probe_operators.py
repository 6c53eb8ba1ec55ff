"""Operators timed where they run: in the stages of small reference networks, as an executor runs them.

An operator that is called over and over on the same tensors finds its code and its data in the first cache and takes a
third of what it takes between a hundred others. So a CPU's figures for small operators come from a forward and backward
of networks that have the usual ones, each timed in its place, and from least squares over all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import nnls
from torch import nn

from stagewright.estimation.operators import Kernel, Work, work
from stagewright.execution.clock import synchronize, waited_s
from stagewright.execution.reference import Reference
from stagewright.execution.stage_runner import StageOptions, StageRunner
from stagewright.execution.weights import Weights
from stagewright.graph import Node
from stagewright.graph.split import split_graph
from stagewright.graph.stage import Stage
from stagewright.graph.views import issued
from stagewright.tracing.trace import trace_module

SIZES = ((64, 64), (128, 128), (256, 256))
"""Width and tokens of the reference networks: one in which operators are mostly overhead, one in which they are not."""
_HEADS, _BLOCKS, _VOCABULARY = 4, 2, 1000
_WARM_UP, _LEAST_PASSES = 2, 4
_ROUNDS, _LEAST_S = 8, 1e-8
_WATCHED = 0.1
"""Time for the reference computation, in that of a pass."""

_CPU = torch.device("cpu")

_T = TypeVar("_T")
Samples = list[tuple[Work, float]]
"""What an operator asked of the device, and its mean seconds over the faster half of all passes."""


class _ReferenceBlock(nn.Module):
    """Attention, a layer of two products and a gated one, each behind a norm or dropout of another kind."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.scale = nn.Parameter(torch.ones(width))
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gate, self.value = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.back = nn.Linear(2 * width, width, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.query_key_value(self.norm(x)).chunk(3, -1)
        q, k, v = (part.view(batch, length, _HEADS, -1).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.out(attended.reshape(batch, length, width))
        x = x + self.dropout(self.down(F.gelu(self.up(x))))
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale
        return x + self.back(F.silu(self.gate(y)) * self.value(y))


class _ReferenceNetwork(nn.Module):
    """An embedding, blocks, a head and the cross entropy of the next token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, width)
        self.blocks = nn.Sequential(*(_ReferenceBlock(width) for _ in range(_BLOCKS)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, _VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.norm(self.blocks(self.embedding(tokens))))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class OperatorMarks:
    """Moments in front of and after every operator."""

    def __init__(self) -> None:
        self.moments: list[float] = []
        self._waited_s = waited_s()
        for _ in range(1000):
            self()
        self.cost_s = float(np.median(np.diff(self.moments)))
        self.moments.clear()

    def __call__(self) -> None:
        self.moments.append(time.perf_counter())

    def clear(self) -> None:
        """Forget moments so far."""
        self.moments.clear()
        self._waited_s = waited_s()

    def waited(self) -> float:
        """Seconds since `clear` for which other programs had the processor."""
        return waited_s() - self._waited_s

    def taken(self) -> np.ndarray:
        """Seconds of each operator since the last call, in order."""
        seconds = np.diff(self.moments) - self.cost_s
        self.moments.clear()
        return np.maximum(seconds, self.cost_s)


@dataclass(frozen=True)
class Pass:
    """A forward and backward: seconds of every operator, and those for which other programs had the processor."""

    seconds: np.ndarray
    waited_s: float


class ReferenceNetwork:
    """A small network whose operators are timed in their places, a pass after the other: on a GPU what the host takes to
    issue them."""

    def __init__(self, width: int, length: int, device: torch.device = _CPU) -> None:
        torch.manual_seed(0)
        self._device = device
        network = _ReferenceNetwork(width).to(device)
        self._tokens = torch.randint(_VOCABULARY, (1, length)).to(device)
        graph = trace_module(network, {"tokens": self._tokens}, "reference")
        (self._stage,) = split_graph(graph, [])
        self._marks = OperatorMarks()
        self._runner = _runner(self._stage, network, self._marks, device)
        self._runner.begin_step(0)
        self._reference = Reference(device)
        self._passes: list[tuple[Pass, float]] = []
        for _ in range(_WARM_UP):
            self.step()

    def run(self, seconds: float) -> None:
        """For about `seconds`, and a few passes at least; behind each of them the machine's speed is looked at."""
        end, least = time.perf_counter() + seconds, len(self._passes) + _LEAST_PASSES
        while len(self._passes) < least or time.perf_counter() < end:
            taken = self.step()
            self._passes.append((taken, self._reference.seconds(_WATCHED * float(taken.seconds.sum()))))

    def samples(self) -> Samples:
        """Every operator that is issued, over the faster half of the passes of all runs."""
        nodes = calls_of(self._stage)
        mean = np.mean([taken for taken, _ in self._kept()], axis=0)
        return [
            (work(node, self._stage.value), float(taken))
            for node, taken in zip(nodes, mean, strict=True)
            if node is not None
        ]

    @property
    def reference_s(self) -> float:
        """What the reference computation took while those passes did."""
        return float(np.mean([look for _, look in self._kept()]))

    def _kept(self) -> list[tuple[np.ndarray, float]]:
        passes, looks = zip(*self._passes, strict=True)
        return faster_half(list(zip(undelayed(passes), looks, strict=True)), lambda one: float(one[0].sum()))

    def step(self) -> Pass:
        """A forward and backward."""
        self._marks.clear()
        self._runner.forward(0, {}, {"tokens": self._tokens})
        forward = self._marks.taken()
        self._runner.backward(0, {})
        taken = Pass(np.concatenate([forward, self._marks.taken()]), self._marks.waited())
        synchronize(self._device)
        return taken


def undelayed(passes: Sequence[Pass]) -> list[np.ndarray]:
    """Seconds of the operators of each pass without those for which other programs had the processor: they are of the
    operators that took longest beyond what they take in the middle of all passes.

    >>> passes = [Pass(np.array([1.0, 1.0]), 0.0)] * 2 + [Pass(np.array([1.25, 5.0]), 4.0)]
    >>> [taken.tolist() for taken in undelayed(passes)]
    [[1.0, 1.0], [1.0, 1.0], [1.25, 1.0]]
    """
    usual = np.median([one.seconds for one in passes], axis=0)
    return [_without(one.waited_s, one.seconds, usual) for one in passes]


def _without(waited: float, seconds: np.ndarray, usual: np.ndarray) -> np.ndarray:
    excess = np.maximum(seconds - usual, 0.0)
    largest = np.argsort(-excess)
    before = np.cumsum(excess[largest]) - excess[largest]
    taken = seconds.copy()
    taken[largest] -= np.clip(waited - before, 0.0, excess[largest])
    return taken


def faster_half(samples: Sequence[_T], seconds: Callable[[_T], float]) -> list[_T]:
    """What is left of `samples` without those taken while a neighbour on the same cores or memory slowed this machine."""
    return sorted(samples, key=seconds)[: (len(samples) + 1) // 2]


def calls_of(stage: Stage) -> tuple[Node | None, ...]:
    """The operators of a forward and backward that are issued, in order; None in the place of a view that is not."""
    functions = (stage.forward, stage.backward)
    return tuple(
        node if call is not None else None
        for function in functions
        for node, call in zip(function.nodes, issued(function, stage.value).nodes, strict=True)
    )


def _runner(stage: Stage, network: nn.Module, mark: OperatorMarks, device: torch.device) -> StageRunner:
    tensors = dict(network.named_parameters()) | dict(network.named_buffers())
    return StageRunner(stage, Weights([stage], tensors, device), device, StageOptions(1.0), mark=mark)


@dataclass(frozen=True)
class OperatorFigures:
    """What least squares over timed operators say of a CPU. Seconds, bytes/s, FLOP/s."""

    view_overhead_s: float
    host_overhead_s: float
    cache_bandwidth: float
    norm_bandwidth: float
    function_rate: float
    random_rate: float
    scatter_rate: float
    product_s: float
    """Of each product, the overhead of any operator included, beside what its arithmetic and packing take."""
    flop_s: float
    packed_byte_s: float
    attention_overhead_s: float
    attention_flops: float
    attention_backward_flops: float


def host_figures(samples: Samples) -> tuple[float, float]:
    """Return the mean seconds of an operator that launches a kernel, and of a view.

    >>> host_figures([(Work(Kernel.MATMUL, "float32"), 6e-6), (Work(Kernel.VIEW, "float32"), 2e-6)])
    (6e-06, 2e-06)
    """
    views = [seconds for asked, seconds in samples if asked.kernel is Kernel.VIEW]
    kernels = [seconds for asked, seconds in samples if asked.kernel is not Kernel.VIEW]
    return float(np.mean(kernels)), float(np.mean(views))


def fitted(samples: Samples) -> OperatorFigures:
    """The figures under which the seconds of `samples` are off by the least squares of their relative errors.

    Each kind of operator takes an overhead and what it moves, evaluates, draws and scatters at constant rates.
    """
    by_kernel: dict[Kernel, Samples] = {kernel: [] for kernel in Kernel}
    for found, seconds in samples:
        by_kernel[found.kernel].append((found, seconds))
    views = [seconds for _, seconds in by_kernel[Kernel.VIEW]]
    streams = by_kernel[Kernel.MEMORY] + by_kernel[Kernel.NORM]
    overhead, moved, normed, functions, random, scattered = least_squares(
        [
            (
                1.0, *(found.bytes_moved if found.kernel is kernel else 0.0 for kernel in (Kernel.MEMORY, Kernel.NORM)),
                found.num_functions, found.num_random, found.num_scattered,
            )
            for found, _ in streams
        ],
        [seconds for _, seconds in streams],
    )  # fmt: skip
    products = by_kernel[Kernel.MATMUL]
    product, flop, packed_byte = least_squares(
        [(1.0, found.arithmetic, found.bytes_moved) for found, _ in products],
        [seconds for _, seconds in products],
    )
    forward, backward = by_kernel[Kernel.ATTENTION], by_kernel[Kernel.ATTENTION_BACKWARD]
    attention, per_flop, per_flop_backward = least_squares(
        [(1.0, _computed(found), 0.0) for found, _ in forward]
        + [(1.0, 0.0, _computed(found)) for found, _ in backward],
        [seconds for _, seconds in forward + backward],
    )
    return OperatorFigures(
        view_overhead_s=float(np.mean(views)),
        host_overhead_s=overhead,
        cache_bandwidth=_rate(moved),
        norm_bandwidth=_rate(normed),
        function_rate=_rate(functions),
        random_rate=_rate(random),
        scatter_rate=_rate(scattered),
        product_s=product,
        flop_s=flop,
        packed_byte_s=packed_byte,
        attention_overhead_s=max(attention - overhead, 0.0),
        attention_flops=_rate(per_flop),
        attention_backward_flops=_rate(per_flop_backward),
    )


def _computed(found: Work) -> float:
    return found.arithmetic if found.in_blocks is None else found.in_blocks


def least_squares(rows: Sequence[tuple[float, ...]], seconds: Sequence[float]) -> list[float]:
    """Coefficients, none negative, of the least sum of squared errors, each over the seconds expected.

    So weighted, what is expected of all rows adds up to what they took: a fit of relative errors, which slow outliers
    make small, would expect too little of a step. The weights need the result; a few rounds settle both.
    """
    columns, taken = np.asarray(rows), np.asarray(seconds)
    expected, found = taken, np.zeros(columns.shape[1])
    for _ in range(_ROUNDS):
        weight = 1 / np.sqrt(np.maximum(expected, _LEAST_S))
        found, _ = nnls(columns * weight[:, None], taken * weight)
        expected = columns @ found
    return [float(one) for one in found]


def _rate(seconds_each: float) -> float:
    return 1 / max(seconds_each, 1e-15)
