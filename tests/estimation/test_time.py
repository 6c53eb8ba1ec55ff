"""Seconds of functions: device and host, GPU and CPU; the optimizer step."""

from __future__ import annotations

import pytest

from stagewright.cluster import load_cluster
from stagewright.cluster.attention import FORWARD_FLOP, Scores
from stagewright.cluster.matmul import MatmulShape
from stagewright.estimation.operators import Kernel, Work, work
from stagewright.estimation.state import Precision
from stagewright.estimation.time import ACCESS_S, Costing, cost, kernel_seconds, optimizer_seconds
from stagewright.graph import Part
from stagewright.graph.views import not_issued
from stagewright.tracing.cache import trace

GPU = load_cluster("8x-h100").device
CPU = GPU.model_copy(update={"kind": "cpu", "launch_overhead_s": 0.0})


def test_a_gpu_is_bound_by_its_kernels_or_by_the_host() -> None:
    graph = trace("tiny-llama", 2, 32, "bfloat16")
    forward = [node for node in graph.nodes if node.part is Part.FORWARD]
    idle = not_issued(graph)
    is_view = {node.id: work(node, graph.values.__getitem__).kernel is Kernel.VIEW for node in forward}
    views = sum(is_view[node.id] for node in forward if node.id not in idle)
    assert 0 < views < sum(is_view.values())
    issue = GPU.host_overhead_s * (len(forward) - sum(is_view.values())) + GPU.view_seconds * views
    assert Costing(graph, GPU).seconds(forward) == pytest.approx(issue)  # tiny kernels: the host is slower
    quick = GPU.model_copy(update={"host_overhead_s": 0.0})
    kernels = [work(node, graph.values.__getitem__) for node in forward]
    busy = sum(
        kernel_seconds(item, GPU) + GPU.launch_overhead_s
        for item in kernels
        if item.kernel is not Kernel.VIEW
    )
    assert Costing(graph, quick).seconds(forward) == pytest.approx(busy)


def test_what_the_host_takes_longer_is_told_apart() -> None:
    graph = trace("tiny-llama", 2, 32, "bfloat16")
    forward = [node for node in graph.nodes if node.part is Part.FORWARD]
    quick = Costing(graph, GPU.model_copy(update={"host_overhead_s": 0.0})).seconds(forward)
    tiny = Costing(graph, GPU)
    assert tiny.sums(forward).behind_seconds == pytest.approx(tiny.seconds(forward) - quick)
    assert Costing(graph, CPU).sums(forward).behind_seconds == 0
    slow = GPU.model_copy(update={"launch_overhead_s": 1.0})
    assert Costing(graph, slow).sums(forward).behind_seconds == 0


def test_a_cpu_issues_and_computes_in_turn() -> None:
    item = Work(Kernel.MEMORY, "float32", bytes_moved=1e6)
    assert cost(item, CPU).device_s == pytest.approx(CPU.host_overhead_s + kernel_seconds(item, CPU))
    assert cost(item, CPU).host_s == 0


def test_a_cpu_packs_operands_and_then_multiplies() -> None:
    item = Work(Kernel.MATMUL, "bfloat16", arithmetic=1e9, bytes_moved=1e6)
    packing = CPU.model_copy(update={"packing_bandwidth": 1e10})
    assert kernel_seconds(item, packing) == pytest.approx(CPU.matmul_seconds(1e9, "bfloat16") + 1e-4)
    assert kernel_seconds(item, CPU) < kernel_seconds(item, packing)


def test_a_cpu_adds_to_an_embedding_row_by_row() -> None:
    item = Work(Kernel.MEMORY, "float32", bytes_moved=1e6, num_scattered=1e4)
    scattering = CPU.model_copy(update={"scatter_rate": 1e8})
    assert kernel_seconds(item, scattering) == pytest.approx(kernel_seconds(item, CPU) + 1e-4)


def test_a_product_of_unknown_shape_is_bound_by_arithmetic_or_by_memory() -> None:
    large = Work(Kernel.MATMUL, "bfloat16", 2e15, 2e15, 1e9)
    assert kernel_seconds(large, GPU) == pytest.approx(2e15 / GPU.matmul_flops("bf16"), rel=1e-3)
    thin = Work(Kernel.MATMUL, "bfloat16", 2e6, 2e6, 1e9)
    assert kernel_seconds(thin, GPU) == pytest.approx(GPU.memory_seconds(1e9), rel=1e-4)
    moved = 1e12 / GPU.memory_seconds(1e12) * GPU.matmul_seconds(1e15, "bf16")
    even = Work(Kernel.MATMUL, "bfloat16", 1e15, 1e15, moved)
    assert 1.0 < kernel_seconds(even, GPU) / GPU.matmul_seconds(1e15, "bf16") < 2.0


def test_a_product_is_costed_by_its_shape() -> None:
    shape = MatmulShape(1, 8192, 4096, 4096)
    flop = 2.0 * 8192 * 4096 * 4096
    item = Work(Kernel.MATMUL, "bfloat16", flop, flop, 2e8, shapes=(shape,))
    assert kernel_seconds(item, GPU) == GPU.shaped_matmul_seconds((shape,), "bfloat16", 2e8)
    assert flop / GPU.matmul_flops("bf16") < kernel_seconds(item, GPU) < 1.3 * flop / GPU.matmul_flops("bf16")
    plain = GPU.model_copy(update={"products": None})
    assert kernel_seconds(item, plain) != kernel_seconds(item, GPU)


def test_norms_attain_less_than_streams_where_that_is_known() -> None:
    item = Work(Kernel.NORM, "bfloat16", bytes_moved=1e9)
    plain = GPU.model_copy(update={"norm_efficiency": None})
    assert kernel_seconds(item, plain) == GPU.memory_seconds(1e9)
    slow = GPU.model_copy(update={"norm_efficiency": GPU.memory_efficiency / 2})
    assert kernel_seconds(item, slow) == pytest.approx(2 * GPU.memory_seconds(1e9))


def test_attention_with_arithmetic_halved_takes_half_the_time() -> None:
    full, causal = (Work(Kernel.ATTENTION, "bfloat16", 1e15, share * 1e15, 1.0) for share in (1.0, 0.5))
    assert kernel_seconds(full, GPU) == pytest.approx(2 * kernel_seconds(causal, GPU))


def test_attention_is_costed_by_its_shape_where_that_is_described() -> None:
    scores = Scores(32, 4096, 4096, FORWARD_FLOP, 4096)
    flop = FORWARD_FLOP * 32 * 4096.0**2
    item = Work(Kernel.ATTENTION, "bfloat16", flop, flop, 1.0, scores=scores)
    assert kernel_seconds(item, GPU) == pytest.approx(GPU.attention_seconds(scores, "bfloat16"))
    plain = GPU.model_copy(update={"attention": None})
    limit = flop / (GPU.attention_efficiency * (GPU.peak_flops.bf16 or 0.0))
    assert kernel_seconds(item, plain) == pytest.approx(limit)
    assert limit < kernel_seconds(item, GPU) < 1.2 * limit


def test_model_flop_leave_out_the_scores_computed_again() -> None:
    costing = Costing(trace("tiny-llama", 2, 32, "float32"), GPU)
    graph = costing.graph
    again = sum(
        work(n, graph.values.__getitem__).flop for n in graph.nodes if "attention_for_cpu_backward" in n.op
    )
    assert costing.flop - costing.model_flop == pytest.approx(again / 5)
    assert again > 0


def test_the_optimizer_streams_its_state() -> None:
    assert optimizer_seconds(1e9, GPU, has_master=False, clips=False) == GPU.memory_seconds(28e9)
    assert optimizer_seconds(1e9, GPU, has_master=True, clips=True) == GPU.memory_seconds(46e9)


@pytest.mark.parametrize(("dtype", "expected"), [("bfloat16", 18), ("float32", 16), ("float64", 32)])
def test_bytes_of_training_state(dtype: str, expected: int) -> None:
    assert Precision.of(dtype).bytes_per_parameter == expected


def test_ramping_up_a_product_takes_as_long_in_every_precision() -> None:
    slow = GPU.model_copy(update={"matmul_half_flop": 8e9})
    ramp_s = 8e9 / GPU.matmul_flops("bf16")
    for dtype in ("fp32", "bf16"):
        assert slow.matmul_seconds(1e12, dtype) - 1e12 / GPU.matmul_flops(dtype) == pytest.approx(ramp_s)


def test_serial_accesses_wait_for_memory() -> None:
    quick = Work(Kernel.MEMORY, "float32", bytes_moved=1e6)
    slow = Work(Kernel.MEMORY, "float32", bytes_moved=1e6, serial_accesses=1000)
    assert kernel_seconds(slow, GPU) - kernel_seconds(quick, GPU) == pytest.approx(1000 * ACCESS_S)


def test_a_depthwise_convolution_gains_nothing_from_matrix_units() -> None:
    half, single = (Work(Kernel.DEPTHWISE, dtype, 1e12, 1e12) for dtype in ("float16", "float32"))
    assert kernel_seconds(half, GPU) == kernel_seconds(single, GPU) > 1e12 / GPU.matmul_flops("fp32")
