"""Fixtures of the tests of planning."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Modules of the folder of benchmarks, by name."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module
