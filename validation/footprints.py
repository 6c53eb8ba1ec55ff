"""Judge what `stagewright estimate --runtime` predicts of memory alone: what layers keep, and peaks of pipeline stages.

Sets with step times too, those of the zero-bubble paper and of 8 B200, are judged by `runtimes.py`.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from verdict import Row, arguments, document, show, summary

from stagewright.cluster import load_cluster
from stagewright.errors import StagewrightError
from stagewright.planning.estimate import estimate
from stagewright.planning.job import Job
from stagewright.planning.predictions import RankPrediction
from stagewright.tracing.models.reference import ModelReference, resolve

BAR = 0.04
DATA = Path(__file__).parent / "data" / "footprints"
GIB, MIB = 2**30, 2**20
HALF = "other"
"""No constant was fitted on any row."""

Record = dict[str, str]


class Kept(NamedTuple):
    """Bytes of the first rank."""

    state: int
    activations: int


def korthikanti(records: list[Record], left_out: Counter[str]) -> Iterator[Row]:
    """Figure 1: bytes per GPU; figure 7: share of the activations without recomputation.

    The figures are of layers alone. So is what as many layers again add to the first rank, which is judged.
    """
    for record in records:
        name, mode = record["model"], record["mode"]
        found = layers_keep(name, mode)
        label = f"figure {record['figure']}: {name} {mode}"
        if record["figure"] == "1":
            for what, num_bytes, column in (
                ("state", found.state, "params_grads_optimizer_gib"),
                ("activations", found.activations, "activations_gib"),
            ):
                yield Row(f"{label}, {what}", "Korthikanti", num_bytes / GIB, float(record[column]), HALF)
        elif mode == "none":
            left_out["what shares are of"] += 1
        else:
            share = 100 * found.activations / layers_keep(name, "none").activations
            yield Row(label, "Korthikanti", share, float(record["activation_pct_of_baseline"]), HALF)


@cache
def layers_keep(name: str, mode: str) -> Kept:
    """What all layers of a model of Korthikanti et al. keep on its first rank, at the moment of its peak."""
    once, twice = (_first_rank(name, mode, copies) for copies in (1, 2))
    state = _state(twice) - _state(once)
    return Kept(state, twice.allocated_peak_bytes - once.allocated_peak_bytes - state)


def _state(rank: RankPrediction) -> int:
    return sum(rank.categories[name] for name in ("parameters", "gradients", "optimizer", "master"))


def _first_rank(name: str, mode: str, copies: int) -> RankPrediction:
    """Their count has fp32 gradients, which Megatron-LM of that time has beside bf16; all else is as in fp16."""
    layers, hidden, heads, count = {"22B": (48, 6144, 64, 1), "530B": (105, 20480, 128, 70)}[name]
    sizes = {"n_layer": copies * layers, "n_embd": hidden, "n_head": heads}
    options: dict[str, Any] = {
        "tp": 8, "dp": 1, "sequence_parallel": "seq" in mode,
        "recompute": "full" if mode == "full" else "selective" if "selective" in mode else "none",
    }  # fmt: skip
    if name == "22B":
        cluster, size, options = "8x-a100-80", 4, options | {"pp": 1, "microbatch": 4}
    else:
        cluster, size = "35x8x-a100-80", 1
        options |= {"pp": 35, "schedule": "interleaved-1f1b", "chunks": 3}
    job = Job(global_batch=size * count, sequence_length=2048, dtype="bf16", runtime="megatron-lm")
    model = resolve("gpt2", sizes | {"n_positions": 2048, "vocab_size": 51_200})
    return estimate(model, load_cluster(cluster), job, **options).predictions.ranks[0]


def mist(records: list[Record], left_out: Counter[str]) -> Iterator[Row]:
    """Allocated peak of every stage that was measured."""
    for record in records:
        measured = [float(text) for text in re.findall(r"(\d+) MB", record["measured_stage_peak_alloc_mb"])]
        if reason := _cannot_be_asked(record, measured):
            left_out[reason] += 1
            continue
        try:
            ranks = _mist_ranks(record)
        except StagewrightError as error:
            left_out[str(error)] += 1
            continue
        for rank, peak in zip(ranks, measured, strict=True):
            label = f"{record['case'].removeprefix('l4-24gb/')} stage {rank.rank}"
            yield Row(label, "Mist", rank.allocated_peak_bytes / MIB, peak, HALF)


def _cannot_be_asked(record: Record, measured: list[float]) -> str | None:
    layers, recomputed = record["layers_per_stage"], record["ckpt_layers_per_stage"]
    strategies = _strategies(record)
    if not measured:
        return "no memory was published"
    if set(recomputed.split("/")) != {"0"} and recomputed != layers:
        return "stages recompute their first layers only, or not all stages do"
    if any(any(strategy[6:]) for strategy in strategies):
        return "a part of its state or activations waits on the host"
    if len({tuple(strategy) for strategy in strategies}) > 1:
        return "its stages have different widths"
    return None


def _strategies(record: Record) -> list[list[float]]:
    stages = record["stage_strategy_bsz_dp_tp_ws_gs_os_wo_go_oo_ao"].split("|")
    return [[float(part) for part in text.split(",")] for text in stages]


def _mist_ranks(record: Record) -> tuple[RankPrediction, ...]:
    size, dp, tp, *shared = (int(part) for part in _strategies(record)[0][:6])
    counts = [int(text) for text in record["layers_per_stage"].split("/")]
    devices = int(record["n_nodes"]) * int(record["gpus_per_node"])
    job = Job(
        global_batch=int(record["global_batch"]), sequence_length=int(record["seq_len"]), dtype="fp16",
        runtime=str(DATA / "mist.toml"),
    )  # fmt: skip
    weights, gradients, optimizer = shared
    level = 3 if weights else 2 if gradients else 1 if optimizer else 0
    return estimate(
        _mist_model(record), load_cluster(f"{devices}x-l4"), job, tp=tp, pp=len(counts), dp=dp, microbatch=size,
        zero=level if dp > 1 else None, layers_per_stage=counts,
        recompute="none" if set(record["ckpt_layers_per_stage"].split("/")) == {"0"} else "full",
    ).predictions.ranks  # fmt: skip


def _mist_model(record: Record) -> ModelReference:
    """Its configurations, benchmark/mist/configs/model, have no dropout and a head of its own."""
    layers, hidden, heads, vocabulary = (int(record[key]) for key in ("layers", "hidden", "heads", "vocab"))
    common = {"vocab_size": vocabulary, "tie_word_embeddings": False}
    if record["family"] == "gpt":
        sizes = {"n_layer": layers, "n_embd": hidden, "n_head": heads, "n_positions": int(record["seq_len"])}
        plain = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return resolve("gpt2", common | sizes | plain | {"activation_function": "gelu_pytorch_tanh"})
    sizes = {
        "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": int(record["intermediate"]),
        "num_attention_heads": heads, "num_key_value_heads": heads,
    }  # fmt: skip
    return resolve("llama-2-7b", common | sizes)


SETS: dict[str, Callable[[list[Record], Counter[str]], Iterator[Row]]] = {
    "korthikanti_memory_fig1_fig7.csv": korthikanti,
    "mist_tuned_configs.csv": mist,
}
"""Tables, and what judges them; rows that are not judged are counted by their reason."""


def main() -> None:
    """Print the verdict of every table that is there; ends with 1 where a bar is missed."""
    given = arguments(__doc__, DATA).parse_args()
    missed, documents = [], {}
    for name, judge in SETS.items():
        path = given.data / name
        if not path.exists():
            continue
        with path.open(newline="", encoding="utf-8") as file:
            records = list(csv.DictReader(file))
        left_out: Counter[str] = Counter()
        found = list(judge(records, left_out))
        if not found:
            missed.append(f"{name}, of which nothing is judged")
        elif summary("all", found).mean > BAR:
            missed.append(name)
        if given.json:
            documents[name] = (document(found, BAR) if found else {}) | {"left_out": dict(left_out)}
            continue
        if found:
            print(f"{name}:")
            show(found, BAR, "", False)
        for reason, count in left_out.most_common():
            print(f"{name}: {count} rows left out: {reason}")
        print()
    if given.json:
        json.dump(documents, sys.stdout, indent=1)
        print()
    if missed:
        sys.exit(f"above their bars: {'; '.join(missed)}")


if __name__ == "__main__":
    main()
