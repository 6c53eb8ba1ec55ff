"""A run whose ranks are no longer as fast as planned goes on under another plan, once, with the same losses."""

from __future__ import annotations

import os
import re
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
from stagewright.cluster import with_slower_devices
from stagewright.execution.adapting import Adaptation
from stagewright.planning.estimate import estimate
from stagewright.planning.plan import Plan
from stagewright.planning.replanning import replanned
from stagewright.tracing.models.reference import resolve


@pytest.fixture(scope="module")
def plan() -> Plan:
    job = stagewright.Job(global_batch=8, sequence_length=32, dtype="fp32", num_steps=45)
    model = resolve("tiny-llama", dict(SMALL_LLAMA))
    found = stagewright.plan(
        model,
        local(2),
        job,
        pp=2,
        dp=1,
        tp=1,
        schedules="1f1b",
        recompute="none",
        microbatch=1,
        is_improved=False,
    )
    return found.plans[0]


def test_a_slow_device_gets_less_of_the_model(plan: Plan) -> None:
    found = replanned(plan, with_slower_devices(local(2), {0: 1.0, 1: 2.0}))
    assert found.seconds < 0.9 * found.stays_s
    assert found.plan.cuts != plan.cuts
    assert (found.plan.num_ranks, found.plan.job, found.plan.placement) == (
        plan.num_ranks,
        plan.job,
        plan.placement,
    )
    again = replanned(found.plan, with_slower_devices(local(2), {0: 1.0, 1: 2.0}))
    assert again.seconds == pytest.approx(found.seconds, rel=0.03)


def test_of_several_stages_a_rank_may_become_one(plan: Plan) -> None:
    """Whose order was found for ranks that are alike: with one each, stages can be as different as the ranks."""
    model, slow = resolve("tiny-llama", dict(SMALL_LLAMA)), with_slower_devices(local(2), {0: 1.0, 1: 3.0})
    several = estimate(model, local(2), plan.job, pp=2, schedule="zb-v")
    single = estimate(model, slow, plan.job, pp=2, schedule="1f1b", recompute="none")
    found = replanned(several, slow)
    assert several.num_stages == 4 and single.num_stages == 2
    assert found.seconds <= single.predictions.step_seconds < found.stays_s
    quiet = replanned(several, local(2))
    assert quiet.seconds <= quiet.stays_s


@pytest.fixture(scope="module")
def saving(plan: Plan) -> Plan:
    """Of a job with so little memory that stages recompute."""
    peak = max(rank.reserved_peak_bytes for rank in plan.predictions.ranks)
    job = plan.job.model_copy(update={"memory_limit": int(0.93 * peak), "loss_pieces": 1})
    found = stagewright.plan(
        resolve("tiny-llama", dict(SMALL_LLAMA)), local(2), job, pp=2, dp=1, tp=1, schedules="1f1b", microbatch=1,
        is_improved=False, loss_pieces=1, host_optimizer="never",
    )  # fmt: skip
    assert any(policy != "keep" for policy in found.plans[0].memory_policy)
    return found.plans[0]


def test_what_is_recomputed_is_chosen_anew(saving: Plan) -> None:
    slow = with_slower_devices(local(2), {0: 1.0, 1: 2.0})
    found = replanned(saving, slow)
    assert found.seconds < 0.95 * found.stays_s
    assert found.plan.memory_policy != saving.memory_policy
    assert (found.plan.num_ranks, found.plan.devices) == (saving.num_ranks, saving.devices)
    for rank in found.plan.predictions.ranks:
        assert rank.reserved_peak_bytes <= (saving.job.memory_limit or 0)


def test_nothing_is_looked_at_while_ranks_are_as_planned(plan: Plan, tmp_path: Path) -> None:
    """Nor where one is slow for a few steps, or all are alike slow."""
    watch = Adaptation(plan, tmp_path / "adapting", 1.0)
    for step in range(200):
        slowdowns = [1.0, 2.0] if step % 4 < 2 else [1.7, 1.8]
        assert watch.after(step, slowdowns, 1.0, 1000) == [] and not watch.has_proposal
        assert not watch._searcher.is_asked
    watch.close()


def test_what_was_searched_for_ranks_that_have_changed_again_is_left(plan: Plan, tmp_path: Path) -> None:
    watch = Adaptation(plan, tmp_path / "adapting", 0.0)
    for step in range(3):
        watch.after(step, [1.0, 2.0], 1.0, 1000)
    wait(watch)
    watch.after(3, [1.0, 1.0], 1.0, 1000)
    assert not watch.has_proposal
    for step in range(4, 7):
        watch.after(step, [1.0, 2.0], 1.0, 1000)
    wait(watch)
    for step in range(7, 9):
        watch.after(step, [1.0, 2.1], 1.0, 1000)
    assert watch.has_proposal
    watch.close()


def test_a_search_that_has_ended_is_said_once(plan: Plan, tmp_path: Path) -> None:
    watch = Adaptation(plan, tmp_path / "adapting", 0.0)
    watch._searcher._process.kill()
    watch._searcher._process.wait()
    said = [text for step in range(60) for text in watch.after(step, [1.0, 2.0], 1.0, 1000)]
    watch.close()
    assert len(said) == 1 and "the process that searches has ended (-9)" in said[0]
    assert not watch.has_proposal


def test_a_folder_that_cannot_be_written_ends_no_training(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "full").write_text("")
    watch = Adaptation(plan, tmp_path / "full" / "adapting", 0.0)
    said = [text for step in range(30) for text in watch.after(step, [1.0, 2.0], 1.0, 1000)]
    watch.close()
    assert len(said) == 1 and re.search("the run keeps its own: .*nothing is searched", said[0])
    watch = Adaptation(plan, tmp_path / "adapting", 0.0)
    (tmp_path / "adapting" / "slowdowns.json").mkdir()
    said = [text for step in range(4) for text in watch.after(step, [1.0, 2.0], 1.0, 1000)]
    watch.close()
    assert said and "the run keeps its own: " in said[0] and not watch.has_proposal


def wait(watch: Adaptation) -> None:
    """Until its search is done."""
    assert watch._searcher.is_asked
    deadline = Deadline(60)
    while not watch._searcher.is_done and deadline:
        time.sleep(0.05)
    assert watch._searcher.is_done


@pytest.mark.multiprocess
@pytest.mark.parametrize("which", ["plan", pytest.param("saving", marks=pytest.mark.slow)])
def test_a_run_changes_its_plan_once_when_a_rank_becomes_slow(
    which: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    plan = request.getfixturevalue(which)
    plan.save(tmp_path / "plan.json")
    stayed = run_ranks(train, 2, str(tmp_path), False, timeout=120)
    found = run_ranks(train, 2, str(tmp_path), True, timeout=200)
    assert found[0]["losses"] == pytest.approx(stayed[0]["losses"], rel=1e-4)
    assert stayed[0]["cuts"] == [list(plan.cuts)]
    first, last = found[0]["cuts"]
    assert first == list(plan.cuts) != last
    assert found[0]["cuts"] == found[1]["cuts"]
    said = [text for text in found[0]["said"] if "continues with other cuts" in text]
    assert len(said) == 1 and said[0].startswith("rank 1 takes 2.2 times as long as the plan assumes")
    assert any(text.startswith("a step takes ") for text in found[0]["said"])


def train(rank: int, num_ranks: int, folder: str, adapts: bool) -> dict[str, Any]:
    """Train the plan; from the seventh step on the second rank takes 2.2 times as long as its device's figures say."""
    from stagewright.execution import session
    from stagewright.execution.link_watch import LinkWatch
    from stagewright.execution.trainer import Trainer

    os.environ["LOCAL_RANK"] = str(rank)
    done = [0]

    def slowdown(batch: Any, now: Plan, pipeline_rank: int, length: int) -> float:
        done[0] += 1
        slow = 2.2 if pipeline_rank == 1 and done[0] > 6 else 1.0
        return slow / assumed[0] if pipeline_rank == 1 else 1.0

    session.slowdown_of = slowdown
    LinkWatch.looked = lambda self, plan, times: (
        None
    )  # the plan is for other links than those between processes
    assumed, cuts = [1.0], []
    with warnings.catch_warnings(record=True) as said:
        trainer = Trainer(
            f"{folder}/plan.json", out=f"{folder}/{adapts}", device="cpu", random_weights=True, adapt=adapts
        )
        if trainer._adaptation is not None:
            trainer._adaptation.change_s = 0.0  # steps are short here
        adopt = trainer.adopt

        def adopted(plan: Plan) -> None:
            adopt(plan)
            cuts.append(list(plan.cuts))
            assumed[0] = 2.2

        trainer.adopt = adopted
        cuts.append(list(trainer.plan.cuts))
        steps = trainer.step

        def step(batch: Any = None) -> Any:
            ours = trainer._adaptation
            while ours is not None and ours._searcher.is_asked and not ours._searcher.is_done:
                time.sleep(0.05)  # steps are short here, and the search is not
            return steps(batch)

        trainer.step = step
        record = trainer.fit()
    return {
        "losses": [] if record is None else list(record.losses),
        "cuts": cuts,
        "said": [str(one.message) for one in said],
    }
