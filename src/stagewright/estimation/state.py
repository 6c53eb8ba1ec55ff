"""What a rank holds from step to step: parameters, gradients, optimizer state and constants, to the byte."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from stagewright.estimation.liveness import FunctionMemory, function_memory
from stagewright.graph.stage import Function, Stage
from stagewright.graph.tensor import ITEM_BYTES

_STEP_COUNTER_BYTES = 4  # AdamW counts steps in one float32 per parameter


@dataclass(frozen=True)
class Precision:
    """Element types of training state: `gradient` of the buffers in which gradients are added up.

    Where it differs from the type of a parameter, the optimizer keeps a master copy in the gradient's type.

    >>> Precision.of("bfloat16").bytes_per_parameter, Precision.of("float32").bytes_per_parameter
    (18, 16)
    """

    parameter: str
    gradient: str

    @classmethod
    def of(cls, dtype: str) -> Precision:
        """What trains parameters of `dtype` (a torch name): half precision adds up gradients in float32."""
        return cls(dtype, "float32" if ITEM_BYTES[dtype] < 4 else dtype)

    @property
    def bytes_per_parameter(self) -> int:
        """Parameter, gradient, two moments of AdamW, and the master copy where there is one."""
        parameter, gradient = ITEM_BYTES[self.parameter], ITEM_BYTES[self.gradient]
        return parameter + 3 * gradient + (gradient if self.parameter != self.gradient else 0)


@dataclass(frozen=True)
class ResidentBytes:
    """Bytes of a rank that are there during every action.

    `rederived`: bytes that exist beside them while the derived values of a step replace those of the last.
    `step_transient`: bytes that exist only during the optimizer step.
    """

    categories: dict[str, int]
    rederived: int = 0
    step_transient: int = 0

    @cached_property
    def total(self) -> int:
        return sum(self.categories.values())


def resident_bytes(stages: Sequence[Stage]) -> ResidentBytes:
    """What the rank that holds `stages` keeps from step to step; a tensor that several stages use is one.

    Master weights and gradients as `Precision.of` each parameter's type. Source: PyTorch's fused AdamW, which
    needs no memory of its own. Ignores: the norms of the gradients, a few bytes each.
    """
    sizes: dict[str, dict[int, int]] = {
        name: {} for name in ("parameters", "gradients", "optimizer", "master")
    }
    constants: dict[int, int] = {}
    for stage in stages:
        for value in stage.parameters:
            sizes["parameters"][value] = stage.graph.storage_bytes[stage.value(value).storage]
        for value in (*stage.buffers, *stage.constants):
            constants[value] = stage.graph.storage_bytes[stage.value(value).storage]
        for value, _ in stage.gradients:
            meta = stage.value(value).meta
            precision = Precision.of(meta.dtype)
            gradient = meta.num_elements * ITEM_BYTES[precision.gradient]
            sizes["gradients"][value] = gradient
            sizes["optimizer"][value] = 2 * gradient + _STEP_COUNTER_BYTES
            if precision.gradient != meta.dtype:
                sizes["master"][value] = gradient
    made = [_made(stage) for stage in stages]
    cotangents = sum(stage.value(stage.graph.loss).meta.storage_bytes for stage in stages)
    fixed = sum(constants.values()) + cotangents + sum(sum(m.kept.values()) for pair in made for m in pair)
    categories = {name: sum(found.values()) for name, found in sizes.items()} | {"constants": fixed}
    rederived = _peak_in_turn(derived for _, derived in made)
    return ResidentBytes(categories, rederived)


def _made(stage: Stage) -> tuple[FunctionMemory, FunctionMemory]:
    """The static and the derived values that a stage keeps."""
    functions = (stage.forward, stage.input_grad, stage.weight_grad, stage.backward)
    nodes = [node for function in functions for node in function.nodes]
    used = {value for node in nodes for value in node.inputs}.union(
        *(function.outputs for function in functions)
    )
    sources = frozenset({*stage.parameters, *stage.buffers, *stage.constants})
    static = {value for node in stage.static for value in node.outputs if value is not None}
    derived = {value for node in stage.derived for value in node.outputs if value is not None}
    return (
        function_memory(Function(stage.static, (), tuple(sorted(static & used))), sources, stage.value),
        function_memory(
            Function(stage.derived, (), tuple(sorted(derived & used))), sources | static, stage.value
        ),
    )


def _peak_in_turn(functions: Iterable[FunctionMemory]) -> int:
    """The most that making derived values anew takes while the old ones are there, stage after stage."""
    return max((function.peak(()).above_entry for function in functions), default=0)
