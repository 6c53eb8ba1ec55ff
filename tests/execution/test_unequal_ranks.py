"""A pipeline over processes with unequal numbers of threads, planned for what each has, trains as equal ones do."""

from __future__ import annotations

from pathlib import Path

import pytest
from plans import trained

from local_cluster import local
from stagewright.cluster import Cluster
from stagewright.execution.planned_device import num_threads
from stagewright.planning.job import Job
from stagewright.planning.search import plan
from stagewright.tracing.models.reference import resolve

MODEL = resolve("tiny-llama", {"num_hidden_layers": 4})


def processes(*threads: int) -> Cluster:
    """One process on a CPU for each of `threads`, as fast as it has threads."""
    (node,) = local(1).nodes
    whole = node.device
    nodes = []
    for count in threads:
        peaks = {name: value * count / 4 for name, value in whole.peak_flops if value}
        update = {
            "name": f"{count} threads",
            "num_threads": count,
            "peak_flops": whole.peak_flops.model_copy(update=peaks),
            "memory_bandwidth": whole.memory_bandwidth * count / 4,
            "host_overhead_s": 0.0,
            "launch_overhead_s": 0.0,
        }
        nodes.append(node.model_copy(update={"device": whole.model_copy(update=update), "count": 1}))
    return Cluster(name="processes", nodes=tuple(nodes))


@pytest.mark.multiprocess
def test_ranks_with_unequal_threads(tmp_path: Path) -> None:
    job = Job(global_batch=8, sequence_length=48, dtype="fp32", num_steps=2)
    equal, unequal = (
        plan(MODEL, processes(*threads), job, pp=2, microbatch=2, schedules=["1f1b"]).plans[0]
        for threads in ((1, 1), (1, 2))
    )
    assert equal.cuts != unequal.cuts
    assert sorted(num_threads(unequal, device) or 0 for device in unequal.devices or (0, 1)) == [1, 2]
    wanted, got = trained(equal, tmp_path / "equal"), trained(unequal, tmp_path / "unequal")
    assert got.losses == pytest.approx(wanted.losses, rel=1e-6)
    predicted = [rank.allocated_peak_bytes for rank in unequal.predictions.ranks]
    assert [rank.allocated_peak_bytes for rank in got.ranks] == predicted
