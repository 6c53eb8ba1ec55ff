"""A process that dies in torch's capture is reported in one sentence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MODEL = """
import os, signal, torch
from torch import nn

class Dies(nn.Module):
    def forward(self, x):
        os.kill(os.getpid(), signal.SIGSEGV)
        return x

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.inner = nn.Linear(4, 4), nn.Sequential(nn.Tanh(), Dies())

    def forward(self, x):
        return self.inner(self.first(x)).mean()

def build(microbatch_size):
    return Net(), {"x": torch.randn(microbatch_size, 4)}
"""
TRACE = """
from stagewright.tracing.models.reference import resolve
from stagewright.tracing.settings import TraceSettings
from stagewright.tracing.trace import trace_reference
trace_reference(resolve("model.py:build"), TraceSettings(microbatch_size=2, sequence_length=16), {})
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell")
def test_a_crash_names_the_phase_and_the_module(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    died = subprocess.run(
        [sys.executable, "-c", TRACE], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert died.returncode < 0
    said = died.stderr.strip().splitlines()[-1]
    assert said.startswith("error: the process died within torch while 'build' was traced")
    assert "dry run of the model on fake tensors, in module 'net.inner.1'" in said
