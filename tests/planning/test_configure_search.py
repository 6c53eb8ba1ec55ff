"""The search over widths: nothing it leaves out is better, and nothing it keeps is too large."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from stagewright.cluster import load_cluster
from stagewright.errors import InputError, PlanError
from stagewright.estimation.megatron import Experts, Shape, find_megatron_stack, footprints
from stagewright.estimation.megatron.fusion import find_fusion
from stagewright.planning.configure import iteration
from stagewright.planning.configure.balance import balanced_layers
from stagewright.planning.configure.fitting import Room
from stagewright.planning.configure.iteration import Run
from stagewright.planning.configure.lineup import orders
from stagewright.planning.configure.money import Target
from stagewright.planning.configure.objective import offers
from stagewright.planning.configure.ranks import placed, rank_lines
from stagewright.planning.configure.search import Configured, _Search, configure
from stagewright.planning.configure.space import Bounds, layout_of, widths
from stagewright.planning.job import Job

SHAPE = Shape(24, 4096, 14336, 32, 128256, 8, 128, gated=True, has_bias=False, tied=False)
CLUSTER = load_cluster("16x-h100")
JOB = Job(global_batch=32, sequence_length=4096)
STACK = "megatron-core+te"


@cache
def found() -> Configured:
    return configure(SHAPE, CLUSTER, JOB)


def test_configurations_come_fastest_first_use_all_devices_and_fit() -> None:
    steps = [one.step_s for one in found().configurations]
    assert steps == sorted(steps)
    for one in found().configurations:
        layout = one.layout
        assert layout.tp * layout.cp * layout.pp * layout.dp == 16
        assert layout.dp * layout.microbatch_size * layout.num_microbatches == 32
        assert one.bound_s <= one.step_s
        assert one.memory.fits
        peak = max(rank.peak_bytes for rank in footprints(SHAPE, layout, find_megatron_stack(STACK)))
        assert peak <= one.memory.peak_bytes <= CLUSTER.device.usable_bytes


def test_nothing_left_out_is_faster() -> None:
    everything = configure(SHAPE, CLUSTER, JOB, keep=100_000, bounds=Bounds(largest_cp=2, chunks=(1, 2)))
    few = configure(SHAPE, CLUSTER, JOB, keep=3, bounds=Bounds(largest_cp=2, chunks=(1, 2)))
    assert everything.num_bounded == 0 < few.num_bounded
    assert [one.layout for one in few.configurations] == [one.layout for one in everything.configurations[:3]]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b"])
@pytest.mark.parametrize("num_microbatches", [4, 12, 16, 44])
def test_two_lengths_of_a_program_tell_all_longer_ones(
    schedule: str, num_microbatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = 2 if schedule == "interleaved-1f1b" else 1
    one = next(one for one in widths(SHAPE, CLUSTER, JOB, Bounds(tp=4, cp=1, pp=4)) if one.dp == 1)
    layout = layout_of(one, JOB, schedule, chunks, "none", False, None)
    layout = replace(layout, num_microbatches=num_microbatches)
    run = Run(SHAPE, layout, find_megatron_stack(STACK), find_fusion(STACK), CLUSTER)
    short = run.step().pipeline_s
    monkeypatch.setattr(iteration, "_PERIODIC", ())
    assert run.step().pipeline_s == pytest.approx(short, rel=1e-12)


def test_bounds_of_memory_are_below_what_a_replay_finds() -> None:
    room = Room(SHAPE, find_megatron_stack(STACK))
    for number, one in enumerate(widths(SHAPE, CLUSTER, JOB, Bounds(largest_cp=2))):
        if number % 5 == 0 and one.pp > 1:
            for recompute in ("none", "full"):
                layout = layout_of(one, JOB, "1f1b", 1, recompute, True, None)
                assert room.least(layout) <= room.peaks(layout)[0]


def test_stages_balance_embedding_and_head() -> None:
    assert balanced_layers(10, [1.0] * 4, 0.1, 1.5) == (3, 3, 3, 1)
    assert sum(balanced_layers(126, [1.0] * 16, 0.2, 2.3)) == 126
    assert balanced_layers(126, [1.0] * 128, 0.2, 2.3) == (0, *(1,) * 126, 0)
    with pytest.raises(InputError, match="cannot fill"):
        balanced_layers(125, [1.0] * 128, 0.0, 0.0)


def test_what_is_left_out_says_by_how_much() -> None:
    with pytest.raises(PlanError, match=r"no configuration fits .* misses .* .iB"):
        configure(SHAPE, load_cluster("1x-h100"), JOB)
    with pytest.raises(InputError, match="no figures for bf16"):
        configure(SHAPE, load_cluster("8x-h100+8x-v100-32"), JOB)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        (Bounds(tp=3), "tp 3 does not divide the 32 attention heads"),
        (Bounds(tp=32), "tp 32 does not divide the 16 devices"),
        (Bounds(tp=4, pp=8), "tp 4 x pp 8 does not divide the 16 devices"),
        (Bounds(cp=3), "cp 3 cuts samples into 6 equal parts, which 4096 tokens are not"),
        (Bounds(pp=64), "pp 64 is more than the 24 layers"),
        (Bounds(ep=2), "ep 2 spreads experts, and this model has none: leave out --ep"),
        (Bounds(microbatch=5), "microbatches of 5 do not divide the global batch of 32"),
        (
            Bounds(tp=1, pp=1, cp=1, microbatch=8),
            "no widths divide 16 devices and a global batch of 32, microbatches of 8",
        ),
    ],
)
def test_widths_that_cannot_be_are_named(bounds: Bounds, message: str) -> None:
    with pytest.raises(InputError, match=message):
        configure(SHAPE, CLUSTER, JOB, bounds=bounds)


def test_samples_longer_than_learned_positions_are_refused() -> None:
    with pytest.raises(InputError, match="4096 exceeds the 1024 learned positions"):
        configure(replace(SHAPE, num_positions=1024), CLUSTER, JOB)


@pytest.mark.parametrize("wrong", [float("inf"), float("nan"), -1.0])
def test_money_and_targets_are_finite(wrong: float) -> None:
    with pytest.raises(InputError, match="finite number"):
        Target(wrong)
    with pytest.raises(InputError, match="finite number"):
        Target(1e9, wrong)
    with pytest.raises(InputError, match="finite number"):
        offers(SHAPE, CLUSTER, JOB, "speed", Target(1e9), price_per_hour=wrong)


def test_experts_are_spread_where_that_is_faster() -> None:
    sparse = Shape(
        16,
        2048,
        6144,
        32,
        151936,
        4,
        128,
        gated=True,
        has_bias=False,
        tied=False,
        experts=Experts(64, 4, 768),
    )
    best = configure(sparse, load_cluster("8x-h100"), JOB).configurations[0]
    assert best.layout.ep > 1
    assert (best.layout.dp * best.layout.cp) % best.layout.ep == 0


def test_cost_tries_parts_of_the_cluster_and_time_other_batches() -> None:
    bounds = Bounds(largest_cp=1, chunks=(1,))
    by_cost = offers(SHAPE, CLUSTER, JOB, "cost", Target(1e9), price_per_hour=2.0, bounds=bounds)
    assert {one.bill.num_devices for one in by_cost} == {8, 16}
    costs = [one.bill.dollars or 0.0 for one in by_cost]
    assert costs == sorted(costs)
    by_time = offers(SHAPE, CLUSTER, JOB, "time-to-train", Target(1e9, 16.0), bounds=bounds)
    assert {one.bill.global_batch for one in by_time} >= {8, 32, 128}
    assert by_time[0].bill.days == min(one.bill.days for one in by_time)
    with pytest.raises(InputError, match="--price"):
        offers(SHAPE, CLUSTER, JOB, "cost", Target(1e9))


def test_every_device_gets_one_rank() -> None:
    best = found().configurations[0]
    moved = placed(SHAPE, best, JOB, STACK)
    lines = rank_lines(moved)
    assert len({tuple(line.split(",")[1:]) for line in lines}) == 16
    assert moved.step_s <= best.step_s
    assert moved.assignment is not None and moved.assignment.seconds <= moved.assignment.seconds_by_default


def test_a_search_keeps_its_own_bounds() -> None:
    search = _Search(
        SHAPE, CLUSTER, JOB, find_megatron_stack(STACK), find_fusion(STACK), Bounds(largest_cp=1)
    )
    candidates = list(search.candidates([CLUSTER], list(widths(SHAPE, CLUSTER, JOB, search.bounds))))
    for one in candidates[::17]:
        layout = search.layout(one)
        run = Run(SHAPE, layout, search.stack, search.fusion, CLUSTER)
        assert search.bound_s(one) <= run.step().seconds


MIXED = load_cluster("8x-h100+8x-a100-80")


@cache
def found_mixed() -> Configured:
    return configure(SHAPE, MIXED, JOB)


def test_mixed_devices_get_layers_as_they_are_fast() -> None:
    best = found_mixed().configurations[0]
    counts: dict[str, int] = {"h100": 0, "a100-80": 0}
    split = best.layout.layers(SHAPE.num_layers)
    for stage, layers in enumerate(split):
        (device,) = best.devices[stage % best.layout.pp]
        counts[device.name] += layers
    ratio = counts["h100"] / counts["a100-80"]
    assert ratio > 1.5  # the last stage has the head too
    even = replace(best.layout, layers_per_stage=None)
    stack, fusion = find_megatron_stack(STACK), find_fusion(STACK)
    assert best.step_s < Run(SHAPE, even, stack, fusion, best.cluster).step().seconds
    slow, fast = (configure(SHAPE, load_cluster(name), JOB) for name in ("16x-a100-80", "16x-h100"))
    assert fast.configurations[0].step_s < best.step_s < slow.configurations[0].step_s


def test_every_rank_of_a_mixed_cluster_fits_its_own_device() -> None:
    small = load_cluster("8x-h100+8x-a100-40")
    made = configure(
        SHAPE, small, Job(global_batch=16, sequence_length=4096), bounds=Bounds(recompute=("none",))
    )
    tightened = 0
    for one in made.configurations:
        ranks = footprints(SHAPE, one.layout, find_megatron_stack(STACK))
        for rank, devices in zip(ranks, one.devices, strict=True):
            assert rank.peak_bytes <= min(device.usable_bytes for device in devices)
            tightened += any(device.name == "a100-40" for device in devices)
    assert tightened


def test_mixed_bounds_are_below_what_is_predicted() -> None:
    search = _Search(SHAPE, MIXED, JOB, find_megatron_stack(STACK), find_fusion(STACK), Bounds(largest_cp=1))
    clusters = orders(MIXED, "bf16")
    assert [cluster.device_of(0).name for cluster in clusters] == ["h100", "a100-80"]
    candidates = list(search.candidates(clusters, list(widths(SHAPE, MIXED, JOB, search.bounds))))
    for one in candidates[::41]:
        run = Run(SHAPE, search.layout(one), search.stack, search.fusion, one.cluster)
        assert search.bound_s(one) <= run.step().seconds


def test_stages_stay_on_the_devices_they_are_sized_for() -> None:
    best = found_mixed().configurations[0]
    lines = rank_lines(placed(SHAPE, best, JOB, STACK))
    assert len({tuple(line.split(",")[1:]) for line in lines}) == 16
    per_stage = 16 // best.layout.pp
    for number, line in enumerate(lines):
        name = MIXED.device_of(8 * int(line.split(",")[1])).name
        (device,) = best.devices[number // per_stage]
        assert name == device.name


@pytest.mark.parametrize("dtype", ["fp32", "tf32", "fp64", "fp8", "autocast"])
def test_a_precision_that_a_stack_does_not_train_in_is_refused(dtype: str) -> None:
    with pytest.raises(InputError, match=f"trains in bf16 or fp16, not in {dtype}: give --dtype bf16"):
        configure(SHAPE, CLUSTER, JOB.model_copy(update={"dtype": dtype}))


def test_deepspeed_in_tf32_takes_jobs_in_tf32_and_fp32() -> None:
    small, cluster = replace(SHAPE, num_layers=4), load_cluster("8x-a100-80")

    def share(dtype: str) -> float:
        job = JOB.model_copy(update={"dtype": dtype})
        best = configure(small, cluster, job, stack="deepspeed-tf32", bounds=Bounds(tp=1, cp=1, pp=2))
        return best.configurations[0].mfu

    assert 0.05 < share("tf32") == share("fp32") < 1
    with pytest.raises(InputError, match="trains in tf32 or fp32, not in bf16: give --dtype tf32"):
        share("bf16")


def test_attention_alone_is_made_again_where_its_scores_are_kept() -> None:
    gpt, cluster = Shape.gpt(24, 6144, 64, 51200, 2048), load_cluster("4x8x-a100-80")
    job = Job(global_batch=64, sequence_length=2048)
    for stack, expected in (("megatron-deepspeed", True), (STACK, False)):
        found = configure(gpt, cluster, job, stack=stack, keep=10).configurations
        assert any(one.layout.recompute == "selective" for one in found) is expected
        assert all(one.bound_s <= one.step_s for one in found)
