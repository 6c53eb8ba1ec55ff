"""A run with a link that stays slower than planned: told from a slow neighbour, searched for, and gone on with, once."""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from cells import SMALL_LLAMA

import stagewright
from local_cluster import local
from multiprocess import run_ranks
from patience import Deadline
from stagewright.cluster import Cluster, with_slower_links
from stagewright.execution.adapting import Adaptation
from stagewright.execution.link_times import LinkTime
from stagewright.execution.link_watch import LinkWatch
from stagewright.planning.estimate import estimate
from stagewright.planning.plan import Plan
from stagewright.planning.replanning import replanned
from stagewright.tracing.models.reference import resolve

LATENCY_S, SLEEPS_S = 1e-3, 12e-3


def slow_enough(num_devices: int) -> Cluster:
    """Processors whose links take what messages between processes do, or longer."""
    found = local(num_devices)
    (node,) = found.nodes
    link = node.intra_node.model_copy(update={"latency_s": LATENCY_S, "collectives": None})
    return found.model_copy(update={"nodes": (node.model_copy(update={"intra_node": link}),)})


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Of two stages a rank, so that values cross the link three times."""
    job = stagewright.Job(global_batch=8, sequence_length=32, dtype="fp32", num_steps=34)
    model = resolve("tiny-llama", dict(SMALL_LLAMA))
    return estimate(
        model, slow_enough(2), job, pp=2, dp=1, schedule="interleaved-1f1b", chunks=2, recompute="none"
    )


def test_a_cluster_with_a_slower_link() -> None:
    whole = slow_enough(3)
    found = with_slower_links(whole, {(0, 1): 10.0})
    seconds = whole.point_to_point_seconds(1e6, 0, 1)
    assert found.point_to_point_seconds(1e6, 0, 1) == pytest.approx(10 * seconds)
    assert found.point_to_point_seconds(1e6, 1, 0) == pytest.approx(10 * seconds)
    assert found.point_to_point_seconds(1e6, 1, 2) == pytest.approx(seconds)
    assert with_slower_links(whole, {}) == whole


def test_a_slow_link_is_crossed_less_often(plan: Plan) -> None:
    found = replanned(plan, with_slower_links(slow_enough(2), {(0, 1): 20.0}))
    assert plan.num_stages == 4 and found.plan.num_stages == 2
    assert found.seconds < 0.8 * found.stays_s


class Watched:
    """A watch over the links of a plan for two ranks, whose steps and links take what is said."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.watch, self.step = plan, LinkWatch(plan), 0
        self.planned_s = 2 * slow_enough(2).point_to_point_seconds(4096, 0, 1)

    def train(self, num_steps: int, factor: float, lateness: float = 2.0, pace: float = 1.0) -> int:
        """Steps that take so many times as long as planned at this pace; returns how often links were timed."""
        looks = 0
        for _ in range(num_steps):
            self.watch.after(
                self.plan, self.step, (pace, pace), lateness * pace * self.plan.predictions.step_seconds
            )
            if self.watch.wants_look:
                looks += 1
                seconds = factor * pace * self.planned_s
                self.watch.looked(self.plan, [LinkTime((0, 1), (4096,), (4096,), seconds)])
            self.step += 1
        return looks


@pytest.fixture
def watched(plan: Plan) -> Watched:
    return Watched(plan)


def test_links_are_timed_where_steps_are_late_alone(watched: Watched) -> None:
    assert watched.train(30, factor=5.0, lateness=1.1) == 0
    assert watched.train(30, factor=1.2) == 3 and not watched.watch.staying


def test_a_link_is_slow_after_three_looks(watched: Watched) -> None:
    watched.train(5, factor=6.0)
    assert not watched.watch.staying
    watched.train(5, factor=6.0)
    assert watched.watch.staying == {(0, 1): pytest.approx(6.0)}
    assert watched.watch.is_still({(0, 1): 5.0}) and not watched.watch.is_still({(0, 1): 2.5})
    watched.train(3, factor=1.0)
    assert not watched.watch.staying


def test_a_machine_that_is_slower_as_a_whole_has_no_slow_link(watched: Watched) -> None:
    """Computations, messages and steps take four times as long as planned."""
    watched.train(30, factor=1.3, pace=4.0)
    assert not watched.watch.staying


def test_a_slow_link_that_costs_next_to_nothing_is_left_alone(watched: Watched) -> None:
    watched.planned_s /= 1000.0
    watched.train(30, factor=300.0)
    assert not watched.watch.staying


def test_a_link_that_the_plan_was_made_for_may_be_quick_again(watched: Watched) -> None:
    watched.train(10, factor=6.0)
    watched.watch.settle(watched.step, watched.watch.staying)
    assert watched.watch.assumed == {(0, 1): pytest.approx(6.0)}
    assert watched.train(30, factor=6.0, lateness=1.0) and not watched.watch.staying
    watched.train(20, factor=1.0, lateness=0.5)
    watched.watch.settle(watched.step, watched.watch.staying)
    assert watched.watch.assumed == {}


def test_a_search_for_a_link_that_is_quick_again_is_over(plan: Plan, tmp_path: Path) -> None:
    """So that a rank which becomes slow later is seen."""
    adaptation, planned = Adaptation(plan, tmp_path / "adapting", 0.0), plan.predictions.step_seconds
    watched = Watched(plan)
    step = 0
    while not adaptation._searcher.is_asked:
        adaptation.after(step, [1.0, 1.0], 2 * planned, 1000)
        if adaptation.links.wants_look:
            adaptation.looked(step, [LinkTime((0, 1), (4096,), (4096,), 6 * watched.planned_s)], 1000)
        step += 1
    adaptation.after(step, [1.0, 1.0], planned, 1000)
    adaptation.looked(step, [LinkTime((0, 1), (4096,), (4096,), watched.planned_s)], 1000)
    deadline = Deadline(60)
    while not adaptation._searcher.is_done and deadline:
        time.sleep(0.05)
    for later in range(step + 1, step + 5):
        assert adaptation.after(later, [1.0, 1.0], planned, 1000) == []
    assert not adaptation._searcher.is_asked and not adaptation.has_proposal
    adaptation.close()


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_run_with_a_slow_link_goes_on_under_another_plan(plan: Plan, tmp_path: Path) -> None:
    """Messages are slow from the seventh step on; that no rank computes longer is so by the pace that the test says. The
    run changes once, says why, and its losses are those of one that stays."""
    plan.save(tmp_path / "plan.json")
    stayed = run_ranks(train, 2, str(tmp_path), False, "link", timeout=150)
    found = run_ranks(train, 2, str(tmp_path), True, "link", timeout=150)
    assert found[0]["losses"] == pytest.approx(stayed[0]["losses"], rel=1e-4)
    assert found[0]["stages"] == found[1]["stages"] == [4, 2]
    changes = [text for text in found[0]["said"] if "continues with" in text]
    assert len(changes) == 1 and changes[0].startswith("the link between ranks 0 and 1 takes ")
    assert "times as long as planned" in changes[0]


@pytest.mark.multiprocess
@pytest.mark.parametrize("slow", ["nothing", "rank"])
def test_a_run_whose_links_are_as_planned_stays(plan: Plan, tmp_path: Path, slow: str) -> None:
    """Also where steps are as late because a rank computes longer."""
    plan.save(tmp_path / "plan.json")
    found = run_ranks(train, 2, str(tmp_path), True, slow, timeout=150)
    assert found[0]["stages"] == [4]
    assert not any("link" in text for text in found[0]["said"])


def train(rank: int, num_ranks: int, folder: str, adapts: bool, slow: str) -> dict[str, Any]:
    """Train the plan. From the seventh step on what is `slow` takes longer: the link, by what is sent on it, or the second
    rank, by its forwards."""
    from stagewright.execution import session
    from stagewright.execution.stage_runner import StageRunner
    from stagewright.execution.trainer import Trainer
    from stagewright.execution.transport import Transport

    os.environ["LOCAL_RANK"] = str(rank)
    is_slow = [False]
    late = {"link": Transport, "rank": StageRunner if rank else None, "nothing": None}[slow]
    if late is not None:
        name = "send" if slow == "link" else "forward"
        method = getattr(late, name)

        def called(*given: Any) -> Any:
            time.sleep(SLEEPS_S * is_slow[0])
            return method(*given)

        setattr(late, name, called)
    session.slowdown_of = lambda *_: 1.0
    stages: list[int] = []
    with warnings.catch_warnings(record=True) as said:
        trainer = Trainer(
            f"{folder}/plan.json", out=f"{folder}/{adapts}", device="cpu", random_weights=True, adapt=adapts
        )
        if trainer._adaptation is not None:
            trainer._adaptation.change_s = 0.0  # steps are short here
        adopt, step = trainer.adopt, trainer.step

        def adopted(plan: Plan) -> None:
            adopt(plan)
            stages.append(plan.num_stages)

        def stepped(batch: Any = None) -> Any:
            is_slow[0] = trainer.step_number >= 6
            ours = trainer._adaptation
            while ours is not None and ours._searcher.is_asked and not ours._searcher.is_done:
                time.sleep(0.05)  # steps are short here, and the search is not
            return step(batch)

        trainer.adopt, trainer.step = adopted, stepped
        stages.append(trainer.plan.num_stages)
        record = trainer.fit()
    losses = [] if record is None else list(record.losses)
    return {"losses": losses, "stages": stages, "said": [str(one.message) for one in said]}
