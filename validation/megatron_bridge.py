"""Rows of Megatron-Bridge's performance summary as runs: which can be predicted, and why others cannot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from footprints import with_lighter_ends

from stagewright.cluster import Cluster
from stagewright.estimation.megatron import Experts, Layout, Shape, find_megatron_stack, shape_of
from stagewright.estimation.megatron.fusion import Dispatch, find_fusion
from stagewright.planning.configure.iteration import Run
from stagewright.tracing.models.reference import resolve

Record = dict[str, str]

_BUNDLED = {
    "LLAMA3_8B": "llama-3-8b", "LLAMA3_70B": "llama-3-70b", "LLAMA3.1_405B": "llama-3-405b",
    "Qwen3_30B_a3B": "qwen3-30b-a3b", "DeepSeekV3": "deepseek-v3",
}  # fmt: skip
DESCRIBED = {
    # Source: config.json of Qwen/Qwen3-235B-A22B, and of openai/gpt-oss-120b, whose every second layer looks at 128 tokens.
    "Qwen3_235B_a22B": Shape(
        94, 4096, 12288, 64, 151_936, 4, 128, gated=True, has_bias=False, tied=False,
        experts=Experts(128, 8, 1536, 0),
    ),
    "GPT OSS 120B": Shape(
        36, 2880, 2880, 64, 201_088, 8, 64, gated=True, has_bias=False, tied=False,
        experts=Experts(128, 4, 2880, 0),
    ),
}  # fmt: skip
_SYSTEMS = {
    "DGX-H100": "h100", "DGX-B200": "b200", "DGX-B300": "b300", "DGX-GB200": "gb200", "DGX-GB300": "gb300",
}  # fmt: skip
FUSED_ATTENTION = {"h100": {"device.attention_efficiency": 0.6, "device.attention_backward_efficiency": 0.5}}
"""What cuDNN's attention, which Transformer Engine calls, attains of the peak on H100, to the nearest tenth (8,192 causal
tokens, heads of 128; Shah et al. 2024, arXiv 2407.08608, figures 5 and 6). The catalog's figures are FlashAttention-2's."""
_EIGHT_BITS = ("FP8", "FP8-CS", "FP8-MX", "MXFP8")


class _Recipe(NamedTuple):
    """How tokens get to their experts, whether beside another microbatch, whether routing is part of a captured graph."""

    dispatch: Dispatch = "every copy"
    hides: bool = False
    captured: bool = False


_RECIPES = {
    ("DeepSeekV3", "DGX-B200"): _Recipe("once per node", hides=True, captured=True),
    ("DeepSeekV3", "DGX-B300"): _Recipe("once per node", hides=True, captured=True),
    ("DeepSeekV3", "DGX-GB200"): _Recipe("once per node", hides=True, captured=True),
    ("DeepSeekV3", "DGX-GB300"): _Recipe("once per node", hides=True, captured=True),
    ("GPT OSS 120B", "DGX-B300"): _Recipe("once per node", captured=True),
    ("GPT OSS 120B", "DGX-GB200"): _Recipe(hides=True),
    ("GPT OSS 120B", "DGX-GB300"): _Recipe(captured=True),
    ("Qwen3_30B_a3B", "DGX-B200"): _Recipe("once per node", captured=True),
    ("Qwen3_30B_a3B", "DGX-B300"): _Recipe("once per node", captured=True),
    ("Qwen3_30B_a3B", "DGX-GB200"): _Recipe("once per node", captured=True),
    ("Qwen3_30B_a3B", "DGX-GB300"): _Recipe("once per node", captured=True),
    ("Qwen3_30B_a3B", "DGX-H100"): _Recipe("once per node"),
    ("Qwen3_235B_a22B", "DGX-GB200"): _Recipe("once per node", captured=True),
    ("Qwen3_235B_a22B", "DGX-GB300"): _Recipe("once per node", captured=True),
    ("Qwen3_235B_a22B", "DGX-H100"): _Recipe(hides=True),
}
"""Recipes that differ from the plain one.

Source: Megatron-Bridge, scripts/performance/configs, *_workload_base_configs.py of releases from 26.02 on (dispatchers
DeepEP and HybridEP; `moe_a2a_overlap`; `cuda_graph_scope`). Earlier ones ran the plain dispatcher without graphs."""
CAST_BYTES = 4
"""Half precision read, and a copy in eight bits written for each of the two products that take it."""


def why_not(record: Record) -> str:
    """Why a row is left out; empty if it is judged."""
    if record["phase"] != "Pre-Training Performance":
        return "not pre-training"
    if _system(record) not in _SYSTEMS:
        return "a device that is not in the catalog"
    if record["model"] not in _BUNDLED and record["model"] not in DESCRIBED:
        return "layers or routing that Megatron's shapes here do not have"
    if record["precision"] not in ("BF16", *_EIGHT_BITS):
        return "four-bit precision, or precision not stated"
    return ""


def left_out(records: Iterable[Record]) -> Counter[str]:
    """Rows that are not judged, by reason."""
    return Counter(reason for reason in map(why_not, records) if reason)


def device_of(record: Record) -> str:
    """The catalog's name of the device."""
    return _SYSTEMS[_system(record)]


def label_of(record: Record) -> str:
    """Model, devices, precision, release."""
    release = record["release"].split()[0]
    return f"{record['model']} on {record['n_gpus']} {_system(record)} {record['precision']} ({release})"


def run_of(record: Record, cluster: Cluster) -> Run:
    """The run of a judged row; parameters that FSDP shards are taken as those of a sharded optimizer."""
    stack, fusion = find_megatron_stack("megatron-core+te"), find_fusion("megatron-core+te")
    recipe = _recipe(record)
    fusion = replace(
        fusion, hidden_gathers="all", dispatch=recipe.dispatch, hides_dispatch=recipe.hides,
        routing_wait_s=0.0 if recipe.captured else fusion.routing_wait_s,
    )  # fmt: skip
    if record["precision"] in _EIGHT_BITS:
        stack, fusion = replace(stack, computes_in="fp8"), replace(fusion, cast_bytes=CAST_BYTES)
    return Run(_shape(record["model"]), _layout(record), stack, fusion, cluster)


def _recipe(record: Record) -> _Recipe:
    key = record["model"], _system(record)
    early = record["release"].startswith("25.") and key[0] != "Qwen3_235B_a22B"
    return _Recipe() if early else _RECIPES.get(key, _Recipe())


def _layout(record: Record) -> Layout:
    num, batch, size, tokens, tp, pp, cp = (
        int(record[key]) for key in ("n_gpus", "global_batch", "micro_batch", "seq_len", "tp", "pp", "cp")
    )
    chunks = int(record["vp"]) if record["vp"].isdigit() else 1
    dp, num_layers, stages = num // (tp * pp * cp), _shape(record["model"]).num_layers, pp * chunks
    lighter = (
        num_layers + 2
    ) % stages == 0 and num_layers % stages != 0  # embedding and head stand for a layer each
    experts = int(record["ep"]) if record["ep"].isdigit() else 1
    return Layout(
        tokens, tp=tp, pp=pp, dp=dp, cp=cp, ep=max(1, experts // tp),  # experts are not split again by tp
        microbatch_size=size, num_microbatches=batch // (dp * size), sequence_parallel=tp > 1,
        shards_optimizer=True, overlaps_reduction=True, num_chunks=chunks,
        schedule="interleaved-1f1b" if chunks > 1 else "1f1b",
        layers_per_stage=with_lighter_ends(num_layers, stages) if lighter else None,
    )  # fmt: skip


@cache
def _shape(model: str) -> Shape:
    if model in DESCRIBED:
        return DESCRIBED[model]
    config = resolve(_BUNDLED[model]).config
    assert config is not None
    return shape_of(config)


def _system(record: Record) -> str:
    return record["system"].removeprefix("System: ")
