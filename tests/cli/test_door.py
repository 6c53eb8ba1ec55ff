"""What `import stagewright` offers, and what it does not load."""

from __future__ import annotations

import subprocess
import sys

import pytest

import stagewright


def test_the_door_is_pinned() -> None:
    assert stagewright.__all__ == [
        "Cluster",
        "InputError",
        "Job",
        "Plan",
        "PlanError",
        "RunError",
        "ScheduleError",
        "Space",
        "StagewrightError",
        "TraceError",
        "Trainer",
        "__version__",
        "check",
        "compare",
        "estimate",
        "explain",
        "load_cluster",
        "load_plan",
        "load_profile",
        "plan",
        "probe",
        "profile",
        "run",
        "simulate",
        "trace",
        "verify",
    ]
    assert dir(stagewright) == stagewright.__all__
    assert all(callable(getattr(stagewright, name)) for name in stagewright.__all__ if name[0] != "_")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'plam'"):
        _ = stagewright.plam  # type: ignore[attr-defined]


def test_no_verb_loads_torch_before_it_is_called() -> None:
    code = (
        "import sys, stagewright\n"
        "for name in stagewright.__all__: getattr(stagewright, name)\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
