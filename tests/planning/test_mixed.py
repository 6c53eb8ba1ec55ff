"""Mixed clusters get stages as long as their devices are fast."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from small_devices import with_room

from stagewright.cluster import Cluster, NodeGroup, arranged, load_cluster
from stagewright.errors import PlanError
from stagewright.estimation.stages import RangeCosts
from stagewright.planning import cost, search
from stagewright.planning.candidate import with_cuts
from stagewright.planning.checks import check
from stagewright.planning.configuration import Configuration
from stagewright.planning.cost import priced_results
from stagewright.planning.estimate import estimate
from stagewright.planning.job import Job
from stagewright.planning.partition.bisection import bottleneck
from stagewright.planning.partition.refine import best_partition
from stagewright.planning.partition.solver import partition
from stagewright.planning.partition.stage_ranges import StageRanges
from stagewright.planning.partition.stage_terms import known_ranges, terms_of
from stagewright.planning.plan import Plan, load_plan
from stagewright.planning.prediction.staged_model import costing, costs_by_rank
from stagewright.tracing.cache import trace
from stagewright.tracing.models.reference import resolve

JOB = Job(global_batch=16, sequence_length=512, dtype="bf16")


@pytest.fixture(scope="module")
def mixed() -> Cluster:
    """A third A100, the rest at half its rates."""
    fast = load_cluster("1x-a100-40").nodes[0]
    device = fast.device
    figures = {
        "name": "half-a100",
        "peak_flops": device.peak_flops.model_copy(
            update={name: (device.peak_flops.get(name) or 0) / 2 for name in device.peak_flops.available()}
        ),
        "memory_bandwidth": device.memory_bandwidth / 2,
        "launch_overhead_s": device.launch_overhead_s * 2,
        "host_overhead_s": device.host_overhead_s * 2,
    }
    slow = fast.model_copy(update={"device": device.model_copy(update=figures), "count": 2})
    return Cluster(name="mixed", nodes=(slow, fast))


@pytest.fixture
def box(tmp_path: Path) -> Cluster:
    path = tmp_path / "box.toml"
    path.write_text('[[nodes]]\ndevices = ["rtx3090", "rtx3090", "rtx4090", "rtx4090"]\n')
    return load_cluster(path)


def test_the_unequal_cards_of_one_node_get_unequal_stages(box: Cluster, tmp_path: Path) -> None:
    plan = best(box, pp=4)
    devices = plan.devices or range(4)
    names = [box.device_of(device).name for device in devices]
    assert names in (["rtx3090"] * 2 + ["rtx4090"] * 2, ["rtx4090"] * 2 + ["rtx3090"] * 2)
    seconds = [
        stage.forward_seconds + stage.input_grad_seconds + stage.weight_grad_seconds
        for stage in plan.predictions.stages
    ]
    assert max(seconds) < 1.3 * min(seconds)  # of equal stages the slow cards would take twice as long
    plan.save(tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json")
    assert loaded.cluster.device == "rtx3090 + rtx4090"
    checked = check(loaded)
    assert checked and list(checked.passed) == [
        "document", "gradients", "program", "time", "model", "transfers", "memory",
    ]  # fmt: skip
    again = estimate(loaded, loaded.cluster.load()).predictions
    assert again.step_seconds == pytest.approx(plan.predictions.step_seconds)


def test_each_kind_of_a_nodes_cards_is_tried_alone(box: Cluster) -> None:
    parts = priced_results("gpt2", box, JOB, "speed", 1e9, **SPACE)
    assert {part.cluster.name for part in parts} == {"box", "2 rtx3090 of box", "2 rtx4090 of box"}


SPACE: dict[str, Any] = {"pp": 2, "dp": 1, "microbatch": 2, "schedules": ("1f1b",)}


def test_kinds_that_are_far_slower_alone_are_left_out_where_only_the_best_counts(
    box: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = priced_results("gpt2", box, JOB, "speed", 1e9, **SPACE)
    likely = priced_results("gpt2", box, JOB, "speed", 1e9, only_best=True, **SPACE)
    assert likely[0].best == every[0].best
    monkeypatch.setattr(cost, "MOST_FILLED", -0.9)  # nothing is so much faster
    (whole,) = priced_results("gpt2", box, JOB, "speed", 1e9, only_best=True, **SPACE)
    assert whole.cluster is box and whole.best in [part.best for part in every]


def test_a_search_for_faster_steps_than_there_are_says_so(box: Cluster) -> None:
    fastest = search.plan("gpt2", box, JOB, **SPACE).plans[0]
    step_s = fastest.predictions.step_seconds
    assert search.plan("gpt2", box, JOB, below_s=1.15 * step_s, **SPACE).plans[0] == fastest
    with pytest.raises(PlanError, match=r"no configuration takes less than .* a step"):
        search.plan("gpt2", box, JOB, below_s=0.9 * step_s, **SPACE)


def test_a_search_that_ends_among_the_kinds_keeps_the_plans_of_all_together(
    box: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned(model: str, part: Cluster, *arguments: Any, **options: Any) -> search.SearchResult:
        if part is not box:
            raise KeyboardInterrupt("ended by SIGTERM")
        return search.plan(model, part, *arguments, **options)

    monkeypatch.setattr(cost, "plan", planned)
    options = SPACE | {"patience_s": math.inf}
    (together,) = priced_results("gpt2", box, JOB, "speed", 1e9, only_best=True, **options)
    assert together.result.ended_early == "ended by SIGTERM" and together.cluster is box
    with pytest.raises(KeyboardInterrupt):  # nobody asked for the plans so far
        priced_results("gpt2", box, JOB, "speed", 1e9, only_best=True, **SPACE)


def position_of(device: int, plan: Plan) -> int:
    """The rank that a device is."""
    return plan.devices.index(device) if plan.devices else device


def best(cluster: Cluster, pp: int = 3) -> Plan:
    return search.plan("gpt2", cluster, JOB, pp=pp, microbatch=2, schedules=("1f1b",)).plans[0]


def test_the_fast_device_has_twice_the_work(mixed: Cluster, tmp_path) -> None:
    plan = best(mixed)
    position = position_of(2, plan)
    assert position in (0, 2)
    work = [
        stage.forward_seconds + stage.input_grad_seconds + stage.weight_grad_seconds
        for stage in plan.predictions.stages
    ]
    assert max(work) < 1.4 * min(
        work
    )  # all are busy, though one is fast; narrow boundaries are worth some of it
    alike = best(Cluster(name="alike", nodes=(mixed.nodes[0].model_copy(update={"count": 3}),)))
    even = [stage.parameter_bytes for stage in alike.predictions.stages]
    held = [stage.parameter_bytes for stage in plan.predictions.stages]
    assert held[position] > even[position]
    plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").cluster.device == "half-a100 + " + mixed.nodes[1].device.name


def test_unequal_stages_beat_equal_ones(mixed: Cluster) -> None:
    slow = mixed.nodes[0].model_copy(update={"count": 3})
    all_slow = best(Cluster(name="slow", nodes=(slow,)))
    step = best(mixed).predictions.step_seconds
    # Rates of 2 + 1 + 1 in place of 1 + 1 + 1; equal stages would gain nothing.
    assert 0.7 < step / all_slow.predictions.step_seconds < 0.85


@pytest.mark.parametrize(
    "asked",
    [
        {"zero": 3},
        {"zero": 1, "reduce_dtype": "bf16"},
        {"zero": 2, "shard_size": 1},
        {"schedules": "interleaved-1f1b"},
    ],
)
def test_devices_of_several_kinds_combine_with_whatever_is_asked(
    mixed: Cluster, asked: dict[str, Any]
) -> None:
    job = JOB.model_copy(update={"global_batch": 12})
    for plan in search.plan("gpt2", mixed, job, microbatch=2, tp=1, keep=2, **asked).plans:
        assert estimate(plan, mixed).predictions.step_seconds == pytest.approx(plan.predictions.step_seconds)
        assert plan.dp == 1 or "zero" not in asked or set(plan.sharding) == {asked["zero"]}


def with_memory(cluster: Cluster, *limits: int) -> Cluster:
    """`cluster` whose kinds of nodes have devices with so much memory to use."""
    nodes = [
        group.model_copy(update={"device": with_room(group.device, limit)})
        for group, limit in zip(cluster.nodes, limits, strict=True)
    ]
    return Cluster(name=cluster.name, nodes=tuple(nodes))


def test_an_estimate_of_a_mixed_plan_repeats_its_predictions(mixed: Cluster) -> None:
    plan = best(mixed)
    assert estimate(plan, mixed).predictions == plan.predictions


def test_every_rank_has_the_memory_of_its_own_device(mixed: Cluster) -> None:
    """The fast device has too little for its even share of the time; slow ones have all that it lacks."""
    free = best(mixed)
    wanted = free.predictions.ranks[position_of(2, free)].reserved_peak_bytes
    needed = [rank.reserved_peak_bytes for rank in free.predictions.ranks]
    tight = with_memory(mixed, 4 * max(needed), int(0.7 * wanted))
    found = best(tight)
    fast = position_of(2, found)
    peaks = [rank.reserved_peak_bytes for rank in found.predictions.ranks]
    assert peaks[fast] <= tight.device_of(2).usable_bytes < wanted
    assert free.predictions.step_seconds < found.predictions.step_seconds
    assert found.predictions.lower_bound_seconds < found.predictions.step_seconds


def test_a_limit_for_all_is_not_more_than_a_device_has(mixed: Cluster) -> None:
    needed = max(rank.reserved_peak_bytes for rank in best(mixed).predictions.ranks)
    tight = with_memory(mixed, 4 * needed, int(0.7 * needed))
    limited = JOB.model_copy(update={"memory_limit": 3 * needed})
    plans = search.plan("gpt2", tight, limited, pp=3, microbatch=2, schedules=("1f1b",)).plans
    for plan in plans:
        small = plan.predictions.ranks[position_of(2, plan)]
        assert small.reserved_peak_bytes <= tight.device_of(2).usable_bytes


def test_a_model_that_is_cut_at_few_places_gets_a_shallower_pipeline(
    mixed: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def at_few_places(stage_costs: Sequence[RangeCosts], *given: Any) -> list[int] | None:
        if len(stage_costs) > 1:
            raise PlanError("can be cut at 0 places only: use fewer stages")
        return partition(stage_costs, *given)

    monkeypatch.setattr("stagewright.planning.candidate.partition", at_few_places)
    job = JOB.model_copy(update={"global_batch": 12})
    found = search.plan("gpt2", mixed, job, microbatch=4, schedules=("1f1b",))
    assert {(plan.dp, plan.pp) for plan in found.plans} == {(3, 1)}
    assert {(one.pp, "use fewer" in one.reason) for one in found.excluded} == {(3, True)}
    with pytest.raises(PlanError, match="use fewer stages"):
        search.plan("gpt2", mixed, job, microbatch=4, pp=3, schedules=("1f1b",))


def test_what_a_mixed_plan_lacks_is_said_with_its_rank_and_what_would_help(mixed: Cluster) -> None:
    tight = with_memory(mixed, 2**30, 2**28)
    with pytest.raises(
        PlanError, match=r"dp 1 x pp 3.*on rank \d, .* more than what a .* can give.*devices with"
    ):
        search.plan("gpt2", tight, JOB, pp=3, microbatch=2, schedules=("1f1b",), recompute="none")


def test_cuts_for_mixed_devices_are_those_of_exhaustive_search(mixed: Cluster) -> None:
    """By the costs of ranges: the found cuts' slowest stage, with what it must give up, is the least of all cuts."""
    graph = trace(resolve("tiny-llama", {"num_hidden_layers": 2}), 2, **JOB.traced("cuda"))
    for order in ((0, 1, 2), (2, 0, 1)):
        cluster = arranged(mixed, order)
        model_costs = RangeCosts(graph, costing(graph, cluster, JOB))
        ranges = known_ranges(model_costs)
        ranges = replace(ranges, legal=ranges.legal[::2])
        configuration = Configuration(1, 3, 2, 8, "1f1b")
        staged = with_cuts(
            model_costs,
            configuration,
            partition(costs_by_rank(model_costs, cluster, 3, 1)) or (),
            cluster,
            JOB,
        ).staged
        ends = [*(stage.start for stage in staged.stages), model_costs.size]
        known = terms_of(staged, model_costs)
        assert [one.inverse_speed < 0.6 for one in known] == [device == 2 for device in order]
        demands = [StageRanges(ranges, known).demand(rank, *ends[rank : rank + 2]) for rank in range(3)]
        for fast, slow in ((1.0, 1.0), (0.8, 1.5), (1.5, 0.9)):  # what they have of what they would need
            limits = [
                demand * (fast if device == 2 else slow)
                for demand, device in zip(demands, order, strict=True)
            ]
            terms = known
            terms = [replace(one, capacity=limit) for one, limit in zip(terms, limits, strict=True)]
            leaves = StageRanges(ranges, terms)
            found = best_partition(leaves)
            wanted = min(bottleneck(leaves, cuts) for cuts in combinations(ranges.legal.tolist(), 2))
            assert math.isfinite(wanted), "or there would be nothing to compare"
            assert found is not None and bottleneck(leaves, found.cuts) <= 1.01 * wanted


def test_a_rank_on_two_kinds_of_equal_memory_is_as_slow_as_the_slower() -> None:
    """Whatever the kinds are called and whichever comes first."""
    group = load_cluster("1x-a100-40").nodes[0]
    graph = trace(resolve("tiny-llama", {"num_hidden_layers": 2}), 2, **JOB.traced("cuda"))

    def kind(name: str, share: float) -> NodeGroup:
        peaks = {one: share * peak for one, peak in group.device.peak_flops if peak is not None}
        figures = {"name": name, "peak_flops": group.device.peak_flops.model_copy(update=peaks)}
        return group.model_copy(update={"device": group.device.model_copy(update=figures)})

    for number in range(8):
        kinds = kind(f"fast {number}", 1.0), kind(f"slow {number}", 0.5)
        for nodes in (kinds, kinds[::-1]):
            cluster = Cluster(name="two", nodes=nodes)
            model_costs = RangeCosts(graph, costing(graph, cluster, JOB))
            staged = with_cuts(model_costs, Configuration(2, 1, 2, 8, "1f1b"), (), cluster, JOB).staged
            assert staged.device_of(0).name == f"slow {number}"


def test_stages_of_one_operator_have_no_costs_below_zero() -> None:
    """What is left of a stage without a backward is a difference of sums, as in 256 stages of a small model."""
    job = Job(global_batch=2, sequence_length=32, dtype="fp32")
    cluster = load_cluster("128x-h100+128x-t4")
    found = search.plan("tiny-llama", cluster, job, pp=256, microbatch=1, schedules=["gpipe"])
    assert found.plans[0].num_stages == 256
