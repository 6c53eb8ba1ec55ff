"""Megatron's stacks: what layers keep by the published formulas, and rules on widths."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from stagewright.errors import InputError
from stagewright.estimation.megatron import (
    MEGATRON_STACKS,
    Experts,
    Layout,
    Shape,
    find_megatron_stack,
    footprints,
    shape_of,
    stage_bytes,
)
from stagewright.schedule.families import build
from stagewright.tracing.models.reference import resolve

GPT = Shape.gpt(num_layers=12, hidden=1024, num_heads=16, vocabulary=51200, num_positions=512)


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_layers_keep_what_the_published_formula_says(
    tp: int, sequence_parallel: bool, recompute: str
) -> None:
    """Source: Korthikanti et al. 2022, table 2."""
    layout = Layout(
        512, tp=tp, microbatch_size=4, sequence_parallel=sequence_parallel, recompute=recompute  # type: ignore[arg-type]
    )  # fmt: skip
    tokens_hidden, outside = 512 * 4 * 1024, tp if sequence_parallel else 1
    scores = 5 * 16 * 512 / 1024 / tp
    per_layer = {
        "none": 10 / outside + 24 / tp + scores,
        "selective": 10 / outside + 24 / tp,
        "full": 2 / outside,
    }[recompute]
    (rank,) = footprints(GPT, layout, find_megatron_stack("megatron-deepspeed"))
    assert rank.layer_activation_bytes == pytest.approx(12 * per_layer * tokens_hidden, rel=1e-9)


@pytest.mark.parametrize("stack", MEGATRON_STACKS.values(), ids=lambda stack: stack.name)
@pytest.mark.parametrize("tp", [1, 4])
def test_parameters_add_up_to_the_model(stack, tp: int) -> None:
    layout = Layout(512, tp=tp, pp=4, num_microbatches=8)
    ranks = footprints(replace(GPT, tied=False), layout, stack)
    whole = 12 * GPT.layer_parameters + (2 * 51200 + 512 + 2) * 1024
    replicated = 12 * 6 * 1024 + (512 + 2) * 1024  # norms, biases of rows, positions
    assert sum(rank.num_parameters for rank in ranks) == (whole - replicated) // tp + replicated


def test_bundled_models_have_their_size() -> None:
    expected = {"llama-3-8b": 8.03e9, "mixtral-8x7b": 46.7e9, "deepseek-v3": 671e9, "qwen3-30b-a3b": 30.5e9}
    for name, size in expected.items():
        config = resolve(name).config
        assert config is not None
        (rank,) = footprints(shape_of(config), Layout(128), find_megatron_stack("megatron-core+te"))
        assert rank.num_parameters == pytest.approx(size, rel=0.01), name


def test_a_split_backward_keeps_the_inputs_of_products_and_gradients_of_their_outputs() -> None:
    """32 s b h per layer. Source: Qi et al. 2023 (arXiv 2401.10241), section 2."""
    (stage,) = stage_bytes(GPT, Layout(512, pp=1), find_megatron_stack("megatron-deepspeed"))
    logits = 2 * 512 * 51200 + 2 * 512 * 1024
    assert stage.for_weights == 12 * 32 * 512 * 1024 + logits


def test_the_fullest_rank_of_1f1b_is_the_first() -> None:
    ranks = footprints(GPT, Layout(512, pp=4, num_microbatches=8), find_megatron_stack("megatron-core+te"))
    activations = [rank.categories["activations"] for rank in ranks]
    assert activations[:3] == sorted(activations[:3], reverse=True)
    assert ranks[0].at == "0B0"


def test_a_program_takes_the_place_of_the_schedule() -> None:
    layout, stack = Layout(512, pp=4, num_microbatches=8), find_megatron_stack("megatron-deepspeed")
    all_forward = footprints(GPT, layout, stack, build("gpipe", 4, 8))
    assert all_forward[0].categories["activations"] == pytest.approx(
        2 * footprints(GPT, layout, stack)[0].categories["activations"]
    )


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(512, tp=3), "tp = 3 does not divide the 16 attention heads"),
        (Layout(512, pp=16), "12 layers cannot fill 16 stages"),
        (Layout(512, pp=2, layers_per_stage=(4, 4)), "are not 12 layers on 2 stages"),
        (Layout(512, ep=2), "ep = 2 does not divide the 1 experts"),
    ],
)
def test_widths_that_do_not_fit_are_named(layout: Layout, words: str) -> None:
    with pytest.raises(InputError, match=words):
        footprints(GPT, layout, find_megatron_stack("megatron-deepspeed"))


def test_other_models_are_refused() -> None:
    with pytest.raises(InputError, match="know no 't5' model"):
        shape_of({"model_type": "t5"})


@pytest.mark.parametrize("groups", [(1, 1), (4, 2), (8, 3)])
@pytest.mark.parametrize("parts", [1, 2, 4, 8, 16])
def test_targets_of_a_token_are_those_counted_over_all_choices(groups: tuple[int, int], parts: int) -> None:
    """Sixteen experts, three of them active: every choice of groups, every choice of experts in them."""
    num_groups, active = groups
    size, held = 16 // num_groups, 16 // parts
    met = [
        len({expert // held for expert in chosen})
        for kept in combinations(range(num_groups), active)
        for chosen in combinations([group * size + one for group in kept for one in range(size)], 3)
    ]
    experts = Experts(16, 3, 1024, num_groups=num_groups, num_active_groups=active)
    assert experts.targets(parts) == pytest.approx(sum(met) / len(met))


def test_deepseek_limits_a_token_to_half_of_the_groups() -> None:
    config = resolve("deepseek-v3").config
    assert config is not None
    experts = shape_of(config).experts
    assert experts is not None and (experts.num_groups, experts.num_active_groups) == (8, 4)


def test_buffers_between_experts_count_only_where_experts_are_spread() -> None:
    mixture = replace(GPT, experts=Experts(8, 2, 1024))
    plain, spread = find_megatron_stack("megatron-core+te"), find_megatron_stack("megatron-core+te+deepep")
    for ep, buffers in ((1, 0), (8, spread.dispatch_tokens * 1024 * 2)):
        layout = Layout(512, dp=8, ep=ep)
        found = [footprints(mixture, layout, stack)[0].peak_bytes for stack in (plain, spread)]
        assert found[1] - found[0] == buffers


def test_keys_and_values_are_copied_where_there_are_more_devices_than_heads() -> None:
    shape = Shape(2, 1024, 4096, 16, 32000, 2, 64, gated=True, has_bias=False, tied=False)
    counts = [
        footprints(shape, Layout(1024, tp=tp), find_megatron_stack("megatron-core+te"))[0].num_parameters * tp
        for tp in (2, 8)
    ]
    copies = 2 * shape.num_layers * shape.hidden * shape.head_size * (8 - 2)
    norms = (2 * shape.num_layers + 1) * shape.hidden * (8 - 2)
    padding = 2 * shape.hidden * (32768 - 32000)  # tables of a multiple of 1,024 rows
    assert counts[1] - counts[0] == copies + norms + padding
