"""Profiling of a model's operators in place: in forwards and backwards of a few of its layers on this machine's devices.

An operator that is called repeatedly on the same tensors finds them in the nearest cache; between other operators it does
not, and values that a forward saves for its backward leave the cache when other microbatches come in between. So operators
are timed in place, with several microbatches in flight as in a pipeline, in as many processes as will work at once.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from stagewright.cluster.profile import OperatorProfile
from stagewright.estimation.signatures import signature_of
from stagewright.execution.accelerator import DeviceEvent, accelerator_of
from stagewright.execution.clock import synchronize
from stagewright.execution.data.synthetic import SyntheticBatches
from stagewright.execution.loading import StartingTensors
from stagewright.execution.probe import ProbeRequest, Progress, checked, run_workers
from stagewright.execution.probe_description import processor_name
from stagewright.execution.probe_operators import OperatorMarks, TimedRun, calls_of, faster_half, undelayed
from stagewright.execution.reference import Reference
from stagewright.execution.stage_runner import StageOptions, StageRunner
from stagewright.execution.weights import Weights
from stagewright.graph import OperatorGraph
from stagewright.graph.split import split_graph
from stagewright.planning.job import Job
from stagewright.tracing.cache import trace
from stagewright.tracing.models.build import DeferredModel
from stagewright.tracing.models.reference import ModelReference
from stagewright.units import GIB

_LIMIT_S = 180.0
"""Seconds for processes to start and to read their graphs."""

_WARM_UP, _LEAST_ROUNDS = 2, 4
_MOST_IN_FLIGHT, _MOST_HELD_BYTES = 8, GIB
"""Maximum number of microbatches in flight, and maximum bytes that they may save on the device together."""

_WATCHED = 0.1
"""Time for the reference computation, as a fraction of a round's forwards and backwards."""

_PREPARED = 0.1
"""Fraction of the time after which forwards and backwards are timed."""

Seconds = dict[str, float]
"""Seconds by operator signature."""


@dataclass(frozen=True)
class _ProfileRequest(ProbeRequest):
    reference: ModelReference
    job: Job
    microbatches: tuple[int, ...]


def profile(
    reference: ModelReference,
    job: Job,
    microbatches: Sequence[int],
    device: str = "cpu",
    processes: int = 1,
    seconds: float = 5.0,
    time_limit_s: float | None = None,
    report: Progress = lambda what, fraction: None,
) -> OperatorProfile:
    """Measure the seconds of the operators of `reference` for microbatches of these sizes, while `processes` work at once.

    Args:
        seconds: approximate seconds for the forwards and backwards of each size.
        time_limit_s: seconds after which processes without progress are ended.

    Raises:
        InputError: this machine has no such device, or not as many.
        RunError: a process fails, or makes no progress; none outlives the call.
        TraceError: the model cannot be traced.
    """
    limit_s = time_limit_s or _LIMIT_S + 4 * seconds * len(microbatches)
    base = checked(device, processes, limit_s, seconds)
    for size in microbatches:
        report(f"tracing microbatches of {size}", 0.0)
        _graph(reference, job, size, device)  # cached, so that the processes read it
    request = _ProfileRequest(**vars(base), reference=reference, job=job, microbatches=tuple(microbatches))
    profiles = run_workers(request, report, _measure)[:processes]
    return OperatorProfile(
        device=processor_name(device),
        kind="cpu" if device == "cpu" else "cuda",
        torch=torch.__version__,
        processes=processes,
        reference_s=statistics.median(rank_profile.reference_s for rank_profile in profiles),
        num_threads=base.threads if device == "cpu" else None,
        seconds={
            name: statistics.median(rank_profile.seconds[name] for rank_profile in profiles)
            for name in profiles[0].seconds
        },
    )


def _graph(reference: ModelReference, job: Job, size: int, device: str) -> OperatorGraph:
    """Trace a few of the layers; the others are like them."""
    return trace(reference, size, expand=False, **job.traced(device))


def _measure(rank: int, request: _ProfileRequest, device: torch.device, report: Progress) -> _RankProfile:
    """Profile operators in this process, while all processes run the same operators at the same time.

    Sizes take turns, so that fluctuations of the machine's speed affect them equally.
    """
    runners = []
    longest_s = request.seconds_per_figure / (_WARM_UP + _LEAST_ROUNDS)
    for place, size in enumerate(request.microbatches):
        report(f"preparing microbatches of {size}", _PREPARED * place / len(request.microbatches))
        runners.append(_SizeRunner(request.reference, request.job, size, device, longest_s))
    reference = Reference(device)
    for runner in runners * _WARM_UP:
        runner.step()
    dist.barrier()
    begun, limit_s = time.perf_counter(), request.seconds_per_figure * len(runners)
    rounds: list[_Round] = []
    while len(rounds) < _LEAST_ROUNDS or time.perf_counter() - begun < limit_s:
        done = min((time.perf_counter() - begun) / limit_s, 1.0)
        report(f"round {len(rounds) + 1}", _PREPARED + (1.0 - _PREPARED) * done)
        sizes = tuple(runner.step() for runner in runners)
        watched_s = _WATCHED * sum(float(timed.seconds.sum()) for timed in sizes)
        rounds.append(_Round(reference.seconds(watched_s), sizes))
    by_size = [undelayed(timed) for timed in zip(*(timed_round.sizes for timed_round in rounds), strict=True)]
    looks = [timed_round.reference_s for timed_round in rounds]
    kept = faster_half(
        list(zip(looks, *by_size, strict=True)), lambda sample: sum(float(size.sum()) for size in sample[1:])
    )
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    for runner, columns in zip(runners, zip(*(sizes for _, *sizes in kept), strict=True), strict=True):
        for name, taken in zip(runner.signatures, np.mean(columns, axis=0), strict=True):
            if name is not None:
                seconds[name].append(float(taken))
    means = {name: statistics.fmean(samples) for name, samples in seconds.items()}
    return _RankProfile(statistics.fmean(look for look, *_ in kept), means)


@dataclass(frozen=True)
class _RankProfile:
    reference_s: float
    seconds: Seconds


@dataclass(frozen=True)
class _Round:
    """A run of every size, and the seconds of the reference computation."""

    reference_s: float
    sizes: tuple[TimedRun, ...]


class _SizeRunner:
    """Forwards and backwards of microbatches of one size through a model's few layers.

    Args:
        longest_s: maximum seconds of the forwards and backwards of all microbatches in flight, unless one takes longer.
    """

    def __init__(
        self, reference: ModelReference, job: Job, size: int, device: torch.device, longest_s: float
    ) -> None:
        graph = _graph(reference, job, size, device.type)
        (self._stage,) = split_graph(graph, [])
        model = DeferredModel(reference, size, job.sequence_length, job.torch_name, seed=job.seed)
        wide = torch.float32 if job.dtype in ("bf16", "fp16") else None
        weights = Weights([self._stage], StartingTensors(model, [self._stage]), device, wide)
        batch = SyntheticBatches(model.inputs, job.seed).microbatch(0, 0, graph)
        self._inputs = {name: tensor.to(device) for name, tensor in batch.items()}
        self._device, self._marks = device, OperatorMarks() if device.type == "cpu" else _Events(device)
        self._runner = StageRunner(self._stage, weights, device, StageOptions(1.0), mark=self._marks)
        self._runner.begin_step(0)
        self._num_in_flight = self._held_at_once(longest_s)

    def _held_at_once(self, longest_s: float) -> int:
        self._runner.forward(0, {}, self._inputs)
        held = sum(tensor.nbytes for tensor in self._runner.held[0].values())
        self._runner.backward(0, {})
        synchronize(self._device)
        self._num_in_flight = 1
        taken_s = float(self.step().seconds.sum())
        return max(1, min(_MOST_IN_FLIGHT, _MOST_HELD_BYTES // max(held, 1), int(longest_s / taken_s)))

    @property
    def signatures(self) -> list[str | None]:
        """Signatures of the operators that a run times, in order; None where none is issued."""
        value = self._stage.value
        nodes = calls_of(self._stage)
        return [None if node is None else signature_of(node, value) for node in nodes]

    def step(self) -> TimedRun:
        """Run a forward and backward of every microbatch in flight; return their mean."""
        in_flight = range(self._num_in_flight)
        self._marks.clear()
        forward, backward = [], []
        for microbatch in in_flight:
            self._runner.forward(microbatch, {}, self._inputs)
            forward.append(self._marks.taken())
        for microbatch in in_flight:
            self._runner.backward(microbatch, {})
            backward.append(self._marks.taken())
        synchronize(self._device)
        seconds = np.concatenate([np.mean(forward, axis=0), np.mean(backward, axis=0)])
        return TimedRun(seconds, self._marks.waited() / len(in_flight))


class _Events:
    """The equivalent of `OperatorMarks` on a GPU, with events between operators. The GPU is kept busy until the host has
    issued them all, so that it waits for none."""

    _BUSY_WIDTH = 4096

    def __init__(self, device: torch.device) -> None:
        self._accelerator = accelerator_of(device)
        self._events: list[DeviceEvent] = []
        self._ahead = torch.zeros(self._BUSY_WIDTH, self._BUSY_WIDTH, device=device)
        self._host_s, self._began = 0.0, 0.0
        self._call_s = self._seconds_of(self._work)

    def _work(self) -> None:
        torch.mm(self._ahead, self._ahead)

    def clear(self) -> None:
        self._events.clear()

    def waited(self) -> float:
        """Return 0: a GPU is used by no other program."""
        return 0.0

    def __call__(self) -> None:
        if not self._events:
            for _ in range(int(2 * self._host_s / self._call_s) + 1):
                self._work()
            self._began = time.perf_counter()
        self._events.append(self._accelerator.mark())

    def taken(self) -> np.ndarray:
        """Return the seconds of each operator since the last call, in order."""
        self._host_s = max(self._host_s, time.perf_counter() - self._began)
        self._accelerator.synchronize()
        pairs = zip(self._events[:-1], self._events[1:], strict=True)
        seconds = [max(before.elapsed_time(after) * 1e-3, 1e-8) for before, after in pairs]
        self._events.clear()
        return np.array(seconds)

    def _seconds_of(self, call: Callable[[], object]) -> float:
        """Return the seconds of one call on the GPU."""
        call()
        self._accelerator.synchronize()
        start = time.perf_counter()
        call()
        self._accelerator.synchronize()
        return time.perf_counter() - start
