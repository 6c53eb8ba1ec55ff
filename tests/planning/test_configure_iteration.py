"""Step times of Megatron-style runs: what must hold whatever the constants."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stagewright.cluster import Cluster, MeasuredCollective, all_reduce_seconds, load_cluster
from stagewright.errors import InputError
from stagewright.estimation.megatron import Experts, Layout, Shape, find_megatron_stack
from stagewright.estimation.megatron.fusion import find_fusion
from stagewright.estimation.megatron.kernels import Collective, Kernel
from stagewright.planning.configure.iteration import Run
from stagewright.schedule.placement import linear

GPT = Shape.gpt(8, 2048, 16, 51200, 1024)
LLAMA = Shape(8, 4096, 14336, 32, 128256, 8, 128, gated=True, has_bias=False, tied=False)


@pytest.fixture(scope="module")
def node() -> Cluster:
    return load_cluster("8x-a100-80")


def run(cluster: Cluster, shape: Shape = GPT, **layout: Any) -> Run:
    made = Layout(1024, microbatch_size=2, num_microbatches=8, **layout)
    return Run(shape, made, find_megatron_stack("megatron-core+te"), find_fusion("megatron-core+te"), cluster)


def products(what: Run) -> float:
    """FLOP of products and attention in a forward and backward of one microbatch on one device of every stage."""
    body = what.clock.body
    parts = [body.layer(index) for index in range(what.shape.num_layers)] + [body.head()]
    passes = (p for part in parts for p in (part.forward, part.input_grad, part.weight_grad))
    return sum(kernel.flop * kernel.num for p in passes for kernel in p.kernels)


def test_flop_are_six_per_parameter_and_token_and_attention(node: Cluster) -> None:
    what = run(node)
    weights = 8 * (GPT.layer_parameters - 13 * 2048) + 51200 * 2048
    attention = 8 * 2048 * 1024 * 2048 * (2 + 2.5 * 2) / 2 * 2  # half the scores; a backward of five products
    assert products(what) == pytest.approx(6 * weights * 2048 + attention, rel=2e-3)


@pytest.mark.parametrize("shape", [GPT, LLAMA])
def test_tensor_parallelism_splits_products_evenly(node: Cluster, shape: Shape) -> None:
    assert products(run(node, shape, tp=4)) == pytest.approx(products(run(node, shape)) / 4, rel=1e-3)


def test_one_stage_takes_its_passes_in_a_row(node: Cluster) -> None:
    what = run(node)
    stage = what.clock.stages[0]
    expected = 8 * (stage.forward.seconds + stage.backward.seconds + 2 * what.fusion.pass_host_s)
    assert what.step().pipeline_s == pytest.approx(expected)


def test_full_recomputation_adds_a_forward_of_the_layers(node: Cluster) -> None:
    plain, again = run(node).clock.stages[0], run(node, recompute="full").clock.stages[0]
    layers = 8 * run(node).clock.layer(0)[0].device_s
    assert again.backward.device_s - plain.backward.device_s == pytest.approx(layers)
    assert again.forward == plain.forward


def test_collectives_of_sequence_parallelism_move_what_an_all_reduce_does(node: Cluster) -> None:
    def moved(what: Run) -> float:
        layer = what.clock.body.layer(0)
        each = (*layer.forward.collectives, *layer.input_grad.collectives)
        return sum(one.num_bytes * (2 if one.kind == "all-reduce" else 1) for one in each)

    plain, split = run(node, tp=4), run(node, tp=4, sequence_parallel=True)
    whole = 2 * 2048 * 2048
    assert moved(plain) == 4 * 2 * whole
    assert moved(split) == moved(plain) + 2 * whole  # inputs are gathered again for the gradients of weights


def test_gradients_are_reduced_over_replicas(node: Cluster) -> None:
    what = run(node, dp=8)
    parameters = what.parameters(linear(1))[0][1]
    assert what.step().reduce_s == pytest.approx(all_reduce_seconds(node, 4.0 * parameters, range(8)))
    sharded = replace(what, layout=replace(what.layout, shards_optimizer=True))
    assert sharded.step().optimizer_s == pytest.approx(what.step().optimizer_s / 8)


def test_a_slower_link_never_makes_a_step_faster(node: Cluster) -> None:
    slow = load_cluster("8x-a100-80", {"intra_node.bandwidth": 23e9})
    each: tuple[dict[str, int], ...] = ({"tp": 8}, {"pp": 8}, {"dp": 8}, {"tp": 2, "pp": 2, "dp": 2})
    for widths in each:
        assert run(slow, GPT, **widths).step().seconds > run(node, GPT, **widths).step().seconds


def test_experts_exchange_tokens_and_split_their_weights(node: Cluster) -> None:
    sparse = replace(LLAMA, experts=Experts(8, 2, 4096))
    what = run(node, sparse, dp=8, ep=8)
    layer = what.clock.body.layer(0)
    sent = [one for one in layer.forward.collectives if one.kind == "all-to-all"]
    assert [one.num_bytes for one in sent] == [2 * 2048 * 2 * 4096] * 2
    experts = [
        k for k in layer.forward.kernels if k.kind == "matmul" and k.flop == 2 * 4096 * 4096 * 2 * 4096
    ]
    assert experts == [Kernel("matmul", experts[0].flop, experts[0].num_bytes, 1)]


def test_overlapped_reductions_leave_a_layers_part_exposed(node: Cluster) -> None:
    plain, hidden = run(node, dp=8), run(node, dp=8, overlaps_reduction=True)
    assert hidden.step().reduce_s == pytest.approx(plain.step().reduce_s / 8)
    one = run(load_cluster("8x-a100-80", {"intra_node.bandwidth": 1e8}), dp=8, overlaps_reduction=True)
    left = one.step().reduce_s
    computed = one.clock.stages[0].backward.device_s * 7 / 8
    assert left == pytest.approx(replace(one, layout=run(node, dp=8).layout).step().reduce_s - computed)


def test_stages_take_as_long_as_on_their_slowest_device() -> None:
    fast, slow = load_cluster("4x-a100-80"), load_cluster("4x-t4")
    mixed = Cluster(name="mixed", nodes=(*fast.nodes, *slow.nodes))
    made = Layout(1024, pp=2, dp=4, num_microbatches=4)
    stack, fusion = find_megatron_stack("megatron-core+te"), find_fusion("megatron-core+te")
    first, last = Run(GPT, made, stack, fusion, mixed).stages
    assert first == Run(GPT, made, stack, fusion, load_cluster("8x-a100-80")).stages[0]
    assert last == Run(GPT, made, stack, fusion, load_cluster("8x-t4")).stages[1]
    alone = Layout(1024, dp=8, num_microbatches=4)
    (both,) = Run(GPT, alone, stack, fusion, mixed).stages
    assert both == Run(GPT, alone, stack, fusion, load_cluster("8x-t4")).stages[0]


def test_devices_without_bf16_compute_in_fp16() -> None:
    old = run(load_cluster("8x-v100-32"))
    assert (old.clock.dtype, run(load_cluster("8x-a100-80")).clock.dtype) == ("fp16", "bf16")
    least = products(old) * old.layout.num_microbatches / old.clock.device.matmul_flops("fp16")
    assert old.step().seconds > least


def test_an_unknown_policy_names_the_nearest() -> None:
    with pytest.raises(InputError, match="megatron-lm"):
        find_fusion("megatron-ml")


def test_reductions_hide_behind_the_backward_and_gathers_behind_the_forward() -> None:
    """On links so slow that each outlasts its pass, what is left of both is known."""
    slow = load_cluster("8x-a100-80", {"intra_node.bandwidth": 2e8})
    what = run(slow, dp=8, shards_optimizer=True, overlaps_reduction=True)
    reduce, gather = what.reduce_seconds(*what.parameters(linear(1))[0])
    stage = what.stages[0]
    hidden = (stage.forward.device_s + stage.backward.device_s) * 7 / 8
    assert min(reduce - stage.backward.device_s, gather - stage.forward.device_s) > 0
    assert what.step().reduce_s == pytest.approx(reduce + gather - hidden)
    exposed = replace(what, layout=replace(what.layout, overlaps_reduction=False))
    assert exposed.step().reduce_s == pytest.approx(reduce + gather)


def test_measured_curves_correct_the_collectives_they_are_of(node: Cluster) -> None:
    clocks = []
    for operation in ("all-reduce", "all-gather", "reduce-scatter"):
        curve = MeasuredCollective(
            operation=operation, spans="node", num_ranks=8, num_bytes=(1e6,), seconds=(1.0,)
        )
        clocks.append(run(node.model_copy(update={"collectives": (curve,)}), tp=8).clock)
    for number, kind in enumerate(("all-reduce", "all-gather", "reduce-scatter")):
        took = [clock.collective_seconds(Collective(kind, "tp", 1e6)) for clock in clocks]
        assert took[number] == pytest.approx(1.0)
        assert max(took[:number] + took[number + 1 :]) < 0.01


def mixture_pass(cluster: Cluster, **policy: Any) -> tuple[float, ...]:
    """Device, exposed and hidden seconds of the forward and backward of one layer with experts on 16 devices."""
    shape = replace(LLAMA, experts=Experts(64, 4, 2048, num_groups=2, num_active_groups=1))
    what = run(cluster, shape, dp=16, ep=16)
    layer = replace(what, fusion=replace(what.fusion, routing_wait_s=0.0, **policy)).clock.layer(0)
    whole = layer[0] + layer[1] + layer[2]
    return whole.device_s, whole.exposed_s, whole.beside_s


def test_tokens_that_go_once_to_their_only_node_do_not_wait_for_copies() -> None:
    cluster = load_cluster("2x8x-a100-80")
    _, copies, _ = mixture_pass(cluster)
    _, once, _ = mixture_pass(cluster, dispatch="once per node")
    # One node of two: half the tokens cross, where half of four copies each did.
    assert copies / 4.5 < once < copies / 3


@pytest.mark.parametrize("bandwidth", [1e12, 1e8])
def test_hidden_dispatches_cost_what_they_take_of_the_device_or_outlast(bandwidth: float) -> None:
    cluster = load_cluster(
        "2x8x-a100-80", {"intra_node.bandwidth": bandwidth, "inter_node.bandwidth": bandwidth}
    )
    device, exposed, _ = mixture_pass(cluster)
    hidden = mixture_pass(cluster, hides_dispatch=True)
    assert hidden == (
        device,
        pytest.approx(max(exposed * 20 / 132, exposed - device)),
        pytest.approx(exposed),
    )


def test_a_mixture_waits_for_its_routing_in_both_directions(node: Cluster) -> None:
    shape = replace(LLAMA, experts=Experts(8, 2, 2048))
    what = run(node, shape)
    captured = replace(what, fusion=replace(what.fusion, routing_wait_s=0.0), known={})
    for one, other in zip(what.clock.layer(0)[:2], captured.clock.layer(0)[:2], strict=True):
        assert one.exposed_s - other.exposed_s == pytest.approx(what.fusion.routing_wait_s)


def test_products_of_experts_run_four_at_once(node: Cluster) -> None:
    def rounds(num: int) -> int:
        body = run(node, replace(LLAMA, experts=Experts(num, 2, 1024))).clock.body
        return sum(kernel.rounds for kernel in body.layer(0).forward.kernels if kernel.kind == "matmul")

    assert rounds(16) - rounds(4) == 2 * (4 - 1)


def test_experts_of_tensor_parallel_neighbours_get_their_tokens_sent(node: Cluster) -> None:
    what = run(node, replace(LLAMA, experts=Experts(8, 2, 2048)), tp=8, sequence_parallel=True)
    sent = [one for one in what.clock.body.layer(0).forward.collectives if one.kind == "all-to-all"]
    assert len(sent) == 2 and what.clock.ranks("ep") == tuple(range(8))
    with pytest.raises(InputError, match="tp x ep = 16 does not divide the 8 experts"):
        Layout(1024, tp=8, ep=2, dp=2).checked(num_heads=32, num_experts=8)
