"""What transfers take of ranks that compute is part of a plan's time."""

from __future__ import annotations

import pytest

from stagewright.cluster import Cluster, load_cluster
from stagewright.planning.estimate import estimate
from stagewright.planning.job import Job
from stagewright.planning.plan import Plan
from stagewright.tracing.models.reference import resolve

MODEL = resolve("tiny-llama", {"num_hidden_layers": 4})
JOB = Job(global_batch=8, sequence_length=64, dtype="fp32")
POST_S = 1e-2


def posting(seconds: float | None) -> Cluster:
    """A node of devices whose processors take `seconds` for each message."""
    cluster = load_cluster("4x-t4")
    node = cluster.nodes[0]
    device = node.device.model_copy(update={"message_overhead_s": seconds})
    return cluster.model_copy(update={"nodes": (node.model_copy(update={"device": device}),)})


def planned(cluster: Cluster, pp: int, schedule: str = "gpipe") -> Plan:
    return estimate(MODEL, cluster, JOB, pp=pp, schedule=schedule)


def posts_in_a_row(pp: int) -> float:
    """How often the time of a message is waited for in a step."""
    without, posted = (planned(posting(seconds), pp).predictions.step_seconds for seconds in (None, POST_S))
    return (posted - without) / POST_S


def test_each_message_takes_its_time_of_both_ranks() -> None:
    # Four microbatches of each of two replicas: five forwards and five backwards in a row, of two messages each.
    assert posts_in_a_row(pp=2) == pytest.approx(20, rel=0.01)


def test_transfers_within_a_rank_take_nothing() -> None:
    assert posts_in_a_row(pp=1) == 0


def test_a_rank_in_the_middle_posts_on_both_sides() -> None:
    # Eight microbatches through ranks of one, two, two and one transfer: 1 + 2 + 2 + 1 and seven times two, both ways.
    assert posts_in_a_row(pp=4) == pytest.approx(2 * 2 * 20, rel=0.01)


def test_a_sender_is_busy_until_its_bytes_have_left() -> None:
    """Of one microbatch that takes as long as bytes on their way beside computations; of several it holds up the sender."""
    for num_microbatches, holds_up in ((1, False), (8, True)):
        job = JOB.model_copy(update={"global_batch": 2 * num_microbatches})
        beside, busy = (
            estimate(MODEL, posting(seconds), job, pp=2, schedule="gpipe").predictions.step_seconds
            for seconds in (None, 0.0)
        )
        assert (busy > beside * 1.001) if holds_up else busy == pytest.approx(beside, rel=1e-9)
