"""The plan of a fine-tuning in a few lines: what lies where, how fast it is, and what another kind of plan would lose."""

from __future__ import annotations

import pytest

from stagewright.cluster import load_cluster
from stagewright.planning.plan import Plan
from stagewright.planning.search import plan
from stagewright.report.finetuning import DataSummary, alternative_line, data_lines, device_table, speed_lines
from stagewright.tracing.models.lora import Lora
from stagewright.tracing.models.reference import resolve

JOB = {"global_batch": 4, "sequence_length": 32, "num_steps": 10}


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    """As pipelines, with one piece of the model a card and with two, and as replicas, of unequal cards."""
    reference = resolve("tiny-llama").adapted(Lora.of(2))
    cluster = load_cluster("2x-rtx3090")
    ways = (
        {"pp": 2, "schedules": ["1f1b"]},
        {"pp": 2, "schedules": ["interleaved-1f1b"]},
        {"pp": 1, "schedules": ["1f1b"]},
    )
    return [plan(reference, cluster, JOB, **way).plans[0] for way in ways]


def test_every_device_has_its_layers_and_memory(plans: list[Plan]) -> None:
    def rows_of(plan: Plan) -> list[tuple[str, ...]]:
        return [*zip(*(column.cells for column in device_table(plan).columns), strict=True)]

    rows = rows_of(plans[0])
    assert [row[:2] for row in rows] == [("0", "rtx3090"), ("1", "rtx3090")]
    layers = [row[2] for row in rows]
    assert layers[0].startswith("embedding") and layers[1].endswith("head")
    assert ", " in rows_of(plans[1])[0][2]  # two pieces of the model
    (alone,) = rows_of(plans[2])
    assert alone[:3] == ("0, 1", "rtx3090", "embedding 0-5 head")


def test_data_and_time_are_said_in_samples_and_steps(plans: list[Plan]) -> None:
    data = DataSummary("chat.jsonl", 90, 10, 50, 1200, 600, 1)
    first, second = data_lines(data, plans[0])
    assert first == (
        "chat.jsonl: 90 documents of 1,200 tokens, 50% with a loss, in 50 samples of 32 tokens (75% full); 10 documents "
        "held out"
    )
    assert second == "1 document is longer than 32 tokens and cut: a larger --sequence-length keeps them"
    assert list(speed_lines(plans[0], True))[-1].partition("; ")[2].startswith("10 steps: ")
    assert "a million tokens: " in list(speed_lines(plans[0], False))[-1]


def test_another_kind_of_plan_is_compared_with_the_best(plans: list[Plan]) -> None:
    piped, looped, alone = plans
    assert alternative_line([piped, looped]) is None
    slower = 1 - alone.mean_step_seconds / piped.mean_step_seconds
    assert (alternative_line([alone, looped, piped]) or "").startswith("As a pipeline of 2 it would be ")
    assert f"As a pipeline of 2 it would be {slower:.0%} slower" in (alternative_line([alone, piped]) or "")
    assert (alternative_line([piped, alone]) or "").startswith("Without a pipeline it would be ")
