"""What other systems would choose: by their own accounts, of what fits."""

from __future__ import annotations

import pytest

from stagewright.cluster import load_cluster
from stagewright.errors import InputError, PlanError
from stagewright.estimation.megatron import Shape
from stagewright.planning.configure.search import configure
from stagewright.planning.configure.space import Bounds
from stagewright.planning.configure.strategies import megatron_rule
from stagewright.planning.configure.strategies.choice import STRATEGIES, chosen, find_strategy, own_seconds
from stagewright.planning.job import Job

GPT = Shape.gpt(24, 4096, 32, 51200, 2048)
CLUSTER = load_cluster("2x8x-a100-80")
JOB = Job(global_batch=64, sequence_length=2048)
STACK = "megatron-deepspeed"


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_choice_fits_and_is_no_faster_than_ours(name: str) -> None:
    strategy = find_strategy(name)
    made = chosen(strategy, GPT, CLUSTER, JOB, stack=STACK, bounds=Bounds(), keep=3).configurations
    assert all(one.memory.fits for one in made)
    ours = configure(GPT, CLUSTER, JOB, stack=STACK, keep=1).configurations[0]
    assert ours.step_s <= made[0].step_s
    if name != "megatron":  # which prefers few devices per replica to short steps
        own = [own_seconds(strategy, GPT, one, STACK) for one in made]
        assert own == sorted(own)


def test_varuna_has_no_tensor_parallelism_and_both_recompute() -> None:
    for name in ("varuna", "megatron"):
        first = chosen(
            find_strategy(name), GPT, CLUSTER, JOB, stack=STACK, bounds=Bounds(), keep=1
        ).configurations[0]
        assert first.layout.recompute == "full"
        assert name == "megatron" or first.layout.tp == 1


def test_megatron_chooses_as_its_rule_says() -> None:
    strategy = find_strategy("megatron")

    def fits(tp: int, pp: int) -> bool:
        try:
            chosen(
                strategy, GPT, CLUSTER, JOB, stack=STACK, bounds=Bounds(tp=tp, pp=pp, microbatch=1), keep=1
            )
        except PlanError:
            return False
        return True

    first = chosen(strategy, GPT, CLUSTER, JOB, stack=STACK, bounds=Bounds(), keep=1).configurations[0]
    widths = first.layout.tp, first.layout.pp, first.layout.dp
    assert widths == megatron_rule(16, 8, GPT.num_layers, fits)


def test_widths_they_do_not_know_and_other_names_are_refused() -> None:
    with pytest.raises(InputError, match="strategy 'amp' knows no --cp 2"):
        chosen(find_strategy("amp"), GPT, CLUSTER, JOB, stack=STACK, bounds=Bounds(cp=2))
    with pytest.raises(InputError, match="strategy 'varuna' knows no --tp 2"):
        chosen(find_strategy("varuna"), GPT, CLUSTER, JOB, stack=STACK, bounds=Bounds(tp=2))
    with pytest.raises(InputError, match="did you mean 'varuna'"):
        find_strategy("varunna")
