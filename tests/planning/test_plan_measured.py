"""Plans on measured links: a slow one that ranks can go around costs nothing, in cuts either."""

from __future__ import annotations

import numpy as np
import pytest

from stagewright.cluster import Cluster, MeasuredBandwidth, load_cluster
from stagewright.planning import search
from stagewright.planning.job import Job
from stagewright.planning.plan import Plan
from stagewright.tracing.models.reference import resolve


def with_slow(pair: tuple[int, int] | None) -> Cluster:
    rates = np.full((4, 4), 2e9)
    if pair is not None:
        rates[pair] = 2e7
    measured = MeasuredBandwidth(
        bandwidth=tuple(map(tuple, rates.tolist())), sources={"bandwidth": "planted"}
    )
    return load_cluster("4x1x-a100-40").model_copy(update={"measured": measured})


def planned(cluster: Cluster) -> Plan:
    job = Job(global_batch=8, sequence_length=128, num_steps=1)
    found = search.plan(
        resolve("tiny-gpt2", {"n_layer": 6}), cluster, job, pp=4, schedules=("1f1b",), recompute="none"
    )
    return found.plans[0]


@pytest.mark.parametrize("pair", [(0, 1), (3, 0)])
def test_a_slow_link_costs_a_plan_nothing_where_its_ranks_can_go_around_it(pair: tuple[int, int]) -> None:
    """Nodes 3 and 0 hold the two ends of a tied embedding in the nodes' own order."""
    plain, slow = planned(with_slow(None)), planned(with_slow(pair))
    assert slow.predictions.step_seconds == pytest.approx(plain.predictions.step_seconds, rel=1e-6)
    assert slow.cuts == plain.cuts
    neighbours = [set(slow.devices[rank : rank + 2]) for rank in range(3)]
    assert set(pair) not in [*neighbours, {slow.devices[0], slow.devices[-1]}]
    loaded, given = slow.cluster.load().measured, with_slow(pair).measured
    assert loaded is not None and given is not None and loaded.bandwidth == given.bandwidth
