"""The search over all widths: bounds that hold, orders that are kept, and what is left out."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from stagewright.cluster import load_cluster
from stagewright.errors import InputError, PlanError
from stagewright.graph.repeat import REPEATS
from stagewright.planning.assignment.device_order import devices_of_ranks
from stagewright.planning.assignment.placing import on_devices
from stagewright.planning.best_first import Request, Search
from stagewright.planning.bounds.layer_costs import Layers, stage_seconds, stage_sums
from stagewright.planning.candidate import make_candidate
from stagewright.planning.configuration import Configuration, Recompute
from stagewright.planning.cost import priced_results
from stagewright.planning.estimate import estimate
from stagewright.planning.fitters import LayerFitter
from stagewright.planning.job import Job
from stagewright.planning.memory.fitting import Entry
from stagewright.planning.partition.layers import balanced_layers
from stagewright.planning.plan import Plan
from stagewright.planning.prediction.staged_model import costs_of_model
from stagewright.planning.search import plan as search
from stagewright.planning.search_result import SearchResult
from stagewright.planning.space import Space
from stagewright.tracing.cache import trace
from stagewright.tracing.models.lora import Lora
from stagewright.tracing.models.reference import ModelReference, resolve

CLUSTER = load_cluster("8x-h100")
JOB = Job(global_batch=16, sequence_length=512, runtime="megatron-core+te")
SMALL = {"num_hidden_layers": 8, "hidden_size": 1024, "intermediate_size": 2048, "vocab_size": 8192}
FEW = Space(largest_tp=2, largest_cp=1, largest_microbatch=2, chunks=(1, 2))
LACKING = JOB.model_copy(update={"memory_limit": 700_000_000})


def model() -> ModelReference:
    return resolve("llama-3-8b", SMALL)


@cache
def found() -> SearchResult:
    return search(model(), CLUSTER, JOB, space=FEW, keep=8)


def searched(
    space: Space = FEW, cluster: str = "8x-h100", job: Job = JOB, of: ModelReference | None = None
) -> tuple[Search, list[tuple[float, Entry]]]:
    """A search, and all that waits in it, split into stages, with a bound each."""
    request = Request(of or model(), load_cluster(cluster), job, space.of_runtime(job))
    search = Search(request, lambda stage: None, trace)
    search.gather()
    waiting = [search.waiting.pop() for _ in range(len(search.waiting))]
    split = ((first_s, search.fitter.split(one)) for first_s, _, one in waiting)
    return search, [(max(first_s, known[0]), known[1]) for first_s, known in split if known is not None]


def planned(search: Search, entry: Entry) -> Plan | None:
    fit = search.fitter.fit(entry, math.inf, math.inf)
    return None if fit is None else fit.plan


def test_plans_come_fastest_first_use_all_devices_and_are_what_is_estimated() -> None:
    steps = [plan.predictions.step_seconds for plan in found().plans]
    assert steps == sorted(steps) and len(steps) == 8
    for plan in found().plans:
        assert plan.tp * plan.cp * plan.pp * plan.dp == 8
        assert plan.dp * plan.microbatch_size * plan.num_microbatches == 16
        assert plan.predictions.reserved_peak_bytes <= CLUSTER.device.usable_bytes
        assert estimate(plan, CLUSTER).predictions.step_seconds == pytest.approx(
            plan.predictions.step_seconds
        )


def test_nothing_left_out_is_faster() -> None:
    everything = search(model(), CLUSTER, JOB, space=FEW, keep=100_000)
    assert everything.num_bounded == 0 < found().num_bounded
    assert [plan.program for plan in found().plans] == [plan.program for plan in everything.plans[:8]]


@pytest.mark.parametrize(
    ("cluster", "runtime"),
    [
        ("8x-h100", "megatron-core+te"),
        ("4x-h100+4x-a100-80", "megatron-core+te"),
        ("8x-h100", "torch-fsdp"),
        ("8x-h100", "stagewright"),
    ],
)
def test_bounds_hold(cluster: str, runtime: str) -> None:
    search, waiting = searched(cluster=cluster, job=JOB.model_copy(update={"runtime": runtime}))
    for bound_s, one in waiting[::7]:
        plan = planned(search, one)
        assert plan is not None
        whole = replace(one.configuration, layers_per_stage=None)
        assert search.coarse.first_bound_s(whole, one.configuration.traced, one.cluster) <= bound_s
        assert bound_s <= plan.predictions.step_seconds * (1 + 1e-9)


@pytest.mark.parametrize("runtime", ["stagewright", "megatron-core+te"])
def test_bounds_hold_where_stages_are_uneven(runtime: str) -> None:
    """A rank with more layers than those behind it need not wait for these."""
    uneven = resolve("llama-3-8b", SMALL | {"num_hidden_layers": 7, "vocab_size": 1024})
    job = Job(global_batch=12, sequence_length=512, runtime=runtime)
    search, waiting = searched(Space(tp=1, cp=1, microbatch=1, pp=6), "6x-h100", job, uneven)
    for bound_s, one in waiting:
        plan = planned(search, one)
        assert plan is not None
        assert bound_s <= plan.predictions.step_seconds * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("runtime", "name"),
    [
        pytest.param("megatron-core+te", "llama-3-8b", marks=pytest.mark.slow),
        ("stagewright", "gpt2-xl"),
    ],
)
def test_widths_that_are_not_traced_take_no_less_than_narrower_ones_say(runtime: str, name: str) -> None:
    few = {"n_layer": 4, "n_head": 24, "n_embd": 1536} if name == "gpt2-xl" else SMALL | {"hidden_size": 2048}
    job = JOB.model_copy(update={"runtime": runtime, "sequence_length": 1024})
    space = Space(largest_tp=8, largest_cp=4, pp=1).of_runtime(job)
    search = Search(Request(resolve(name, few), CLUSTER, job, space), lambda stage: None, trace)
    search.gather()
    assert {one.degrees.tp for one in search.untraced} >= {4, 8}
    for one in search.untraced:
        num_ranks = CLUSTER.num_devices / (one.degrees.tp * one.degrees.cp)
        for size in one.microbatch_sizes:
            costs = search.coarse.costs(replace(one.degrees, microbatch=size))
            assert one.bound_s <= job.global_batch / size / num_ranks * costs.total_seconds


@pytest.mark.parametrize("splits_sequence", [True, False])
def test_wider_ranks_share_what_differs_between_them_and_send_no_less(splits_sequence: bool) -> None:
    reference = resolve("llama-3-8b", SMALL | {"num_hidden_layers": 2, "hidden_size": 2048})
    job = Job(global_batch=8, sequence_length=4096)

    def layers(tp: int) -> Layers:
        settings = {"tp": tp, "splits_sequence": splits_sequence, "target": "cuda"}
        return Layers(trace(reference, 1, 4096, "bfloat16", expand=False, **settings), CLUSTER, job)

    of_narrower, of_wider = layers(2).wider_seconds(4, 1), layers(8).wider_seconds(1, 1)
    assert 0.8 * of_wider < of_narrower <= of_wider


def test_a_new_graph_bounds_what_is_wider_no_less_closely() -> None:
    space = Space(largest_tp=8, largest_cp=1, pp=1).of_runtime(JOB)
    search = Search(Request(model(), CLUSTER, JOB, space), lambda stage: None, trace)
    search.gather()
    before = {untraced.degrees.tp: untraced for untraced in search.untraced}
    assert {tp: untraced.narrower.tp for tp, untraced in before.items()} == {4: 2, 8: 2}
    search._gather_untraced()
    (untraced,) = search.untraced
    assert (untraced.degrees.tp, untraced.narrower.tp) == (8, 4)
    assert untraced.bound_s >= before[8].bound_s


def test_what_memory_is_said_to_lack_at_the_least_it_lacks() -> None:
    (search, few), (roomy, many) = searched(job=LACKING), searched()
    assert search.fitter.nearest_bound and len(few) < len(many)
    for _, one in many[::5]:
        missing = search.coarse.missing_bytes(one.configuration, one.configuration.traced, one.cluster)
        plan = planned(roomy, one)
        assert plan is not None and LACKING.memory_limit is not None
        assert missing <= plan.predictions.reserved_peak_bytes - LACKING.memory_limit


def test_what_lacks_memory_in_smaller_microbatches_lacks_it_in_larger_ones() -> None:
    space = replace(FEW, largest_microbatch=4).of_runtime(JOB)
    search = Search(Request(model(), CLUSTER, JOB, space), lambda stage: None, trace)
    search.gather()
    larger: list[Entry] = []
    for one in search.waiting:
        larger.append(one)
        while one.larger:
            larger.append(one := one.grown())
    compared = [(one, known) for one in larger if (known := one.bounded_by)]
    fitter = search.fitter
    assert isinstance(fitter, LayerFitter)
    for one, known in compared:
        times = one.configuration.microbatch // known.microbatch
        count = times * one.configuration.num_microbatches
        smaller = replace(one.configuration, microbatch=known.microbatch, num_microbatches=count)
        missing = fitter.missing_bytes(fitter._in_layers(replace(one, configuration=smaller)))
        assert missing <= fitter.missing_bytes(fitter._in_layers(one)), one.configuration
    assert len(compared) > 30


def test_larger_microbatches_are_bounded_though_dequantising_does_not_grow_with_them() -> None:
    adapted = resolve("tiny-llama").adapted(Lora(rank=4, alpha=8, base="nf4"))
    job = Job(global_batch=8, sequence_length=8)
    cluster = load_cluster("1x-rtx4090")
    (node,) = cluster.nodes
    slow = node.device.model_copy(update={"memory_bandwidth": 1e8})  # not waiting for the host
    cluster = cluster.model_copy(update={"nodes": (node.model_copy(update={"device": slow}),)})

    def layers(size: int) -> Layers:
        return Layers(trace(adapted, size, expand=False, **job.traced("cuda")), cluster, job)

    seconds = {size: layers(size).costs(cluster.device, "none").total_seconds / size for size in (1, 8)}
    assert 0 < layers(1).growing_share * seconds[1] <= seconds[8]


@pytest.mark.parametrize("how", ["none", "selective", "full"])
def test_layers_that_a_graph_leaves_out_cost_what_they_do_in_the_whole_one(how: Recompute) -> None:
    graph = trace(model(), 1, **JOB.traced("cuda"), expand=False)
    assert graph.facts[REPEATS]
    whole = costs_of_model(graph, CLUSTER, JOB)
    candidate = make_candidate(whole, Configuration(1, 1, 1, 1, "1f1b", recompute=how), CLUSTER, JOB)
    stage = candidate.staged.summaries[0]
    costs = Layers(graph, CLUSTER, JOB).costs(CLUSTER.device, how)
    assert costs.num_layers == 8
    forward, backward = stage_seconds([costs], None)
    assert forward[0] == pytest.approx(stage.forward_s)
    assert backward[0] == pytest.approx(stage.rebuild_s + stage.backward_s)
    assert costs.saved_bytes.sum() == pytest.approx(
        stage.saved_bytes, rel=1e-4
    )  # but for masks and positions
    assert costs.state_bytes.sum() == pytest.approx(whole.state_bytes[-1])
    assert stage_sums([costs.state_bytes] * 3, (1, 3, 4)).sum() == pytest.approx(whole.state_bytes[-1])


def test_stages_balance_embedding_and_head() -> None:
    def equal(num: int, first: float, last: float, stages: int) -> list[np.ndarray]:
        return [np.array([first, *[1.0] * num, last])] * stages

    assert balanced_layers(equal(10, 0.1, 1.5, 4)) == (3, 3, 3, 1)
    assert sum(balanced_layers(equal(126, 0.2, 2.3, 16))) == 126
    assert balanced_layers(equal(126, 0.2, 2.3, 128)) == (0, *(1,) * 126, 0)
    with pytest.raises(InputError, match="cannot fill"):
        balanced_layers(equal(125, 0.0, 0.0, 128))


def test_unequal_layers_are_shared_out_by_what_they_take() -> None:
    seconds = np.array([0.0, 4.0, 1.0, 1.0, 1.0, 1.0, 4.0, 0.0])
    counts = balanced_layers([seconds] * 3)
    assert counts == (1, 4, 1)


def test_what_is_left_out_says_by_how_much() -> None:
    with pytest.raises(PlanError, match=r"no configuration fits .* lacks .*iB a device or more"):
        search("llama-3-70b", load_cluster("1x-h100"), JOB, space=Space(microbatch=1))


def test_what_the_bounds_let_pass_and_the_replay_does_not_says_what_would_fit() -> None:
    """The least of the bounds is what one microbatch keeps; workspace and fragments come on top."""
    one = load_cluster("1x-h100")
    needed, waiting = searched(Space(microbatch=1), "1x-h100")
    least = min(
        needed.coarse.missing_bytes(each.configuration, each.configuration.traced, one) for _, each in waiting
    )
    assert waiting[0][1].configuration.dp == 1
    tight = JOB.model_copy(update={"memory_limit": one.device.usable_bytes + least + 2**20})
    with pytest.raises(PlanError, match=r"no configuration fits: the best .* It would fit with"):
        search(model(), one, tight, space=Space(microbatch=1))


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        (Space(tp=3), "tp = 3 does not divide the 8 devices"),
        (Space(tp=4, pp=4), "tp 4 x pp 4 does not divide the 8 devices"),
        (Space(cp=3), "cp 3 cuts samples into 6 parts, which do not divide 512 tokens"),
        (Space(tp=1, cp=1, pp=64, microbatch=1), "pp = 64 does not divide the 8 devices"),
        (Space(tp=1, cp=1, ep=2, microbatch=1), "leave out --ep"),
        (Space(microbatch=5), "microbatches of 5 do not divide the global batch of 16"),
        (Space(tp=1, pp=1, cp=1, microbatch=8), "microbatch = 8 divides no replica's share"),
    ],
)
def test_widths_that_cannot_be_are_named(bounds: Space, message: str) -> None:
    with pytest.raises(InputError, match=message):
        search(model(), CLUSTER, JOB, space=bounds)


@pytest.mark.parametrize("wrong", [float("inf"), float("nan"), -1.0])
def test_tokens_and_prices_are_finite(wrong: float) -> None:
    with pytest.raises(InputError, match="finite number"):
        priced_results(model(), CLUSTER, JOB, "speed", wrong)
    with pytest.raises(InputError, match="finite number"):
        priced_results(model(), CLUSTER, JOB, "speed", 1e9, price_per_hour=wrong)


def test_experts_are_spread_where_that_is_tried() -> None:
    sparse = resolve("tiny-mixtral")
    bounds = Space(largest_tp=1, largest_cp=1, pp=1, microbatch=1, largest_ep=4)
    assert {one.configuration.ep for _, one in searched(bounds, of=sparse)[1]} == {1, 2, 4}
    assert {one.configuration.ep for _, one in searched(FEW)[1]} == {1}


def test_cost_tries_parts_of_the_cluster() -> None:
    two = load_cluster("2x4x-h100")
    bounds = Space(tp=1, cp=1, microbatch=1, chunks=(1,))
    by_cost = priced_results(model(), two, JOB, "cost", 1e9, price_per_hour=2.0, space=bounds, keep=1)
    assert {one.bill.num_devices for one in by_cost} == {4, 8}
    costs = [one.bill.dollars or 0.0 for one in by_cost]
    assert costs == sorted(costs)
    listed = priced_results(model(), two, JOB, "cost", 1e9, space=bounds, keep=1)
    assert listed[0].bill.dollars == pytest.approx(3.20 / 2.0 * (by_cost[0].bill.dollars or 0.0))
    with pytest.raises(InputError, match="no spot price is known for device 'h100': give --price"):
        priced_results(model(), two, JOB, "cost", 1e9, terms="spot")


def test_mixed_devices_get_layers_as_they_are_fast() -> None:
    mixed = load_cluster("4x-h100+4x-a100-80")
    bounds = Space(tp=1, cp=1, pp=2, microbatch=1, chunks=(1,), recompute=("none",))
    (best,) = search(model(), mixed, JOB, space=bounds, keep=1).plans
    first, second = (
        {device.name for device in devices}
        for devices in devices_of_ranks(on_devices(mixed, best.devices), 2)
    )
    sizes = [stage.stop - stage.start for stage in best.predictions.stages]
    fast = 0 if first == {"h100"} else 1
    assert {*first, *second} == {"h100", "a100-80"}
    assert sizes[fast] > sizes[1 - fast]


def test_where_a_kind_lacks_memory_others_take_its_layers() -> None:
    mixed = load_cluster("4x-h100+4x-a100-80")
    limit = JOB.model_copy(update={"memory_limit": 1_450_000_000})
    bounds = Space(tp=1, cp=1, pp=2, microbatch=1, chunks=(1,), recompute=("none",))
    for plan in search(model(), mixed, limit, space=bounds, keep=3).plans:
        assert plan.predictions.reserved_peak_bytes <= 1_450_000_000


@pytest.mark.parametrize("dtype", ["fp32", "tf32", "fp64", "autocast"])
def test_a_precision_that_a_runtime_does_not_train_in_is_refused(dtype: str) -> None:
    with pytest.raises(InputError, match=f"does not train in {dtype}: give --dtype bf16"):
        search(model(), CLUSTER, JOB.model_copy(update={"dtype": dtype}))


@pytest.mark.slow
def test_attention_alone_is_made_again_where_its_scores_are_kept() -> None:
    def ways(runtime: str) -> set[bool]:
        job = Job(global_batch=16, sequence_length=512, dtype="fp16", runtime=runtime)
        found = searched(Space(tp=1, cp=1, microbatch=1), "8x-a100-80", job)[1]
        return {one.configuration.recompute == "selective" for _, one in found}

    assert ways("megatron-deepspeed") == {False, True}
    assert ways("megatron-core+te") == {False}


def test_fsdp_shares_parameters_out_layer_by_layer() -> None:
    job = JOB.model_copy(update={"runtime": "torch-fsdp"})
    bounds = Space(tp=1, cp=1, pp=1, microbatch=1)
    plans = search(model(), CLUSTER, job, space=bounds, keep=4).plans
    assert {max(plan.sharding) for plan in plans} == {2, 3}
