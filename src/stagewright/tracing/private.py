"""Every private torch name Stagewright relies on, in one place.

Tested on torch 2.11, 2.12 and 2.13. `tests/tracing/test_private.py` fails when torch changes one of them.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import _disable_current_modes

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "argument_place",
    "has_autocast_kernel",
    "is_composite",
    "is_mutable",
    "is_seen_by_modes",
    "make_fx",
    "operator_names",
    "run_parts",
    "storage_key",
    "without_cpu_autocast",
    "without_modes",
]


def is_composite(op: torch._ops.OpOverload) -> bool:
    """Whether `op` has no derivative of its own: it is defined by other operators and must be lowered to them."""
    return op._can_decompose() and torch._C._dispatch_has_kernel_for_dispatch_key(
        op.name(), "CompositeImplicitAutograd"
    )


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of the storage behind a (possibly fake) tensor, for as long as the storage is alive."""
    return tensor.untyped_storage()._cdata


def argument_place(op: torch._ops.OpOverload, name: str) -> int | None:
    """The position of an argument in the schema of `op`; None where it has no such argument."""
    names = [argument.name for argument in op._schema.arguments]
    return names.index(name) if name in names else None


def is_mutable(op: Any) -> bool:
    """Whether an operator writes to one of its arguments."""
    return isinstance(op, torch._ops.OpOverload) and op._schema.is_mutable


@functools.cache
def operator_names() -> tuple[str, ...]:
    """Every operator of the ``aten`` namespace, with its overload: ``softmax.int``, ``linear``."""
    names = torch._C._dispatch_get_all_op_names()
    return tuple(sorted(name.removeprefix("aten::") for name in names if name.startswith("aten::")))


def has_autocast_kernel(name: str, device: str) -> bool:
    """Whether autocast of a device ("CPU", "CUDA") has a rule for an operator."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", f"Autocast{device}")


def run_parts(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Call what a composite operator is defined by, also where an exporter wants to keep it whole."""
    return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def without_cpu_autocast() -> contextlib.AbstractContextManager[None]:
    """Operators called while it is open are not cast by the CPU's autocast."""
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))


def without_modes() -> contextlib.AbstractContextManager[Any]:
    """Operators called while it is open see no dispatch mode: neither fake tensors nor a tape."""
    return _disable_current_modes()


def is_seen_by_modes() -> bool:
    """Whether a dispatch mode sees every operator that is called now; torch 2.13 compiles nothing under one."""
    return torch._C._len_torch_dispatch_stack() > 0
