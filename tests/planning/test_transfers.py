"""What transfers take of ranks that compute is part of a plan's time."""

from __future__ import annotations

from collections import Counter

import pytest

from stagewright.cluster import Cluster, load_cluster
from stagewright.estimation.stages import BodyCosts
from stagewright.graph.stage import Stage
from stagewright.planning.candidate import Choice, approximate_seconds, make_candidate
from stagewright.planning.estimate import estimate
from stagewright.planning.job import Job
from stagewright.planning.joint.traced import Wiring
from stagewright.planning.partition.line import terms_of
from stagewright.planning.plan import Plan
from stagewright.planning.prediction.pipeline import Pipeline, costing
from stagewright.planning.prediction.predict import run_timeline, step_seconds
from stagewright.planning.prediction.transfers import flight_seconds, transfers_slow
from stagewright.tracing.cache import trace
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
    """Of one microbatch that takes as long as bytes on their way beside computations, but for the multiprocessors that
    these take; of several it holds up the sender."""
    for num_microbatches, holds_up in ((1, False), (8, True)):
        job = JOB.model_copy(update={"global_batch": 2 * num_microbatches})
        beside, busy = (
            estimate(MODEL, posting(seconds), job, pp=2, schedule="gpipe").predictions.step_seconds
            for seconds in (None, 0.0)
        )
        assert (busy > beside * 1.002) if holds_up else busy == pytest.approx(beside, rel=2e-3)


def test_a_transfer_takes_as_long_as_that_of_the_slowest_replica() -> None:
    """Of two replicas of two stages on nodes of three devices, the second's transfers cross nodes."""
    cluster = load_cluster("2x3x-h100")
    (inside, across) = (cluster.point_to_point_seconds(2**26, *ends) for ends in ((0, 2), (1, 3)))
    job = JOB.model_copy(update={"dtype": "bf16"})
    graph = trace(MODEL, 1, **job.traced("cuda"))
    body = BodyCosts(graph, costing(graph, cluster, job))
    choice = Choice(2, 2, 1, 4, "gpipe")
    line = make_candidate(body, choice, cluster, job).line
    (sent,) = (size for summary in line.summaries for size in summary.sent_bytes.values())
    assert flight_seconds(line, [(0, 1)])[0, 1] == cluster.point_to_point_seconds(sent, 1, 3)
    per_byte = terms_of(line, body, [4, 4])[0].boundary_s_per_byte
    assert per_byte == cluster.point_to_point_seconds(1e9, 1, 3) / 1e9 / 2
    _, bandwidth = Wiring(cluster, 2, 2).link()
    assert bandwidth == pytest.approx(cluster.link_between(1, 3).bandwidth)
    assert inside < across
    cuts = [stage.start for stage in line.stages[1:]]
    node = load_cluster("1x8x-h100")
    slow, fast = (approximate_seconds([body] * 2, cuts, line.program, one, 2) for one in (cluster, node))
    assert slow > fast


def test_transfers_take_multiprocessors_of_what_runs_beside_them() -> None:
    """The stated share of a pass within a node, two multiprocessors of a device between nodes; of a processor nothing."""
    job = JOB.model_copy(update={"dtype": "bf16"})
    graph = trace(MODEL, 1, **job.traced("cuda"))
    for name, share in (("1x2x-h100", 0.15), ("2x1x-h100", 2 / 132)):
        cluster = load_cluster(name)
        body = BodyCosts(graph, costing(graph, cluster, job))
        line = make_candidate(body, Choice(1, 2, 1, 4, "1f1b"), cluster, job).line
        flights = {(0, 1): 2.0, (1, 0): 1.0}
        assert transfers_slow(line, flights).tolist() == pytest.approx([3 * share] * 2)


def test_a_step_looks_at_every_rank_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at every pair of ranks: 512 of them would take longer than the rest of a prediction."""
    cluster = load_cluster("8x-t4")
    graph = trace(MODEL, 1, **JOB.traced("cuda"))
    body = BodyCosts(graph, costing(graph, cluster, JOB))
    line = make_candidate(body, Choice(1, 8, 1, 8, "gpipe"), cluster, JOB).line
    timeline, seen = run_timeline(line), Counter[int]()
    plain = Pipeline.stages_of

    def counted(self: Pipeline, rank: int) -> list[Stage]:
        seen[rank] += 1
        return plain(self, rank)

    monkeypatch.setattr(Pipeline, "stages_of", counted)
    step_seconds(line, timeline)
    assert sorted(seen) == list(range(8))
    assert max(seen.values()) < 8
    assert line.stages is line.stages
