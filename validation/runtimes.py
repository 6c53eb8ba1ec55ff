"""Judge what `stagewright estimate --runtime` predicts for published runs of other runtimes: step times and memory."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from verdict import Row, arguments, document, show, summary

from stagewright.cluster import Cluster, load_cluster
from stagewright.errors import StagewrightError
from stagewright.planning.configuration import RECOMPUTE
from stagewright.planning.estimate import estimate
from stagewright.planning.job import Job
from stagewright.planning.predictions import Predictions
from stagewright.tracing.models.reference import bundled_names, resolve

ROOM, NO_ROOM = "had room", "ran out of memory"
"""Figures of which only one side is wrong: more memory than there is, or 5 % less although it was too little."""

DATA = Path(__file__).parent / "data"
MIB, GB = 2**20, 10**9
ZERO_BUBBLE_VOCABULARY = 32_000
"""The parameters that the models are named by, 14.6 and 28.3 x 10^9, leave room for 25,000 to 33,600 tokens."""

Record = dict[str, str]


@dataclass(frozen=True)
class Asked:
    """What a user would ask of `estimate`: a model with changes of its config, devices, a job and a configuration; `links`
    are figures in which the cluster differs from the catalog's, by their dotted keys."""

    model: str
    changes: dict[str, Any]
    cluster: str
    job: dict[str, Any]
    options: dict[str, Any]
    links: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The sizes that tell runs apart."""
        layers = [
            f" L={self.changes[key]}" for key in ("n_layer", "num_hidden_layers") if key in self.changes
        ]
        width = f" h={self.changes['n_embd']}" if "n_embd" in self.changes else ""
        how = " ".join(
            f"{key}={value}"
            for key, value in self.options.items()
            if not isinstance(value, list | tuple | None)
        )
        model = Path(self.model).name
        return f"{model}{''.join(layers)}{width} batch={self.job['global_batch']} {how}"

    @property
    def graph(self) -> str:
        """What the graph of a rank depends on."""
        degrees = [self.options.get(key) for key in ("tp", "cp", "ep", "microbatch", "sequence_parallel")]
        return json.dumps([self.model, self.changes, self.job | {"global_batch": 0}, degrees])

    def predictions(self) -> Predictions:
        """What is printed for it."""
        asked = [self.model, self.changes, self.cluster, self.job, self.options, self.links]
        return _predictions(json.dumps(asked))


@cache
def _predictions(asked: str) -> Predictions:
    model, changes, cluster, job, options, links = json.loads(asked)
    named = load_cluster(cluster, links) if links else _cluster(cluster)
    return estimate(resolve(model, changes), named, Job(**job), **options).predictions


@cache
def _cluster(name: str) -> Cluster:
    return load_cluster(name)


@dataclass(frozen=True)
class Judged:
    """One figure of a row: its name and unit, what was measured, and what is taken from the predictions."""

    figure: str
    unit: str
    measured: float
    take: Callable[[Predictions], float] = field(repr=False)


def step_seconds(found: Predictions) -> float:
    return found.step_seconds


def _allocated(found: Predictions) -> float:
    return max(rank.allocated_peak_bytes for rank in found.ranks) / 2**30


def _allocated_first(found: Predictions) -> float:
    return found.ranks[0].allocated_peak_bytes / 2**30


def _allocated_gb(found: Predictions) -> float:
    return max(rank.allocated_peak_bytes for rank in found.ranks) / GB


def _reserved(found: Predictions) -> float:
    return max(rank.reserved_peak_bytes for rank in found.ranks) / MIB


def _gpt(record: Record, vocabulary: int = 51_200) -> dict[str, int]:
    """GPT-2's config with the sizes of a row."""
    keys = {"n_embd": "hidden", "n_head": "heads", "n_layer": "layers", "n_positions": "seq_len"}
    return {key: int(record[column]) for key, column in keys.items()} | {"vocab_size": vocabulary}


def with_lighter_ends(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Embedding and head stand for a layer each."""
    each, more = divmod(num_layers + 2, num_stages)
    counts = [each + (stage < more) for stage in range(num_stages)]
    counts[0] -= 1
    counts[-1] -= 1
    return tuple(counts)


def interleaved(chunks: int) -> dict[str, Any]:
    """The options of interleaved 1F1B, where there are several chunks."""
    return {"schedule": "interleaved-1f1b", "chunks": chunks} if chunks > 1 else {}


def _room(cluster: str) -> float:
    """MiB that a framework has of a device."""
    device = _cluster(cluster).device
    return (device.memory_bytes - device.context_bytes) / MIB


def nodes(device: str, num: int) -> str:
    return f"{num // 8}x8x-{device}" if num > 8 and num % 8 == 0 else f"{num}x-{device}"


COMPOSED = "time that a simulator composed"
"""Figure of steps that were not measured: vTrain's single-node table is what its simulator makes of one traced layer per
hidden size, tensor-parallel degree and microbatch (``tests/validation/test_composed_steps.py``)."""

TRACED_LAYERS = DATA / "megatron_time" / "traced-layers.toml"
"""How that simulator composes a step."""


def vtrain(record: Record) -> tuple[Asked, list[Judged]] | str:
    """A run published with vTrain on several nodes, or a step that its simulator composed for one, without recomputation."""
    num = int(record["num_gpus"])
    is_measured = num > 8
    asked = Asked(
        "gpt2", _gpt(record), nodes("a100-80", num),
        {
            "global_batch": int(record["global_batch"]), "sequence_length": int(record["seq_len"]), "dtype": "fp16",
            "runtime": "megatron-deepspeed" if is_measured else str(TRACED_LAYERS),
        },
        {
            "tp": int(record["tp"]), "pp": int(record["pp"]), "dp": int(record["dp"]),
            "microbatch": int(record["micro_batch"]), "recompute": "full" if is_measured else "none",
        },
    )  # fmt: skip
    figure = "time" if is_measured else COMPOSED
    return asked, [Judged(figure, "s", float(record["iteration_ms"]) / 1e3, step_seconds)]


def selene(record: Record) -> tuple[Asked, list[Judged]] | str:
    """A run of Korthikanti et al. 2022."""
    selective = record["recompute"] == "seqsel"
    asked = Asked(
        "gpt2", _gpt(record), nodes("a100-80", int(record["num_gpus"])),
        {
            "global_batch": int(record["global_batch"]), "sequence_length": int(record["seq_len"]), "dtype": "fp16",
            "runtime": "megatron-lm",
        },
        {
            "tp": int(record["tp"]), "pp": int(record["pp"]), "dp": int(record["dp"]),
            "microbatch": int(record["micro_batch"]), "recompute": "selective" if selective else "full",
            "sequence_parallel": selective, **interleaved(int(record["chunks"])),
        },
    )  # fmt: skip
    return asked, [Judged("time", "s", float(record["iteration_s"]), step_seconds)]


def bundled(name: str) -> str | None:
    """Return the bundled model that is called so, with other separators or none."""
    plain = {re.sub(r"[^a-z0-9]", "", bundled_name): bundled_name for bundled_name in bundled_names()}
    return plain.get(re.sub(r"[^a-z0-9]", "", name.lower()))


_B200_MODELS: dict[str, tuple[str, dict[str, int]]] = {
    "deepseekv2": ("deepseek-v3", {  # the sizes of DeepSeek-V2's config
        "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536, "n_routed_experts": 160,
        "num_experts_per_tok": 6, "n_shared_experts": 2, "topk_group": 3, "first_k_dense_replace": 1, "vocab_size": 102400,
    }),
}  # fmt: skip


FLASH = DATA / "footprints" / "megatron-core-flash.toml"
"""Megatron-Core with FlashAttention-2 in place of what Transformer Engine takes by itself."""


def megatron_core(record: Record) -> tuple[Asked, list[Judged]] | str:
    """A run of SimuMax's authors on 8 B200; models have fewer layers than their originals."""
    name = record["model"]
    model, sizes = _B200_MODELS.get(name) or (bundled(name), {})
    if model is None:
        return "the sizes of the model are not known"
    tp, pp, cp, ep = (int(record[key] or 1) for key in ("tp", "pp", "cp", "ep"))
    dp = 8 // (tp * pp * cp)
    asked = Asked(
        model, {**sizes, "num_hidden_layers": int(record["layers"])}, "8x-b200",
        {
            "global_batch": dp * int(record["microbatches"]), "sequence_length": int(record["seq_len"]),
            "runtime": str(FLASH),
        },
        {"tp": tp, "pp": pp, "dp": dp, "cp": cp, "ep": ep, "zero": 1, "sequence_parallel": tp > 1},
    )  # fmt: skip
    return asked, [
        Judged("time", "s", float(record["iteration_ms"]) / 1e3, step_seconds),
        Judged("allocated", "GiB", float(record["peak_allocated_gib"]), _allocated),
        Judged("reserved", "MiB", float(record["max_reserved_mib"]), _reserved),
    ]


_ZERO_BUBBLE = {
    "1F1B": "1f1b",
    "1F1B-I": "interleaved-1f1b",
    "ZB-1p": "zb-h1",
    "ZB-2p": "zb-h2",
    "ZB-V": "zb-v",
}


def zero_bubble(record: Record) -> tuple[Asked, list[Judged]] | str:
    """A run of Qi et al. 2023; embedding and head stand for a layer each."""
    layers, pp, size, count = (
        int(float(record[key])) for key in ("layers", "pp", "micro_batch", "n_microbatches")
    )
    schedule = record["schedule"].rstrip("*")
    chunks = {"1F1B-I": (layers + 2) // pp, "ZB-V": 2}.get(schedule, 1)
    asked = Asked(
        "gpt2", _gpt(record, ZERO_BUBBLE_VOCABULARY), nodes("a100-80", pp),
        {
            "global_batch": size * count, "sequence_length": int(record["seq_len"]), "dtype": "fp16",
            "runtime": "zero-bubble",
        },
        {
            "pp": pp, "dp": 1, "microbatch": size, "schedule": _ZERO_BUBBLE[schedule], "recompute": "none",
            "layers_per_stage": with_lighter_ends(layers, pp * chunks),
            **({"chunks": chunks} if schedule == "1F1B-I" else {}),
        },
    )  # fmt: skip
    seconds = count * size / (float(record["samples_per_gpu_s"]) * pp)
    return asked, [
        Judged("time", "s", seconds, step_seconds),
        Judged("memory", "GB", float(record["peak_mem_gb"]), _allocated_gb),
    ]


_JEAN_ZAY = {
    "num_nics": 1, "inter_node.bandwidth": 0.95 * 12.5e9, "device.matmul_efficiency.fp16": 0.755,
}  # fmt: skip
"""Figures of Jean Zay. Between nodes, of four links of 100 Gbit/s what one carries, as BigScience's own all-reduces between
such nodes attained 15 to 42 Gbit/s (github.com/bigscience-workshop/bigscience, experiments/bandwidth). Matmuls in fp16 have
the catalog's rate in bf16: of 14,336 wide layers (tp 8, pp 12, microbatches of 2) each took 1.74 s of a step in bf16 there,
and 1.91 in fp16."""


BLOCKING = DATA / "footprints" / "deepspeed-blocking.toml"
"""DeepSpeed under ``CUDA_LAUNCH_BLOCKING=1``."""

_BLOCKING_FROM = "2022-02-20"
"""The day of the first runs behind the section of the chronicle that introduces it."""


def bloom(record: Record) -> tuple[Asked, list[Judged]] | str:
    """A run of BigScience's on Jean Zay, as a GPT with the same widths.

    Ignores: that positions are biases of the scores, and the norm behind the embedding. Memory is what `nvidia-smi` showed,
    of which nothing is judged but whether it fitted.
    """
    if record["status"] not in ("ok", "OOM") or (record["status"] == "ok" and not record["step_time_s"]):
        return f"no time was published ({record['status'] or 'unknown'})"
    if not record["heads"]:
        return "the number of heads is not known"
    layers, pp, tp, dp = (int(record[key]) for key in ("layers", "pp", "tp", "dp"))
    counts = with_lighter_ends(layers, pp) if "slot each" in record["pp_partition"] else None
    sizes = _gpt(record, int(record["vocab"])) | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    asked = Asked(
        "gpt2", sizes, nodes("a100-80", int(record["n_gpus"])),
        {
            "global_batch": int(record["global_batch_seqs"]), "sequence_length": int(record["seq_len"]),
            "dtype": record["precision"][:4],
            "runtime": str(BLOCKING) if record["date"] >= _BLOCKING_FROM else "deepspeed",
        },
        {
            "tp": tp, "pp": pp, "dp": dp, "microbatch": int(record["micro_batch"]),
            "zero": int(record["zero_stage"]) or None, "recompute": "full", "layers_per_stage": counts,
        },
        _JEAN_ZAY,
    )  # fmt: skip
    room = _room(asked.cluster)
    if record["status"] == "OOM":
        return asked, [Judged(NO_ROOM, "MiB", room, _reserved)]
    return asked, [
        Judged("time", "s", float(record["step_time_s"]), step_seconds),
        Judged(ROOM, "MiB", room, _reserved),
    ]


_BESIDE_TORCH = 3 * 2**30
"""What `nvidia-smi` showed beside PyTorch's own memory where layers were split, as Sailor's simulator has it."""


def sailor(record: Record) -> tuple[Asked, list[Judged]] | str:
    """A run published with Sailor: its models in Megatron-DeepSpeed on GH200, GPT-2's vocabulary padded for its ranks.

    Source: github.com/eth-easl/sailor, third_party/Megatron-DeepSpeed/megatron/model/opt_model.py and gpt_neo_model.py. Its
    stages list embedding and head as layers of their own. Memory is what `nvidia-smi` showed.
    """
    if record["site"] != "clariden":
        return "nodes whose devices differ"
    layers, hidden, heads = {"OPT-350": (24, 1024, 16), "GPT-NEO": (32, 2560, 20)}[record["model"]]
    pp, size = int(record["num_stages"]), int(record["micro_batch"])
    (tp,) = {width for stage in json.loads(record["tp_per_stage_replica"]) for width in stage}
    (dp,) = set(json.loads(record["dp_per_stage"]))
    counts = [last - first + 1 for first, last in json.loads(record["stage_layers_first_last"])]
    counts[0] -= 1
    counts[-1] -= 1
    padded = -(-50_257 // (128 * tp)) * 128 * tp
    drops = 0.1 if record["model"] == "GPT-NEO" else 0.0
    sizes: dict[str, Any] = {
        "n_embd": hidden, "n_head": heads, "n_layer": layers, "n_positions": 2048, "vocab_size": padded,
        "activation_function": "gelu" if record["model"] == "GPT-NEO" else "relu", "tie_word_embeddings": False,
        "resid_pdrop": drops, "embd_pdrop": drops, "attn_pdrop": 0.0,
    }  # fmt: skip
    nodes = int(record["nodes"])
    asked = Asked(
        "gpt2", sizes, "4x-gh200" if nodes == 1 else f"{nodes}x4x-gh200",
        {
            "global_batch": int(record["global_batch"]), "sequence_length": 2048, "dtype": "tf32",
            "runtime": "deepspeed-tf32",
        },
        {"tp": tp, "pp": pp, "dp": dp, "microbatch": size, "recompute": "none", "layers_per_stage": counts},
    )  # fmt: skip
    return asked, [
        Judged("time", "s", float(record["iteration_s"]), step_seconds),
        Judged("memory", "MiB", (float(record["max_memory_bytes"]) - _BESIDE_TORCH) / MIB, _reserved),
    ]


_CARDS = {"h100_80gb": "h100", "a100_80gb": "a100-80", "a100_40gb": "a100-40"}
_FLASH2 = {"MPT-1b", "MPT-3b", "MPT-7b"}


def mpt(record: Record) -> tuple[Asked, list[Judged]] | str:
    """A run of llm-foundry's, as GPT-2 with the same widths; which attention it had is what `sweep.py` and the defaults of
    `submit_benchmarks.py` say at the commit that published the table.

    Ignores: that MPT has no biases. Of memory nothing was published but that it was enough.
    """
    if record["precision"] == "amp_fp8":
        return "what Transformer Engine 0.10 casts in fp8 is not known"
    num, tokens, size = (int(record[key]) for key in ("n_gpus", "seq_len", "micro_batch_per_gpu"))
    has_flash2 = record["gpu"] == "h100_80gb" and num >= 128 and record["model"] in _FLASH2
    runtime = DATA / "fsdp" / ("llm-foundry-flash2.toml" if has_flash2 else "llm-foundry.toml")
    plain = {"activation_function": "gelu", "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    asked = Asked(
        "gpt2", _gpt(record, int(record["vocab"])) | plain, nodes(_CARDS[record["gpu"]], num),
        {
            "global_batch": num * size * int(record["grad_accum"]), "sequence_length": tokens, "dtype": "bf16",
            "runtime": str(runtime),
        },
        {
            "dp": num, "pp": 1, "microbatch": size, "zero": {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2}[record["fsdp_strategy"]],
            "reduce_dtype": "bf16" if record["fsdp_mixed_precision"] == "PURE" else "fp32",
            "recompute": "full" if record["act_ckpt_full_block"] == "True" else "none",
        },
    )  # fmt: skip
    return asked, [
        Judged("time", "s", float(record["step_time_s"]), step_seconds),
        Judged(ROOM, "MiB", _room(asked.cluster), _reserved),
    ]


def narayanan(record: Record) -> tuple[Asked, list[Judged]] | str:
    """A run of Narayanan et al. 2021, whose TFLOP/s count 96 B s l h^2 (1 + s/6h + V/16lh) for a step with recomputation:
    microbatches of one sample, two chunks where they divide the layers."""
    tp, pp, dp, num, batch, tokens = (
        int(record[key]) for key in ("tp", "pp", "dp", "n_gpus", "global_batch", "seq_len")
    )
    layers, hidden, vocabulary = (int(record[key]) for key in ("layers", "hidden", "vocab"))
    has_chunks = pp > 1 and layers % (2 * pp) == 0 and batch // dp % pp == 0
    asked = Asked(
        "gpt2", _gpt(record, vocabulary), nodes("a100-80", num),
        {"global_batch": batch, "sequence_length": tokens, "dtype": "fp16", "runtime": "megatron-lm"},
        {
            "tp": tp, "pp": pp, "dp": dp, "recompute": "full",
            **interleaved(2 if has_chunks else 1),
        },
    )  # fmt: skip
    extra = 1 + tokens / (6 * hidden) + vocabulary / (16 * layers * hidden)
    flop = 96 * batch * tokens * layers * hidden**2 * extra
    return asked, [Judged("time", "s", flop / num / 1e12 / float(record["tflops_per_gpu_hw"]), step_seconds)]


def megascale(record: Record) -> tuple[Asked, list[Judged]] | str:
    """A run of Megatron-LM that Jiang et al. 2024 compare with; their own changes of model and network are not predicted."""
    if record["system"] != "Megatron-LM":
        return "MegaScale's own kernels and network are not known"
    if not record["step_s"]:
        return "no time was published"
    tp, pp, num, batch = (int(record[key]) for key in ("tp", "pp", "n_gpus", "global_batch"))
    asked = Asked(
        "gpt2", _gpt(record, 64_000), nodes("a100-80", num),
        {
            "global_batch": batch, "sequence_length": int(record["seq_len"]), "dtype": "bf16",
            "runtime": "megatron-lm",
        },
        {
            "tp": tp, "pp": pp, "dp": num // (tp * pp), "zero": 1, "sequence_parallel": True, "recompute": "selective",
            "schedule": "interleaved-1f1b", "chunks": 6,
        },
    )  # fmt: skip
    return asked, [Judged("time", "s", float(record["step_s"]), step_seconds)]


OVERLAPPED = DATA / "throughput" / "megatron-core-overlapped.toml"
"""Megatron-Core as its README starts it: reductions, gathers and collectives of a split sequence beside computations."""


def weak_scaling(record: Record) -> tuple[Asked, list[Judged]] | str:
    """A run of Megatron-LM's README, whose TFLOP/s count 72 B s l h^2 (1 + s/6h + V/12lh)."""
    tp, pp, dp, num, batch, tokens = (
        int(record[key]) for key in ("tp", "pp", "dp", "n_gpus", "global_batch", "seq_len")
    )
    layers, hidden, vocabulary = (int(record[key]) for key in ("layers", "hidden", "vocab"))
    plain = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "tie_word_embeddings": False}
    asked = Asked(
        "gpt2", _gpt(record, vocabulary) | plain, nodes("h100", num),
        {"global_batch": batch, "sequence_length": tokens, "runtime": str(OVERLAPPED)},
        {"tp": tp, "pp": pp, "dp": dp, "zero": 1, "sequence_parallel": tp > 1},
    )  # fmt: skip
    flop = 72 * batch * tokens * layers * hidden**2
    flop *= 1 + tokens / (6 * hidden) + vocabulary / (12 * layers * hidden)
    return asked, [Judged("time", "s", flop / num / 1e12 / float(record["tflops_per_gpu"]), step_seconds)]


_BRIDGE_MODELS: dict[str, tuple[str, dict[str, int]]] = {
    "LLAMA3_8B": ("llama-3-8b", {}),
    "LLAMA3_70B": ("llama-3-70b", {}),
    "LLAMA3.1_405B": ("llama-3-405b", {}),
    "Qwen3_30B_a3B": ("qwen3-30b-a3b", {}),
    "DeepSeekV3": ("deepseek-v3", {}),
    "Qwen3_235B_a22B": ("qwen3-30b-a3b", {  # the sizes of Qwen3-235B-A22B's config
        "num_hidden_layers": 94, "hidden_size": 4096, "num_attention_heads": 64, "moe_intermediate_size": 1536,
    }),
}  # fmt: skip
_BRIDGE_SYSTEMS = {
    "DGX-H100": "h100", "DGX-B200": "b200", "DGX-B300": "b300", "DGX-GB200": "gb200", "DGX-GB300": "gb300",
}  # fmt: skip
_RECIPES = {
    **{("DeepSeekV3", device): "-once-beside-graphs" for device in ("b200", "b300", "gb200", "gb300")},
    **{("Qwen3_30B_a3B", device): "-once-graphs" for device in ("b200", "b300", "gb200", "gb300")},
    ("Qwen3_30B_a3B", "h100"): "-once", ("Qwen3_235B_a22B", "gb200"): "-once-graphs",
    ("Qwen3_235B_a22B", "gb300"): "-once-graphs", ("Qwen3_235B_a22B", "h100"): "-beside",
}  # fmt: skip
"""Files of recipes that differ from the plain one.

Source: Megatron-Bridge, scripts/performance/configs, *_workload_base_configs.py of releases from 26.02 on (dispatchers
DeepEP and HybridEP; `moe_a2a_overlap`; `cuda_graph_scope`). Earlier ones ran the plain dispatcher without graphs.
"""


def bridge(record: Record) -> tuple[Asked, list[Judged]] | str:
    """A row of Megatron-Bridge's performance summary. Ignores: what few recipes recompute."""
    system = record["system"].removeprefix("System: ")
    if record["phase"] != "Pre-Training Performance":
        return "not pre-training"
    if system not in _BRIDGE_SYSTEMS:
        return "a device that is not in the catalog"
    if record["model"] not in _BRIDGE_MODELS:
        return "layers or routing that no bundled model has"
    if record["precision"] not in ("BF16", "FP8", "FP8-CS", "FP8-MX", "MXFP8"):
        return "four-bit precision, or precision not stated"
    num, batch, size, tokens, tp, pp, cp = (
        int(record[key]) for key in ("n_gpus", "global_batch", "micro_batch", "seq_len", "tp", "pp", "cp")
    )
    (model, sizes), device = _BRIDGE_MODELS[record["model"]], _BRIDGE_SYSTEMS[system]
    chunks = int(record["vp"]) if record["vp"].isdigit() else 1
    layers, stages = _num_layers(model, sizes), pp * chunks
    has_lighter_ends = (layers + 2) % stages == 0 and layers % stages != 0
    early = record["release"].startswith("25.") and record["model"] != "Qwen3_235B_a22B"
    way = "" if early else _RECIPES.get((record["model"], device), "")
    has_fsdp = record["fsdp"].isdigit() and int(record["fsdp"]) > 1
    in_domains = f"{num // 64}x64x-{device}" if device.startswith("gb") and num > 64 else f"{num}x-{device}"
    asked = Asked(
        model, sizes, in_domains,
        {
            "global_batch": batch, "sequence_length": tokens, "dtype": "bf16" if record["precision"] == "BF16" else "fp8",
            "runtime": str(DATA / "throughput" / f"megatron-bridge{way}.toml"),
        },
        {
            "tp": tp, "pp": pp, "dp": num // (tp * pp * cp), "cp": cp, "microbatch": size, "zero": 3 if has_fsdp else 1,
            "ep": int(record["ep"]) if record["ep"].isdigit() else 1, "sequence_parallel": tp > 1, **interleaved(chunks),
            "layers_per_stage": with_lighter_ends(layers, stages) if has_lighter_ends else None,
        },
    )  # fmt: skip
    seconds = batch * tokens / num / float(record["tokens_per_s_per_gpu"])
    return asked, [Judged("time", "s", seconds, step_seconds)]


def mixture(record: Record) -> tuple[Asked, list[Judged]] | str:
    """A run of Megatron-MoE-ModelZoo's on H100."""
    num, batch, tokens, tp, pp, chunks, ep = (
        int(record[key]) for key in ("n_gpus", "global_batch", "seq_len", "tp", "pp", "vp", "ep")
    )
    way = "-once" * (record["dispatcher"] == "DeepEP") + "-beside" * (record["overlap"] == "1")
    (model, sizes), dp = _BRIDGE_MODELS[record["model"]], num // (tp * pp)
    asked = Asked(
        model, sizes, nodes("h100", num),
        {
            "global_batch": batch, "sequence_length": tokens,
            "runtime": str(DATA / "throughput" / f"megatron-bridge{way}.toml"),
        },
        {
            "tp": tp, "pp": pp, "dp": dp, "microbatch": int(record["micro_batch"]), "zero": 1, "ep": ep,
            "sequence_parallel": True, **interleaved(chunks),
            "layers_per_stage": with_lighter_ends(_num_layers(model, sizes), pp * chunks),
        },
    )  # fmt: skip
    return asked, [Judged("time", "s", float(record["step_s"]), step_seconds)]


def _num_layers(model: str, sizes: dict[str, int]) -> int:
    config = resolve(model, sizes).config
    assert config is not None
    return int(config["num_hidden_layers"])


ASYNC_TP = DATA / "throughput" / "torch-fsdp-async-tp.toml"
_TITAN_MODELS = {
    "Llama3-8B": "llama-3-8b", "Llama3.1-8B": "llama-3-8b", "Llama3-70B": "llama-3-70b", "Llama3.1-70B": "llama-3-70b",
    "Llama3.1-405B": "llama-3-405b",
}  # fmt: skip
_TITAN_SCHEDULES = {"": "1f1b", "1F1B": "1f1b", "Interleaved1F1B": "interleaved-1f1b"}


def torchtitan(record: Record) -> tuple[Asked, list[Judged]] | str:
    """A run of torchtitan's on H100 with HBM2e.

    A pipeline has as many microbatches as ranks and, where it is interleaved, two stages a rank, and keeps what it has
    gathered until its step ends, as the defaults of December 2024 have it.
    """
    technique, tokens = record["technique"].lower(), int(record["seq_len"])
    if not record["local_batch"] or not record["tps_per_gpu"]:
        return "no batch or no rate was published"
    if record["table"] == "issue773-8B":
        return "the devices of a user's report are not named"
    if "rowwise" in technique:
        return "the speed of row-wise fp8 matmuls is not known"
    if record["schedule"] not in _TITAN_SCHEDULES:
        return f"schedule {record['schedule']} ran without what its row names"
    num, tp, pp, cp, size = (int(record[key]) for key in ("n_gpus", "tp", "pp", "cp", "local_batch"))
    dp = num // (tp * pp * cp)
    count = pp if pp > 1 else 1
    interleaved = {"chunks": 2} if record["schedule"] == "Interleaved1F1B" else {}
    asked = Asked(
        _TITAN_MODELS[record["model"]], {}, nodes("h100-hbm2e", num),
        {
            "global_batch": dp * size, "sequence_length": tokens,
            "runtime": str(ASYNC_TP) if "async" in technique else "torch-fsdp",
            **({"dtype": "fp8"} if "float8" in technique else {}),
            **({"compiled": True} if "compile" in technique else {}),
        },
        {
            "tp": tp, "pp": pp, "dp": dp, "cp": cp, "microbatch": size // count, "zero": 3 if pp == 1 else 1,
            "sequence_parallel": tp > 1, "schedule": _TITAN_SCHEDULES[record["schedule"]], **interleaved,
            "recompute": "selective" if "selective" in record["ac"] else record["ac"],
        },
    )  # fmt: skip
    seconds = dp * size * tokens / num / float(record["tps_per_gpu"])
    figures = [Judged("time", "s", seconds, step_seconds)]
    if record["peak_mem_gib"].replace(".", "").isdigit():
        figures.append(Judged("reserved", "MiB", float(record["peak_mem_gib"]) * 1024, _reserved))
    return asked, figures


KEMPNERFORGE = DATA / "throughput" / "kempnerforge.toml"
"""FSDP2 and tensor parallelism with all that training keeps in bf16."""
IN_STAGES = DATA / "throughput" / "kempnerforge-pipeline.toml"
"""The same in PyTorch's pipelines."""
FOUR_H200 = {
    "num_nics": 2, "intra_node.latency_s": 6e-6, "intra_node.bandwidth": 125.5e9, "intra_node.ring_bandwidth": 250.6e9,
}  # fmt: skip
"""A node of four H200 as KempnerForge's cluster has it: without a switch, each two joined by a third of their links, as the
catalog's GH200, whose measured figures these are; and half an adapter of 400 Gbit/s each. Of another run, that of
benchmarks/profiling/13b_24gpu_profiling.md, 205 reductions over nodes, 69 GB from every device, took 2.95 s: 23.5 GB/s, and
1,640 gathers, 277 GB, 15.9 s.
"""


def kempnerforge(record: Record) -> tuple[Asked, list[Judged]] | str:
    """A run of KempnerForge's on H200, four to a node; ranks of a pipeline keep what they have gathered, and hold whole
    activations between layers that they share."""
    if record["act_ckpt"] not in RECOMPUTE:
        return "recomputation is that of a file, whose name alone was published"
    pp, tp, dp, num = (int(record[key]) for key in ("pp", "tp", "fsdp_shard", "n_gpus"))
    sizes = {
        "num_hidden_layers": "layers", "hidden_size": "hidden", "num_attention_heads": "heads",
        "num_key_value_heads": "kv_heads", "intermediate_size": "ffn", "vocab_size": "vocab",
    }  # fmt: skip
    asked = Asked(
        "llama-3-8b", {name: int(record[column]) for name, column in sizes.items()},
        f"{num // 4}x4x-h200" if num > 4 else f"{num}x-h200",
        {
            "global_batch": int(record["global_batch_seqs"]), "sequence_length": int(record["seq_len"]),
            "runtime": str(KEMPNERFORGE if pp == 1 else IN_STAGES), "compiled": record["compile"] == "yes",
        },
        {
            "tp": tp, "pp": pp, "dp": dp, "microbatch": int(record["micro_batch_per_rank"]),
            "zero": 3 if pp == 1 else 2, "sequence_parallel": tp > 1 and pp == 1, "schedule": "1f1b",
            "recompute": record["act_ckpt"], **({"reduce_dtype": "fp32"} if dp > 1 else {}),
        },
        FOUR_H200,
    )  # fmt: skip
    return asked, [
        Judged("time", "s", float(record["step_time_s"]), step_seconds),
        Judged("allocated", "GiB", float(record["mem_max_allocated_gib_rank0"]), _allocated_first),
    ]


@dataclass(frozen=True)
class Source:
    """A table of runs: where it is, how a row is asked, every so many of which constants were fitted on (0:
    none), the bars, and what is judged of several rows together."""

    folder: str
    reader: Callable[[Record], tuple[Asked, list[Judged]] | str]
    fitted: int
    bars: dict[str, float]
    compared: Callable[[list[tuple[Record, Predictions]]], Iterator[tuple[str, Row]]] | None = None


SOURCES = {
    "megatron_a100_single_node.csv": Source("megatron_time", vtrain, 6, {COMPOSED: 0.06}),
    "megatron_a100_multi_node.csv": Source("megatron_time", vtrain, 0, {"time": 0.08}),
    "megatron_selene_a100.csv": Source("megatron_time", selene, 2, {"time": 0.02}),
    "megatron_core_b200.csv": Source(
        "footprints", megatron_core, 1, {"time": 0.05, "allocated": 0.01, "reserved": 0.016}
    ),
    "megatron_sc21_table1.csv": Source("throughput", narayanan, 0, {"time": 0.13}),
    "megatron_core_h100_weak_scaling.csv": Source("throughput", weak_scaling, 0, {"time": 0.13}),
    "megascale_tab2_fig9.csv": Source("throughput", megascale, 0, {"time": 0.13}),
    "bloom_megatron_deepspeed_a100.csv": Source("bloom", bloom, 0, {"time": 0.12}),
    "mpt_fsdp_llmfoundry.csv": Source("fsdp", mpt, 1, {"time": 0.08}),
    "megatron_bridge_performance.csv": Source("throughput", bridge, 1, {"time": 0.13}),
    "megatron_moe_zoo.csv": Source("throughput", mixture, 1, {"time": 0.13}),
    "sailor_measured.csv": Source("sailor", sailor, 2, {"time": 0.07, "memory": 0.05}),
    "torchtitan_benchmarks.csv": Source("throughput", torchtitan, 0, {"time": 0.13, "reserved": 0.05}),
    "kempnerforge_h200.csv": Source("throughput", kempnerforge, 0, {"time": 0.10, "allocated": 0.06}),
    "zero_bubble_measured.csv": Source("footprints", zero_bubble, 3, {"time": 0.03, "memory": 0.05}),
}


def answer(asked: Asked) -> Predictions | str:
    """Return the predictions, or why there are none."""
    try:
        return asked.predictions()
    except StagewrightError as error:
        return str(error)


def answers(asked: Sequence[Asked], pool: Executor) -> list[Predictions | str]:
    """Return the answers to `asked` in their order. Those of one graph are for one process, which traces it once."""
    of_graph: dict[str, list[int]] = {}
    for index, question in enumerate(asked):
        of_graph.setdefault(question.graph, []).append(index)
    groups = sorted(of_graph.values(), key=len, reverse=True)
    found = pool.map(_answers, ([asked[index] for index in group] for group in groups))
    by_index = {
        index: prediction
        for group, predictions in zip(groups, found, strict=True)
        for index, prediction in zip(group, predictions, strict=True)
    }
    return [by_index[index] for index in range(len(asked))]


def _answers(asked: Sequence[Asked]) -> list[Predictions | str]:
    return [answer(question) for question in asked]


def _asked(source: Source, record: Record) -> tuple[Asked, list[Judged]] | str:
    """What a row asks; of columns, models or devices that its reader does not know, that."""
    try:
        return source.reader(record)
    except (KeyError, ValueError) as fault:
        return f"its row cannot be read: {type(fault).__name__} {fault}"


def rows(
    source: Source, records: list[Record], left_out: Counter[str], pool: Executor, every: int = 1
) -> Iterator[tuple[str, Row]]:
    """(unit, row) of every figure that is predicted, of one of so many rows; those that are not are counted in `left_out`
    by their reason."""
    asked = [(index, _asked(source, records[index])) for index in range(0, len(records), every)]
    left_out.update(made for _, made in asked if isinstance(made, str))
    wanted = [(index, made) for index, made in asked if not isinstance(made, str)]
    predictions = answers([made for _, (made, _) in wanted], pool)
    predicted: list[tuple[Record, Predictions]] = []
    for (index, (question, figures)), prediction in zip(wanted, predictions, strict=True):
        if isinstance(prediction, str):
            left_out[prediction] += 1
            continue
        predicted.append((records[index], prediction))
        half = "fit" if source.fitted and index % source.fitted == 0 else "other"
        for one in figures:
            yield one.unit, Row(question.label, one.figure, one.take(prediction), one.measured, half)
    if source.compared is not None:
        yield from source.compared(predicted)


SAFETY = "memory safety"
"""Of every measured peak: a run is against the prediction that took more than a device would have which is just large enough
by it, with what plans leave free."""

MEMORY = ("allocated", "reserved", "memory")


def _is_wrong(verdict: str, row: Row) -> bool:
    """Whether a run that had room is predicted to have none, one that had none to have 5 % to spare, or one to be safe on
    a device that is too small."""
    if verdict == SAFETY:
        held_back = _cluster("1x-a100-80").device.reserve_fraction  # as of every device in the catalog
        return row.measured > row.predicted / (1 - held_back)
    return row.error > 0 if verdict == ROOM else row.error < -0.05


def verdicts(found: list[Row]) -> Iterator[tuple[str, int, list[Row]]]:
    """Of each kind that some rows are judged by: its name, how many they are, and those against the prediction."""
    for verdict, figures in ((SAFETY, MEMORY), (ROOM, (ROOM,)), (NO_ROOM, (NO_ROOM,))):
        judged = [row for row in found if row.group in figures]
        if judged:
            yield verdict, len(judged), [row for row in judged if _is_wrong(verdict, row)]


def judge(sources: dict[str, Source], description: str | None) -> None:
    """Print the verdict of every table that is there; ends with 1 where a bar is missed."""
    parser = arguments(description, DATA)
    parser.add_argument("--only", choices=sources, help="one table")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="one of N rows")
    given = parser.parse_args()
    missed, documents = [], {}
    with ProcessPoolExecutor() as pool:
        for name, source in sources.items():
            own = given.data / source.folder / name
            path = own if own.exists() else given.data / name
            if (given.only and given.only != name) or not path.exists():
                continue
            with path.open(newline="", encoding="utf-8") as file:
                records = list(csv.DictReader(file))
            left_out: Counter[str] = Counter()
            judgements: dict[str, dict[str, Any]] = {}
            found = list(rows(source, records, left_out, pool, given.every))
            if not found:
                missed.append(f"{name}, of which nothing is judged")
            for figure, bar in source.bars.items():
                judged = [(unit, row) for unit, row in found if row.group == figure]
                if not judged:
                    continue
                only = [row for _, row in judged]
                if summary("all", only).mean > bar:
                    missed.append(f"{name}, {figure}")
                if given.json:
                    judgements[figure] = document(only, bar)
                    continue
                print(f"{name}: {figure}, {len({row.predicted for row in only})} distinct predictions")
                show(only, bar, judged[0][0], False, every_row=len(only) < 100)
                print()
            for verdict, count, wrong in verdicts([row for _, row in found]):
                if wrong:
                    missed.append(f"{name}, {verdict}")
                if given.json:
                    judgements[verdict] = {"rows": count, "wrong": len(wrong)}
                    continue
                print(f"{name}: {verdict}: {count} rows, {len(wrong)} against the prediction")
                for row in wrong:
                    print(
                        f"  {row.label}: {row.group}, {row.predicted:,.1f} predicted, {row.measured:,.1f} measured"
                    )
                print()
            if given.json:
                documents[name] = judgements | {"left_out": dict(left_out)}
            if not given.json:
                for reason, count in left_out.most_common():
                    print(f"{name}: {count} rows left out: {reason}\n")
    if given.json:
        json.dump(documents, sys.stdout, indent=1)
        print()
    if missed:
        sys.exit(f"above their bars: {'; '.join(missed)}")


if __name__ == "__main__":
    judge(SOURCES, __doc__)
