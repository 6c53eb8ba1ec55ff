"""Judge what `stagewright estimate --runtime` predicts for pipelines that NVIDIA has published: step times and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from goldens import golden
from runtimes import Asked, Judged, Record, Source, interleaved, judge, nodes, step_seconds, with_lighter_ends

DATA = Path(__file__).parent / "data" / "pipelines"
NEMO = DATA.parent / "throughput" / "megatron-bridge.toml"
"""NeMo's recipes, whose successor is Megatron-Bridge: reductions, gathers and tensor parallel collectives overlap."""
MLPERF = DATA / "mlperf.toml"
"""The same as MLPerf's benchmark runs it, which spends more on every step."""

_NEMOTRON = str(DATA / "nemotron-4-340b.json")
_GPT3 = {
    "n_embd": 12288, "n_head": 96, "n_layer": 96, "n_positions": 2048, "vocab_size": 51200,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
_GROK = {
    "hidden_size": 6144, "num_attention_heads": 48, "num_key_value_heads": 8, "intermediate_size": 32768,
    "vocab_size": 131072,
}  # fmt: skip
_NEMOTRON_15B = {
    "hidden_size": 6144, "num_hidden_layers": 32, "num_attention_heads": 48, "head_dim": 128, "intermediate_size": 24576,
}  # fmt: skip
_NEMOTRON_CHUNKS = 12
"""Stages a rank of Nemotron 340B, which the releases before and after 25.04 state, and it does not."""
_CLOUD_MODELS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("llama 3.1 8b", "llama-3-8b", {}),
    ("llama3 8b", "llama-3-8b", {}),
    ("llama 3.1 70b", "llama-3-70b", {}),
    ("llama3 70b", "llama-3-70b", {}),
    ("llama3.1 405b", "llama-3-405b", {}),
    ("nemotron4 15b", _NEMOTRON, _NEMOTRON_15B),
    ("nemotron4 340b", _NEMOTRON, {}),
    ("nemotron 340b", _NEMOTRON, {}),
    ("nemo megatron", "gpt2", _GPT3),
    ("grok", "mixtral-8x7b", _GROK),
)
"""Models by what their names in the recipes begin with."""


def in_domains(device: str, num: int) -> str:
    """Return the name of a cluster of `num` devices, with NVLink domains of 64 where the device has large ones."""
    if not device.startswith("gb"):
        return nodes(device, num)
    return f"{num // 64}x64x-{device}" if num > 64 else f"{num}x-{device}"


def _partition(num_layers: int, num_stages: int) -> tuple[int, ...] | None:
    """Return layers per stage where embedding and head stand for a layer each, which is where layers alone do not divide."""
    is_asymmetric = num_layers % num_stages and (num_layers + 2) % num_stages == 0
    return with_lighter_ends(num_layers, num_stages) if is_asymmetric else None


def cloud(record: Record) -> tuple[Asked, list[Judged]] | str:
    """A row of the DGX Cloud recipes. Grok's experts have GeGLU where Mixtral's have SwiGLU, with the same sizes."""
    name = record["model"].lower()
    if "JAX" in record["framework"]:
        return "a runtime on JAX"
    if not record["gbs"] or not record["tp"]:
        return "no batch or no degrees were published"
    if "lora" in name:
        return "low-rank adapters"
    known = [(model, sizes) for start, model, sizes in _CLOUD_MODELS if name.startswith(start)]
    if not known:
        return "layers that no bundled model has"
    (model, sizes), num, batch = known[0], int(record["n_gpus"]), int(record["gbs"])
    tp, pp, cp, size = (int(record[key] or 1) for key in ("tp", "pp", "cp", "mbs"))
    chunks = int(record["vp"] or (_NEMOTRON_CHUNKS if "340b" in name else 1))
    ep = int(record["ep"]) if record["ep"].isdigit() else 1
    layers, precision = int(record["layers"]), record["precision"].lower()
    if "n_layer" not in sizes:
        sizes = sizes | {"num_hidden_layers": layers}
    device = record["gpu"].lower()
    asked = Asked(
        model, sizes, in_domains(device, num),
        {
            "global_batch": batch, "sequence_length": int(record["seq"]), "dtype": precision, "runtime": str(NEMO),
        },
        {
            "tp": tp, "pp": pp, "cp": cp, "dp": num // (tp * pp * cp), "microbatch": size, "zero": 1, "ep": ep,
            "sequence_parallel": tp > 1, **interleaved(chunks if pp > 1 else 1),
            "layers_per_stage": _partition(layers, pp * chunks) if pp > 1 else None,
        },
    )  # fmt: skip
    figure = f"{'pipelines' if pp > 1 else 'without pipelines'}, {precision}"
    return asked, [Judged(figure, "s", float(record["step_s"]), step_seconds)]


_MLPERF_DEVICES = {"NVIDIA H100-SXM5-80GB": "h100", "NVIDIA Blackwell GPU (GB200)": "gb200"}
_OTHER_MLPERF_DEVICES = {"H200": "h200", "B200": "b200", "GB300": "gb300", "B300": "b300"}


def mlperf(record: Record) -> tuple[Asked, list[Judged]] | str:
    """A step of Llama 3.1 405B in MLPerf Training."""
    if record["benchmark"] != "llama31_405b":
        return f"benchmark {record['benchmark']}"
    if record["precision_hint"] != "fp8":
        return f"precision {record['precision_hint'] or 'not stated'}"
    if not record["step_s_median"] or not record["tp"]:
        return "no time or no configuration was published"
    text = record["accelerator"]
    device = _MLPERF_DEVICES.get(text) or next(
        (short for name, short in _OTHER_MLPERF_DEVICES.items() if name in text), ""
    )
    if not device:
        return f"accelerator {text}"
    tp, pp, cp, chunks, num, batch = (
        int(record[key]) for key in ("tp", "pp", "cp", "vp", "n_gpus", "global_batch_size")
    )
    has_lighter_ends = record["asym_pp_embed"] == "True" and record["asym_pp_loss"] == "True"
    asked = Asked(
        "llama-3-405b", {}, in_domains(device, num),
        {
            "global_batch": batch, "sequence_length": int(record["seq_length"]), "dtype": "fp8", "runtime": str(MLPERF),
        },
        {
            "tp": tp, "pp": pp, "cp": cp, "dp": num // (tp * pp * cp), "microbatch": int(record["micro_batch"]), "zero": 1,
            "sequence_parallel": True, **interleaved(chunks),
            "layers_per_stage": with_lighter_ends(126, pp * chunks) if has_lighter_ends else None,
        },
    )  # fmt: skip
    return asked, [Judged("time", "s", float(record["step_s_median"]), step_seconds)]


_OVERLAPS = {"HybridEP, no overlap": "-once", "HybridEP, EP overlap": "-once-beside"}
_LLAMA_TFLOP = 6 * 70.6e9 / 1e12
"""Of a token, without its attention, from which only ratios of steps are taken."""


def skill(record: Record) -> tuple[Asked, list[Judged]] | str:
    """A run that Megatron-Bridge's guides compare with another; only their differences are judged."""
    way = _OVERLAPS.get(record["variant"])
    if record["model"] == "Qwen3-30B-A3B" and way and record["global_batch"]:
        model, runtime, dtype = "qwen3-30b-a3b", NEMO.with_stem(f"{NEMO.stem}{way}"), "bf16"
        seconds = float(record["step_ms"]) / 1e3
    elif record["model"] == "Llama-3-70B" and record["variant"] in ("expandable_segments", "more TP"):
        model, runtime, dtype = "llama-3-70b", NEMO, "fp8"
        tokens = int(record["global_batch"]) * int(record["sequence_length"])
        seconds = tokens * _LLAMA_TFLOP / int(record["gpus"]) / float(record["model_tflops_per_gpu"])
    else:
        return "a change that no configuration describes, or runs without a batch"
    tp, pp, num = (int(record[key]) for key in ("tp", "pp", "gpus"))
    asked = Asked(
        model, {}, nodes("h100", num),
        {
            "global_batch": int(record["global_batch"]), "sequence_length": int(record["sequence_length"]), "dtype": dtype,
            "runtime": str(runtime),
        },
        {
            "tp": tp, "pp": pp, "dp": num // (tp * pp), "ep": int(record["ep"] or 1), "zero": 1,
            "sequence_parallel": tp > 1, **interleaved(int(record["vpp"] or 1)),
        },
    )  # fmt: skip
    return asked, [Judged("time", "s", seconds, step_seconds)]


def bridge_card(record: Record) -> tuple[Asked, list[Judged]] | str:
    """A verified run of Megatron-Bridge's model cards that tells its batch and degrees."""
    if record["status"] != "verified":
        return "not verified, and no time"
    if record["card"] == "deepseek-v3":
        return "how its 61 layers and the one behind them were cut into stages is not told"
    if not record["gbs_in_text"] or not record["dp_in_text"]:
        return "no batch or no degrees were published"
    asked = Asked(
        record["card"], {}, nodes(record["gpu"].lower(), int(record["n_gpus"])),
        {
            "global_batch": int(record["gbs_in_text"]), "sequence_length": int(record["seq_length"]),
            "dtype": record["precision"], "runtime": str(NEMO),
        },
        {
            "tp": int(record["tp_in_text"]), "pp": int(record["pp_in_text"]), "dp": int(record["dp_in_text"]), "zero": 1,
            "microbatch": int(record["mbs_in_text"]),
        },
    )  # fmt: skip
    seconds = float(record["last_10_steps_step_time_ms_avg"]) / 1e3
    return asked, [Judged("time", "s", seconds, step_seconds)]


COMPARED = {"megatron_bridge_skills.csv": Source("pipelines", skill, 0, {})}
"""Tables whose rows are judged by their differences alone."""

SOURCES = {
    "megatron_functional_tests.csv": Source("pipelines", golden, 0, {"allocated": 0.02, "time": 0.12}),
    "mlperf_training.csv": Source("pipelines", mlperf, 1, {"time": 0.05}),
    "megatron_bridge_model_cards.csv": Source("pipelines", bridge_card, 0, {"time": 0.10}),
    "dgxc_benchmarking.csv": Source(
        "pipelines", cloud, 0,
        {
            "pipelines, bf16": 0.10, "pipelines, fp8": 0.12, "without pipelines, bf16": 0.13, "without pipelines, fp8": 0.13,
        },
    ),
}  # fmt: skip


if __name__ == "__main__":
    judge(SOURCES, __doc__)
