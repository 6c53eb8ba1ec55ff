"""The report of a run of a plan that predicts nothing of its ranks, such as one of another program."""

from __future__ import annotations

from rich.console import Console

from stagewright.execution.record import RankRecord, Record
from stagewright.planning.job import Job
from stagewright.planning.plan import ClusterSection, ModelSection, Plan
from stagewright.planning.predictions import Predictions, RankPrediction
from stagewright.report.runs import run_document, run_summary


def plan(*ranks: RankPrediction) -> Plan:
    return Plan(
        stagewright="0", model=ModelSection(text="tiny-llama", digest="0", name="tiny-llama"),
        job=Job(global_batch=1, sequence_length=8), cluster=ClusterSection(name="here", num_devices=1, device="cpu"),
        dp=1, pp=1, num_stages=1, microbatch_size=1, num_microbatches=1, cuts=(), placement=(0,), schedule="1f1b",
        program=(("0F0", "0B0"),), memory_policy=("keep",),
        predictions=Predictions(
            step_seconds=1.0, lower_bound_seconds=1.0, tokens_per_second=8.0, mfu=0.1, bubble_fraction=0.0, ranks=ranks,
            stages=(),
        ),
    )  # fmt: skip


RECORD = Record(
    stagewright="0", model="tiny-llama", device="cpu", losses=(1.0, 0.5), gradient_norms=(1.0, 1.0),
    step_seconds=(2.0, 2.0), metered_steps=(0,), predicted_step_seconds=1.0,
    ranks=(
        RankRecord(
            rank=0, pipeline_rank=0, replica=0, allocated_peak_bytes=2048, busy_seconds=1.5, sent_bytes=0, actions=()
        ),
    ),
)  # fmt: skip


def text(document: dict) -> str:
    console = Console(width=140)
    with console.capture() as capture:
        console.print(run_summary(document))
    return capture.get()


def shown(document: dict) -> str:
    return next(line for line in text(document).splitlines() if "allocated peak of rank 0" in line)


def test_what_was_predicted_stands_beside_what_was_measured() -> None:
    predicted = RankPrediction(
        rank=0, busy_seconds=1.0, allocated_peak_bytes=1024, reserved_peak_bytes=1024, categories={}
    )
    document = run_document(plan(predicted), RECORD, "record.json")
    (rank,) = document["ranks"]
    assert (rank["predicted_allocated_peak_bytes"], rank["predicted_busy_seconds"]) == (1024, 1.0)
    assert "+100.0%" in shown(document)


def test_where_nothing_was_predicted_the_measured_stands_alone() -> None:
    document = run_document(plan(), RECORD, "record.json")
    (rank,) = document["ranks"]
    assert rank["predicted_allocated_peak_bytes"] is None and rank["predicted_busy_seconds"] is None
    assert "2.0 KiB" in shown(document) and "%" not in shown(document)


def test_what_the_machine_was_slower_by_is_told_apart() -> None:
    (rank,) = RECORD.ranks
    looked = ((0, 9.0), (1, 1.5), (2, 1.25), (3, 1.75))  # the first step does not count
    slowed = rank.model_copy(update={"slowdowns": looked})
    steady = rank.model_copy(update={"rank": 1, "slowdowns": ((1, 1.0), (2, 1.0), (3, 1.0))})
    more = {"losses": (1.0,) * 4, "gradient_norms": (1.0,) * 4, "step_seconds": (9.0, 2.0, 2.0, 2.0)}
    record = RECORD.model_copy(update={"ranks": (steady, slowed), **more})
    document = run_document(plan(), record, "record.json")
    assert document["machine_slowdown"] == 1.5  # ranks wait for the slowest
    lines = text(document)
    assert "at the machine's speed" in lines and "+33.3%" in lines and "+100.0%" in lines
    assert "took 50% longer" in lines and "from 1.00 to 1.75 times" in lines
    unprobed = run_document(plan(), RECORD, "record.json")
    assert unprobed["machine_slowdown"] is None and "machine" not in text(unprobed)
