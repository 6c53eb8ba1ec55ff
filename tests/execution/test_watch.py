"""Who is blamed when a rank goes: the one that shows no sign of life, also if it never showed any."""

from __future__ import annotations

import json

import pytest
import torch.distributed as dist

from stagewright.execution import watch
from stagewright.execution.watch import Watch


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    monkeypatch.setattr(watch, "_BLAME_WITHIN_S", 0.3)
    monkeypatch.setattr(watch, "_INTERVAL_S", 0.02)
    monkeypatch.setattr(watch, "_SETTLE_S", 0.1)
    return dist.HashStore()


def test_a_rank_that_was_never_heard_of_is_blamed(store: dist.Store) -> None:
    assert (Watch(0, 2, store).blame() or "").startswith("rank 1 died or froze at the start")


def test_a_rank_that_fell_silent_is_blamed_where_it_stood(store: dist.Store) -> None:
    store.set("watch/1", json.dumps([7, "1F3", 0.0]))
    assert (Watch(0, 2, store).blame() or "").startswith("rank 1 died or froze at 1F3")


def test_ranks_that_go_on_are_not_blamed(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    beats = iter(range(100))
    read = Watch._read

    def beating(self: Watch) -> None:
        store.set("watch/1", json.dumps([next(beats), "1F3", 0.0]))
        read(self)

    monkeypatch.setattr(Watch, "_read", beating)
    assert Watch(0, 2, store).blame() is None
