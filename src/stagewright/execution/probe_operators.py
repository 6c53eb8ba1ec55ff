"""Operators timed in place: in the stages of small reference networks, as an executor runs them.

An operator that is called repeatedly on the same tensors finds its code and its data in the first cache and takes a third
of its time between a hundred others. So a CPU's figures for small operators come from a forward and backward of networks
of the usual operators, each timed in place, and from least squares over all of them.
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
"""Width and tokens of the reference networks: from one in which operators are mostly overhead to one in which they are
not."""
_HEADS, _BLOCKS, _VOCABULARY = 4, 2, 1000
_WARM_UP, _LEAST_RUNS = 2, 4
_ROUNDS, _LEAST_S = 8, 1e-8
_WATCHED = 0.1
"""Time for the reference computation, as a fraction of a run."""

_CPU = torch.device("cpu")

_T = TypeVar("_T")
Samples = list[tuple[Work, float]]
"""Work of operators, each with its mean seconds over the faster half of all runs."""


class _ReferenceBlock(nn.Module):
    """Attention, a two-matmul layer and a gated one, each with another kind of norm or dropout."""

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
    """An embedding, blocks, a head and the cross-entropy of the next token."""

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
    """Recorded moments before and after every operator."""

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
        """Forget the moments so far."""
        self.moments.clear()
        self._waited_s = waited_s()

    def waited(self) -> float:
        """Return the seconds since `clear` for which other programs had the processor."""
        return waited_s() - self._waited_s

    def taken(self) -> np.ndarray:
        """Return the seconds of each operator since the last call, in order."""
        seconds = np.diff(self.moments) - self.cost_s
        self.moments.clear()
        return np.maximum(seconds, self.cost_s)


@dataclass(frozen=True)
class TimedRun:
    """A forward and backward: the seconds of every operator, and those for which other programs had the processor."""

    seconds: np.ndarray
    waited_s: float


class ReferenceNetwork:
    """A small network whose operators are timed in place, run after run; on a GPU, the host's time to issue them is
    measured."""

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
        self._runs: list[tuple[TimedRun, float]] = []
        for _ in range(_WARM_UP):
            self.step()

    def run(self, seconds: float) -> None:
        """Run forwards and backwards for about `seconds`, and at least a few; time the reference computation after each."""
        end, least = time.perf_counter() + seconds, len(self._runs) + _LEAST_RUNS
        while len(self._runs) < least or time.perf_counter() < end:
            taken = self.step()
            self._runs.append((taken, self._reference.seconds(_WATCHED * float(taken.seconds.sum()))))

    def samples(self) -> Samples:
        """Return the samples of every issued operator, over the faster half of all runs."""
        nodes = calls_of(self._stage)
        mean = np.mean([taken for taken, _ in self._kept()], axis=0)
        return [
            (work(node, self._stage.value), float(taken))
            for node, taken in zip(nodes, mean, strict=True)
            if node is not None
        ]

    @property
    def reference_s(self) -> float:
        """Mean seconds of the reference computation after those runs."""
        return float(np.mean([look for _, look in self._kept()]))

    def _kept(self) -> list[tuple[np.ndarray, float]]:
        runs, looks = zip(*self._runs, strict=True)
        return faster_half(
            list(zip(undelayed(runs), looks, strict=True)), lambda sample: float(sample[0].sum())
        )

    def step(self) -> TimedRun:
        """Run and time a forward and backward."""
        self._marks.clear()
        self._runner.forward(0, {}, {"tokens": self._tokens})
        forward = self._marks.taken()
        self._runner.backward(0, {})
        taken = TimedRun(np.concatenate([forward, self._marks.taken()]), self._marks.waited())
        synchronize(self._device)
        return taken


def undelayed(runs: Sequence[TimedRun]) -> list[np.ndarray]:
    """Return the seconds of each run's operators without those for which other programs had the processor, which are
    attributed to the operators that exceed their medians over all runs most.

    >>> runs = [TimedRun(np.array([1.0, 1.0]), 0.0)] * 2 + [TimedRun(np.array([1.25, 5.0]), 4.0)]
    >>> [taken.tolist() for taken in undelayed(runs)]
    [[1.0, 1.0], [1.0, 1.0], [1.25, 1.0]]
    """
    usual = np.median([timed.seconds for timed in runs], axis=0)
    return [_without(timed.waited_s, timed.seconds, usual) for timed in runs]


def _without(waited: float, seconds: np.ndarray, usual: np.ndarray) -> np.ndarray:
    excess = np.maximum(seconds - usual, 0.0)
    largest = np.argsort(-excess)
    before = np.cumsum(excess[largest]) - excess[largest]
    taken = seconds.copy()
    taken[largest] -= np.clip(waited - before, 0.0, excess[largest])
    return taken


def faster_half(samples: Sequence[_T], seconds: Callable[[_T], float]) -> list[_T]:
    """Return the faster half of `samples`, without those taken while other programs slowed this machine."""
    return sorted(samples, key=seconds)[: (len(samples) + 1) // 2]


def calls_of(stage: Stage) -> tuple[Node | None, ...]:
    """Return the issued operators of a forward and backward in order, with None in place of each view that is not issued."""
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
    """A CPU's figures from least squares over timed operators, in seconds, bytes/s and FLOP/s."""

    view_overhead_s: float
    host_overhead_s: float
    cache_bandwidth: float
    norm_bandwidth: float
    function_rate: float
    random_rate: float
    scatter_rate: float
    matmul_s: float
    """Seconds of each matmul besides its arithmetic and packing, including the overhead of any operator."""
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
    views = [seconds for operator, seconds in samples if operator.kernel is Kernel.VIEW]
    kernels = [seconds for operator, seconds in samples if operator.kernel is not Kernel.VIEW]
    return float(np.mean(kernels)), float(np.mean(views))


def fitted(samples: Samples) -> OperatorFigures:
    """Fit figures to the seconds of `samples` by weighted least squares.

    Each kind of operator takes an overhead, and moves, evaluates, draws and scatters at constant rates.
    """
    by_kernel: dict[Kernel, Samples] = {kernel: [] for kernel in Kernel}
    for operator, seconds in samples:
        by_kernel[operator.kernel].append((operator, seconds))
    views = [seconds for _, seconds in by_kernel[Kernel.VIEW]]
    streams = by_kernel[Kernel.MEMORY] + by_kernel[Kernel.NORM]
    overhead, moved, normed, functions, random, scattered = least_squares(
        [
            (
                1.0,
                *(operator.bytes_moved if operator.kernel is kernel else 0.0 for kernel in (Kernel.MEMORY, Kernel.NORM)),
                operator.num_functions, operator.num_random, operator.num_scattered,
            )
            for operator, _ in streams
        ],
        [seconds for _, seconds in streams],
    )  # fmt: skip
    matmuls = by_kernel[Kernel.MATMUL]
    matmul, flop, packed_byte = least_squares(
        [(1.0, operator.arithmetic, operator.bytes_moved) for operator, _ in matmuls],
        [seconds for _, seconds in matmuls],
    )
    forward, backward = by_kernel[Kernel.ATTENTION], by_kernel[Kernel.ATTENTION_BACKWARD]
    attention, per_flop, per_flop_backward = least_squares(
        [(1.0, _computed(operator), 0.0) for operator, _ in forward]
        + [(1.0, 0.0, _computed(operator)) for operator, _ in backward],
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
        matmul_s=matmul,
        flop_s=flop,
        packed_byte_s=packed_byte,
        attention_overhead_s=max(attention - overhead, 0.0),
        attention_flops=_rate(per_flop),
        attention_backward_flops=_rate(per_flop_backward),
    )


def _computed(operator: Work) -> float:
    return operator.arithmetic if operator.in_blocks is None else operator.in_blocks


def least_squares(rows: Sequence[tuple[float, ...]], seconds: Sequence[float]) -> list[float]:
    """Return the non-negative coefficients of the least sum of squared errors, each divided by the expected seconds.

    With these weights, the expected seconds of all rows add up to the measured ones: a fit of relative errors, which slow
    outliers make small, would predict too little for a step. The weights depend on the result; a few rounds settle both.
    """
    columns, taken = np.asarray(rows), np.asarray(seconds)
    expected, coefficients = taken, np.zeros(columns.shape[1])
    for _ in range(_ROUNDS):
        weight = 1 / np.sqrt(np.maximum(expected, _LEAST_S))
        coefficients, _ = nnls(columns * weight[:, None], taken * weight)
        expected = columns @ coefficients
    return [float(coefficient) for coefficient in coefficients]


def _rate(seconds_each: float) -> float:
    return 1 / max(seconds_each, 1e-15)
