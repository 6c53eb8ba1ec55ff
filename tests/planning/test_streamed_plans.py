"""Streamed weights in plans: where devices lack memory, with the seconds of the link, and refused where they cannot be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from small_devices import with_room

from stagewright.cluster import Cluster, load_cluster
from stagewright.errors import InputError, PlanError
from stagewright.planning.estimate import estimate
from stagewright.planning.plan import Plan
from stagewright.planning.prediction.sharding import HostCopies
from stagewright.planning.search import plan
from stagewright.tracing.models.lora import Lora
from stagewright.tracing.models.reference import resolve
from stagewright.units import MIB

MODEL = resolve("tiny-llama", {"num_hidden_layers": 8})
ADAPTED = MODEL.adapted(Lora(rank=4, alpha=8))
JOB: dict[str, Any] = {"global_batch": 8, "sequence_length": 64, "dtype": "bf16"}


def small(megabytes: int, link: float = 20e9) -> Cluster:
    cluster = load_cluster("2x-rtx3090")
    (node,) = cluster.nodes
    device = with_room(node.device, megabytes * MIB).model_copy(update={"host_link_bandwidth": link})
    return cluster.model_copy(update={"nodes": (node.model_copy(update={"device": device}),)})


def planned(cluster: Cluster, **options: Any) -> Plan:
    return plan(ADAPTED, cluster, JOB, pp=2, is_improved=False, **options).plans[0]


def estimated(cluster: Cluster, **fields: Any) -> Plan:
    return estimate(
        MODEL,
        cluster,
        JOB,
        pp=2,
        dp=1,
        schedule="breadth-first",
        chunks=4,
        recompute="full",
        streamed=True,
        **fields,
    )


def test_weights_are_streamed_where_they_do_not_fit() -> None:
    assert not planned(small(1000)).streamed
    weights = sum(rank.categories["parameters"] for rank in planned(small(1000)).predictions.ranks)
    tight = small(28)
    with pytest.raises(PlanError, match="no configuration fits"):
        planned(tight, streamed="never")
    streamed = planned(tight)
    assert streamed.streamed and streamed.schedule == "breadth-first" and not streamed.host_optimizer
    assert all(rank.reserved_peak_bytes <= 28 * MIB for rank in streamed.predictions.ranks)
    assert sum(rank.host_bytes for rank in streamed.predictions.ranks) == pytest.approx(weights, rel=0.2)


def test_weights_are_streamed_too_where_partitions_turn_out_to_lack_memory() -> None:
    """Where the state of the optimizer is too little to make up for what they lack."""
    assert planned(small(30)).streamed


def test_a_model_trained_whole_has_its_optimizer_on_the_host() -> None:
    streamed = estimated(small(1000))
    assert streamed.host_optimizer == (0, 1)
    assert all(
        not rank.categories["parameters"] + rank.categories["optimizer"]
        for rank in streamed.predictions.ranks
    )
    assert {text[-6:] for actions in streamed.program for text in actions if "E" in text} == {
        "GATHER",
        "ELEASE",
        "REDUCE",
    }


def test_a_slow_link_makes_ranks_wait() -> None:
    fast, slow = (estimated(small(1000, link)).predictions for link in (20e9, 0.1e9))
    assert fast.costs is not None and slow.costs is not None
    ratio = slow.costs.gather_seconds[2] / fast.costs.gather_seconds[2]
    assert ratio == pytest.approx(200, rel=1e-6)
    assert slow.step_seconds > sum(slow.costs.gather_seconds[2::2]) > fast.step_seconds


def test_all_devices_together_read_no_faster_than_the_host() -> None:
    cluster = load_cluster("2x-rtx3090")
    (node,) = cluster.nodes
    (flat,) = (buffer for buffer in _flats() if buffer.stages == (2,))
    assert node.host is not None
    copies = HostCopies(node.device, node.host, _runtime())
    slow = replace(copies, host=node.host.model_copy(update={"memory_bandwidth": 1e9}))
    assert slow.gather([flat]) == node.host.model_copy(update={"memory_bandwidth": 1e9}).memory_seconds(
        2 * flat.num_elements
    )
    assert copies.gather([flat]) == 2 * flat.num_elements / node.device.host_link_bandwidth


def _flats() -> Any:
    from stagewright.planning.estimate import staged_model_of

    return staged_model_of(estimated(small(1000)), small(1000)).flats


def _runtime() -> Any:
    from stagewright.estimation.runtime import STAGEWRIGHT, load_runtime

    return load_runtime(STAGEWRIGHT)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dp": 2}, "streamed weights are for one replica"),
        ({"zero": 3}, "streamed weights are for one replica"),
        ({"streamed": "sometimes"}, "--streamed sometimes"),
        (
            {"pp": 1, "tp": 1},
            "need one replica .* 3 stages a rank of a layer or more, but the model has 8 layers",
        ),
    ],
)
def test_what_cannot_be_streamed_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        plan(MODEL, small(1000), JOB, **{"streamed": "always", **options})


def test_other_runtimes_do_not_stream() -> None:
    with pytest.raises(InputError, match="does not stream"):
        estimate(MODEL, small(1000), {**JOB, "runtime": "megatron-lm"}, pp=2, streamed=True)
