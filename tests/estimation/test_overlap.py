"""Which collectives overlap with which matmuls, and what of them remains."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from stagewright.cluster import load_cluster
from stagewright.estimation.overlap import OverlappedCollectives, Overlaps, Pair, pairs_of
from stagewright.estimation.time import Costing
from stagewright.graph import OperatorGraph, Part
from stagewright.graph.graph import short_name
from stagewright.graph.split import split_graph
from stagewright.graph.tensor_parallel import REDUCE_SCATTER
from stagewright.planning.bounds.layer_costs import Layers
from stagewright.planning.job import Job
from stagewright.planning.prediction.regions import kept_policy
from stagewright.planning.prediction.staged_model import costs_of_model
from stagewright.tracing.cache import trace

CLUSTER = load_cluster("2x8x-h100")
RANKS = 4


@cache
def traced(cp: int = 1, size: int = 2) -> OperatorGraph:
    return trace(
        "tiny-llama", size, 64, "bfloat16",
        target="cuda", attention="fused", tp=RANKS, cp=cp, splits_sequence=True,
    )  # fmt: skip


def job(folder: Path, which: OverlappedCollectives, based_on: str = "megatron-core+te") -> Job:
    file = folder / f"{based_on}-{which}.toml"
    file.write_text(f'based_on = "{based_on}"\noverlapped_collectives = "{which}"\n')
    return Job(global_batch=16, sequence_length=64, runtime=str(file))


def costing(wanted: Job, cp: int = 1) -> Costing:
    return costs_of_model(wanted.rewritten(traced(cp)), CLUSTER, wanted).costing


def described(
    graph: OperatorGraph, which: OverlappedCollectives, layer: str
) -> set[tuple[str, str, tuple[str, ...], float, float]]:
    """Return the pairs of one layer, by the last part of modules and the names of operators and parts."""
    pairs = set()
    for pair in pairs_of(graph, which):
        node = graph.nodes[pair.collective]
        if f".layers.{layer}." in f"{node.module}.":
            kernels = [graph.nodes[kernel] for kernel in pair.kernels]
            names = tuple(f"{short_name(kernel.op)} {kernel.part.name.lower()}" for kernel in kernels)
            place = f"{node.module.rpartition('.')[2]} {node.part.name.lower()}"
            pairs.add((f"{short_name(node.op)} {place}", names, pair.alone, pair.exposed))
    return pairs


def test_a_worked_example() -> None:
    """Around a ring of four, with a matmul of 40 microseconds: three quarters of it hide 30 of a gather's 50. With a
    reduce-scatter of 20 in four parts the last part remains, and 12 of another's 20 hide during 16 of a matmul."""
    collective_s = np.array([0, 50.0, 0, 20, 0, 20])
    kernel_s = np.array([40.0, 0, 60, 0, 16, 0])
    pairs = [
        Pair(1, (0,), alone=1 / 4),
        Pair(3, (2,), alone=1 / 4, exposed=1 / 4),
        Pair(5, (4,), alone=1 / 4),
    ]
    overlaps = Overlaps(pairs, collective_s, kernel_s)
    assert overlaps.hidden_seconds(np.arange(6)).tolist() == [0, 30, 0, 15, 0, 12, 0]
    assert overlaps.hidden_seconds(np.array([1, 2, 3, 5, -1])).tolist() == [0, 0, 0, 15, 0, 0, 0]
    assert overlaps.hidden_seconds(np.array([0, 2, 4])).tolist() == [0] * 7


def test_several_matmuls_hide_one_gather_and_one_of_two_pairs_counts() -> None:
    pairs = [Pair(0, (1, 2), alone=1 / 2), Pair(0, (3,))]
    overlaps = Overlaps(pairs, np.array([100.0, 0, 0, 0]), np.array([0, 30.0, 50, 20]))
    for nodes, hidden_s in (([0, 1, 2], 40), ([0, 1], 15), ([0, 3], 20), ([0, 1, 2, 3], 40), ([0], 0)):
        assert overlaps.hidden_seconds(np.array(nodes))[0] == hidden_s


def test_libraries_pair_collectives_with_the_matmuls_of_their_layer(tmp_path: Path) -> None:
    quarter = 1 / RANKS
    graph = costing(job(tmp_path, "all")).graph
    assert described(graph, "all", "1") == {
        ("all_gather self_attn forward", ("joined products forward",), quarter, 0.0),
        ("all_gather self_attn forward", ("joined products input_grad",), 0.0, 0.0),
        ("reduce_scatter o_proj forward", ("mm forward",), 1 / 4, 1 / 4),
        ("all_gather mlp forward", ("joined products forward",), quarter, 0.0),
        ("all_gather mlp forward", ("joined products input_grad",), 0.0, 0.0),
        ("reduce_scatter down_proj forward", ("mm forward",), 1 / 4, 1 / 4),
        ("all_gather down_proj input_grad", ("mm input_grad",), quarter, 0.0),
        ("reduce_scatter mlp input_grad", ("joined products weight_grad",), 0.0, 0.0),
        ("all_gather o_proj input_grad", ("mm input_grad",), quarter, 0.0),
        ("reduce_scatter self_attn input_grad", ("joined products weight_grad",), 0.0, 0.0),
    }
    whole = {pair for pair in described(graph, "all", "1") if pair[2] == 0.0}
    assert described(graph, "backward", "1") == whole and not pairs_of(graph, "none")


def test_a_compiler_leaves_reduced_sums_of_several_matmuls_alone(tmp_path: Path) -> None:
    graph = costing(job(tmp_path, "fused", "torch-fsdp")).graph
    quarter = 1 / RANKS
    assert described(graph, "fused", "1") == {
        ("all_gather self_attn forward", ("mm forward",) * 3, quarter, 0.0),
        ("reduce_scatter o_proj forward", ("mm forward",), quarter, 0.0),
        ("all_gather mlp forward", ("mm forward",) * 2, quarter, 0.0),
        ("reduce_scatter down_proj forward", ("mm forward",), quarter, 0.0),
        ("all_gather down_proj input_grad", ("mm input_grad",), quarter, 0.0),
        ("all_gather o_proj input_grad", ("mm input_grad",), quarter, 0.0),
    }


def test_context_parallel_ranks_exchange_keys_during_attention(tmp_path: Path) -> None:
    graph = costing(job(tmp_path, "all"), cp=2).graph
    pairs = described(graph, "all", "1") - described(graph, "backward", "1")
    rings = {(name, kernels) for name, kernels, alone, _ in pairs if alone == 1 / 2}
    assert rings == {
        ("all_gather self_attn forward", ("shared_attention forward",)),
        ("reduce_scatter self_attn input_grad", ("shared_attention_backward input_grad",)),
    }


def test_what_is_not_hidden_is_time_of_the_device(tmp_path: Path) -> None:
    costs = costing(job(tmp_path, "all"))
    (stage,) = split_graph(costs.graph, [], [kept_policy(costs.graph)])
    value = stage.value
    columns = costs.columns(stage.forward.nodes, value)
    for place, node in enumerate(stage.forward.nodes):
        cost = costs.of(node, value)
        if node.op == REDUCE_SCATTER and ".layers." in node.module:
            maker = stage.forward.nodes[place - 2]
            assert short_name(maker.op) == "mm"
            sent_s, matmul_s = cost.overlapped_s, costs.of(maker, value).kernel_s
            shown_s = cost.device_s - sent_s + max(sent_s / 4, sent_s - 3 / 4 * matmul_s)
            assert columns[0, place] == pytest.approx(shown_s)
        elif node.op not in ("stagewright.all_gather.default", REDUCE_SCATTER):
            assert columns[0, place] == cost.device_s
    assert costs.sums(stage.forward.nodes, value).device_s == pytest.approx(columns[0].sum())


def test_reductions_wait_where_gradients_of_weights_come_later(tmp_path: Path) -> None:
    costs = costing(job(tmp_path, "all"))
    (stage,) = split_graph(costs.graph, [], [kept_policy(costs.graph)])
    hidden: dict[str, list[float]] = {}
    for name, function in (("whole", stage.backward), ("split", stage.input_grad)):
        columns = costs.columns(function.nodes, stage.value)
        hidden[name] = [
            costs.of(node, stage.value).device_s - seconds
            for node, seconds in zip(function.nodes, columns[0].tolist(), strict=True)
            if node.op == REDUCE_SCATTER and node.part is Part.INPUT_GRAD and ".layers." in node.module
        ]
    assert min(hidden["whole"]) > 0 and hidden["split"] == [0.0] * len(hidden["whole"])


def test_costs_of_layers_add_up_to_those_of_the_model(tmp_path: Path) -> None:
    for which, based_on in (("all", "megatron-core+te"), ("fused", "torch-fsdp"), ("none", "torch-fsdp")):
        wanted = job(tmp_path, which, based_on)  # type: ignore[arg-type]
        layers = Layers(traced(), CLUSTER, wanted)
        costs, stage = costing(wanted), layers.stage("none")
        by_layer = layers.costs(CLUSTER.device, "none")
        for columns, nodes in (
            (by_layer.forward, stage.forward.nodes),
            (by_layer.backward, (*stage.rebuild.nodes, *stage.backward.nodes)),
        ):
            assert columns.sum(axis=0).tolist() == pytest.approx(costs.sums(nodes, stage.value))


@pytest.mark.parametrize(("which", "based_on"), [("all", "megatron-core+te"), ("fused", "torch-fsdp")])
def test_bounds_on_larger_microbatches_hold(
    tmp_path: Path, which: OverlappedCollectives, based_on: str
) -> None:
    wanted = job(tmp_path, which, based_on)
    layers = {size: Layers(traced(size=size), CLUSTER, wanted) for size in (2, 16)}
    seconds = {size: layers[size].costs(CLUSTER.device, "none").total_seconds / size for size in layers}
    assert 0 < layers[2].growing_share * seconds[2] <= seconds[16]
