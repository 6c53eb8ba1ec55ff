"""Programs that update weights between microbatches pay for every update, and not for one more at the end."""

from __future__ import annotations

import pytest

from stagewright.cluster import load_cluster
from stagewright.planning.estimate import estimate, staged_model_of
from stagewright.planning.job import Job
from stagewright.planning.plan import Plan
from stagewright.planning.prediction.predict import run_timeline
from stagewright.planning.prediction.staged_model import StagedModel
from stagewright.tracing.models.reference import resolve

MODEL = resolve("tiny-llama", {"hidden_size": 1024})
NUM_MICROBATCHES = 8


def estimated(schedule: str, dp: int = 1) -> tuple[Plan, StagedModel]:
    cluster = load_cluster(f"{2 * dp}x-h100")
    job = Job(global_batch=NUM_MICROBATCHES * dp, sequence_length=32, dtype="fp32", clip_norm=None)
    plan = estimate(MODEL, cluster, job, pp=2, dp=dp, schedule=schedule)
    return plan, staged_model_of(plan, cluster)


@pytest.mark.parametrize("dp", [1, 2])
def test_every_early_step_takes_its_time(dp: int) -> None:
    plan, staged = estimated("pipedream", dp)
    timed, free = run_timeline(staged), run_timeline(staged, steps=False)
    assert plan.predictions.step_seconds == timed.makespan_s
    flushed, plain = estimated("1f1b", dp)
    update = flushed.predictions.step_seconds - run_timeline(plain).makespan_s
    each = max(timed.busy_s - free.busy_s) / NUM_MICROBATCHES
    assert each == pytest.approx(update, rel=0.2)
    assert run_timeline(plain).makespan_s == run_timeline(plain, steps=False).makespan_s
