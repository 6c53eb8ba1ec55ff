"""Compilation of stage functions with TorchInductor; a function that cannot be compiled runs uncompiled, with a warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from stagewright.errors import StagewrightWarning
from stagewright.execution.allocation import cause_of
from stagewright.graph.added_nodes import HOST_COPIES
from stagewright.graph.stage import Function, parted
from stagewright.tracing.private import is_seen_by_modes
from stagewright.tracing.runnable import Accumulate, Pure, Reseed, Runnable, pure_function

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}
"""Tolerance between compiled and uncompiled results, as a fraction of the largest element; 0.1 in half precision. Models
in float64 compute some values, such as rotary tables, in float32."""
_LOOSE = 0.1

Tensors = list[torch.Tensor]


def compiled(
    function: Function,
    resident: set[int],
    device: torch.device,
    name: str,
    make: Callable[[Function, str], Runnable],
) -> Runnable:
    """Return what `make` makes of `function`, compiled at its first call (`StageRunner.prepare` makes it, before training).
    The parts between copies to or from the host are compiled separately.

    The first call runs both versions and compares layouts, shared storages and contents. Warns, with the reason, where a
    function stays uncompiled.
    """
    whole = make(function, name)
    if not any(node.op in HOST_COPIES for node in function.nodes):
        return _compiled(whole, function, resident, device, name)
    parts: list[Runnable] = []
    for number, part in enumerate(parted(function, resident, lambda node: node.op in HOST_COPIES)):
        called = f"{name}_{number}"
        runnable = make(part, called)
        is_copy = part.nodes[0].op in HOST_COPIES
        parts.append(runnable if is_copy else _compiled(runnable, part, resident, device, called))
    return replace(whole, call=_Parts(whole, parts))


def _compiled(
    runnable: Runnable, function: Function, resident: Iterable[int], device: torch.device, name: str
) -> Runnable:
    pure = pure_function(function, resident, device, name)
    if pure is None:
        _warn(name, "it draws random numbers")
        return runnable
    return Runnable(_Compiled(runnable, pure, name), runnable.inputs, runnable.outputs, runnable.source)


class _Parts:
    """A call of several parts in order; a value is freed after the last part that uses it."""

    def __init__(self, whole: Runnable, parts: Sequence[Runnable]) -> None:
        self.whole = whole
        last = {value: number for number, part in enumerate(parts) for value in part.inputs}
        last |= dict.fromkeys(whole.outputs, len(parts))
        self.parts = [(part, [last[v] == number for v in part.inputs]) for number, part in enumerate(parts)]
        self.given = [value in last for value in whole.inputs]

    def __call__(
        self, inputs: Tensors, resident: dict[int, torch.Tensor], accumulate: Accumulate, reseed: Reseed
    ) -> Tensors:
        if is_seen_by_modes():
            return self.whole.call(inputs, resident, accumulate, reseed)
        given = zip(self.whole.inputs, inputs, self.given, strict=True)
        values = {value: tensor for value, tensor, is_used in given if is_used}
        inputs.clear()
        for part, is_last in self.parts:
            uses = zip(part.inputs, is_last, strict=True)
            taken = [values.pop(value) if last else values[value] for value, last in uses]
            values.update(zip(part.outputs, part.call(taken, resident, accumulate, reseed), strict=True))
        return [values[value] if value in values else resident[value] for value in self.whole.outputs]


class _Compiled:
    def __init__(self, runnable: Runnable, pure: Pure, name: str) -> None:
        self.runnable = runnable
        self.pure = pure
        self.name = name
        self.checked = False
        self.works = True
        self.fast = torch.compile(pure.call, dynamic=False, fullgraph=True)

    def __call__(
        self, inputs: Tensors, resident: dict[int, torch.Tensor], accumulate: Accumulate, reseed: Reseed
    ) -> Tensors:
        is_metered = is_seen_by_modes()  # metered bytes are those of the operators, as in predictions
        if not self.checked and not is_metered:
            self.checked = True
            self._check([*inputs, *self._read(resident)])
        if not self.works or is_metered:
            return self.runnable.call(inputs, resident, accumulate, reseed)
        arguments = [*inputs, *self._read(resident)]
        inputs.clear()
        results = list(self.fast(*arguments))
        count = len(results) - len(self.pure.parameters)
        for parameter, gradient in zip(self.pure.parameters, results[count:], strict=True):
            accumulate(parameter, gradient)
        return results[:count]

    def _read(self, resident: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        return [resident[value] for value in self.pure.resident]

    def _check(self, arguments: Sequence[torch.Tensor]) -> None:
        """Compile, and compare the results with those of the operators."""
        try:
            results = self.fast(*arguments)
        except Exception as error:  # whatever a compiler raises, the operators can run
            if cause_of(error) is not None:
                raise
            self._give_up(str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__)
            return
        problem = _difference(results, self.pure.call(*arguments), arguments)
        if problem:
            self._give_up(problem)

    def _give_up(self, reason: str) -> None:
        self.works = False
        self.fast = self.pure.call
        _warn(self.name, reason)


def _warn(name: str, reason: str) -> None:
    warnings.warn(f"{name} is not compiled: {reason}", StagewrightWarning, stacklevel=2)


def _difference(
    results: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], given: Sequence[torch.Tensor]
) -> str:
    """Return what compilation changed beyond rounding, in words; empty if nothing."""
    scales = list(map(_largest, wanted))
    for result, expected, scale in zip(results, wanted, scales, strict=True):
        if (result.dtype, result.shape, result.stride()) != (
            expected.dtype,
            expected.shape,
            expected.stride(),
        ):
            return f"a result is {_layout(result)} instead of {_layout(expected)}"
        if not _is_close(result, expected, scale, max(scales)):
            return "a result differs"
    if _sharing((*given, *results)) != _sharing((*given, *wanted)):
        return "results share storages differently"
    return ""


def _layout(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype}{list(tensor.shape)} with strides {tensor.stride()}"


def _is_close(result: torch.Tensor, expected: torch.Tensor, scale: float, largest: float) -> bool:
    """Compare with tolerances; `scale` is the largest element of `expected`, and `largest` that of all results.

    Results below one rounding of it are noise, such as gradients of attention's keys where all tokens are equal.
    """
    if not _is_rounded(result):
        return torch.equal(result, expected)
    noise = torch.finfo(expected.dtype).eps * largest
    if all(bool((tensor.abs() <= noise).all()) for tensor in (result, expected)):
        return True
    part = TOLERANCE.get(expected.dtype, _LOOSE)
    # Equal infinities are close.
    return torch.allclose(result, expected, rtol=part, atol=part * scale, equal_nan=True)


def _largest(tensor: torch.Tensor) -> float:
    """Return the largest finite absolute value of a tensor of rounded numbers; 0 for others."""
    if not _is_rounded(tensor):
        return 0.0
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _is_rounded(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _sharing(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Return, for each tensor, the first one with the same storage, and its offset in it."""
    first: dict[int, int] = {}
    return [
        (first.setdefault(tensor.untyped_storage().data_ptr(), index), int(tensor.storage_offset()))
        for index, tensor in enumerate(tensors)
    ]
