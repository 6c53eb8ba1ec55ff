"""Read rows of Megatron-LM's functional tests: what is asked of `stagewright estimate`, and what its logs say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from runtimes import Asked, Judged, Record, interleaved, step_seconds, with_lighter_ends

from stagewright.planning.predictions import Predictions

DATA = Path(__file__).parent / "data" / "pipelines"
_NODES = {"A100": "a100-80", "A100?": "a100-80", "H100": "h100", "GB200": "gb200"}
_NOT_PLAIN = {
    "use_megatron_fsdp": "Megatron-FSDP, which no runtime file describes",
    "fp8_format": "parameters or activations in eight bits",
    "multi_latent_attention": "layers of no model here: latent attention without DeepSeek's routing",
    "mtp_num_layers": "layers of no model here: multi-token prediction",
    "pipeline_model_parallel_layout": "a layout of stages with parts of their own",
    "cuda_graph_impl": "CUDA graphs, whose memory is not predicted",
    "overlap_moe_expert_parallel_comm": "exchanges with experts during another microbatch, which is alive meanwhile",
    "recompute_modules": "recomputation of single modules",
    "moe_shared_expert_intermediate_size": "layers of no model here: shared experts with GELU",
}
"""Columns, and why rows that have them are left out."""
_OTHER_ARGUMENTS = {
    "grpo": "reinforcement learning, with inference in the same process",
    "defer-embedding-wgrad-compute": "weight gradients of the head that wait for the end of the batch, with their inputs",
    "optimizer=muon": "Muon, with which other runtimes are not predicted",
}
MODELS = Path(__file__).with_name("megatron_models.py")
_DETERMINISTIC = {
    "A100": {"device.attention_backward_efficiency": 0.52 * 0.52},
    "H100": {"device.attention_efficiency": 0.71, "device.attention_backward_efficiency": 0.95 * 0.55},
    "GB200": {"device.attention_efficiency": 0.144, "device.attention_backward_efficiency": 0.52 * 0.134},
}
"""Rates of the kernels that Transformer Engine takes where attention must be deterministic (`get_attention_backend`):
cuDNN's on Hopper, FlashAttention-2 before it and on Blackwell, where it attains 361 TFLOP/s forward
(meta-pytorch/tritonbench#171) and 334 backward (Dao-AILab/flash-attention#1589) of 2,500. With a fixed order of additions
FlashAttention-2's backward has 0.52 of its rate, 155 of 291 to 303 TFLOP/s, and FlashAttention-3's, which stands for
cuDNN's, 0.95 (``kernels/attention_forward_backward.csv``)."""
_CUBLAS = {"device.workspace_bytes": 8 * 4096 * 1024}
"""What ``CUBLAS_WORKSPACE_CONFIG=:4096:8`` makes of cuBLAS's workspace."""
_WORD_PIECES = 28_998
"""Tokens of BERT's cased vocabulary, with Megatron's beginning and end of a text."""
_TIMED_FROM = 2048
"""Hidden size from which the host does not bound a step. One of T5 is a microbatch of short texts, with norms of weights and
zeros of gradients that are logged every time: its time is not judged."""


def golden(record: Record) -> tuple[Asked, list[Judged]] | str:
    """A row of Megatron-LM's functional tests, whose last rank logs.

    Ignores: that layers without biases have fewer parameters than GPT-2's by a thousandth; that positions are learned where
    queries are grouped, for which StarCoder 2's layers stand, with rotary ones.
    """
    if not record["mem_max_allocated_bytes"]:
        return "no peak was published"
    if record["family"] not in ("gpt", "moe", "bert", "t5"):
        return f"layers of no model here: {record['family']}"
    for column, reason in _NOT_PLAIN.items():
        if record[column]:
            return reason
    for argument, reason in _OTHER_ARGUMENTS.items():
        if argument in record["other_args"]:
            return reason
    if not record["n_gpus"] and record["use_distributed_optimizer"] and "release" in record["test"]:
        return "the number of GPUs, over which the optimizer is sharded, is not known"
    model = _model(record)
    if isinstance(model, str):
        return model
    tp_of_experts = record["expert_tensor_parallel_size"] or record["tensor_model_parallel_size"]
    if record["num_experts"] and tp_of_experts != record["tensor_model_parallel_size"]:
        return "experts split over fewer ranks than attention"
    num = int(record["n_gpus"] or 8)
    tp, pp, cp = (
        int(record[f"{kind}_parallel_size"] or 1) for kind in ("tensor_model", "pipeline_model", "context")
    )
    dp, size, batch = num // (tp * pp * cp), int(record["micro_batch_size"]), int(record["global_batch_size"])
    stages = _stages(record, pp)
    asked = Asked(
        *model, f"{num}x-{_NODES[record['gpu']]}",
        {
            "global_batch": batch, "sequence_length": int(record["seq_length"] or _given(record, "encoder-seq-length")),
            "runtime": _runtime(record), "dtype": "fp16" if record["fp16"] else "bf16",
        },
        {
            "tp": tp, "pp": pp, "cp": cp, "dp": dp, "ep": int(record["expert_model_parallel_size"] or 1),
            "microbatch": size, "recompute": _recompute(record),
            "zero": 1 if record["use_distributed_optimizer"] else None,
            "sequence_parallel": bool(record["sequence_parallel"]) and tp > 1, **stages,
        },
        _figures(record),
    )  # fmt: skip
    figures = [
        Judged("allocated", "MiB", float(record["mem_max_allocated_bytes"]) / 2**20, _last_allocated),
    ]
    if int(record["hidden_size"]) >= _TIMED_FROM and record["family"] != "t5":
        figures.append(Judged("time", "s", float(record["step_s_median"]), step_seconds))
    return asked, figures


def _figures(record: Record) -> dict[str, float]:
    """Return the figures in which a row's environment has a device differ from the catalog's."""
    workspace = _CUBLAS if ":4096:8" in record["env_vars"] else {}
    in_order = "NVTE_ALLOW_NONDETERMINISTIC_ALGO=0" in record["env_vars"]
    return workspace | (_DETERMINISTIC[record["gpu"].rstrip("?")] if in_order else {})


def _model(record: Record) -> tuple[str, dict[str, Any]] | str:
    """Return the bundled model with the layers of a row, and its sizes; or why there is none."""
    tp, is_t5 = int(record["tensor_model_parallel_size"] or 1), record["family"] == "t5"
    hidden, heads = int(record["hidden_size"]), int(record["num_attention_heads"])
    layers = _given(record, "encoder-num-layers") if is_t5 else int(record["num_layers"])
    tokens = (
        _WORD_PIECES + _given(record, "vocab-extra-ids") if is_t5 else int(record["vocab_size"] or 50_257)
    )
    multiple = tp * int(
        (re.search(r"make-vocab-size-divisible-by=(\d+)", record["other_args"]) or [0, 128])[1]
    )
    vocabulary = -(-tokens // multiple) * multiple
    drop = {
        name: 0.0 if f"{name}-dropout=0.0" in record["other_args"] else 0.1
        for name in ("hidden", "attention")
    }
    if is_t5:
        if record["sequence_parallel"]:
            return "sequence parallelism of an encoder and a decoder"
        return f"{MODELS}:t5", {
            "hidden": hidden, "heads": heads, "layers": layers, "vocabulary": vocabulary, "inner": _inner(record),
            "target_length": _given(record, "decoder-seq-length"), "hidden_dropout": drop["hidden"],
            "attention_dropout": drop["attention"],
        }  # fmt: skip
    if record["family"] == "bert":
        vocabulary = -(-_WORD_PIECES // multiple) * multiple
        return f"{MODELS}:bert", {
            "hidden": hidden, "heads": heads, "layers": layers, "vocabulary": vocabulary, "inner": _inner(record),
            "hidden_dropout": drop["hidden"], "attention_dropout": drop["attention"],
        }  # fmt: skip
    tied = not record["untie_embeddings_and_output_weights"]
    is_plain = not (record["swiglu"] or record["normalization"] or record["num_experts"])
    if not is_plain or "qk-layernorm" in record["other_args"]:
        if record["num_query_groups"] or record["position_embedding_type"] == "rope":
            return (
                "layers of no model here: experts, gates, RMS norms or norms of queries with rotary positions"
            )
        return f"{MODELS}:gpt", {
            "hidden": hidden, "heads": heads, "layers": layers, "vocabulary": vocabulary, "tied": tied,
            "positions": int(record["seq_length"]), "inner": _inner(record), "gated": bool(record["swiglu"]),
            "rms": bool(record["normalization"]), "normed": "qk-layernorm" in record["other_args"],
            "biases": not record["disable_bias_linear"], "num_experts": int(record["num_experts"] or 0),
            "chosen": int(record["moe_router_topk"] or 1), "hidden_dropout": drop["hidden"],
            "attention_dropout": drop["attention"],
        }  # fmt: skip
    if groups := int(record["num_query_groups"] or 0):
        return str(DATA / "megatron-gpt-grouped.json"), {
            "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": groups,
            "intermediate_size": int(record["ffn_hidden_size"] or 4 * hidden), "vocab_size": vocabulary,
            "tie_word_embeddings": tied, "max_position_embeddings": int(record["seq_length"]),
            "residual_dropout": drop["hidden"], "embedding_dropout": drop["hidden"],
            "attention_dropout": drop["attention"],
        }  # fmt: skip
    if record["position_embedding_type"] == "rope":
        return str(DATA / "megatron-gpt-rope.json"), {
            "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
            "intermediate_size": 4 * hidden, "vocab_size": vocabulary, "tie_word_embeddings": tied,
            "hidden_dropout": drop["hidden"], "attention_dropout": drop["attention"],
        }  # fmt: skip
    return "gpt2", {
        "n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": int(record["seq_length"]),
        "vocab_size": vocabulary, "tie_word_embeddings": tied,
        "resid_pdrop": drop["hidden"], "embd_pdrop": drop["hidden"], "attn_pdrop": drop["attention"],
    }  # fmt: skip


def _given(record: Record, argument: str) -> int:
    """Return the value of one of the other arguments of a row."""
    return int(re.search(rf"\b{argument}=(\d+)", record["other_args"])[1])  # type: ignore[index]


def _inner(record: Record) -> int:
    """Return the width between the matmuls of a feed-forward layer or expert."""
    of_experts = record["moe_ffn_hidden_size"] if record["num_experts"] else ""
    hidden = int(record["hidden_size"])
    return int(
        of_experts
        or record["ffn_hidden_size"]
        or (8 * hidden // 3 // 64 * 64 if record["swiglu"] else 4 * hidden)
    )


def _stages(record: Record, pp: int) -> dict[str, Any]:
    """Return the options that say how layers are dealt out to stages."""
    layers = int(record["num_layers"] or 0)
    if record["num_layers_per_virtual_pipeline_stage"]:
        chunks = layers // pp // int(record["num_layers_per_virtual_pipeline_stage"])
    else:
        chunks = int(record["num_virtual_stages_per_pipeline_rank"] or 1)
    first, last = (int(record[f"decoder_{end}_pipeline_num_layers"] or 0) for end in ("first", "last"))
    counts: tuple[int, ...] | None = None
    if first and last:
        counts = (first, *((layers - first - last) // (pp - 2),) * (pp - 2), last)
    elif record["account_for_embedding_in_pipeline_split"] and record["account_for_loss_in_pipeline_split"]:
        counts = with_lighter_ends(layers, pp * chunks)
    return {**interleaved(chunks), "layers_per_stage": counts}


def _recompute(record: Record) -> str:
    if record["recompute_granularity"] == "selective" or record["recompute_activations"]:
        return "selective"
    return "full" if record["recompute_granularity"] == "full" else "none"


def _runtime(record: Record) -> str:
    """Return the runtime file of a row; images of 2025, and those with long-term support
    when recordings still kept every fifth step, have no fused attention whose dropout is deterministic."""
    is_stored = record["attention_backend"] == "unfused" or record["transformer_impl"] == "local"
    is_thinned = 5 * int(record["n_steps_measured"]) <= int(record["train_iters"] or 0)
    is_old = "dracooci" in record["platform"] or (record["environment"] == "lts" and is_thinned)
    is_stored |= is_old and "NVTE_ALLOW_NONDETERMINISTIC_ALGO=0" in record["env_vars"]
    parts = [
        "goldens",
        "fused-loss" if "cross-entropy-loss-fusion" in record["other_args"] else "",
        "unfused" if is_stored else "",
        "grouped" if record["moe_grouped_gemm"] else "",
    ]
    return str(DATA / f"{'-'.join(filter(None, parts))}.toml")


def _last_allocated(predictions: Predictions) -> float:
    return predictions.ranks[-1].allocated_peak_bytes / 2**20
