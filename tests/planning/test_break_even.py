"""Up to which batch breadth-first order is the fastest."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from stagewright.cluster import load_cluster
from stagewright.planning.job import Job
from stagewright.planning.objectives.break_even import BreakEven, Compared, break_even
from stagewright.planning.search import plan
from stagewright.planning.space import Space
from stagewright.report.plans import break_even_document, break_even_line
from stagewright.tracing.models.reference import resolve

CLUSTER = load_cluster("4x-h100")
SPACE = Space.of(pp=4, tp=1, microbatch=1, schedules=("1f1b", "interleaved-1f1b", "breadth-first"))


@pytest.fixture(autouse=True)
def _looks_further(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of so small a model breadth-first order is near the fastest at no batch but those where it wins."""
    monkeypatch.setattr("stagewright.planning.objectives.break_even._FAR", 0.03)


def job(batch: int) -> Job:
    return Job(global_batch=batch, sequence_length=512, dtype="fp32")


def found(batch: int) -> BreakEven | None:
    plans = plan("tiny-gemma", CLUSTER, job(batch), SPACE).plans
    return break_even(plans, resolve("tiny-gemma"), CLUSTER, job(batch), SPACE)


def test_batches_that_only_breadth_first_order_divides_are_its_own() -> None:
    """Interleaved 1F1B takes multiples of four microbatches, here eight are no advantage any more."""
    one = found(2)
    assert one is not None and one.asked.global_batch == 2
    assert one.asked.gain > 0.05
    wins = one.largest_win
    assert wins is not None and wins.global_batch < one.batches[-1].global_batch
    assert [each.gain > 0 for each in one.batches] == [True] * (len(one.batches) - 1) + [False]


def test_the_batch_is_halved_until_it_wins() -> None:
    """The search itself leaves breadth-first order out, which is slower at this batch."""
    one = found(4)
    assert one is not None and one.asked.gain <= 0
    assert [each.global_batch for each in one.batches] == [2, 4]
    assert one.largest_win is one.batches[0]


def test_where_breadth_first_order_is_much_slower_smaller_batches_are_not_looked_at() -> None:
    assert found(8) is None


def test_another_optimizer_is_asked_what_it_keeps() -> None:
    plain = job(8).model_copy(update={"optimizer": "sgd"})
    plans = plan("tiny-gemma", CLUSTER, plain, SPACE).plans
    assert break_even(plans, resolve("tiny-gemma"), CLUSTER, plain, SPACE) is None


def test_without_a_pipeline_there_is_nothing_to_say() -> None:
    alone = replace(SPACE, pp=1)
    plans = plan("tiny-gemma", CLUSTER, job(8), alone).plans
    assert break_even(plans, resolve("tiny-gemma"), CLUSTER, job(8), alone) is None


@pytest.mark.parametrize(
    ("batches", "asked", "line", "beta_min"),
    [
        (
            [(8, 1.0, 1.1), (16, 2.0, 1.98)], 1,
            "is 1.0% slower than the fastest of the other schedules here; it is the fastest up to 0.125 samples a device (a "
            "batch of 8): by 10.0% there.", 0.125,
        ),
        (
            [(8, 1.0, 1.1), (16, 2.0, 2.04), (32, 4.0, 3.9)], 0,
            "is the fastest up to 0.25 samples a device (a batch of 16), by 10.0% here, by 2.0% there.", 0.25,
        ),
        ([(8, 1.0, 1.1)], 0, "is the fastest up to 0.125 samples a device (a batch of 8) or more, by 10.0% here.", 0.125),
        ([(8, 1.0, 0.99), (16, 2.0, 1.98)], 1, "slower than the fastest of the other schedules here, and no faster down to "
         "0.125 samples a device (a batch of 8).", None),
        ([(8, 1.0, math.inf), (16, 2.0, 1.98)], 1, "(a batch of 8): nothing else fits there.", 0.125),
    ],
)  # fmt: skip
def test_what_is_said(
    batches: list[tuple[int, float, float]], asked: int, line: str, beta_min: float | None
) -> None:
    compared = tuple(Compared(*one) for one in batches)
    one = BreakEven(64, compared[asked], compared)
    assert line in break_even_line(one)
    document = break_even_document(one)
    assert document["beta_min"] == beta_min
    assert [each["global_batch"] for each in document["batches"]] == [each[0] for each in batches]


def test_others_are_searched_where_none_is_among_the_plans() -> None:
    alone = replace(SPACE, schedules=("breadth-first",))
    plans = plan("tiny-gemma", CLUSTER, job(4), alone).plans
    one = break_even(plans, resolve("tiny-gemma"), CLUSTER, job(4), SPACE)
    usual = found(4)
    assert one is not None and usual is not None
    assert one.asked.others_s == pytest.approx(usual.asked.others_s, rel=0.01)
    assert break_even(plans, resolve("tiny-gemma"), CLUSTER, job(4), alone) is None
