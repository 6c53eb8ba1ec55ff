"""Stagewright plans and runs pipeline-parallel training of PyTorch models."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from stagewright.tracing.cache import trace as trace

_HOMES = {
    "trace": "stagewright.tracing.cache",
}
"""Where each verb lives; imported when it is first asked for, so that nothing is loaded that is not used."""

__all__ = ["__version__", "trace"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'stagewright' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
