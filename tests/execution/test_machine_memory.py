"""A run whose ranks cannot have room on this machine is refused before any of them is started."""

from __future__ import annotations

from pathlib import Path

import pytest
from plans import make_plan

from stagewright.errors import InputError
from stagewright.execution import launch
from stagewright.execution.preflight import refuse_without_room
from stagewright.machine import machine_bytes
from stagewright.planning.plan import Plan
from stagewright.planning.predictions import RankPrediction


def with_bytes(plan: Plan, allocated: int, on_host: int = 0) -> Plan:
    ranks = [
        RankPrediction(
            rank=rank,
            busy_seconds=1.0,
            allocated_peak_bytes=allocated,
            reserved_peak_bytes=allocated,
            categories={},
            host_bytes=on_host,
        )
        for rank in range(plan.pp)
    ]
    predictions = plan.predictions.model_copy(update={"ranks": tuple(ranks)})
    return plan.model_copy(update={"predictions": predictions})


def test_ranks_that_need_more_than_the_machine_has_are_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = with_bytes(make_plan(tmp_path / "plan.json"), machine_bytes() // 2 + 1)
    plan.save(tmp_path / "plan.json")
    monkeypatch.setattr(launch, "start_ranks", lambda *_: pytest.fail("processes were started"))
    with pytest.raises(InputError, match=r"2 ranks of the plan need .* `stagewright probe` describes"):
        launch.run(tmp_path / "plan.json", out=tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


def test_what_is_on_the_host_and_every_replica_counts(tmp_path: Path) -> None:
    half = machine_bytes() // 2
    single = make_plan(tmp_path / "plan.json")
    refuse_without_room(with_bytes(single, half))
    with pytest.raises(InputError):
        refuse_without_room(with_bytes(single, half, on_host=1))
    with pytest.raises(InputError, match="4 ranks"):
        refuse_without_room(with_bytes(single, half).model_copy(update={"dp": 2}))
