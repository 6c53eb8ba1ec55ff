"""Models of tests are not compared with their graphs before they run, which takes as long as many a test, but where it is
what is tested."""

from __future__ import annotations

import os
from typing import Any

from stagewright.execution import first_comparison

_compare_once = first_comparison.compare_once


def _compare_if_wanted(*given: Any, **named: Any) -> None:
    if os.environ.get("STAGEWRIGHT_TEST_COMPARES"):
        _compare_once(*given, **named)


first_comparison.compare_once = _compare_if_wanted
