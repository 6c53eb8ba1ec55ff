"""What ring attention takes beside its kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stagewright.cluster import all_gather_seconds, load_cluster
from stagewright.estimation.collectives import ring_seconds
from stagewright.estimation.time import Costing
from stagewright.graph.graph import short_name
from stagewright.graph.tensor_parallel import neighbour_strides
from stagewright.tracing.cache import trace

TOKENS, SIZE = 256, 2
GATHERED = {"attention": "fused", "target": "cuda"}


@pytest.mark.parametrize("cp", [2, 4])
def test_results_are_added_in_float32_and_all_heads_are_gathered(cp: int) -> None:
    graph = trace("tiny-llama", SIZE, TOKENS, "bfloat16", {"num_hidden_layers": 1}, cp=cp, **GATHERED)
    cluster = load_cluster("8x-h100")
    value, strides = graph.values.__getitem__, neighbour_strides(graph)
    found = {
        short_name(node.op): (node, ring_seconds(node, value, cluster, strides, cluster.device))
        for node in graph.nodes
        if ring_seconds(node, value, cluster, strides, cluster.device)
    }
    assert set(found) == {"shared_attention", "shared_attention_backward"}
    node, forward_s = found["shared_attention"]
    batch, heads, tokens, width = value(node.inputs[0]).meta.shape
    assert (batch, tokens) == (SIZE, TOKENS // cp)
    key_heads = value(node.inputs[1]).meta.shape[1]
    assert heads > key_heads  # otherwise nothing is repeated
    queries = 4 * batch * heads * tokens * width
    shared = 2 * 2 * batch * key_heads * TOKENS * width
    whole_s = all_gather_seconds(cluster, heads // key_heads * shared, range(cp))
    again_s = whole_s - all_gather_seconds(cluster, shared, range(cp))
    memory = cluster.device.memory_seconds
    assert forward_s == pytest.approx(memory(queries * (8.1 * (cp - 1) + 3)) + again_s)
    assert found["shared_attention_backward"][1] == pytest.approx(
        memory(queries * (12.6 * cp + 7.5)) + whole_s
    )


def test_only_runtimes_with_a_ring_pay_for_it() -> None:
    cluster = load_cluster("8x-h100")
    plain = trace("tiny-llama", SIZE, TOKENS, "bfloat16", {"num_hidden_layers": 1}, cp=2, **GATHERED)
    ringed = replace(plain, facts=plain.facts | {"runtime": "torch-fsdp"})
    value, strides = plain.values.__getitem__, neighbour_strides(plain)
    (node,) = [one for one in plain.nodes if short_name(one.op) == "shared_attention"]
    own_s, ring_s = (
        Costing(graph, cluster.device, cluster).of(node, value).device_s for graph in (plain, ringed)
    )
    assert ring_s == pytest.approx(
        own_s + ring_seconds(node, value, cluster, strides, cluster.device), rel=1e-6
    )
