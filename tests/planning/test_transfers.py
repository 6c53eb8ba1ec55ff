"""What transfers take of ranks that compute is part of a plan's time."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from stagewright.cluster import Cluster, load_cluster
from stagewright.estimation.runtime import STAGEWRIGHT
from stagewright.estimation.stages import RangeCosts
from stagewright.graph.stage import Stage
from stagewright.planning.candidate import approximate_seconds, make_candidate
from stagewright.planning.configuration import Configuration
from stagewright.planning.estimate import estimate
from stagewright.planning.job import Job
from stagewright.planning.joint.layout import Layout, stage_costs, stages_of, transfer_times
from stagewright.planning.joint.plan import DeadlinePolicy, scheduled
from stagewright.planning.joint.problem import JointProblem, LayerTable
from stagewright.planning.joint.traced import LinkModel
from stagewright.planning.partition.stage_terms import terms_of
from stagewright.planning.plan import Plan
from stagewright.planning.prediction.bubble import bubble
from stagewright.planning.prediction.predict import step_costs, step_seconds
from stagewright.planning.prediction.staged_model import StagedModel, costing, costs_of_model
from stagewright.planning.prediction.step_times import simulated
from stagewright.planning.prediction.transfers import lane_seconds, transfer_seconds, transfers_slow
from stagewright.planning.predictions import StepCosts, TransferCosts
from stagewright.schedule import build, chain, insert_communication
from stagewright.schedule.list_scheduler.priorities import UNLIMITED
from stagewright.schedule.list_scheduler.terms import Rule
from stagewright.simulation import StageCosts, simulate
from stagewright.tracing.cache import trace
from stagewright.tracing.models.reference import resolve

MODEL = resolve("tiny-llama", {"num_hidden_layers": 4})
JOB = Job(global_batch=8, sequence_length=64, dtype="fp32")
POST_S = 1e-2


def posting(seconds: float | None, kind: str = "cuda") -> Cluster:
    """A node of devices whose processors take `seconds` for each message."""
    cluster = load_cluster("4x-t4")
    node = cluster.nodes[0]
    device = node.device.model_copy(update={"message_overhead_s": seconds, "kind": kind})
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
    # Boundaries of one, one and two messages, of which ranks post 1, 2, 3 and 2. Eight microbatches: all of these once and
    # seven times three, both ways.
    assert posts_in_a_row(pp=4) == pytest.approx(2 * (1 + 2 + 3 + 2 + 7 * 3), rel=0.01)


def test_a_sender_is_busy_until_its_bytes_have_left() -> None:
    """Of one microbatch that takes as long as bytes on their way beside computations, but for the multiprocessors that
    these take; of several it holds up the sender."""
    for num_microbatches, holds_up in ((1, False), (8, True)):
        job = JOB.model_copy(update={"global_batch": 2 * num_microbatches})
        beside, busy = (
            estimate(MODEL, posting(seconds, "cpu"), job, pp=2, schedule="gpipe").predictions.step_seconds
            for seconds in (None, 0.0)
        )
        assert (busy > beside * 1.001) if holds_up else busy == pytest.approx(beside, rel=1e-3)


def test_a_transfer_takes_as_long_as_that_of_the_slowest_replica() -> None:
    """Of two replicas of two stages on nodes of three devices, the second's transfers cross nodes."""
    cluster = load_cluster("2x3x-h100")
    (inside, across) = (cluster.point_to_point_seconds(2**26, *ends) for ends in ((0, 2), (1, 3)))
    job = JOB.model_copy(update={"dtype": "bf16"})
    graph = trace(MODEL, 1, **job.traced("cuda"))
    model_costs = RangeCosts(graph, costing(graph, cluster, job))
    configuration = Configuration(2, 2, 1, 4, "gpipe")
    staged = make_candidate(model_costs, configuration, cluster, job).staged
    (sent,) = (size for summary in staged.summaries for size in summary.sent_bytes.values())
    assert transfer_seconds(staged, [(0, 1)])[0, 1] == cluster.point_to_point_seconds(sent, 1, 3)
    per_byte = terms_of(staged, model_costs)[0].boundary_s_per_byte
    assert per_byte == cluster.point_to_point_seconds(1e9, 1, 3) / 1e9 / 2
    _, bandwidth = LinkModel(cluster, 2, 2).link()
    assert bandwidth == pytest.approx(cluster.link_between(1, 3).bandwidth)
    assert inside < across
    cuts = [stage.start for stage in staged.stages[1:]]
    node = load_cluster("1x8x-h100")
    slow, fast = (
        approximate_seconds([model_costs] * 2, cuts, staged.program, one, 2) for one in (cluster, node)
    )
    assert slow > fast


def pipeline_of_two(cluster: Cluster, runtime: str = STAGEWRIGHT) -> StagedModel:
    job = JOB.model_copy(update={"dtype": "bf16", "runtime": runtime})
    model_costs = costs_of_model(trace(MODEL, 1, **job.traced("cuda")), cluster, job)
    return make_candidate(model_costs, Configuration(1, 2, 1, 4, "1f1b"), cluster, job).staged


@pytest.mark.parametrize(("name", "share"), [("1x2x-h100", 4 / 132), ("2x1x-h100", 2 / 132)])
def test_transfers_take_multiprocessors_of_what_the_sender_computes(name: str, share: float) -> None:
    """The thread blocks of a lane within a node, two between nodes; the receiver waits."""
    staged = pipeline_of_two(load_cluster(name))
    assert transfers_slow(staged, {(0, 1): 2.0, (1, 0): 1.0}).tolist() == pytest.approx([2 * share, share])


def test_other_runtimes_hide_transfers_as_before() -> None:
    cluster = load_cluster("1x2x-h100")
    theirs = pipeline_of_two(cluster, "torch-fsdp")
    assert transfers_slow(theirs, {(0, 1): 2.0, (1, 0): 1.0}).tolist() == pytest.approx([0.45, 0.45])
    assert not step_costs(theirs).receivers_wait and theirs.receives_ahead == 1
    assert not pipeline_of_two(posting(None, "cpu")).uses_lanes


def test_a_lane_is_as_fast_as_its_thread_blocks_copy() -> None:
    """What NCCL attained between two H100 with at most four of them, and a link that is slower as it is."""
    cluster = load_cluster("1x2x-h100")
    for num_bytes, measured in ((8e6, 66.1e9), (64e6, 131.5e9), (1e9, 132.6e9)):
        taken = lane_seconds(cluster, num_bytes, 0, 1, 1) - lane_seconds(cluster, 0, 0, 1, 1)
        assert num_bytes / taken == pytest.approx(measured, rel=0.01)
    slow = load_cluster("2x1x-h100")
    assert lane_seconds(slow, 1e9, 0, 1, 1) == slow.blocks_seconds(1e9, 0, 1, 1)
    assert lane_seconds(slow, 1e9, 1, 1, 1) == 0


def test_a_receiver_waits_for_what_it_could_use() -> None:
    """By hand: of two microbatches, each forward of the second rank starts when it is free and the value is sent, and
    takes its transfer and its computation; so does each backward of the first."""
    sent = TransferCosts(
        source=0, target=1, value_bytes=1, gradient_bytes=1, value_seconds=10.0, gradient_seconds=20.0
    )
    passes = {
        "forward_seconds": (1.0, 1.0),
        "input_grad_seconds": (1.0, 1.0),
        "weight_grad_seconds": (1.0, 1.0),
    }
    costs = StepCosts(**passes, backward_seconds=(2.0, 2.0), transfers=(sent,), receivers_wait=True)
    program = build("1f1b", 2, 2)  # 0F0 0F1 0B0 0B1 and 1F0 1B0 1F1 1B1
    timeline = simulated(program, costs)
    assert timeline.end_s.tolist() == [1, 2, 36, 58, 12, 14, 25, 27]
    assert simulated(program, costs.model_copy(update={"receivers_wait": False})).makespan_s == 56
    assert timeline.start_s.tolist() == [0, 1, 34, 56, 11, 12, 24, 25]
    assert timeline.busy_s.tolist() == [6, 6]
    found = bubble(program, costs)
    assert found.total == pytest.approx(1 - 12 / (2 * 58))
    assert found.transfers == pytest.approx(found.total - (1 - 12 / (2 * 9)))


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("1f1b", 1), ("gpipe", 1), ("zb-h1", 1), ("interleaved-1f1b", 1.03), ("zb-v", 1.03), ("dualpipe-v", 1.03),
    ],
)  # fmt: skip
def test_waiting_receivers_take_what_the_lowered_program_takes(name: str, most: float) -> None:
    """Simulated with its sends and receives, each transfer on its way from when both are issued; with several stages a rank
    a little more, as a value that is sent first and used later is received early."""
    program = build(name, 4, 8)
    stages = range(program.num_stages)
    times = [1.0 + 0.1 * stage for stage in stages]
    sent = [
        TransferCosts(
            source=a, target=c, value_bytes=1, gradient_bytes=1, value_seconds=s, gradient_seconds=s
        )
        for a, c in chain(program.num_stages)
        if (s := 0.3 * (program.placement.rank_of_stage[a] != program.placement.rank_of_stage[c])) >= 0
    ]
    costs = StepCosts(
        forward_seconds=times, input_grad_seconds=times, weight_grad_seconds=times,
        backward_seconds=[2 * seconds for seconds in times], transfers=sent, receivers_wait=True,
    )  # fmt: skip
    lowered = insert_communication(program, ahead=0)
    of_stages = StageCosts.of(times, times, times)
    taken_s = simulate(lowered, of_stages, {(a, b): 0.3 for a in stages for b in (a - 1, a + 1)}).makespan_s
    assert taken_s * (1 - 1e-9) <= simulated(program, costs).makespan_s <= taken_s * most * (1 + 1e-9)


def test_the_joint_search_sees_what_receivers_wait_for() -> None:
    """Its own times of a layout are those of the simulator, with transfers in the ranks' time and with none on the way."""
    table = LayerTable.of([1.0, 2, 3, 1], [1.0, 2, 3, 1], [1.0, 1, 1, 1], boundary_bytes=4.0)
    layout = Layout((1, 2, 3, 4), (0, 1, 1, 0))
    policy = DeadlinePolicy.of(Rule(1, False, False, float("inf"), 0.0, UNLIMITED, False, 0.0), 4)
    problem = JointProblem.of(table, 2, 3, bytes_per_s=8.0, receivers_wait=True)
    stages, costs = stages_of(problem, layout), stage_costs(problem, layout)
    assert stages.transfer.tolist() == [0] * 4 and set(transfer_times(problem, layout).values()) == {0}
    assert stages.forward.tolist() == costs.forward_s.tolist() == [1, 2.5, 3, 1.5]
    assert stages.input_grad.tolist() == costs.input_grad_s.tolist() == [1.5, 2, 3.5, 1]
    waiting, hidden = (
        scheduled("joint", one, layout, policy) for one in (problem, replace(problem, receivers_wait=False))
    )
    assert waiting is not None and hidden is not None and waiting.makespan_s > hidden.makespan_s


def test_a_step_looks_at_every_rank_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at every pair of ranks: 512 of them would take longer than the rest of a prediction."""
    cluster = load_cluster("8x-t4")
    graph = trace(MODEL, 1, **JOB.traced("cuda"))
    model_costs = RangeCosts(graph, costing(graph, cluster, JOB))
    staged = make_candidate(model_costs, Configuration(1, 8, 1, 8, "gpipe"), cluster, JOB).staged
    seen = Counter[int]()
    plain = StagedModel.stages_of

    def counted(self: StagedModel, rank: int) -> list[Stage]:
        seen[rank] += 1
        return plain(self, rank)

    monkeypatch.setattr(StagedModel, "stages_of", counted)
    step_seconds(staged)
    assert sorted(seen) == list(range(8))
    assert max(seen.values()) < 8
    assert staged.stages is staged.stages
