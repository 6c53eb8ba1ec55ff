"""Pieces of a chain: minimum cuts as a library computes them, and equal pieces examined once."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from stagewright.cluster import load_cluster
from stagewright.estimation.stage_memory import StageMemory
from stagewright.estimation.time import Costing
from stagewright.graph.split import split_graph
from stagewright.planning.checkpointing.chain import Chain, chain_of
from stagewright.planning.checkpointing.pieces import _reached
from stagewright.planning.checkpointing.rank_chain import PieceCache, network_of
from stagewright.tracing.cache import trace


@pytest.mark.parametrize("seed", range(20))
def test_what_the_source_reaches_is_what_maximum_flow_leaves(seed: int) -> None:
    draw = random.Random(seed)
    size = draw.randint(3, 40)
    pairs = {(draw.randrange(size), draw.randrange(size)) for _ in range(4 * size)}
    capacities = {(a, b): draw.randint(1, 50) for a, b in pairs if a != b}
    starts, ends = np.array(list(capacities), np.int64).T
    room = np.array(list(capacities.values()), np.int64)

    graph = csr_array((room.astype(np.int32), (starts, ends)), shape=(size, size))
    left = graph - maximum_flow(graph, 0, 1).flow
    left.eliminate_zeros()
    expected = np.zeros(size, bool)
    expected[breadth_first_order(left, 0, return_predecessors=False)] = True
    assert _reached(size, starts.copy(), ends.copy(), room).tolist() == expected.tolist()


def chain_of_model(model: str) -> Chain:
    graph = trace(model, 2, 32, "float32")
    (whole,) = split_graph(graph, [])
    return chain_of(StageMemory(whole), Costing(graph, load_cluster("2x-h100").device))


@pytest.mark.parametrize("link_s_per_byte", [math.inf, 1e-10])
def test_equal_pieces_have_the_points_of_each(link_s_per_byte: float) -> None:
    chain, cache = chain_of_model("tiny-llama"), PieceCache()
    last = len(chain.boundaries) - 1
    for stop in range(1, last + 1):
        for length in (1, 2, 4):
            if length > stop:
                continue
            network = network_of(chain, stop - length, stop)
            points = network.points(length <= 2)
            if math.isfinite(link_s_per_byte):
                first, end = chain.boundaries[stop - length], chain.boundaries[stop]
                points = network.with_moves(points, link_s_per_byte, chain.spare_s(first, end))
            assert cache.points(chain, stop - length, stop, link_s_per_byte) == points
    assert len(cache._points) < len(cache._at)  # layers are equal


def test_copies_at_the_end_of_a_stage_have_no_time() -> None:
    chain = chain_of_model("tiny-llama")
    last = len(chain.boundaries) - 1
    network = network_of(chain, last - 1, last)
    points = network.points(True)
    (everything,) = (point for point in points if not point.ran)
    link_s_per_byte = sum(network.seconds) / everything.kept_bytes  # as much as the link moves meanwhile

    def seconds(spare_s: float) -> float:
        """Of the point that moves all."""
        moved = network.with_moves([everything], link_s_per_byte, spare_s)
        return next(point.seconds for point in moved if point.moved_bytes == everything.kept_bytes)

    assert seconds(sum(network.seconds)) == pytest.approx(0.0, abs=1e-12)
    assert 0 < seconds(0.0) <= sum(network.seconds) * (1 + 1e-9)
