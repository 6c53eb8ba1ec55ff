"""What other systems would choose: by their own accounts, of what fits."""

from __future__ import annotations

from functools import cache

import pytest

from peers.widths import megatron_rule
from peers.widths.choice import STRATEGIES, chosen, find_strategy, own_seconds
from stagewright.cluster import load_cluster
from stagewright.errors import InputError, PlanError
from stagewright.planning.job import Job
from stagewright.planning.plan import Plan
from stagewright.planning.search import plan as search
from stagewright.planning.search_result import SearchResult
from stagewright.planning.space import Space
from stagewright.report.configurations import recomputed
from stagewright.tracing.models.reference import ModelReference, resolve

CLUSTER = load_cluster("4x-a100-80")
JOB = Job(
    global_batch=32, sequence_length=1024, dtype="fp16", runtime="megatron-deepspeed", memory_limit=8 * 2**30
)


@cache
def gpt() -> ModelReference:
    return resolve("gpt2", {"n_layer": 8, "n_embd": 2048, "n_head": 16})


@cache
def made_by(name: str) -> SearchResult:
    return chosen(find_strategy(name), gpt(), CLUSTER, JOB, keep=3)


@cache
def ours() -> Plan:
    return search(gpt(), CLUSTER, JOB, space=Space(largest_cp=1, zero=(0, 1)), keep=1).plans[0]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "amp")) for name in STRATEGIES]
)
def test_a_choice_fits_and_is_no_faster_than_ours(name: str) -> None:
    made = made_by(name).plans
    assert all(plan.predictions.reserved_peak_bytes <= 8 * 2**30 for plan in made)
    assert ours().predictions.step_seconds <= made[0].predictions.step_seconds
    if name != "megatron":  # which prefers few devices per replica to short steps
        own = [own_seconds(find_strategy(name), plan, CLUSTER) for plan in made]
        assert own == pytest.approx(sorted(own))


def test_varuna_has_no_tensor_parallelism_and_both_recompute() -> None:
    for name in ("varuna", "megatron"):
        first = made_by(name).plans[0]
        assert recomputed(first) == "full"
        assert name == "megatron" or first.tp == 1


def test_megatron_chooses_as_its_rule_says() -> None:
    strategy = find_strategy("megatron")

    def fits(tp: int, pp: int) -> bool:
        try:
            chosen(strategy, gpt(), CLUSTER, JOB, space=Space(tp=tp, pp=pp, microbatch=1), keep=1)
        except PlanError:
            return False
        return True

    first = made_by("megatron").plans[0]
    assert (first.tp, first.pp, first.dp) == megatron_rule(4, 4, 8, fits)


def test_widths_they_do_not_know_and_other_names_are_refused() -> None:
    with pytest.raises(InputError, match="strategy 'amp' knows no --cp 2"):
        chosen(find_strategy("amp"), gpt(), CLUSTER, JOB, space=Space(cp=2))
    with pytest.raises(InputError, match="strategy 'varuna' knows no --tp 2"):
        chosen(find_strategy("varuna"), gpt(), CLUSTER, JOB, space=Space(tp=2))
    with pytest.raises(InputError, match="did you mean 'varuna'"):
        find_strategy("varunna")
