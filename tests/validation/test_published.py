"""Published throughput and configurations: what is judged, what is left out and why, and how near the judged ones come."""

from __future__ import annotations

import csv
from dataclasses import replace

import known_answers
import megatron_bridge
import pytest
import throughput

from stagewright.cluster import load_cluster
from stagewright.estimation.megatron.kernels import Kernel, Pass
from stagewright.estimation.megatron.seconds import kernel_seconds


def _records() -> list[dict[str, str]]:
    with (throughput.DATA / throughput.BRIDGE).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _row(model: str, system: str) -> dict[str, str]:
    return next(
        record for record in _records() if record["model"] == model and record["system"].endswith(system)
    )


def test_as_many_rows_of_megatron_bridge_are_judged_and_left_out_as_the_results_say() -> None:
    """`validation/results/throughput-2026-11-21.md` states these numbers: change both or neither."""
    records = _records()
    judged = [record for record in records if throughput.bridge(record) is not None]
    assert len(judged) == 89
    assert sorted(megatron_bridge.left_out(records).values()) == [3, 17, 39]
    assert {megatron_bridge.device_of(record) for record in judged} == {
        "h100",
        "b200",
        "b300",
        "gb200",
        "gb300",
    }


@pytest.mark.parametrize(
    ("model", "system"), [("LLAMA3_70B", "DGX-H100"), ("LLAMA3.1_405B", "DGX-H100"), ("Qwen3_30B_a3B", "DGX-B200")]
)  # fmt: skip
def test_runs_in_eight_bits_come_within_an_eighth(model: str, system: str) -> None:
    judged = throughput.bridge(_row(model, system))
    assert judged is not None
    _, predicted, published = judged
    assert predicted == pytest.approx(published, rel=0.125)


def test_eight_bits_spare_attention_and_the_head() -> None:
    cluster = load_cluster("8x8x-h100")
    run = megatron_bridge.run_of(_row("LLAMA3_70B", "DGX-H100"), cluster)
    half = replace(run, stack=replace(run.stack, computes_in=None), known={})
    attention = Kernel("attention", 1e12, 0.0)
    head = Kernel("matmul", 1e12, 0.0, in_half=True)
    linear = Kernel("matmul", 1e12, 0.0)
    for kernel in (attention, head):
        assert run.clock.pass_seconds(_alone(kernel)) == half.clock.pass_seconds(_alone(kernel))
    device = cluster.device_of(0)
    assert kernel_seconds(linear, device, "fp8") < kernel_seconds(linear, device, "bf16")
    assert run.clock.pass_seconds(_alone(linear)).seconds < half.clock.pass_seconds(_alone(linear)).seconds


def _alone(kernel: Kernel) -> Pass:
    return Pass((kernel,))


def test_a_known_configuration_is_predicted_as_it_ran_and_never_beats_ours() -> None:
    known = next(known for known in known_answers.KNOWN if known.name == "GPT 39.1B")
    found = known_answers.answer(known)["found"]
    assert isinstance(found, dict)
    assert found["ran"]["mfu"] == pytest.approx(known.published_mfu, rel=0.05)
    assert found["ours"]["step_s"] <= found["theirs"]["step_s"]
