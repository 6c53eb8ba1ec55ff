"""What a trace keeps to itself, and what it passes on; in fresh processes, as libraries say most things once."""

from __future__ import annotations

import logging
import subprocess
import sys
import warnings

import pytest

from stagewright.tracing.trace import quiet_capture

_TRACE = """
import warnings
from stagewright.tracing.cache import trace
trace({name!r}, 1, 64, "float32", use_cache=False)
"""

_TALKATIVE = """
import logging, warnings, torch
from stagewright.tracing.trace import trace_module
class Talkative(torch.nn.Linear):
    def forward(self, x):
        warnings.warn("weights are odd", FutureWarning)
        logging.getLogger("mine").warning("seen x")
        return super().forward(x).sum()
trace_module(Talkative(4, 4), {"x": torch.ones(2, 4)})
"""


def said(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def test_a_trace_of_a_bundled_model_says_nothing() -> None:
    # Mamba layers, which have GPU kernels that are not installed, and attention.
    assert said(_TRACE.format(name="tiny-nemotron-h")) == ""


def test_what_the_model_says_is_passed_on() -> None:
    text = said(_TALKATIVE)
    assert "weights are odd" in text and "seen x" in text


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_slow_fallback_is_told_where_it_can_be_helped(
    device: str, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("transformers.integrations.hub_kernels")
    logger.addHandler(caplog.handler)  # the library's loggers do not propagate
    try:
        with quiet_capture(device):
            logger.warning("`scan` is falling back to its reference PyTorch implementation")
            logger.warning("another thing")
        logger.warning("afterwards `scan` is falling back to its reference")
    finally:
        logger.removeHandler(caplog.handler)
    heard = [message.split()[0] for message in dict.fromkeys(caplog.messages)]
    assert heard == ["`scan`"] * (device == "cuda") + ["another", "afterwards"]


def test_filters_of_warnings_are_put_back() -> None:
    before = list(warnings.filters)
    with quiet_capture("cpu"):
        pass
    assert warnings.filters == before


def test_an_error_on_fake_tensors_is_raised_and_not_logged_by_torch_as_well() -> None:
    wrong = """
import torch
from stagewright.errors import TraceError
from stagewright.tracing.trace import trace_module
class Wrong(torch.nn.Linear):
    def forward(self, x):
        return (super().forward(x) * torch.ones(3)).sum()
try:
    trace_module(Wrong(4, 4), {"x": torch.ones(2, 4)})
except TraceError as error:
    print(error)
"""
    text = said(wrong)
    assert "a dimension of length 3" in text
    assert "Traceback" not in text
