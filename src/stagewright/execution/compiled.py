"""Stage functions through TorchInductor, each for itself: one that cannot be compiled runs as it is, with a warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from stagewright.errors import StagewrightWarning
from stagewright.execution.allocation import cause_of
from stagewright.graph.added_nodes import MOVES
from stagewright.graph.stage import Function, parted
from stagewright.tracing.private import is_seen_by_modes
from stagewright.tracing.runnable import Accumulate, Pure, Reseed, Runnable, pure_function

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}
"""How far a compiled result may be from that of the operators, of its largest element; 0.1 in half precision. Models in
float64 compute some values, such as rotary tables, in float32."""
_LOOSE = 0.1

Tensors = list[torch.Tensor]


def compiled(
    function: Function,
    resident: set[int],
    device: torch.device,
    name: str,
    make: Callable[[Function, str], Runnable],
) -> Runnable:
    """What `make` makes of `function`, compiled when it is first called (`StageRunner.prepare` does, before training): what
    lies between two moves to or from the host each for itself.

    The first call runs both and compares layouts, what shares storages, and contents. Warns where the operators are run as
    they are, and says why.
    """
    whole = make(function, name)
    if not any(node.op in MOVES for node in function.nodes):
        return _compiled(whole, function, resident, device, name)
    parts: list[Runnable] = []
    for number, part in enumerate(parted(function, resident, lambda node: node.op in MOVES)):
        called = f"{name}_{number}"
        runnable = make(part, called)
        moves = part.nodes[0].op in MOVES
        parts.append(runnable if moves else _compiled(runnable, part, resident, device, called))
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
    """Runs parts one after the other; a value goes with the last that uses it."""

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
        known = {value: tensor for value, tensor, is_used in given if is_used}
        inputs.clear()
        for part, is_last in self.parts:
            uses = zip(part.inputs, is_last, strict=True)
            taken = [known.pop(value) if last else known[value] for value, last in uses]
            known.update(zip(part.outputs, part.call(taken, resident, accumulate, reseed), strict=True))
        return [known[value] if value in known else resident[value] for value in self.whole.outputs]


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
        is_metered = is_seen_by_modes()  # bytes are counted of the operators, as they are predicted
        if not self.checked and not is_metered:
            self.checked = True
            self._check([*inputs, *self._read(resident)])
        if not self.works or is_metered:
            return self.runnable.call(inputs, resident, accumulate, reseed)
        arguments = [*inputs, *self._read(resident)]
        inputs.clear()
        made = list(self.fast(*arguments))
        count = len(made) - len(self.pure.parameters)
        for parameter, gradient in zip(self.pure.parameters, made[count:], strict=True):
            accumulate(parameter, gradient)
        return made[:count]

    def _read(self, resident: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        return [resident[value] for value in self.pure.resident]

    def _check(self, arguments: Sequence[torch.Tensor]) -> None:
        """Compile, and compare with what the operators give."""
        try:
            found = self.fast(*arguments)
        except Exception as error:  # whatever a compiler may raise, the operators are there
            if cause_of(error) is not None:
                raise
            self._give_up(str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__)
            return
        problem = _difference(found, self.pure.call(*arguments), arguments)
        if problem:
            self._give_up(problem)

    def _give_up(self, reason: str) -> None:
        self.works = False
        self.fast = self.pure.call
        _warn(self.name, reason)


def _warn(name: str, reason: str) -> None:
    warnings.warn(f"{name} is not compiled: {reason}", StagewrightWarning, stacklevel=2)


def _difference(
    found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], given: Sequence[torch.Tensor]
) -> str:
    """What compiling changed beyond rounding; empty if nothing."""
    for one, other in zip(found, wanted, strict=True):
        if (one.dtype, one.shape, one.stride()) != (other.dtype, other.shape, other.stride()):
            return f"a result is {_layout(one)} instead of {_layout(other)}"
        if not _is_close(one, other):
            return "a result is another"
    if _sharing((*given, *found)) != _sharing((*given, *wanted)):
        return "results share other storages"
    return ""


def _layout(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype}{list(tensor.shape)} with strides {tensor.stride()}"


def _is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    finite = other[other.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    part = TOLERANCE.get(other.dtype, _LOOSE)
    # Equal infinities are close.
    return torch.allclose(one, other, rtol=part, atol=part * scale, equal_nan=True)


def _sharing(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """For each tensor, the first one with the same storage, and its offset there."""
    first: dict[int, int] = {}
    return [
        (first.setdefault(tensor.untyped_storage().data_ptr(), index), int(tensor.storage_offset()))
        for index, tensor in enumerate(tensors)
    ]
