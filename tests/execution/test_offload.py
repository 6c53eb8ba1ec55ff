"""A plan that offloads trains as predicted, to the byte."""

from __future__ import annotations

from pathlib import Path

import pytest
from plans import make_plan, peaks_on_cpus

from stagewright.cluster import load_cluster
from stagewright.execution.launch import run
from stagewright.planning.estimate import estimate, staged_model_of
from stagewright.planning.plan import StagePolicy, load_plan
from stagewright.planning.prediction.predict import rank_memories
from stagewright.schedule.lower import insert_recomputation


@pytest.mark.multiprocess
@pytest.mark.parametrize("pp", [1, 2])
def test_an_offloading_plan_uses_the_memory_that_was_predicted(pp: int, tmp_path: Path) -> None:
    """On a lone rank with one microbatch in flight, too."""
    kept = make_plan(
        tmp_path / "kept.json",
        schedule="gpipe",
        pp=pp,
        num_steps=2,
        num_microbatches=6 if pp > 1 else 1,
        sequence_length=128,
    )
    cluster = load_cluster(f"{pp}x-h100")
    line = staged_model_of(kept, cluster)
    names = tuple(
        line.stages[0].graph.nodes[node].name
        for node in line.stages[0].graph.forward_ids[line.stages[0].start : line.stages[0].stop]
    )
    program = insert_recomputation(line.program, [0])
    plan = kept.model_copy(
        update={
            "memory_policy": (StagePolicy(offload=names, fetch_ahead=2**16), *kept.memory_policy[1:]),
            "program": tuple(tuple(map(str, actions)) for actions in program.ranks),
        }
    )
    plan = estimate(plan, cluster)
    plan.save(tmp_path / "plan.json")
    plan = load_plan(tmp_path / "plan.json")
    before, after = (rank_memories(staged_model_of(one, cluster))[0].peak_bytes for one in (kept, plan))
    assert after < before
    record = run(tmp_path / "plan.json", steps=2, out=tmp_path / "run")
    assert record is not None
    measured = [rank.allocated_peak_bytes for rank in record.ranks]
    predicted = peaks_on_cpus(plan)
    assert measured == pytest.approx(predicted, rel=1e-3)
