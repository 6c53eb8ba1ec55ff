"""Plans whose ranks share layers: what the links between them cost, and which widths a search tries."""

from __future__ import annotations

import pytest

from stagewright.cluster import Cluster, all_reduce_seconds, load_cluster
from stagewright.errors import InputError
from stagewright.estimation.collectives import slowest_group
from stagewright.estimation.time import Costing
from stagewright.graph.tensor_parallel import ALL_REDUCE
from stagewright.planning.estimate import estimate
from stagewright.planning.job import Job
from stagewright.planning.plan import Plan
from stagewright.planning.search import plan
from stagewright.tracing.cache import trace

CLUSTER = load_cluster("4x-h100")
JOB = Job(global_batch=8, sequence_length=32, dtype="fp32")


def slower(factor: float) -> Cluster:
    """`CLUSTER` with links inside the node of a part of the bandwidth and as many times the latency."""
    group = CLUSTER.nodes[0]
    link = group.intra_node
    changed = link.model_copy(
        update={
            "latency_s": link.latency_s * factor, "bandwidth": link.bandwidth / factor,
            "ring_bandwidth": link.collective_bandwidth / factor,
        }
    )  # fmt: skip
    nodes = (group.model_copy(update={"intra_node": changed}),)
    return Cluster.model_construct(name="slower", nodes=nodes, measured=None)


def test_sums_over_ranks_cost_what_their_links_take() -> None:
    graph = trace("tiny-llama", 2, 32, "float32", tp=2)
    sums = [node for node in graph.nodes if node.op == ALL_REDUCE]
    sizes = [graph.values[node.inputs[0]].meta.payload_bytes for node in sums]
    slow = slower(10)
    near, far = (Costing(graph, CLUSTER.device, cluster) for cluster in (CLUSTER, slow))
    found = [far.of(node, graph.values.__getitem__).device_s for node in sums]
    less = [near.of(node, graph.values.__getitem__).device_s for node in sums]
    expected = [
        all_reduce_seconds(slow, size, range(2)) - all_reduce_seconds(CLUSTER, size, range(2))
        for size in sizes
    ]
    assert [a - b for a, b in zip(found, less, strict=True)] == pytest.approx(expected)
    with pytest.raises(InputError, match="split over 2 ranks"):
        Costing(graph, CLUSTER.device)


def test_a_group_that_spans_nodes_is_the_one_that_counts() -> None:
    two_nodes = load_cluster("16x-h100")
    assert list(slowest_group(two_nodes, 4)) in ([0, 1, 2, 3], [4, 5, 6, 7])
    assert two_nodes.num_nodes == 2 and list(slowest_group(two_nodes, 16)) == list(range(16))


def test_sharing_layers_shares_their_memory() -> None:
    alone, shared = (estimate("tiny-llama", CLUSTER, JOB, dp=1, pp=1, tp=tp) for tp in (1, 2))
    whole, part = (found.predictions.ranks[0].categories for found in (alone, shared))
    assert 0.5 < part["parameters"] / whole["parameters"] < 0.51
    assert shared.num_ranks == 2 and shared.tp == 2
    assert Plan.model_validate_json(shared.model_dump_json()) == shared
    again = estimate(shared, CLUSTER)
    assert again.predictions == shared.predictions


def test_a_search_tries_the_widths_that_divide_the_model() -> None:
    found = plan("tiny-gemma", CLUSTER, JOB, tp=None, microbatch=2, schedules=["1f1b"])
    assert {one.tp for one in found.plans} == {1}
    refused = [one for one in found.excluded if one.tp > 1]
    assert {one.tp for one in refused} == {2, 4} and all("key-value heads" in one.reason for one in refused)
    wide = plan("tiny-llama", CLUSTER, JOB, tp=None, microbatch=2, schedules=["1f1b"], keep=64)
    tried = {one.tp for one in (*wide.plans, *wide.excluded)}
    assert tried == {1, 2, 4} and all(one.num_ranks == 4 for one in wide.plans)
    with pytest.raises(InputError, match="tp = 3 does not divide the 4 devices"):
        plan("tiny-llama", CLUSTER, JOB, tp=3)
