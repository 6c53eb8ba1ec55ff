"""Data that is read ahead: the same samples at the same steps, with the same errors, and steps that do not wait for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from texts import small_plan

from patience import patient
from stagewright.errors import InputError
from stagewright.execution.data.batches import Batches
from stagewright.execution.data.prefetch import Prefetcher, PrefetchRequest
from stagewright.execution.data.user_dataset import InOrder, MapStyle
from stagewright.execution.trainer import Trainer
from stagewright.graph import OperatorGraph
from stagewright.planning.job import Job
from stagewright.tracing.cache import trace

STEPS = 6


class Numbers(torch.utils.data.Dataset[Any]):
    """Samples that say which they are; notes who asks for which, and when."""

    def __init__(
        self, size: int = 100, seconds: float = 0.0, fails_at: int | None = None, draws: bool = False
    ) -> None:
        self.size, self.seconds, self.fails_at, self.draws = size, seconds, fails_at, draws
        self.asked: list[tuple[int, str]] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        self.asked.append((index, threading.current_thread().name))
        time.sleep(self.seconds)
        if self.fails_at is not None and len(self.asked) > self.fails_at:
            raise ValueError("no such file")
        if self.draws:
            return {"input_ids": torch.randint(0, 96, (16,))}
        return {"input_ids": (torch.arange(16) * (index + 1)) % 96}


def batches_of(dataset: Numbers) -> Batches:
    job = Job(global_batch=2, sequence_length=16, dtype="fp32", num_steps=STEPS)
    return Batches([lambda length: MapStyle(dataset, "numbers")], [1.0], job)


@pytest.fixture(scope="module")
def graph() -> OperatorGraph:
    return trace("tiny-llama", 1, sequence_length=16)


@pytest.fixture
def reader() -> Iterator[Prefetcher]:
    made = Prefetcher()
    yield made
    made.close()
    assert not made._thread.is_alive()


def wanted(batches: Batches, step: int, graph: OperatorGraph) -> PrefetchRequest:
    return PrefetchRequest(batches, step, (0, 1), graph, frozenset({"input_ids"}))


def test_what_is_read_ahead_is_what_would_be_read_then(graph: OperatorGraph, reader: Prefetcher) -> None:
    """Also where another step is asked for than was read ahead."""
    plain, ahead = batches_of(Numbers()), batches_of(dataset := Numbers())
    for step, following in ((0, 1), (1, 2), (2, 3), (7, 8), (8, 9), (3, 4), (4, 5)):
        taken = reader.take(wanted(ahead, step, graph))
        reader.read_ahead(wanted(ahead, following, graph))
        expected = list(wanted(plain, step, graph).read())
        assert [one["input_ids"].tolist() for one in taken] == [one["input_ids"].tolist() for one in expected]
    assert {name for _, name in dataset.asked} == {"stagewright-reader"}


def test_an_error_is_raised_at_its_step(graph: OperatorGraph, reader: Prefetcher) -> None:
    batches = batches_of(Numbers(fails_at=3))
    reader.take(wanted(batches, 0, graph))
    reader.read_ahead(wanted(batches, 1, graph))
    with pytest.raises(InputError, match=r"^sample \d+ of 'numbers' failed at .*no such file"):
        reader.take(wanted(batches, 1, graph))


class Broken:
    """Samples in order, of which the second cannot be read."""

    def __iter__(self) -> Iterator[Any]:
        yield {"input_ids": torch.zeros(16)}
        raise ValueError("no such file")


def test_samples_in_order_that_fail_do_so_again() -> None:
    """Where what was read ahead is not wanted, and the same data is read later."""
    samples = InOrder(Broken(), "broken")
    _ = samples[0]
    for _ in range(2):
        with pytest.raises(InputError, match=r"'broken' failed after sample 1 of epoch 0 .*no such file"):
            _ = samples[1]


def test_samples_that_draw_random_numbers_are_read_when_their_step_begins(
    graph: OperatorGraph, reader: Prefetcher
) -> None:
    """The model draws from the same: its numbers, and theirs, would depend on who is first."""
    batches = batches_of(dataset := Numbers(draws=True))
    reader.take(wanted(batches, 0, graph))
    reader.read_ahead(wanted(batches, 1, graph))
    assert len(dataset.asked) == 2
    torch.manual_seed(3)
    first = reader.take(wanted(batches, 1, graph))
    torch.manual_seed(3)
    assert first[0]["input_ids"].tolist() == torch.randint(0, 96, (1, 16)).tolist()


def test_a_dataset_that_hangs_does_not_keep_the_process(
    graph: OperatorGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stagewright.execution.data.prefetch._LEAVE_S", 0.1)
    reader, batches = Prefetcher(), batches_of(Numbers(seconds=0.5))
    reader.read_ahead(wanted(batches, 0, graph))
    began = time.monotonic()
    reader.close()
    assert time.monotonic() - began < patient(0.3)
    assert reader._thread.daemon


def test_steps_do_not_wait_for_data_and_learn_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses are to the last bit those of a run that reads when a step begins, also of one that goes on in mid-epoch; what
    is read ahead and not trained on is not counted as seen, and no thread is left."""
    small_plan(tmp_path, pp=1, num_steps=STEPS)
    losses = {}
    for is_ahead in (False, True):
        with monkeypatch.context() as patch:
            if not is_ahead:
                patch.setattr(Prefetcher, "read_ahead", lambda *_: None)
            losses[is_ahead] = fitted(tmp_path, f"whole-{is_ahead}", STEPS)
    assert losses[True] == losses[False]
    kept = {"checkpoint": tmp_path / "kept"}
    before = fitted(tmp_path, "first", STEPS // 2, **kept)
    after = fitted(tmp_path, "second", STEPS, resume=True, **kept)
    assert before + after == losses[True]
    assert "stagewright-reader" not in {thread.name for thread in threading.enumerate()}


def test_a_rank_whose_data_fails_says_that_it_reads(tmp_path: Path) -> None:
    small_plan(tmp_path, pp=1, num_steps=STEPS)
    with pytest.raises(InputError, match=r"^rank 0 failed at reading data: sample \d+ of .*no such file"):
        Trainer(tmp_path / "plan.json", f"{__file__}:failing", out=tmp_path / "out", device="cpu").fit()


def failing() -> Numbers:
    return Numbers(fails_at=4)


def fitted(folder: Path, name: str, steps: int, **options: Any) -> tuple[float | None, ...]:
    data = f"{__file__}:Numbers"
    record = Trainer(
        folder / "plan.json", data, steps=steps, out=folder / name, device="cpu", **options
    ).fit()
    assert record is not None
    return record.losses
