"""Fits that other processes work out ahead of a search: the search stays the same, and goes on without them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

import pytest
from small_devices import with_room

from stagewright.cluster import Cluster, load_cluster
from stagewright.planning.memory import fits_ahead
from stagewright.planning.memory.fits_ahead import Attempt, FitsAhead
from stagewright.planning.memory.fitting import Fit, Miss
from stagewright.planning.search import plan
from stagewright.planning.search_result import SearchResult
from stagewright.units import MIB

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that start as copies")
JOB: dict[str, Any] = {"global_batch": 8, "sequence_length": 64, "dtype": "bf16"}


def cluster() -> Cluster:
    whole = load_cluster("2x-rtx3090")
    (node,) = whole.nodes
    return whole.model_copy(
        update={"nodes": (node.model_copy(update={"device": with_room(node.device, 60 * MIB)}),)}
    )


def searched() -> SearchResult:
    return plan("tiny-llama", cluster(), JOB, is_improved=False)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fits_ahead, "_WORTH_S", 0.0)
    monkeypatch.setattr(fits_ahead, "num_more_processes", lambda: 2)


def test_a_search_is_the_same_with_other_processes(eager: None, monkeypatch: pytest.MonkeyPatch) -> None:
    answered: list[Fit | Miss | None] = []
    take = FitsAhead._answered

    def noted(self: FitsAhead, attempt: Attempt) -> Fit | Miss | None:
        was_begun = attempt in self._answers
        answer = take(self, attempt)
        if was_begun:
            answered.append(answer)
        return answer

    monkeypatch.setattr(FitsAhead, "_answered", noted)
    ahead = searched()
    assert any(isinstance(answer, Miss) for answer in answered) and None not in answered
    monkeypatch.setattr(fits_ahead, "num_more_processes", lambda: 0)
    alone = searched()
    assert ahead.plans == alone.plans
    assert ahead.excluded == alone.excluded


def test_a_search_goes_on_where_a_process_dies(eager: None, monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[int] = []
    start = FitsAhead._start

    def killing(self: FitsAhead, attempt: Attempt, later: Sequence[Attempt]) -> None:
        start(self, attempt, later)
        for child, _ in self._running.values():
            os.kill(child, signal.SIGKILL)
            children.append(child)

    monkeypatch.setattr(FitsAhead, "_start", killing)
    without = searched()
    assert children
    monkeypatch.setattr(FitsAhead, "_start", lambda self, attempt, later: None)
    assert without.plans == searched().plans


def test_processes_end_with_the_search(eager: None, monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[int] = []
    forked = fits_ahead.forked

    def noted(work: Callable[[BinaryIO], None]) -> tuple[int, int]:
        child, answers = forked(work)
        children.append(child)
        return child, answers

    monkeypatch.setattr(fits_ahead, "forked", noted)
    searched()
    assert children
    for child in children:
        with pytest.raises(ChildProcessError):
            os.waitpid(child, os.WNOHANG)
