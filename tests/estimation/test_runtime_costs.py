"""What runtimes pay for products in eight bits and for experts that ranks share out."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from stagewright.cluster import load_cluster
from stagewright.cluster.dispatch import dispatch_seconds
from stagewright.cluster.matmul import MatmulShape
from stagewright.errors import InputError
from stagewright.estimation.collectives import collective_seconds, distinct, met
from stagewright.estimation.runtime import load_runtime
from stagewright.estimation.time import Costing
from stagewright.graph import Node, OperatorGraph, Part
from stagewright.graph.added_nodes import ACCUMULATE
from stagewright.graph.expert_parallel import ALL_TO_ALL
from stagewright.graph.graph import short_name
from stagewright.graph.layers import layer_of
from stagewright.graph.tensor_parallel import neighbour_strides
from stagewright.planning.estimate import estimate, staged_model_of
from stagewright.planning.job import Job
from stagewright.planning.prediction.staged_model import costs_of_model
from stagewright.tracing.cache import trace
from stagewright.tracing.models.reference import resolve

CLUSTER = load_cluster("2x4x-h100")


def written(folder: Path, name: str, text: str) -> str:
    path = folder / f"{name}.toml"
    path.write_text(f"{text}\n")
    return str(path)


@cache
def dense() -> OperatorGraph:
    return trace("tiny-llama", 2, 64, "bfloat16", target="cuda", attention="fused")


@cache
def mixture() -> OperatorGraph:
    return trace("tiny-mixtral", 2, 64, "bfloat16", target="cuda", attention="fused", experts="grouped", ep=4)


def costing(runtime: str, graph: OperatorGraph, dtype: str = "bf16") -> Costing:
    job = Job(global_batch=16, sequence_length=64, dtype=dtype, runtime=runtime)  # type: ignore[arg-type]
    return costs_of_model(graph, CLUSTER, job).costing


def device_s(found: Costing, node: Node) -> float:
    return found.of(node, found.graph.values.__getitem__).device_s


def products(graph: OperatorGraph) -> list[Node]:
    return [node for node in graph.nodes if short_name(node.op) == "mm"]


def test_eight_bits_spare_the_head() -> None:
    half, eight = (costing("torch-fsdp", dense(), dtype) for dtype in ("bf16", "fp8"))
    same = {bool(layer_of(node.module)): set() for node in products(dense())}
    for node in products(dense()):
        same[bool(layer_of(node.module))].add(device_s(half, node) == device_s(eight, node))
    assert same == {True: {False}, False: {True}}


def test_what_is_cast_once_is_not_cast_for_every_product(tmp_path: Path) -> None:
    once = written(tmp_path, "once", 'based_on = "torch-fsdp"\ncasts = "once"')
    every, cast = (costing(one, dense(), "fp8") for one in ("torch-fsdp", once))
    inside = [node for node in products(dense()) if layer_of(node.module)]
    for node in inside:
        assert device_s(cast, node) < device_s(every, node)
    weights = [node for node in inside if node.part is Part.WEIGHT_GRAD]
    device = CLUSTER.device
    for node in weights:  # nothing is cast for them but what the other two products have cast
        flop = cast.of(node, dense().values.__getitem__).flop
        assert device_s(cast, node) < device.matmul_seconds(flop, "fp8") + 2 * device.launch_overhead_s


def test_tokens_travel_once_per_node() -> None:
    graph = mixture()
    sent = [node for node in graph.nodes if node.op == ALL_TO_ALL]
    rows = next(node for node in sent if len(graph.values[node.inputs[0]].meta.shape) == 2)
    shape, copies = graph.values[rows.inputs[0]].meta.shape, 2
    over_nodes = load_cluster("4x2x-h100")
    lookup, strides = graph.values.__getitem__, neighbour_strides(graph)
    every, once = (collective_seconds(rows, lookup, over_nodes, strides, count) for count in (None, 24))
    num_bytes = graph.values[rows.inputs[0]].meta.payload_bytes / shape[0]
    tokens = met(over_nodes, range(4), shape[0] / copies, num_bytes, copies)
    assert tokens[2:] == (distinct(2, 4), distinct(2, 2))
    there, back = (
        dispatch_seconds(over_nodes, tokens, range(4), sums=sums, num_multiprocessors=24)
        for sums in (False, True)
    )
    assert once == pytest.approx((there + back) / 2)
    assert once != every
    weights = next(node for node in sent if len(graph.values[node.inputs[0]].meta.shape) == 1)
    assert collective_seconds(weights, lookup, over_nodes, strides, 24) == 0.0  # they go with the tokens
    assert distinct(2, 2) == 1.5


def test_dispatches_beside_another_microbatch_take_no_time_of_their_own(tmp_path: Path) -> None:
    graph = mixture()
    lines = 'based_on = "megatron-core+te"\n'
    hidden = written(tmp_path, "hidden", lines + "hides_dispatch = true\n[waits]\nbeside_share = 0.2")
    waits = written(tmp_path, "waits", lines + "[waits]\nrouting_s = 1e-3")
    plain, beside, waiting = (costing(one, graph) for one in ("megatron-core+te", hidden, waits))
    whole = plain.graph
    sent = [node for node in whole.nodes if node.op == ALL_TO_ALL]
    one = next(node for node in sent if len(whole.values[node.inputs[0]].meta.shape) == 2)
    shown, away = (each.of(one, whole.values.__getitem__) for each in (plain, beside))
    assert away.hidden_s == pytest.approx(shown.device_s)
    assert away.device_s == pytest.approx(0.2 * shown.device_s)
    longer = waiting.arrays[0].sum() - plain.arrays[0].sum()
    num_layers = len({layer_of(node.module) for node in sent})
    assert longer == pytest.approx(2 * num_layers * 1e-3)
    others = [node for node in whole.nodes if node.op != ALL_TO_ALL]
    assert beside.seconds(others) == plain.seconds(others)


def test_the_best_attention_there_is_where_a_device_says_so(tmp_path: Path) -> None:
    best = load_runtime(written(tmp_path, "best", 'based_on = "torch-fsdp"\nattention_kernels = "best"'))
    assert best.attention_kernels == "best"
    device = load_cluster("8x-h100").device.with_attention(1.0, best=True)
    assert (device.attention_efficiency, device.attention_backward_efficiency) == (0.71, 0.55)
    other = load_cluster("8x-a100-80").device
    assert other.with_attention(1.0, best=True) is other


def test_files_are_based_on_files_beside_them(tmp_path: Path) -> None:
    written(tmp_path, "base", 'based_on = "torch-fsdp"\nattention_rate = 0.5')
    child = load_runtime(written(tmp_path, "child", 'based_on = "base.toml"\ncasts = "once"'))
    assert (child.attention_rate, child.casts, child.shard_units) == (0.5, "once", "layers")
    written(tmp_path, "one", 'based_on = "two.toml"')
    with pytest.raises(InputError, match="is based on itself"):
        load_runtime(written(tmp_path, "two", 'based_on = "one.toml"'))
    with pytest.raises(InputError, match=r"lone\.toml.*there is no file"):
        load_runtime(written(tmp_path, "lone", 'based_on = "none.toml"'))
    winding = written(tmp_path, "winding", f'based_on = "../{tmp_path.name}/winding.toml"')
    with pytest.raises(InputError, match="is based on itself"):
        load_runtime(winding)


def test_compiled_kernels_cost_the_runtimes_host(tmp_path: Path) -> None:
    slow = written(tmp_path, "slow", 'based_on = "torch-fsdp"\n[host]\nkernel_s = 1e-4')
    job = Job(global_batch=16, sequence_length=64, runtime=slow, compiled=True)
    found = costs_of_model(dense(), CLUSTER, job).costing
    issued = {
        found.of(found.graph.nodes[index], found.graph.values.__getitem__).host_s for index in found.fusions
    }
    assert issued == {0.0, 1e-4}


def test_runtimes_with_grouped_kernels_of_their_own_reach_the_dense_rate() -> None:
    b200 = load_cluster("4x-b200")
    for name, share in (("megatron-core+te", 1.0), ("torch-fsdp", 0.73)):
        graph = replace(mixture(), facts={**mixture().facts, "runtime": name})
        products = Costing(graph, b200.device, b200).device.products
        assert products is not None
        assert products.grouped_share == share


def test_heads_of_odd_widths_leave_the_tensor_cores(tmp_path: Path) -> None:
    """Where the runtime says so, and only the products of heads."""

    def explicit(head_dim: int) -> OperatorGraph:
        changes = {"hidden_size": 4 * head_dim, "head_dim": head_dim, "num_attention_heads": 4}
        reference = resolve("tiny-llama", changes | {"num_key_value_heads": 4})
        return trace(reference, 2, 64, "float16", target="cuda", attention="explicit")

    lines = 'based_on = "torch-fsdp"\nattention = "explicit"\n'
    plain = written(tmp_path, "plain", lines)
    other = written(tmp_path, "other", lines + 'unaligned_products = "other cores"')
    for head_dim, is_slower in ((16, False), (20, True)):
        graph = explicit(head_dim)
        usual, odd = (costing(one, graph, "fp16") for one in (plain, other))
        slower = {
            short_name(node.op) for node in graph.nodes if device_s(odd, node) > device_s(usual, node) * 1.001
        }
        assert slower == ({"bmm"} if is_slower else set())


def odd_heads(vocabulary: int) -> OperatorGraph:
    return trace(
        resolve("tiny-llama", {"vocab_size": vocabulary}), 2, 64, "bfloat16", target="cuda", attention="fused"
    )


@pytest.mark.parametrize(("cluster", "slower"), [("1x-h100", 1 / 0.17), ("1x-a100-80", 1.0)])
def test_logits_of_an_odd_vocabulary_take_the_arithmetic_of_old_kernels_on_hopper(
    cluster: str, slower: float
) -> None:
    device = load_cluster(cluster).device
    shapes = [MatmulShape(1, 16_384, 50_304, 2_048)]
    even, odd = (
        device.shaped_matmul_seconds(shapes, "bf16", 1e9, aligned=aligned) for aligned in (True, False)
    )
    assert odd / even == pytest.approx(slower, rel=0.1)


def test_a_compiler_pads_an_odd_vocabulary() -> None:
    of_head = {}
    for vocabulary in (50_256, 50_257):
        graph = odd_heads(vocabulary)
        head = [node for node in products(graph) if not layer_of(node.module)]
        for compiled in (False, True):
            costs = Costing(graph, CLUSTER.device, CLUSTER, compiled=compiled)
            of_head[vocabulary, compiled] = sum(device_s(costs, node) for node in head)
    assert of_head[50_257, False] > 1.5 * of_head[50_256, False]
    assert of_head[50_257, True] == pytest.approx(of_head[50_256, True], rel=0.02)


def test_what_grows_of_a_fused_operator_is_no_more_than_it_takes() -> None:
    """Nodes of equal signature may be at different places of what is fused."""
    graph = dense()
    costs, value = Costing(graph, CLUSTER.device, CLUSTER, compiled=True), graph.values.__getitem__
    grows = {node.id: costs.growing(node, value) for node in graph.nodes if node.id in costs.fusions}
    assert sum(grows.values()) > 0
    for node in graph.nodes:
        assert costs.growing(node, value) <= costs.of(node, value).device_s * (1 + 1e-9), node.name


def test_messages_that_a_rank_waits_for_add_their_shapes(tmp_path: Path) -> None:
    text = 'based_on = "torch-fsdp"\ntransfers = "sends and receives"\n[waits]\nmessage_s = '
    steps, bound = {}, {}
    for seconds in ("0.0", "1e-3"):
        runtime = written(tmp_path, f"waits-{seconds}", text + seconds)
        job = Job(global_batch=16, sequence_length=64, runtime=runtime)
        plan = estimate("tiny-llama", load_cluster("2x-h100"), job, pp=2)
        steps[seconds] = plan.predictions.step_seconds
        bound[seconds] = plan.host_bound
    # A rank of two sends and receives once in either direction of each of 16 microbatches.
    assert steps["1e-3"] - steps["0.0"] == pytest.approx(2e-3 * 16, rel=0.15)
    assert bound["1e-3"] > bound["0.0"]


def test_a_host_that_waits_for_kernels_adds_its_time(tmp_path: Path) -> None:
    waiting = written(tmp_path, "blocking", 'based_on = "torch-fsdp"\n[host]\nwaits_for_kernels = true')
    usual, slow = (costing(one, dense()) for one in ("torch-fsdp", waiting))
    node = products(dense())[0]
    both = usual.of(node, dense().values.__getitem__)
    assert device_s(slow, node) == both.device_s + both.host_s
    assert slow.sums(dense().nodes).behind_seconds == 0.0
    assert slow.seconds(dense().nodes) == pytest.approx(
        usual.arrays.device_s.sum() + usual.arrays.host_s.sum()
    )


def test_so_does_it_where_kernels_are_compiled(tmp_path: Path) -> None:
    waiting = written(tmp_path, "blocking", 'based_on = "torch-fsdp"\n[host]\nwaits_for_kernels = true')
    usual, slow = (
        costs_of_model(dense(), CLUSTER, Job(
            global_batch=16, sequence_length=64, dtype="bf16", runtime=runtime, compiled=True
        )).costing
        for runtime in ("torch-fsdp", waiting)
    )  # fmt: skip
    assert usual.fusions and slow.arrays.host_s.sum() == 0.0
    assert slow.seconds(dense().nodes) == pytest.approx(
        usual.arrays.device_s.sum() + usual.arrays.host_s.sum()
    )


def test_a_matmul_that_accumulates_leaves_no_gradient_to_add(tmp_path: Path) -> None:
    """Linear layers transpose their weights, so that what the matmul returns is a view away from the gradient."""
    adding = written(tmp_path, "adding", 'based_on = "torch-fsdp"\nadds_in_products = true')
    seconds = {}
    for runtime in ("torch-fsdp", adding):
        plan = estimate(
            "tiny-llama", CLUSTER, Job(global_batch=8, sequence_length=64, runtime=runtime), dp=8, pp=1
        )
        (stage,) = staged_model_of(plan, CLUSTER).stages
        found = costing(runtime, dense())
        seconds[runtime] = [
            found.of(node, stage.value).device_s for node in stage.weight_grad.nodes if node.op == ACCUMULATE
        ]
    norms_and_embedding = 2 * 6 + 1 + 1  # whose gradients no matmul returns
    assert all(seconds["torch-fsdp"]) and len(seconds[adding]) == len(seconds["torch-fsdp"])
    assert sum(bool(value) for value in seconds[adding]) == norms_and_embedding


def test_transfers_overlap_where_ranks_have_several_stages(tmp_path: Path) -> None:
    costs = {}
    for transfers in ("overlapped", "overlapped if interleaved", "sends"):
        runtime = written(
            tmp_path, transfers.replace(" ", "-"), f'based_on = "megatron-lm"\ntransfers = "{transfers}"'
        )
        job = Job(global_batch=8, sequence_length=64, runtime=runtime)
        for options in ({}, {"schedule": "interleaved-1f1b", "chunks": 2}):
            plan = estimate(
                resolve("tiny-llama", {"num_hidden_layers": 4}), CLUSTER, job, tp=2, pp=2, dp=2, **options
            )
            assert plan.predictions.costs is not None
            costs[transfers, bool(options)] = [t.value_seconds > 0 for t in plan.predictions.costs.transfers]
    for is_interleaved in (False, True):
        like = "overlapped" if is_interleaved else "sends"
        assert costs["overlapped if interleaved", is_interleaved] == costs[like, is_interleaved]
        assert costs["overlapped", is_interleaved] != costs["sends", is_interleaved]


def added_bytes(folder: Path, texts: tuple[str, str], length: int = 64, **options: Any) -> list[int]:
    """By how much the second of two runtimes adds to the allocated peak of every rank, for samples of `length` tokens;
    `options` are those of the estimate, and the model and the cluster if these are others than usual."""
    model, cluster = options.pop("model", "tiny-llama"), options.pop("cluster", CLUSTER)
    peaks = []
    for number, text in enumerate(texts):
        job = Job(global_batch=8, sequence_length=length, runtime=written(folder, str(number), text))
        ranks = estimate(model, cluster, job, **options).predictions.ranks
        peaks.append([rank.allocated_peak_bytes for rank in ranks])
    return [more - less for less, more in zip(*peaks, strict=True)]


def config_of(model: str) -> dict[str, Any]:
    config = resolve(model).config
    assert config is not None
    return config


def test_a_thread_for_backwards_has_a_workspace(tmp_path: Path) -> None:
    without, with_thread = (
        f'based_on = "megatron-core+te"\nhas_backward_thread = {has_thread}'
        for has_thread in ("false", "true")
    )
    added = added_bytes(tmp_path, (without, with_thread), dp=8, pp=1)
    assert added == [CLUSTER.device.workspace_bytes]


@pytest.mark.parametrize(("cluster", "mebibytes"), [("8x-a100-80", 4), ("8x-h100", 32)])
def test_kernels_of_a_runtime_have_workspaces_as_the_device_wants_them(
    tmp_path: Path, cluster: str, mebibytes: int
) -> None:
    fewer, more = (f'based_on = "megatron-core+te"\nworkspaces = {count}' for count in (1, 5))
    added = added_bytes(tmp_path, (fewer, more), cluster=load_cluster(cluster), dp=8, pp=1)
    assert added == [4 * mebibytes * 2**20]


def test_logits_of_the_microbatch_before_are_kept(tmp_path: Path) -> None:
    freed, kept = (f'based_on = "megatron-lm"\nkeeps_logits = {keeps}' for keeps in ("false", "true"))
    added = added_bytes(tmp_path, (freed, kept), dp=1, pp=2)
    assert added == [0, 2 * 64 * config_of("tiny-llama")["vocab_size"]]


def test_gradients_may_be_flattened_to_be_summed(tmp_path: Path) -> None:
    apart, flat = (
        f'based_on = "megatron-lm"\n[optimizer]\nflattens_gradients = {flattens}'
        for flattens in ("false", "true")
    )
    (added,) = added_bytes(tmp_path, (apart, flat), length=1, dp=8, pp=1)
    parameters = trace("tiny-llama", 1, 1, "bfloat16", target="cuda").num_parameters
    assert 0 < added <= 4 * parameters


def test_kernels_of_the_backward_have_scratch_of_their_own(tmp_path: Path) -> None:
    none, eight = (
        f"""based_on = "megatron-lm"
[[kernels]]
name = "softmax"
around = ["_softmax"]
absorbs = ["mul", "masked_fill", "_to_copy"]
keeps = ["results"]
backward_scratch_bytes = {scratch}
"""
        for scratch in (0, 8)
    )
    (added,) = added_bytes(tmp_path, (none, eight), length=2048, dp=8, pp=1)
    assert 0 < added <= 8 * config_of("tiny-llama")["num_attention_heads"] * 2048**2


def test_column_parallel_matmuls_may_keep_copies_of_their_input(tmp_path: Path) -> None:
    shared, copied = (
        f'based_on = "megatron-lm"\nattention = "fused"\ncolumn_inputs = "{inputs}"'
        for inputs in ("shared", "copied")
    )
    deep = resolve("tiny-llama", {"num_hidden_layers": 8})
    (added,) = added_bytes(tmp_path, (shared, copied), length=2048, model=deep, tp=2, dp=4, pp=1)
    # Two of three copies for queries, keys and values, and one of two for both parts of the gate, are in addition.
    assert added == pytest.approx(8 * 3 * 2 * 2048 * config_of("tiny-llama")["hidden_size"], rel=0.15)
