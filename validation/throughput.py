"""Predicted beside published throughput of public training configurations, by source."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import megatron_bridge
from verdict import Row, arguments, grouped, show

from stagewright.cluster import Cluster, load_cluster
from stagewright.errors import StagewrightError
from stagewright.estimation.megatron import Layout, Shape, find_megatron_stack
from stagewright.estimation.megatron.fusion import Gathers, find_fusion
from stagewright.planning.configure.iteration import Run

BAR = 0.15
DATA = Path(__file__).parent / "data" / "throughput"
BRIDGE = "megatron_bridge_performance.csv"
MODERN = "megatron-core+te"
"""Runtime of every source from 2023 on; the oldest is Megatron-LM's own."""

Record = dict[str, str]
Judged = tuple[str, float, float]
"""Label, predicted and published figure."""


def nodes_of_eight(device: str, num: int, given: dict[str, float] | None = None) -> Cluster:
    """Whole nodes of eight devices, or 64 of an NVLink domain of 72; `given` are figures that differ from the catalog's."""
    size = 64 if device.startswith("gb") else 8
    return load_cluster(f"{num}x-{device}" if num <= size else f"{num // size}x{size}x-{device}", given)


def step_seconds(
    shape: Shape,
    layout: Layout,
    cluster: Cluster,
    runtime: str = MODERN,
    hidden_gathers: Gathers = "all",
    computes_in: str | None = None,
    **policy: Any,
) -> float:
    """Modern runs hide reductions behind computation, and most of them tensor-parallel collectives behind products, as
    their sources say (Megatron-LM's README: `--overlap-grad-reduce`, `--tp-comm-overlap`); `policy` are further fields of
    `Fusion` in which a run differs."""
    stack = find_megatron_stack("megatron-deepspeed" if runtime == "megatron-lm" else runtime)
    stack = replace(stack, computes_in=computes_in)
    modern = runtime != "megatron-lm"
    fusion = replace(find_fusion(runtime), hidden_gathers=hidden_gathers if modern else "none", **policy)
    return Run(shape, replace(layout, overlaps_reduction=modern), stack, fusion, cluster).step().seconds


def selene_layout(num_layers: int, tokens: int, tp: int, pp: int, dp: int, num_microbatches: int) -> Layout:
    """As Narayanan et al. 2021 trained: microbatches of one sample, everything recomputed, two chunks where they divide."""
    chunks = 2 if pp > 1 and num_layers % (2 * pp) == 0 and num_microbatches % pp == 0 else 1
    return Layout(
        tokens, tp=tp, pp=pp, dp=dp, num_microbatches=num_microbatches, recompute="full", num_chunks=chunks,
        schedule="interleaved-1f1b" if chunks > 1 else "1f1b",
    )  # fmt: skip


def narayanan(record: Record) -> Judged:
    """TFLOP/s per device as the paper counts them: 96 B s l h^2 (1 + s/6h + V/16lh), with recomputation."""
    tp, pp, dp, num, batch, tokens = _numbers(record, "tp", "pp", "dp", "n_gpus", "global_batch", "seq_len")
    layers, hidden, heads, vocabulary = _numbers(record, "layers", "hidden", "heads", "vocab")
    shape = Shape.gpt(layers, hidden, heads, vocabulary, tokens)
    layout = selene_layout(layers, tokens, tp, pp, dp, batch // dp)
    seconds = step_seconds(shape, layout, nodes_of_eight("a100-80", num), "megatron-lm")
    extra = 1 + tokens / (6 * hidden) + vocabulary / (16 * layers * hidden)
    flop = 96 * batch * tokens * layers * hidden**2 * extra
    return f"{record['params_b']} B", flop / seconds / num / 1e12, float(record["tflops_per_gpu_hw"])


def weak_scaling(record: Record) -> Judged:
    """TFLOP/s per device without recomputation: 72 B s l h^2 (1 + s/6h + V/12lh)."""
    tp, pp, dp, num, batch, tokens = _numbers(record, "tp", "pp", "dp", "n_gpus", "global_batch", "seq_len")
    layers, hidden, heads, vocabulary = _numbers(record, "layers", "hidden", "heads", "vocab")
    shape = Shape.gpt(layers, hidden, heads, vocabulary, tokens, drops=False, tied=False)
    layout = Layout(
        tokens, tp=tp, pp=pp, dp=dp, num_microbatches=batch // dp, sequence_parallel=tp > 1,
        shards_optimizer=True,
    )  # fmt: skip
    seconds = step_seconds(shape, layout, nodes_of_eight("h100", num))
    flop = 72 * batch * tokens * layers * hidden**2
    flop *= 1 + tokens / (6 * hidden) + vocabulary / (12 * layers * hidden)
    return f"{record['params_b']} B", flop / seconds / num / 1e12, float(record["tflops_per_gpu"])


def megascale(record: Record) -> Judged | None:
    """Seconds per step of Megatron-LM's rows; MegaScale's own changes of the model and the network are not predicted."""
    if record["system"] != "Megatron-LM" or not record["step_s"]:
        return None
    tp, pp, num, batch, tokens = _numbers(record, "tp", "pp", "n_gpus", "global_batch", "seq_len")
    layers, hidden, heads = _numbers(record, "layers", "hidden", "heads")
    dp = num // (tp * pp)
    layout = Layout(
        tokens, tp=tp, pp=pp, dp=dp, num_microbatches=batch // dp, sequence_parallel=True,
        recompute="selective", schedule="interleaved-1f1b", num_chunks=6, shards_optimizer=True,
    )  # fmt: skip
    shape = Shape.gpt(layers, hidden, heads, 64_000, tokens)
    seconds = step_seconds(shape, layout, nodes_of_eight("a100-80", num), "megatron-lm")
    return f"{record['model']} on {num}, batch {batch}", seconds, float(record["step_s"])


def bridge(record: Record) -> Judged | None:
    """Tokens per second and device of the rows that `megatron_bridge.why_not` does not leave out."""
    if megatron_bridge.why_not(record):
        return None
    num = int(record["n_gpus"])
    device = megatron_bridge.device_of(record)
    cluster = nodes_of_eight(device, num, megatron_bridge.FUSED_ATTENTION.get(device))
    seconds = megatron_bridge.run_of(record, cluster).step().seconds
    rate = int(record["global_batch"]) * int(record["seq_len"]) / seconds / num
    return megatron_bridge.label_of(record), rate, float(record["tokens_per_s_per_gpu"])


SOURCES: dict[str, Callable[[Record], Judged | None]] = {
    "megatron_sc21_table1.csv": narayanan,
    "megatron_core_h100_weak_scaling.csv": weak_scaling,
    "megascale_tab2_fig9.csv": megascale,
    BRIDGE: bridge,
}


def _numbers(record: Record, *keys: str) -> list[int]:
    return [int(float(record[key])) for key in keys]


def rows(folder: Path = DATA) -> Iterator[Row]:
    """Every row that can be predicted; the others are left out."""
    for name, judge in SOURCES.items():
        for record in _records(folder / name):
            try:
                made = judge(record)
            except StagewrightError as error:
                raise SystemExit(f"{name}: {record}: {error}") from error
            if made is not None:
                yield Row(made[0], name.removesuffix(".csv"), made[1], made[2], "held")


def _records(path: Path) -> list[Record]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def main() -> None:
    """Print the verdict: median and worst row of every source."""
    given = arguments(__doc__, DATA).parse_args()
    found = list(rows(given.data))
    show(found, BAR, "", given.json)
    if not given.json:
        for item in grouped(found):
            print(f"{item.name}: median {item.median:.1%}, worst {item.worst.label} {item.worst.error:+.1%}")
        for reason, num in megatron_bridge.left_out(_records(given.data / BRIDGE)).most_common():
            print(f"{BRIDGE}: {num} rows left out: {reason}")


if __name__ == "__main__":
    main()
