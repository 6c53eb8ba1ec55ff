"""Judge the memory of Megatron's stacks on four published sets: what layers keep, and peaks of whole ranks."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from verdict import Row, arguments, show

from stagewright.estimation.megatron import (
    Experts,
    Latent,
    Layout,
    Shape,
    find_megatron_stack,
    footprints,
    stage_bytes,
)
from stagewright.schedule import Program
from stagewright.schedule.automatic import StageTimes, automatic
from stagewright.schedule.families import build
from stagewright.schedule.placement import linear

BAR = 0.04
DATA = Path(__file__).parent / "data" / "footprints"
_RATES = Path(__file__).parent / "data" / "zero_bubble" / "bubble_rates.csv"
ZERO_BUBBLE_VOCABULARY = 32_000
"""The parameters that the models are named by, 14.6 and 28.3 x 10^9, leave room for 25,000 to 33,600 tokens."""
GIB, MIB, GB = 2**30, 2**20, 10**9

Record = dict[str, str]


def korthikanti(records: list[Record]) -> Iterator[Row]:
    """Figure 1: bytes per GPU; figure 7: share of the activations without recomputation."""
    kept: dict[tuple[str, str], int] = {}
    for record in records:
        name, mode = record["model"], record["mode"]
        shape, layout = _korthikanti_run(name, mode)
        ranks = footprints(shape, layout, find_megatron_stack("megatron-deepspeed"))
        kept[name, mode] = activations = ranks[0].layer_activation_bytes
        label = f"figure {record['figure']}: {name} {mode}"
        if record["figure"] == "1":
            inner = ranks[len(ranks) // 2].state_bytes / GIB
            yield Row(f"{label}, state", "Korthikanti", inner, float(record["params_grads_optimizer_gib"]))
            yield Row(
                f"{label}, activations", "Korthikanti", activations / GIB, float(record["activations_gib"])
            )
        elif mode != "none":
            share = 100 * activations / kept[name, "none"]
            yield Row(label, "Korthikanti", share, float(record["activation_pct_of_baseline"]))


def _korthikanti_run(name: str, mode: str) -> tuple[Shape, Layout]:
    common: dict[str, Any] = {
        "sequence_length": 2048,
        "tp": 8,
        "sequence_parallel": "seq" in mode,
        "recompute": "full" if mode == "full" else "selective" if "selective" in mode else "none",
        "fp32_gradients": True,
    }
    if name == "22B":
        return Shape.gpt(48, 6144, 64, 51200, 2048), Layout(microbatch_size=4, **common)
    interleaved = {"schedule": "interleaved-1f1b", "num_chunks": 3, "num_microbatches": 70}
    return Shape.gpt(105, 20480, 128, 51200, 2048), Layout(pp=35, **interleaved, **common)


def mist(records: list[Record]) -> Iterator[Row]:
    """Allocated peak of every stage that was measured."""
    for record in records:
        measured = [float(text) for text in re.findall(r"(\d+) MB", record["measured_stage_peak_alloc_mb"])]
        strategies = [[float(part) for part in text.split(",")] for text in _strategies(record)]
        if not measured or any(strategy[3] or strategy[4] for strategy in strategies):
            continue
        ranks = footprints(
            _mist_shape(record), _mist_layout(record, strategies[0]), find_megatron_stack("mist")
        )
        for rank, strategy, peak in zip(ranks, strategies, measured, strict=True):
            on_host = strategy[8] * rank.categories["optimizer"]
            label = f"{record['case'].removeprefix('l4-24gb/')} stage {rank.rank}"
            yield Row(label, "Mist", (rank.peak_bytes - on_host) / MIB, peak)


def _strategies(record: Record) -> list[str]:
    return record["stage_strategy_bsz_dp_tp_ws_gs_os_wo_go_oo_ao"].split("|")


def _mist_shape(record: Record) -> Shape:
    layers, hidden, heads, vocabulary = (int(record[key]) for key in ("layers", "hidden", "heads", "vocab"))
    if record["family"] == "gpt":
        positions = int(record["seq_len"])
        return Shape.gpt(layers, hidden, heads, vocabulary, positions, drops=False, tied=False)
    return Shape(
        layers, hidden, int(record["intermediate"]), heads, vocabulary, heads, hidden // heads,
        gated=True, has_bias=False, tied=False,
    )  # fmt: skip


def _mist_layout(record: Record, strategy: list[float]) -> Layout:
    counts = tuple(int(text) for text in record["layers_per_stage"].split("/"))
    return Layout(
        sequence_length=int(record["seq_len"]),
        pp=len(counts),
        dp=int(strategy[1]),
        tp=int(strategy[2]),
        microbatch_size=int(strategy[0]),
        num_microbatches=int(record["grad_accum"]),
        shards_optimizer=bool(strategy[5]),
        layers_per_stage=counts,
        recomputed_layers=tuple(int(text) for text in record["ckpt_layers_per_stage"].split("/")),
        flash_attention=record["flash_attn"] == "True",
    )


ZERO_BUBBLE_FAMILIES = {
    "1F1B": "1f1b",
    "1F1B-I": "interleaved-1f1b",
    "ZB-1p": "zb-auto",
    "ZB-2p": "zb-auto",
    "ZB-V": "zb-v",
}


def zero_bubble(records: list[Record]) -> Iterator[Row]:
    """Peak of the fullest rank, in 10^9 bytes; automatic schedules are made for the measured stage times."""
    for record in records:
        schedule, times = record["schedule"].rstrip("*"), f"m={record['n_microbatches']}"
        label = f"{record['model']} pp={record['pp']} b={record['micro_batch']} {times} {schedule}"
        peak = _zero_bubble_peak(
            *(
                int(float(record[key]))
                for key in ("layers", "hidden", "heads", "seq_len", "pp", "micro_batch")
            ),
            int(record["n_microbatches"]),
            schedule,
        )
        yield Row(label, f"zero bubble, {schedule}", peak / GB, float(record["peak_mem_gb"]))


@cache
def _zero_bubble_peak(
    num_layers: int,
    hidden: int,
    heads: int,
    tokens: int,
    pp: int,
    size: int,
    num_microbatches: int,
    schedule: str,
) -> int:
    shape, stack = (
        Shape.gpt(num_layers, hidden, heads, ZERO_BUBBLE_VOCABULARY, tokens),
        find_megatron_stack("megatron-deepspeed"),
    )
    num_chunks = {"1F1B-I": (num_layers + 2) // pp, "ZB-V": 2}.get(schedule, 1)
    layout = Layout(
        tokens, pp=pp, microbatch_size=size, num_microbatches=num_microbatches, schedule=ZERO_BUBBLE_FAMILIES[schedule],
        num_chunks=num_chunks, layers_per_stage=with_lighter_ends(num_layers, pp * num_chunks),
    )  # fmt: skip
    program = None
    if schedule == "ZB-V":
        program = build("zb-v", pp, num_microbatches)
    elif schedule in ("ZB-1p", "ZB-2p"):
        program = _automatic(shape, layout, 2 if schedule == "ZB-2p" else 1)
    return max(rank.peak_bytes for rank in footprints(shape, layout, stack, program))


def with_lighter_ends(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Embedding and head stand for a layer each."""
    each, more = divmod(num_layers + 2, num_stages)
    counts = [each + (stage < more) for stage in range(num_stages)]
    counts[0] -= 1
    counts[-1] -= 1
    return tuple(counts)


def _automatic(shape: Shape, layout: Layout, copies: int) -> Program:
    """The automatic schedule in `copies` times the memory of 1F1B, for the stage times measured nearest to this run."""
    stages = stage_bytes(shape, layout, find_megatron_stack("megatron-deepspeed"))
    with _RATES.open(newline="", encoding="utf-8") as file:
        rates = [row for row in csv.DictReader(file) if int(row["layers"]) == shape.num_layers]
    measured = min(rates, key=lambda row: abs(int(row["m"]) - layout.num_microbatches))
    passes = [float(measured[key]) for key in ("T_F_ms", "T_B_ms", "T_W_ms")]
    assert layout.layers_per_stage is not None
    counts = np.array(layout.layers_per_stage, float)
    share = counts / counts.max()
    saved = np.array([stage.saved for stage in stages], float)
    held = np.array([stage.for_weights for stage in stages], float)
    inner = float(np.sort(saved)[len(saved) // 2])
    # The last stage keeps logits besides: its embedding and head stand for a layer in the schedule's own unit.
    saved, held = np.minimum(saved, inner), np.minimum(held, inner)
    transfers = float(measured["T_comm_ms"]) * np.ones(layout.pp - 1)
    forward, input_grad, weight_grad = (time * share for time in passes)
    times = StageTimes(forward, input_grad, weight_grad, transfers, saved, held)
    limit = copies * layout.pp * inner
    return automatic(linear(layout.pp), layout.num_microbatches, times, limit, num_moves=0, num_patterns=0)


_LLAMA = Shape(80, 8192, 28672, 64, 128256, 8, 128, gated=True, has_bias=False, tied=False)
_DEEPSEEK = Shape(
    60, 5120, 12288, 128, 102400, 128, 192, gated=True, has_bias=False, tied=False,
    latent=Latent(1536, 512, 128, 64, 128), experts=Experts(160, 6, 1536, 3072), num_dense=1,
)  # fmt: skip
B200_MODELS = {"llama3_70b": _LLAMA, "deepseekv2": _DEEPSEEK}


def b200_layout(record: Record) -> Layout:
    """The widths of a row."""
    keys = ("tp", "cp", "ep", "pp", "dp", "seq_len", "microbatches")
    tp, cp, ep, pp, dp, tokens, num_microbatches = (int(record[key]) for key in keys)
    return Layout(
        tokens, tp=tp, cp=cp, ep=ep, pp=pp, dp=dp, num_microbatches=num_microbatches,
        sequence_parallel=tp > 1, shards_optimizer=True,
    )  # fmt: skip


def megatron_core(records: list[Record]) -> Iterator[Row]:
    """Allocated peak of the fullest rank."""
    for record in records:
        layout = b200_layout(record)
        shape = replace(B200_MODELS[record["model"]], num_layers=int(record["layers"]))
        peak = max(
            rank.peak_bytes for rank in footprints(shape, layout, find_megatron_stack("megatron-core+te"))
        )
        widths = " ".join(f"{key}={record[key]}" for key in ("tp", "cp", "ep", "pp", "dp", "microbatches"))
        yield Row(
            f"{record['model']} {widths}",
            "Megatron-Core on B200",
            peak / GIB,
            float(record["peak_allocated_gib"]),
        )


SETS: dict[str, Callable[[list[Record]], Iterator[Row]]] = {
    "korthikanti_memory_fig1_fig7.csv": korthikanti,
    "mist_tuned_configs.csv": mist,
    "zero_bubble_measured.csv": zero_bubble,
    "megatron_core_b200.csv": megatron_core,
}


def rows(folder: Path = DATA) -> list[Row]:
    """One row per published figure in the files of `folder`; a file that is not there is left out."""
    found: list[Row] = []
    for name, judge in SETS.items():
        path = folder / name
        if path.exists():
            with path.open(newline="", encoding="utf-8") as file:
                found.extend(judge(list(csv.DictReader(file))))
    return found


def main() -> None:
    """Print the verdict."""
    given = arguments(__doc__, DATA).parse_args()
    show(rows(given.data), BAR, "", given.json)


if __name__ == "__main__":
    main()
