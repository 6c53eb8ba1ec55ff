"""The host: which calls wait for the device, and what it costs to issue operators."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from results_file import Results
from stages import Setting, alone, plain_model
from torch.utils._python_dispatch import TorchDispatchMode

from stagewright.execution.clock import synchronize
from stagewright.execution.session import Session
from stagewright.planning.plan import Plan

Call = Callable[[], Any]
HasEnded = Callable[[], bool]

_HELD_TIMES, _LEAST_HELD_S, _MOST_HELD_S = 3.0, {"cuda": 0.3, "cpu": 0.02}, 30.0
"""The stand-in lasts so many times as long as the call takes by itself, at least and at most so long."""
_SLEEP_S = 0.05
_NUM_CALLS = {"cuda": 2000, "cpu": 200}


class StandIn:
    """A kernel on a stream of its own that ends after some seconds, in place of a posted receive; a thread on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._cycles = 10**8
        if self._stream is not None:
            self._sleep()  # loads the kernel
            self._cycles = round(self._cycles * _SLEEP_S / self._sleep())

    def _sleep(self) -> float:
        """Seconds of the sleeping kernel."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._stream):
            start.record()
            torch.cuda._sleep(self._cycles)
            end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def begin(self, seconds: float) -> HasEnded:
        """Start it; the result says whether it has ended."""
        if self._stream is None:
            timer = threading.Timer(seconds, lambda: None)
            timer.start()
            return lambda: not timer.is_alive()
        event = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            for _ in range(max(round(seconds / _SLEEP_S), 1)):
                torch.cuda._sleep(self._cycles)
            event.record()
        return event.query


def waits(
    device: torch.device, what: str, alone: Call, during: Call, begin: Callable[[float], HasEnded]
) -> Results:
    """Whether `during` returns only after the stand-in, and the seconds that `alone`, a call like it, takes by itself."""
    synchronize(device)
    start = time.perf_counter()
    alone()
    alone_s = time.perf_counter() - start
    synchronize(device)
    held_s = min(max(_HELD_TIMES * alone_s, _LEAST_HELD_S[device.type]), _MOST_HELD_S)
    has_ended = begin(held_s)
    start = time.perf_counter()
    during()
    seconds, is_late = time.perf_counter() - start, has_ended()
    while not has_ended():
        time.sleep(0.01)
    judged = "does not wait" if not is_late else "WAITS for the device" if alone_s < held_s else "undecided"
    yield f"{what}: s by itself", [], alone_s
    yield f"{what}: {judged}; returned after {seconds:.3g} s under a receive of {held_s:.3g} s"


def calls_of(device: torch.device) -> dict[str, tuple[Call, Call]]:
    """Calls that a run makes in its first batches, each twice and both times for the first time where that matters."""
    is_gpu, size = device.type == "cuda", 2**28 if device.type == "cuda" else 2**20
    x = torch.rand(1024, device=device)
    total = x.sum()
    kept: list[torch.Tensor] = []

    def allocate() -> None:
        kept.append(torch.empty(size, dtype=torch.uint8, device=device))

    def free() -> None:
        allocate()
        kept.clear()
        if is_gpu:
            torch.cuda.empty_cache()

    def pin(num_bytes: int) -> None:
        kept.append(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_gpu))

    def matmul(dtype: torch.dtype) -> None:
        square = torch.ones(64, 64, dtype=dtype, device=device)
        torch.mm(square, square)

    def compiled(factor: float) -> None:
        torch.compile(lambda value: value.sin() * factor + value.cos(), dynamic=False)(x)

    def captured(term: float) -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            x.add(term)

    calls: dict[str, tuple[Call, Call]] = {
        "first use of a kernel": (partial(torch.expm1, x), partial(torch.log1p, x)),
        "first matmul of a type": (partial(matmul, torch.float64), partial(matmul, torch.complex64)),
        "allocation from the device": (allocate, allocate),
        "allocation and empty_cache": (free, free),
        "allocation of pinned memory": (partial(pin, 2**24), partial(pin, 2**26)),
        "copy from pageable memory": (lambda: torch.ones(2**20).to(device), lambda: torch.ones(2**21).to(device)),
        ".item()": (total.item, total.item),
    }  # fmt: skip
    if is_gpu:
        calls |= {
            "capture of a CUDA graph": (partial(captured, 1.0), partial(captured, 2.0)),
            "synchronize of another stream": (torch.cuda.Stream().synchronize, torch.cuda.Stream().synchronize),
            "synchronize of the device": (torch.cuda.synchronize, torch.cuda.synchronize),
        }  # fmt: skip
    calls["torch.compile, first call"] = (
        partial(compiled, 2.0),
        partial(compiled, 3.0),
    )  # last, as it takes longest
    return calls


def issue(setting: Setting, plan: Plan) -> Results:
    """Host seconds per operator: of torch's overloads and bindings, under autograd, and as the executor issues it."""
    device, aten = setting.device, torch.ops.aten
    predictions = [cluster.device.host_overhead_s for cluster in setting.described]
    x = torch.rand(64, 64, device=device)
    forms: dict[str, tuple[Call, Call]] = {
        "add": (partial(aten.add.Tensor, x, x), partial(torch.add, x, x)),
        "mm": (partial(aten.mm.default, x, x), partial(torch.mm, x, x)),
        "view": (partial(aten.view.default, x, [-1]), partial(x.view, -1)),
    }
    for what, (overload, binding) in forms.items():
        for form, call in (("overload", overload), ("binding", binding)):
            yield f"{what}, {form}: s", predictions, _seconds(device, call, _NUM_CALLS[device.type])
    with alone(device):
        session = Session(plan, device, None, True)
        inputs, module = session.microbatches(0, session.graph), plain_model(session)

        def plain() -> None:
            module.zero_grad(set_to_none=True)
            module(**inputs[0]).backward()

        ours = partial(session.runner.run_batch, 0, inputs)
        for what, batch in (("autograd", plain), ("executor", ours)):
            batch()
            with Counting() as counting:
                batch()
            seconds = _seconds(device, batch, setting.repeats) / counting.count
            yield f"{plan.model.name}, {counting.count} operators by {what}: s each", predictions, seconds


class Counting(TorchDispatchMode):
    """Counts operators."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _seconds(device: torch.device, call: Call, count: int) -> float:
    """Of the host per call, which does not wait for the device: the least mean over `count` calls."""
    means = []
    for _ in range(4):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(count):
            call()
        means.append((time.perf_counter() - start) / count)
    return min(means)
