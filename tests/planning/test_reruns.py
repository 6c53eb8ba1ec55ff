"""What a stage keeps and when operators run again, found by annealing: as replayed, within limits, near the optimum."""

from __future__ import annotations

from collections import Counter

import pytest

from stagewright.graph.policy import Policy
from stagewright.planning.checkpointing.fit import fit
from stagewright.planning.checkpointing.reruns import RerunSearch, RerunStage
from stagewright.planning.plan import StagePolicy

pytestmark = pytest.mark.usefixtures("whole_annealing")


@pytest.mark.parametrize("seed", [6, 8, 9])
def test_what_is_promised_is_what_the_replay_finds(load, seed: int) -> None:
    """Peaks to the byte where nothing runs again, no higher and in the same time where operators do."""
    whole = load("one_stage").OneStage(load("small_stages").small_stage(seed))
    stage = RerunStage(whole.kept.staged.memories[0], whole.costs.costing, 1.0)
    search = RerunSearch(stage)
    beside = whole.kept.peak_bytes - search.most_bytes
    assert beside == whole.kept.stage.held_bytes([whole.graph.loss])
    for share in (0.9, 0.75):
        found = search.within(share * search.most_bytes)
        assert found is not None
        saved = whole.under(Policy(reruns=stage.reruns(found.present)))
        assert saved.peak_bytes <= share * search.most_bytes + beside
        assert saved.added_seconds == pytest.approx(found.seconds, rel=1e-9)


def test_limits_are_met_that_recomputing_once_cannot_meet(load) -> None:
    whole = load("one_stage").OneStage(load("small_stages").small_stage(7))
    problem = load("checkmate").problem_of(whole.kept.stage, whole.costs.costing)
    above = whole.kept.peak_bytes - problem.kept_peak
    limit = round(1.02 * load("checkmate").least_bytes(problem))
    saved = whole.within(limit + above)
    assert saved is not None and saved.peak_bytes <= limit + above
    assert max(Counter(node.id for node in saved.again).values()) > 1
    optimum = load("checkmate").solve(problem, limit)
    assert optimum.is_proved
    assert optimum.seconds * (1 - 1e-9) <= saved.added_seconds <= 1.5 * optimum.seconds


def test_a_choice_is_what_its_plan_says(load) -> None:
    """Names of operators in a policy of a plan lead to the same stage."""
    ours = load("one_stage")
    whole = ours.OneStage(load("small_stages").small_stage(6))
    line = whole._line_within(round(0.6 * whole.kept.peak_bytes))
    found = fit(line, whole.costs, offload=False, thorough=True)
    assert found is not None and found.choice.reruns
    (policy,) = found.memory_policy
    assert isinstance(policy, StagePolicy) and policy.reruns
    assert {*policy.recompute} == {name for _, again in policy.reruns for name in again}
    named = {whole.graph.nodes[node].name: node for node in whole.graph.forward_ids}
    reruns = tuple((named[one], tuple(named[other] for other in again)) for one, again in policy.reruns)
    saved = whole.under(Policy(reruns=reruns))
    assert saved.peak_bytes == ours.Saved(found.staged, found.memories[0]).peak_bytes
    assert saved.added_seconds == ours.Saved(found.staged, found.memories[0]).added_seconds


@pytest.mark.parametrize(
    ("policy", "problem"),
    [
        ({"reruns": [["a:1", ["b:1"]]]}, "'b:1' is in only one of them"),
        ({"reruns": [["a:1", ["b:1"]]], "recompute": ["b:1", "c:1"]}, "'c:1' is in only one of them"),
        (
            {"reruns": [["a:1", ["b:1"]]], "recompute": ["b:1"], "checkpoints": ["c:1"]},
            "leave out checkpoints",
        ),
    ],
)
def test_policies_that_contradict_themselves_are_refused(policy: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        StagePolicy.model_validate(policy)
