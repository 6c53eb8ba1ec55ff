"""Models whose code checkpoints: planned by default as it says, run as predicted, trained as plain PyTorch trains them."""

from __future__ import annotations

from pathlib import Path

import pytest
from plans import peaks_on_cpus, trained

from stagewright.cluster import load_cluster
from stagewright.execution.verification import verify
from stagewright.planning.estimate import estimate
from stagewright.planning.job import Job
from stagewright.planning.plan import Plan, StagePolicy
from stagewright.tracing.models.reference import resolve

pytestmark = pytest.mark.multiprocess

MODEL = "tiny-llama"
CHECKPOINTED = {"num_hidden_layers": 4, "gradient_checkpointing": True}


def planned(pp: int, schedule: str, recompute: str | None) -> Plan:
    job = Job(global_batch=4, sequence_length=32, dtype="fp32", num_steps=2)
    reference = resolve(MODEL, CHECKPOINTED)
    return estimate(
        reference,
        load_cluster("2x-h100"),
        job,
        pp=pp,
        dp=1,
        schedule=schedule,
        recompute=recompute,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(("pp", "schedule"), [(1, "1f1b"), (2, "1f1b"), (2, "zb-h1")])
def test_a_checkpointed_model_trains_as_one_that_keeps_and_within_what_was_predicted(
    pp: int, schedule: str, tmp_path: Path
) -> None:
    asked, kept = planned(pp, schedule, None), planned(pp, schedule, "none")
    assert all(isinstance(policy, StagePolicy) for policy in asked.memory_policy)
    assert kept.memory_policy == ("keep",) * pp
    for folder in (tmp_path / "asked", tmp_path / "kept"):
        folder.mkdir()
    found, plain = trained(asked, tmp_path / "asked"), trained(kept, tmp_path / "kept")
    assert found.losses == plain.losses
    measured = [rank.allocated_peak_bytes for rank in found.ranks]
    predicted = peaks_on_cpus(asked)
    assert measured == pytest.approx(predicted, rel=1e-3)
    assert sum(measured) < sum(rank.allocated_peak_bytes for rank in plain.ranks)


def test_a_checkpointed_model_is_verified_against_autograd_with_its_checkpoints() -> None:
    found = verify(MODEL, planned(2, "1f1b", None))
    assert found.holds and found.num_equal_gradients == found.num_gradients
