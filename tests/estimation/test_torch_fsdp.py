"""PyTorch's fully sharded data parallelism as a runtime: its units, what it keeps, and what its collectives cost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from stagewright.cluster import load_cluster
from stagewright.errors import InputError
from stagewright.estimation.runtime import load_runtime
from stagewright.graph import Node, Part
from stagewright.graph.graph import short_name
from stagewright.graph.layers import layer_of
from stagewright.graph.tensor_parallel import COLLECTIVES
from stagewright.planning.estimate import estimate, staged_model_of
from stagewright.planning.job import Job
from stagewright.planning.plan import Plan
from stagewright.planning.prediction.predict import action_costs
from stagewright.planning.prediction.regions import layers_policy, selective_policy
from stagewright.planning.prediction.staged_model import costs_of_model
from stagewright.schedule import Kind, build, insert_microbatch_gathers
from stagewright.tracing.cache import trace
from stagewright.tracing.models.reference import resolve

CLUSTER = load_cluster("8x-h100")


def estimated(
    runtime: str = "torch-fsdp", compiled: bool = False, microbatch: int = 2, **options: object
) -> Plan:
    job = Job(global_batch=32, sequence_length=64, dtype="bf16", runtime=runtime, compiled=compiled)
    return estimate("tiny-llama", CLUSTER, job, dp=8, pp=1, microbatch=microbatch, **options)  # type: ignore[arg-type]


def changed(folder: Path, text: str) -> str:
    path = folder / "other.toml"
    path.write_text(f'based_on = "torch-fsdp"\n{text}\n')
    return str(path)


def test_every_layer_is_gathered_and_reduced_on_its_own() -> None:
    found = estimated(zero=3)
    graph = trace("tiny-llama", 2, 64, "bfloat16", target="cuda", attention="fused")
    names = [layer_of(graph.nodes[node].module) for node in graph.forward_ids]
    units = [one for index, one in enumerate(names) if index == 0 or names[index - 1] != one]
    assert found.num_stages == len(units) == len(set(names) - {""}) + 2
    (actions,) = found.program
    counts = [[actions.count(f"{unit}{kind}") for kind in ("GATHER", "REDUCE")] for unit in range(len(units))]
    root, layers = [0, len(units) - 1], range(1, len(units) - 1)
    assert all(counts[unit] == [2, 2] for unit in root)  # whole through each of two microbatches
    assert all(counts[unit][0] >= 2 and counts[unit][1] == 2 for unit in layers)
    assert max(counts[unit][0] for unit in layers) > 2  # for forward and backward
    ends = [index for index, text in enumerate(actions) if text == "0RELEASE"]
    assert [actions[index - 1] for index in ends] == ["0B0", "0B1"]


def test_shards_are_fp32_masters_and_nothing_else(tmp_path: Path) -> None:
    found = estimated(zero=3).predictions.ranks[0]
    other = estimated(changed(tmp_path, "[optimizer]\ngathers_masters = false"), zero=3).predictions.ranks[0]
    assert found.categories["parameters"] == 0 < other.categories["parameters"]
    assert found.categories["master"] == other.categories["master"] == 2 * other.categories["parameters"]


def test_selective_recomputation_keeps_every_second_product() -> None:
    job = Job(global_batch=8, sequence_length=64, dtype="bf16", runtime="torch-fsdp")
    graph = costs_of_model(
        trace("tiny-llama", 2, 64, "bfloat16", target="cuda", attention="fused"), CLUSTER, job
    ).graph
    kept = selective_policy(graph).checkpoints - layers_policy(graph).checkpoints
    makers = [graph.nodes[graph.values[value].node] for value in kept]
    first = [node for node in makers if layer_of(node.module).endswith(".0")]
    names = sorted(node.module.rpartition(".")[2] for node in first if short_name(node.op) == "mm")
    assert names == ["down_proj", "gate_proj", "q_proj", "v_proj"]
    assert any("attention" in node.op for node in first)

    plans = [estimated(zero=3, recompute=how) for how in ("none", "selective", "full")]
    peaks = [one.predictions.ranks[0].allocated_peak_bytes for one in plans]
    seconds = [one.predictions.ranks[0].busy_seconds for one in plans]
    assert peaks[0] > peaks[1] > peaks[2]
    assert seconds[0] < seconds[1] < seconds[2]
    assert set(plans[1].memory_policy) == {"selective"}


def test_collectives_slow_what_runs_beside_them(tmp_path: Path) -> None:
    slowed, alone = estimated(zero=3), estimated(changed(tmp_path, "[waits]\nbeside_share = 0.0"), zero=3)
    costs = slowed.predictions.costs
    gathers = sum(
        costs.gather_seconds[int(text.removesuffix("GATHER"))]
        for text in slowed.program[0]
        if "GATHER" in text
    )
    reductions = 2 * sum(costs.reduce_seconds)
    longer = slowed.predictions.ranks[0].busy_seconds - alone.predictions.ranks[0].busy_seconds
    share = load_runtime("torch-fsdp").waits.beside_share
    assert longer == pytest.approx(share * (gathers + reductions), rel=1e-6)


def test_attention_kernels_of_another_speed(tmp_path: Path) -> None:
    device = CLUSTER.device
    graph = trace("tiny-llama", 1, 4096, "bfloat16", target="cuda", attention="fused")
    job = Job(global_batch=1, sequence_length=4096, dtype="bf16", runtime="torch-fsdp")
    slow = job.model_copy(update={"runtime": changed(tmp_path, "attention_rate = 0.5")})
    plain, other = (costs_of_model(graph, CLUSTER, one).costing.arrays[0] for one in (job, slow))
    names = [short_name(node.op) for node in graph.nodes]
    attention = [index for index, name in enumerate(names) if "attention" in name]
    rest = [index for index in range(len(names)) if index not in attention]
    assert len(attention) > 1
    assert (other[attention] > 1.2 * plain[attention]).all()
    assert (other[rest] == plain[rest]).all()
    assert device.with_attention(1.0) is device
    half = device.with_attention(0.5)
    assert half.attention_efficiency == device.attention_efficiency / 2
    assert half.attention_backward_efficiency == device.attention_backward_efficiency / 2


def test_compiled_where_the_runtime_names_no_kernels(tmp_path: Path) -> None:
    eager, compiled = (estimated(compiled=one, zero=3).predictions for one in (False, True))
    assert compiled.ranks[0].busy_seconds < eager.ranks[0].busy_seconds
    kernel = '[[kernels]]\nname = "gate"\naround = ["silu"]\nabsorbs = ["mul"]\nsources.absorbs = "here"'
    with pytest.raises(InputError, match="leave out --compiled"):
        estimated(changed(tmp_path, kernel), compiled=True, zero=3)


def test_what_runs_beside_computations_slows_them_hidden_or_not() -> None:
    found = estimated(zero=1)
    summed = found.predictions.costs.reduce_seconds[0]  # as far as nothing hides it
    staged = staged_model_of(found, CLUSTER)
    assert staged.reduce_seconds(0) > summed
    processors = CLUSTER.nodes[0].device.model_copy(update={"kind": "cpu"})
    node = CLUSTER.nodes[0].model_copy(update={"device": processors})
    alone = action_costs(replace(staged, cluster=CLUSTER.model_copy(update={"nodes": (node,)})))
    slowed = action_costs(staged)
    longer = slowed.forward_seconds[0] - alone.forward_seconds[0]
    share = load_runtime("torch-fsdp").waits.beside_share
    assert longer == pytest.approx(share * staged.reduce_seconds(0) / (2 * staged.program.num_microbatches))


FACTORIES = """
import torch
from torch import nn

class FlatLayout(nn.Module):
    def __init__(self, empty):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)
        self.empty = nn.Parameter(torch.zeros(0, 8, dtype=torch.float64)) if empty else None

    def forward(self, x):
        y = self.outer(torch.relu(self.inner(x))).square().mean()
        return y if self.empty is None else y + self.empty.sum().to(y.dtype)

def flat():
    return FlatLayout(False), (torch.zeros(2, 8),)

def empty():
    return FlatLayout(True), (torch.zeros(2, 8),)
"""


def test_parameters_without_elements_are_no_buffers(tmp_path: Path) -> None:
    (tmp_path / "made.py").write_text(FACTORIES)
    job = Job(global_batch=16, sequence_length=64, dtype="fp32", runtime="torch-fsdp")
    for zero in (2, 3):
        found = estimate(f"{tmp_path}/made.py:empty", CLUSTER, job, dp=8, pp=1, zero=zero, recompute="none")
        assert found.predictions.ranks[0].reserved_peak_bytes > 0


def test_selective_recomputation_needs_layers(tmp_path: Path) -> None:
    (tmp_path / "made.py").write_text(FACTORIES)
    job = Job(global_batch=16, sequence_length=64, dtype="fp32", runtime="torch-fsdp")
    with pytest.raises(InputError, match="this model has none"):
        estimate(f"{tmp_path}/made.py:flat", CLUSTER, job, dp=8, pp=1, recompute="selective")


def test_what_was_asked_before_is_not_worked_out_again() -> None:
    job = Job(global_batch=8, sequence_length=64, dtype="bf16", runtime="torch-fsdp")
    asked = {"target": "cuda", "attention": "fused"}
    graph = trace("tiny-llama", 2, 64, "bfloat16", **asked)  # type: ignore[arg-type]
    known = costs_of_model(graph, CLUSTER, job)
    assert costs_of_model(graph, CLUSTER, job.model_copy(update={"global_batch": 16})) is known
    assert costs_of_model(graph, CLUSTER, job.model_copy(update={"compiled": True})) is not known
    assert costs_of_model(graph, load_cluster("8x-a100-80"), job) is not known


def test_gradients_stay_whole_in_the_type_of_their_sums_until_the_last_microbatch(tmp_path: Path) -> None:
    own = '[optimizer]\ngradients = "parameter"\ngathers_masters = false'
    often, once = (
        changed(folder, text + own)
        for folder, text in zip(folders(tmp_path, 2), ("", 'reduces = "last microbatch"\n'), strict=True)
    )
    plans = [estimated(one, zero=3, reduce_dtype="fp32", microbatch=microbatch) for one, microbatch in
             ((often, 2), (once, 2), (often, 4), (once, 4))]  # fmt: skip
    (every, last, whole_often, whole_once) = plans
    num_stages, counts = every.num_stages, [" ".join(one.program[0]).count("REDUCE") for one in plans]
    assert counts == [2 * num_stages, num_stages, num_stages, num_stages]
    parameters = trace("tiny-llama", 1, 64, "bfloat16").num_parameters
    held = last.predictions.ranks[0].categories
    assert (
        3 * parameters < held["whole_gradients"] < 4.1 * parameters
    )  # some units are being reduced at the peak
    assert every.predictions.ranks[0].categories["whole_gradients"] < held["whole_gradients"] / 3
    assert whole_often.predictions.ranks[0] == whole_once.predictions.ranks[0]  # of one microbatch


def test_reductions_of_what_is_held_are_behind_the_last_microbatch() -> None:
    program = insert_microbatch_gathers(build("1f1b", 1, 3), [0], reduces_once=True)
    (actions,) = program.ranks
    assert [str(action) for action in actions][-3:] == ["0B2", "0RELEASE", "0REDUCE"]
    assert sum(action.kind is Kind.REDUCE for action in actions) == 1


def test_shards_of_parameters_stay_beside_whole_ones(tmp_path: Path) -> None:
    own = '[optimizer]\ngradients = "parameter"\ngathers_masters = false\n'
    plain, kept = (
        estimated(changed(folder, own + more), zero=2).predictions.ranks[0].categories["parameters"]
        for folder, more in zip(folders(tmp_path, 2), ("", "keeps_shards = true"), strict=True)
    )
    assert kept == pytest.approx(plain * 9 / 8, rel=1e-3)


def test_logits_in_a_variable_stay_while_the_loss_is_differentiated(tmp_path: Path) -> None:
    options = {"sequence_length": 256, "dtype": "bf16", "global_batch": 8}
    peaks, seconds = [], []
    for folder, text in zip(folders(tmp_path, 2), ("", "holds_logits = true"), strict=True):
        job = Job(runtime=changed(folder, 'loss = "as logits"\n' + text), **options)  # type: ignore[arg-type]
        model = resolve("tiny-llama", {"vocab_size": 32_768})
        found = estimate(model, load_cluster("1x-h100"), job, pp=1, microbatch=8, recompute="full")
        peaks.append(found.predictions.ranks[0].allocated_peak_bytes)
        seconds.append(found.predictions.step_seconds)
    graph = trace("tiny-llama", 8, 256, "bfloat16", {"vocab_size": 32_768}, loss="as logits")
    (loss,) = (node for node in graph.nodes if short_name(node.op) == "_log_softmax")
    assert peaks[1] - peaks[0] == graph.values[loss.inputs[0]].meta.payload_bytes
    assert seconds[1] == seconds[0]


def collectives(runtime: str, compiled: bool, splits: bool = True) -> dict[tuple[str, str, Part], float]:
    """Seconds of the collectives of the first layer, by module, operator and part."""
    job = Job(global_batch=8, sequence_length=64, dtype="bf16", runtime=runtime, compiled=compiled)
    graph = trace(
        "tiny-llama", 2, 64, "bfloat16", target="cuda", attention="fused", tp=2, splits_sequence=splits
    )
    costing = costs_of_model(graph, CLUSTER, job).costing
    seconds = zip(costing.graph.nodes, costing.arrays.device_s.tolist(), strict=True)
    return {
        (node.module, short_name(node.op), node.part): one
        for node, one in seconds
        if node.op in COLLECTIVES and ".layers.0." in node.module and node.part < Part.WEIGHT_GRAD
    }


def test_compiled_collectives_take_as_long_as_eager_ones() -> None:
    eager, compiled = (collectives("torch-fsdp", one) for one in (False, True))
    assert eager == compiled and min(eager.values()) > 5e-6


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("splits", [False, True])
def test_products_that_share_no_gathers_have_collectives_of_their_own(
    tmp_path: Path, compiled: bool, splits: bool
) -> None:
    shared = collectives("torch-fsdp", compiled, splits)
    apart = collectives(changed(tmp_path, "shares_gathers = false"), compiled, splits)
    assert shared.keys() == apart.keys()
    ratios = {key: round(apart[key] / shared[key], 6) for key in shared}
    once = 1 if compiled else None
    for place, num in (("self_attn", 3), ("mlp", 2)):
        entry = f"net.model.layers.0.{place}"
        if splits:
            assert ratios[entry, "all_gather", Part.FORWARD] == (once or num)
            assert ratios[entry, "reduce_scatter", Part.INPUT_GRAD] == num
    leaving = [ratio for (module, *_), ratio in ratios.items() if module.endswith(("o_proj", "down_proj"))]
    assert set(leaving) == {1}
    assert max(ratios.values()) == (3 if splits else 1)


def test_what_is_gathered_for_products_in_eight_bits_is_cast_before(tmp_path: Path) -> None:
    graph = trace(
        "tiny-llama", 8, 2048, "bfloat16", target="cuda", attention="fused", tp=2, splits_sequence=True
    )

    def device_seconds(runtime: str, dtype: str) -> list[tuple[Node, float]]:
        job = Job(global_batch=8, sequence_length=2048, dtype=dtype, runtime=runtime)  # type: ignore[arg-type]
        costing = costs_of_model(graph, CLUSTER, job).costing
        nodes = zip(costing.graph.nodes, costing.arrays.device_s.tolist(), strict=True)
        return [(node, seconds) for node, seconds in nodes if ".layers.0." in node.module]

    def sent(runtime: str, dtype: str) -> dict[str, float]:
        return {
            f"{short_name(node.op)} {node.module} {node.part}": seconds
            for node, seconds in device_seconds(runtime, dtype)
            if node.op in COLLECTIVES and node.part < Part.WEIGHT_GRAD
        }

    whole = changed(tmp_path, "casts_gathers = false")
    assert sent("torch-fsdp", "bf16") == sent(whole, "bf16") == sent(whole, "fp8")
    cast, plain = sent("torch-fsdp", "fp8"), sent(whole, "fp8")
    assert {name for name in plain if cast[name] < plain[name]} == {
        name for name in plain if "all_gather" in name
    }
    assert all(cast[name] == plain[name] for name in plain if "all_gather" not in name)
    cheaper = {
        node.module.rpartition(".")[2]
        for (node, cast_s), (_, plain_s) in zip(
            device_seconds("torch-fsdp", "fp8"), device_seconds(whole, "fp8"), strict=True
        )
        if node.op not in COLLECTIVES and node.part is Part.FORWARD and cast_s < plain_s
    }
    assert cheaper == {
        "q_proj",
        "k_proj",
        "v_proj",
        "gate_proj",
        "up_proj",
    }  # their input is cast once, before


def test_a_model_compiled_as_a_whole_hands_over_all_gradients_at_once(tmp_path: Path) -> None:
    whole = changed(tmp_path, 'compiles = "model"\n[optimizer]\ngradients = "parameter"')
    cluster, parameters = load_cluster("1x-h100"), trace("tiny-llama", 1, 64, "bfloat16").num_parameters

    def peak(compiled: bool, num_microbatches: int) -> int:
        job = Job(
            global_batch=num_microbatches, sequence_length=64, dtype="bf16", runtime=whole, compiled=compiled
        )
        return estimate("tiny-llama", cluster, job, pp=1).predictions.ranks[0].allocated_peak_bytes

    assert peak(True, 1) == peak(False, 1)  # nothing to add to
    more = peak(True, 2) - peak(False, 2)
    assert (
        0.9 * parameters < more <= 2 * parameters
    )  # in bf16, less what the peak in front of them was higher


def folders(parent: Path, count: int) -> list[Path]:
    made = [parent / str(index) for index in range(count)]
    for one in made:
        one.mkdir()
    return made
