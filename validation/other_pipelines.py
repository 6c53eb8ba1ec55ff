"""Judge what `stagewright estimate` predicts for pipelines that others than NVIDIA have published."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from amp import spearman
from runtimes import (
    _BESIDE_TORCH,
    DATA,
    NO_ROOM,
    ROOM,
    Asked,
    Judged,
    Record,
    Source,
    _allocated,
    _reserved,
    _room,
    judge,
    nodes,
    step_seconds,
    with_lighter_ends,
)
from verdict import Row

from stagewright.planning.predictions import Predictions

Predicted = list[tuple[Record, Predictions]]
"""Rows of a table and what is predicted for them."""

ORDER = "order on one node"
GAIN = "gain of a balanced cut"
BY_STAGE = "memory of a stage"

_SLOW_PAIRS = {"inter_node.bandwidth": 0.87e9, "inter_node.ring_bandwidth": 47.7e9}
"""Between nodes of nanotron's cluster: what one pair of GPUs attains, whatever others send. Fit of its rows on 16 GPUs, in
which a transfer adds 1.15 ms per MB; the job script did not yet load the network's library."""


def nanotron(record: Record) -> tuple[Asked, list[Judged]] | str:
    """A run of nanotron's on H100; ranks pad the vocabulary to a multiple of their number."""
    if record["note"].endswith(("unexplained", "steps on this allocation were disturbed")):
        return f"its row says: {record['note']}"
    tp, pp, dp, num = (int(record[key]) for key in ("tp", "pp", "dp", "gpus"))
    counts = record["layers_by_stage"].split(" (")[0].split()
    sizes = {
        "hidden_size": 2048, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 32,
        "num_key_value_heads": 32, "vocab_size": -(-50_257 // tp) * tp, "tie_word_embeddings": True,
    }  # fmt: skip
    asked = Asked(
        "llama-3-8b", sizes, f"{num // 8}x8x-h100" if num > 8 else f"{num}x-h100",
        {
            "global_batch": int(record["global_batch"]), "sequence_length": int(record["sequence_length"]),
            "runtime": "nanotron",
        },
        {
            "tp": tp, "pp": pp, "dp": dp, "microbatch": int(record["micro_batch"]), "zero": 1,
            "sequence_parallel": tp > 1, "layers_per_stage": tuple(map(int, counts)), "recompute": "none",
        },
        _SLOW_PAIRS if num > 8 else {},
    )  # fmt: skip
    return asked, [
        Judged("time", "s", float(record["step_s_median"]), step_seconds),
        Judged("allocated", "GiB", float(record["peak_allocated_MiB"]) / 1024, _allocated),
        Judged("reserved", "MiB", float(record["peak_reserved_MiB"]), _reserved),
    ]


def order_on_one_node(predicted: Predicted) -> Iterator[tuple[str, Row]]:
    """Rank correlation of the configurations of eight GPUs; 1 is the measured order."""
    pairs = [
        (found.step_seconds, float(record["step_s_median"]))
        for record, found in predicted
        if record["gpus"] == "8"
    ]
    if len(pairs) > 2:
        yield (
            "Spearman",
            Row(f"{len(pairs)} configurations", ORDER, spearman(*map(list, zip(*pairs, strict=True))), 1.0),
        )


_PLAIN_MACHINE = {
    "device.host_overhead_s": 5e-5, "device.attention_efficiency": 0.375, "device.attention_backward_efficiency": 0.3,
}  # fmt: skip
"""In which torchtitan's machine differs from the catalog's RTX 3090. Fit of its rows at hidden sizes of 256 and 1,024: what
the host spends on an operator, and attention in float32, which FlashAttention does not compute, at half of the rate."""

_TITAN_SCHEDULES = {
    "1F1B": "1f1b", "Interleaved1F1B": "interleaved-1f1b", "InterleavedZeroBubble": "interleaved-zb",
}  # fmt: skip


def autopartition(record: Record) -> tuple[Asked, list[Judged]] | str:
    """A run of torchtitan's on four RTX 3090, with its own cut, which counts embedding and head as a layer each, or with one
    that balances FLOP: layers divided evenly."""
    if not record["tokens_per_s_per_gpu"].isdigit():
        return f"its rate reads '{record['tokens_per_s_per_gpu']}'"
    hidden, layers, pp, chunks, count = (
        int(record[key]) for key in ("hidden", "layers", "pp", "stages_per_rank", "microbatches")
    )
    model, sizes = _titan_model(record["model"], hidden, layers)
    stages = pp * chunks
    even = tuple(layers // stages + (index < layers % stages) for index in range(stages))
    asked = Asked(
        model, sizes, f"{record['gpus']}x-rtx3090",
        {
            "global_batch": count, "sequence_length": int(record["sequence_length"]), "dtype": "fp32",
            "runtime": "torchtitan-pipeline",
        },
        {
            "pp": pp, "dp": 1, "microbatch": 1, "schedule": _TITAN_SCHEDULES[record["schedule"]],
            "layers_per_stage": even if _is_balanced(record) else with_lighter_ends(layers, stages),
            "recompute": "none", **({"chunks": chunks} if chunks > 1 else {}),
        },
        _PLAIN_MACHINE,
    )  # fmt: skip
    return asked, [Judged("time", "s", _titan_seconds(record), step_seconds)]


def _is_balanced(record: Record) -> bool:
    """Whether the cut balances FLOP. The source's tables of several schedules have a column more, which the collection has
    not seen in rows of 1F1B: there the rate of a balanced cut stands in the row of the other."""
    is_shifted = record["schedule"] == "1F1B" and (record["hidden"] == "1024" or record["layers"] == "24")
    return is_shifted or "auto" in record["split"]


def _titan_seconds(record: Record) -> float:
    tokens = int(record["microbatches"]) * int(record["sequence_length"])
    return tokens / (float(record["tokens_per_s_per_gpu"]) * int(record["gpus"]))


def _titan_model(name: str, hidden: int, layers: int) -> tuple[str, dict[str, Any]]:
    """A bundled model with the sizes of torchtitan's, whose feed-forward width is 8/3 of the hidden size, rounded to 256."""
    if name.startswith("deepseek"):
        return "deepseek-v2-lite", {
            "hidden_size": hidden, "num_hidden_layers": layers, "first_k_dense_replace": layers,
            "intermediate_size": 1024, "vocab_size": 2048,
        }  # fmt: skip
    return "llama-3-8b", {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": 16, "num_key_value_heads": 16,
        "head_dim": hidden // 16, "intermediate_size": -(-8 * hidden // 3 // 256) * 256, "vocab_size": 2048,
    }  # fmt: skip


def gain_of_a_cut(predicted: Predicted) -> Iterator[tuple[str, Row]]:
    """By what factor a balanced cut is faster than torchtitan's own, for every pair of rows that differ in nothing else."""
    by_run: dict[tuple[str, ...], dict[bool, tuple[float, float]]] = {}
    for record, found in predicted:
        run = tuple(record[key] for key in ("model", "hidden", "layers", "schedule"))
        by_run.setdefault(run, {})[_is_balanced(record)] = found.step_seconds, _titan_seconds(record)
    for run, cuts in by_run.items():
        if len(cuts) == 2:
            ours, measured = (
                plain / balanced for plain, balanced in zip(cuts[False], cuts[True], strict=True)
            )
            yield "x", Row(" ".join((run[0].split(" ")[0], *run[1:])), GAIN, ours, measured, "other")


_FLAG_MODELS = {
    "Llama-3-70B": ("llama-3-70b", {}),
    "Llama-2-70B": ("llama-2-70b", {}),
    "LLaMA-7B": ("llama-2-7b", {}),
    "LLaMA-13B": ("llama-2-13b", {}),
    "Mixtral-8x7B": ("mixtral-8x7b", {}),
    "Qwen1.5-MoE (14B)": ("mixtral-8x7b", {
        "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16,
        "intermediate_size": 5504, "vocab_size": 151936,
    }),
}  # fmt: skip
"""Bundled models with the sizes of FlagPerf's scripts; its mixture of 14 B has eight experts, two active, none shared."""

_FLAG_SYSTEMS = {
    "H100-80GB": ("h100", {}),
    "H800-80GB": ("h100", {"intra_node.bandwidth": 163e9}),
    "A800-80GB": ("a100-80", {"intra_node.bandwidth": 156e9}),
    "A100-80GB": ("a100-80", {}),
    "A100-40GB": ("a100-40", {}),
}  # fmt: skip
"""Devices; between those for China NVLink has 400 GB/s in place of 900 and 600."""

_FLAG_RUNTIMES = {
    "Paddle 2.5.1": str(DATA / "pipelines" / "paddle.toml"),
    "FlagScale": str(DATA / "pipelines" / "flagscale.toml"),
}
"""Runtimes; others are Megatron-Core with Transformer Engine."""


def flagperf(record: Record) -> tuple[Asked, list[Judged]] | str:
    """A run published with FlagPerf. Memory is what `nvidia-smi` shows, of every stage where it is told. Selective
    recomputation is of attention's scores, which fused attention never stores."""
    tp, pp, dp, num = (int(record[key]) for key in ("tp", "pp", "dp", "gpus"))
    is_paddle = record["framework"].startswith("Paddle")
    (model, sizes), (device, links) = _FLAG_MODELS[record["model"]], _FLAG_SYSTEMS[record["gpu"]]
    precision = record["precision"].split()[0]
    if precision == "fp32":
        return "whether matmuls in fp32 used TF32 is not told"
    recompute = "full" if record["recompute"] == "full" else "none"
    asked = Asked(
        model, sizes, nodes(device, num),
        {
            "global_batch": int(record["global_batch"]), "sequence_length": int(record["sequence_length"]),
            "dtype": "bf16" if precision == "amp" else precision,
            "runtime": _FLAG_RUNTIMES.get(record["framework"], "megatron-core+te"),
        },
        {
            "tp": tp, "pp": pp, "dp": dp, "microbatch": int(record["micro_batch"]), "recompute": recompute,
            "zero": int(record["sharding"][-1]) if record["sharding"] else 1 if dp > 1 else None,
            "sequence_parallel": tp > 1 and not is_paddle,
        },
        links,
    )  # fmt: skip
    tokens = int(record["global_batch"]) * int(record["sequence_length"])
    figures = [Judged("time", "s", tokens / num / float(record["tokens_per_s_per_gpu"]), step_seconds)]
    beside = _BESIDE_TORCH / 2**30
    if record["memory_gib_by_stage"]:
        for stage, measured in enumerate(record["memory_gib_by_stage"].split()):
            figures.append(Judged(BY_STAGE, "GiB", float(measured) - beside, partial(_reserved_of, stage)))
    elif record["memory_gib"]:
        figures.append(Judged("memory", "GiB", float(record["memory_gib"]) - beside, _reserved_gib))
    return asked, figures


def _reserved_of(stage: int, found: Predictions) -> float:
    return found.ranks[stage].reserved_peak_bytes / 2**30


def _reserved_gib(found: Predictions) -> float:
    return _reserved(found) / 1024


_ROUND_MODELS = {
    "Qwen3-1.7B": "qwen3-1.7b", "Meta-Llama-3.1-8B": "llama-3.1-8b", "Qwen3-32B": "qwen3-32b",
    "GPT-OSS-20B": "gpt-oss-20b",
}  # fmt: skip
_ROUND_SYSTEMS = {
    "RTX 4090 24GB PCIe": ("rtx4090", {"intra_node.ring_bandwidth": 2.7e9}),
    "A800 80GB NVLink": ("a100-80", {"intra_node.bandwidth": 156e9}),
}  # fmt: skip
"""Devices and their links. Eight RTX 4090 around a ring attain what is fitted on the runs with tensor parallelism; other
machines with them attain up to 20 GB/s (NVIDIA/nccl#1530)."""

BALANCED = DATA / "pipelines" / "megatron-balanced.toml"


def roundpipe(record: Record) -> tuple[Asked, list[Judged]] | str:
    """A run of RoundPipe's authors on eight devices of one node under Megatron, DeepSpeed or FSDP, with recomputation."""
    framework, outcome = record["framework"], record["tokens_per_s"]
    if framework.startswith(("RoundPipe", "Mobius")):
        return f"{framework.split('-')[0]} moves layers between host and device while it computes: no runtime of ours"
    if record["model"] not in _ROUND_MODELS:
        return "LoRA of experts: which kernels compute them is not told"
    if framework == "Megatron-PP" and record["gpu"].startswith("A800"):
        return "too fast for recomputation, without which it has no room: what Megatron was told is not"
    num, size = int(record["n_gpus"]), int(record["micro_batch"] or 1)
    tp, pp = (int(record[key] or 1) for key in ("tp", "pp"))
    (device, links), is_megatron = _ROUND_SYSTEMS[record["gpu"]], framework.startswith("Megatron")
    dp = num // (tp * pp)
    asked = Asked(
        _ROUND_MODELS[record["model"]], {}, f"{num}x-{device}",
        {
            "global_batch": int(record["global_batch_seqs"] or num * size), "sequence_length": int(record["seq_len"]),
            "runtime": str(BALANCED) if is_megatron else "torch-fsdp",
        },
        {
            "tp": tp, "pp": pp, "dp": dp, "microbatch": size, "sequence_parallel": tp > 1,
            "zero": {"Deepspeed-Zero2": 2, "FSDP-Zero3": 3}.get(framework),
            "recompute": "full",
        },
        links,
    )  # fmt: skip
    if outcome == "OOM":
        return asked, [Judged(NO_ROOM, "MiB", _room(asked.cluster), _reserved)]
    return asked, [
        Judged("time", "s", float(record["step_s"]), step_seconds),
        Judged(ROOM, "MiB", _room(asked.cluster), _reserved),
    ]


_PERLMUTTER = {"num_nics": 4, "inter_node.bandwidth": 22e9}
"""Four adapters of 200 Gbit/s a node. The rows tell of 90 % of the time in communication, so only memory is judged."""


def _perlmutter_nodes(num: int) -> str:
    return f"{num // 4}x4x-a100-40" if num > 4 else f"{num}x-a100-40"


def perlmutter(record: Record) -> tuple[Asked, list[Judged]] | str:
    """A run of torchtitan's on A100 with 40 GB, four a node, with the recomputation that its files have: whether it fits, as
    all of these did."""
    if record["workload"].startswith("nanochat"):
        return "two DGX Spark without a parallelism of ours, and no time"
    if record["framework"] == "megatron-lm":
        return "the size of Megatron's microbatches is not told"
    tp, pp, num, batch = (int(record[key]) for key in ("tp", "pp", "gpus", "global_batch"))
    dp = num // (tp * pp)
    size = int((record["pp_microbatch"] if pp > 1 else record["micro_batch"]) or batch // dp)
    asked = Asked(
        "deepseek-v2-lite" if record["workload"].startswith("deepseek") else "llama-3-8b", {},
        _perlmutter_nodes(num),
        {"global_batch": batch, "sequence_length": int(record["sequence_length"]), "runtime": "torch-fsdp"},
        {
            "tp": tp, "pp": pp, "dp": dp, "microbatch": size, "zero": 3 if pp == 1 else 2, "sequence_parallel": tp > 1,
            "ep": int(record["ep"] or 1), "recompute": record["activation_checkpointing"] or "selective",
        },
        _PERLMUTTER,
    )  # fmt: skip
    return asked, [Judged(ROOM, "MiB", _room(asked.cluster), _reserved)]


def search_trial(record: Record) -> tuple[Asked, list[Judged]] | str:
    """A trial of a search over Megatron's parallelism on the same devices, one microbatch a replica: whether it fits, as
    all did that ended well. Optimizers are taken to be sharded, which is not told."""
    if record["status"] != "success":
        return "why it failed is not told"
    if not record["workload"].endswith("Megatron"):
        return "its framework is not told"
    if record["workload"].startswith("DeepSeek"):
        return "DeepSeek under tensor parallelism, which no bundled model is sharded for"
    num, tp, pp, dp, size = (int(record[key]) for key in ("gpus", "tp", "pp", "dp", "micro_batch"))
    asked = Asked(
        "llama-3-8b", {}, _perlmutter_nodes(num),
        {
            "global_batch": dp * size, "sequence_length": int(record["sequence_length"]),
            "runtime": "megatron-core+te",
        },
        {
            "tp": tp, "pp": pp, "dp": dp, "microbatch": size, "zero": 1 if dp > 1 else None, "sequence_parallel": tp > 1,
            "recompute": "full" if record["activation_checkpointing"] == "True" else "none",
        },
        _PERLMUTTER,
    )  # fmt: skip
    return asked, [Judged(ROOM, "MiB", _room(asked.cluster), _reserved)]


def automodel(record: Record) -> tuple[Asked, list[Judged]] | str:
    """A fine-tuning run of NeMo Automodel's own tests on eight H100 under FSDP. Lengths vary from step to step: the median
    of its tokens counts, padding included or not."""
    if record["recipe"] != "llama3_2_1b_squad":
        return "no bundled model"
    num, batch = int(record["gpus_from_tps"]), int(record["global_batch"])
    asked = Asked(
        "llama-3.2-1b", {}, f"{num}x-h100",
        {
            "global_batch": batch, "sequence_length": round(int(record["tokens_per_step_median"]) / batch),
            "runtime": "torch-fsdp",
        },
        {"dp": num, "microbatch": int(record["local_batch"]), "zero": 3, "recompute": "none"},
    )  # fmt: skip
    allocated = Judged("allocated", "GiB", float(record["mem_GiB_median"]), _allocated)
    return asked, [Judged("time", "s", float(record["step_s_median"]), step_seconds), allocated]


_RTX3090_FLOPS = 71e12
"""Peak that TouchNet's utilisation counts with: with it, its steps round to the seconds that it prints."""


def thread(record: Record) -> tuple[Asked, list[Judged]] | str:
    """A point of a thread that tells model, devices, batch and parallelism. Its time follows from the utilisation, which
    counts 6 FLOP a parameter and 12 L h s a token."""
    if not record["system"].startswith("TouchNet"):
        return "model, batch or devices are not told"
    num, batch, tokens = int(record["gpus"]), int(record["global_batch"]), int(record["sequence_length"])
    tp, pp, dp = (int(record[key] or 1) for key in ("tp", "pp", "dp"))
    asked = Asked(
        "llama-3.2-1b", {}, f"{num}x-rtx3090",
        {"global_batch": batch, "sequence_length": tokens, "runtime": "torchtitan-pipeline", "compiled": True},
        {
            "tp": tp, "pp": pp, "dp": dp, "microbatch": 1, "zero": 3 if pp == 1 else 2, "sequence_parallel": tp > 1,
            "recompute": "full",
        },
    )  # fmt: skip
    share = float(record["other_metric"].split()[1]) / 100
    flop = batch * tokens * (6 * 1.236e9 + 12 * 16 * 2048 * tokens)
    return asked, [Judged("time", "s", flop / num / _RTX3090_FLOPS / share, step_seconds)]


SOURCES = {
    "nanotron_bench_cluster.csv": Source(
        "pipelines",
        nanotron,
        1,
        {"time": 0.10, "allocated": 0.04, "reserved": 0.08, ORDER: 0.05},
        order_on_one_node,
    ),
    "torchtitan_autopartition_3090.csv": Source(
        "pipelines", autopartition, 1, {"time": 0.12, GAIN: 0.04}, gain_of_a_cut
    ),
    "roundpipe_consumer_gpus.csv": Source("pipelines", roundpipe, 1, {"time": 0.15}),
    "ccl_bench_training.csv": Source("pipelines", perlmutter, 0, {}),
    "ccl_search_trials.csv": Source("pipelines", search_trial, 0, {}),
    "automodel_goldens.csv": Source("pipelines", automodel, 0, {"time": 0.25, "allocated": 0.10}),
    "issue_thread_points.csv": Source("pipelines", thread, 0, {"time": 0.25}),
    "flagperf_pipelines.csv": Source(
        "pipelines", flagperf, 0, {"time": 0.15, BY_STAGE: 0.05, "memory": 0.10}
    ),
}

if __name__ == "__main__":
    judge(SOURCES, __doc__)
