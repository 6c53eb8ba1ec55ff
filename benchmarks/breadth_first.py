"""Predicted throughput of four pipeline schedules against the batch size per GPU, on 64 V100.

The models and the cluster are those of Lamy-Poirier 2023, "Breadth-First Pipeline Parallelism" (arXiv
2211.05953): encoders of 52 B and 6.6 B parameters, 64 V100 32 GB in nodes of eight with InfiniBand between
them. Every schedule is shown at its best configuration out of all widths (tensor, pipeline, data), microbatch
sizes, stages per rank, rank orders and shardings of the data-parallel state that fit into memory, always
with recomputation of every layer.

Costs: matrix products of a layer and attention by their FLOP (Narayanan et al. 2021, arXiv 2104.04473,
appendix) at the attained rate of the device; other operators by the bytes of the activations they make
(Korthikanti et al. 2022, arXiv 2205.05198, equation 2), each written and read once; tensor-parallel
all-reduces (two per pass) exposed; boundary values scattered over the tensor-parallel ranks for the
network and gathered behind it. Cluster figures: the catalog entry `v100-32`.

Ignores: kernel launches and the host, fragmentation, that transfers, collectives and computations slow each
other down, the embedding's time and its share of the state, and groups of microbatches (the hybrid of
depth-first and breadth-first).

Run: ``python benchmarks/breadth_first.py [--adapters N] [--output FILE] [--json]`` (a minute on one core).
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import Any

import numba
import numpy as np

from encoder_costs import LayerCosts, Model
from pipeline_configuration import STATE_BYTES, Configuration, Overlap, Result, evaluate, memory_bytes
from stagewright.cluster import Cluster, load_cluster

BATCHES_PER_GPU = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
SCHEDULES = ("breadth-first", "interleaved-1f1b", "1f1b", "gpipe")
NAMES = dict(zip(SCHEDULES, ("breadth-first", "depth-first", "1F1B", "GPipe"), strict=True))
_MOST_ACTIONS = 40_000
"""Of a program; larger ones have so many microbatches that the order matters little."""

MODELS = (Model("52 B", 64, 8192, 64), Model("6.6 B", 32, 4096, 32))

Study = dict[str, dict[str, Result | None]]
"""Results by setting, and by schedule or by what is hidden."""

Studies = dict[float, Study]
"""By batch size per GPU."""


# -- the search ---------------------------------------------------------------------------------------------


def powers(most: int) -> list[int]:
    return [2**n for n in range(most.bit_length()) if 2**n <= most]


def configurations(
    model: Model,
    schedule: str,
    global_batch: int,
    num_devices: int,
    overlap: Overlap,
    may_shard: bool,
    scatters: bool = True,
) -> Iterator[Configuration]:
    """All configurations of a schedule for one batch, whether they fit or not."""
    loops = powers(16)[1:] if schedule in ("breadth-first", "interleaved-1f1b") else [1]
    for tp in powers(8):
        for pp in powers(num_devices // tp)[1:]:
            dp = num_devices // (tp * pp)
            for size in powers(8):
                count, rest = divmod(global_batch, dp * size)
                if rest or not count or (schedule == "interleaved-1f1b" and count % pp):
                    continue
                for chunks in loops:
                    if model.num_layers % (pp * chunks) or 2 * count * pp * chunks > _MOST_ACTIONS:
                        continue
                    for is_sharded in (False, True)[: 1 + (may_shard and dp > 1)]:
                        for inside in (True, False)[: 1 + (dp > 1)]:
                            yield Configuration(
                                schedule,
                                tp,
                                pp,
                                dp,
                                size,
                                count,
                                chunks,
                                is_sharded,
                                inside,
                                overlap,
                                scatters,
                            )


def best(model: Model, cluster: Cluster, candidates: Iterable[Configuration]) -> Result | None:
    """The fastest that fits; ``None`` if none does."""
    found: Result | None = None
    layers: dict[tuple[int, int], LayerCosts] = {}
    for c in candidates:
        sizes = (c.tp, c.microbatch_size)
        layer = layers.setdefault(sizes, LayerCosts(model, cluster, *sizes))
        state = STATE_BYTES * model.layer_parameters * model.num_layers / (c.pp * c.tp)
        if state / (c.dp if c.is_sharded else 1) > cluster.device.usable_bytes:
            continue
        least = c.num_microbatches * model.num_layers / c.pp * (layer.forward_s + layer.backward_s)
        if found is not None and least >= found.step_s:
            continue
        if memory_bytes(c, layer) <= cluster.device.usable_bytes:
            result = evaluate(c, layer)
            found = result if found is None or result.step_s < found.step_s else found
    return found


def study(model: Model, cluster: Cluster, batch_per_gpu: float) -> Study:
    """By setting and schedule the best configuration.

    'as published': depth-first and 1F1B as in Megatron-LM of 2022 (nothing sharded, nothing hidden), the
    others with everything hidden. 'same means': every schedule may shard and hides everything. Then
    breadth-first at its best when less is hidden, and depth-first with more and more of the means of
    breadth-first. 'whole values': the same as published, with every tensor-parallel rank sending all of a
    boundary value.
    """
    batch = round(batch_per_gpu * cluster.num_devices)

    def of(schedule: str, overlap: Overlap, may_shard: bool, scatters: bool = True) -> Result | None:
        sizes = batch, cluster.num_devices
        return best(model, cluster, configurations(model, schedule, *sizes, overlap, may_shard, scatters))

    same = {schedule: of(schedule, Overlap.ALL, True) for schedule in SCHEDULES}
    published = {
        schedule: of(schedule, Overlap.NONE, False) if "1f1b" in schedule else same[schedule]
        for schedule in SCHEDULES
    }
    exposed = {overlap.value: of("breadth-first", overlap, True) for overlap in Overlap}
    leader = same["breadth-first"]
    kept: dict[str, Result | None] = {}
    if leader is not None:
        c = leader.configuration
        layer = LayerCosts(model, cluster, c.tp, c.microbatch_size)
        kept = {overlap.value: evaluate(replace(c, overlap=overlap), layer) for overlap in Overlap}
    depth_first = {
        "as published": published["interleaved-1f1b"],
        "transfers hidden": of("interleaved-1f1b", Overlap.NO_COLLECTIVES, False),
        "reductions hidden too": of("interleaved-1f1b", Overlap.ALL, False),
        "and fully sharded": same["interleaved-1f1b"],
    }
    return {
        "as published": published,
        "same means": same,
        "breadth-first with": exposed,
        "breadth-first kept": kept,
        "depth-first with": depth_first,
        "whole values": {
            "breadth-first": of("breadth-first", Overlap.ALL, True, scatters=False),
            "interleaved-1f1b": of("interleaved-1f1b", Overlap.NONE, False, scatters=False),
        },
    }


# -- the report ---------------------------------------------------------------------------------------------


def cell(result: Result | None) -> str:
    return "does not fit" if result is None else f"{result.tflops:.1f} ({result.configuration})"


def gain(results: dict[str, Result | None], schedule: str, over: str) -> str:
    first, second = results[schedule], results[over]
    return "" if first is None or second is None else f"{first.tflops / second.tflops - 1:+.0%}"


def tables(model: Model, studies: Studies) -> Iterator[str]:
    yield f"## {model.name}\n"
    for setting in ("as published", "same means"):
        yield f"### Tflop/s per GPU, {setting}\n"
        yield f"| batch per GPU | {' | '.join(NAMES[s] for s in SCHEDULES)} | breadth-first over depth-first | over 1F1B |"
        yield "| ---: |" + " --- |" * len(SCHEDULES) + " ---: | ---: |"
        for batch, found in studies.items():
            results = found[setting]
            gains = [gain(results, "breadth-first", other) for other in ("interleaved-1f1b", "1f1b")]
            cells = [f"{batch:g}", *(cell(results[schedule]) for schedule in SCHEDULES), *gains]
            yield f"| {' | '.join(cells)} |"
        yield ""
    overlaps = [overlap.value for overlap in Overlap]
    yield "### Which overlap makes the difference: breadth-first, best configuration kept, Tflop/s per GPU\n"
    yield from _steps(studies, "breadth-first kept", overlaps)
    yield "### The same, with the best configuration for each kind of overlap\n"
    yield from _steps(studies, "breadth-first with", overlaps)
    yield "### What depth-first lacks: at its best each time, Tflop/s per GPU\n"
    yield from _steps(studies, "depth-first with", list(next(iter(studies.values()))["depth-first with"]))
    yield "### How the baseline sends its boundary values: depth-first as published, Tflop/s per GPU\n"
    yield "| batch per GPU | scattered | whole | lead of breadth-first over scattered | over whole | both whole |"
    yield "| ---: | --- | --- | ---: | ---: | ---: |"
    for batch, found in studies.items():
        scattered, whole = found["as published"], found["whole values"]
        mixed = {**whole, "breadth-first": scattered["breadth-first"]}
        leads = [gain(each, "breadth-first", "interleaved-1f1b") for each in (scattered, mixed, whole)]
        cells = [cell(each["interleaved-1f1b"]) for each in (scattered, whole)]
        yield f"| {batch:g} | {' | '.join([*cells, *leads])} |"
    yield ""


def _steps(studies: Studies, setting: str, columns: list[str]) -> Iterator[str]:
    yield f"| batch per GPU | {' | '.join(columns)} |"
    yield "| ---: |" + " ---: |" * len(columns)
    for batch, found in studies.items():
        results = [found[setting].get(column) for column in columns]
        cells = ["" if each is None else f"{each.tflops:.1f}" for each in results]
        yield f"| {batch:g} | {' | '.join(cells)} |"
    yield ""


def summary(model: Model, studies: Studies) -> Iterator[str]:
    """The largest leads, and what overlap is worth to breadth-first, in one line each."""
    for ours, theirs, words in (
        ("as published", "as published", "as published"),
        ("as published", "whole values", "as published, and depth-first sends whole boundary values"),
        ("whole values", "whole values", "as published, and both send whole boundary values"),
        ("same means", "same means", "same means"),
    ):
        leads = []
        for batch, found in studies.items():
            first, second = found[ours]["breadth-first"], found[theirs]["interleaved-1f1b"]
            if first is not None and second is not None:
                leads.append((first.tflops / second.tflops - 1, batch))
        lead, batch = max(leads)
        yield f"* {model.name}, {words}: breadth-first leads depth-first by up to {lead:.0%} (batch per GPU {batch:g})."
    for setting, words in (("breadth-first kept", "kept"), ("breadth-first with", "chosen anew")):
        gathers, transfers = (
            max(
                hidden.tflops / less.tflops - 1
                for found in studies.values()
                if (hidden := found[setting].get(Overlap.ALL.value)) is not None
                and (less := found[setting].get(overlap.value)) is not None
            )
            for overlap in (Overlap.NO_COLLECTIVES, Overlap.NO_TRANSFERS)
        )
        yield (
            f"* {model.name}, configuration {words}: hiding gathers and reductions gains up to {gathers:.0%}, "
            f"hiding transfers up to {transfers:.0%}."
        )


def preamble(num_nics: int, seconds: float) -> Iterator[str]:
    yield f"# Breadth-first pipeline parallelism on 64 V100, {date.today()}\n"
    yield "Predicted, not measured.\n"
    yield (__doc__ or "").split("Run:")[0].split("\n\n", 1)[1].strip() + "\n"
    yield f"Each node has {num_nics} adapters of 100 Gbit/s.\n"
    yield "Configurations: TP, PP (x stages per rank), DP (FS: state fully sharded), microbatches x their size."
    yield "As published: depth-first and 1F1B with nothing sharded and every communication exposed, as in the"
    yield "Megatron-LM of the paper; breadth-first and GPipe with everything hidden. Same means: everything hidden"
    yield "and sharding allowed for all four."
    yield "Exposed transfers keep the sender busy. In Megatron-LM both ends wait, in one exchange with both neighbours"
    yield "per step; a simulation of these exchanges gave steps 0 to 1.4 % longer, because the ends wait at once."
    yield "Scattered: each tensor-parallel rank sends its part of a boundary value and the receivers gather the parts (a"
    yield "default of Megatron-LM, Narayanan et al. 2021, section 4.1); whole: each sends all of it. Which of the two the"
    yield "published runs did, and how many adapters their nodes had, we do not know.\n"
    versions = f"Python {platform.python_version()}, numpy {np.__version__}, numba {numba.__version__}"
    yield f"Command: `python {' '.join(sys.argv)}`, {seconds:.0f} s on one {platform.machine()} core ({versions}).\n"


def plain(result: Result | None) -> dict[str, Any] | None:
    if result is None:
        return None
    configuration = asdict(result.configuration) | {"overlap": result.configuration.overlap.value}
    return asdict(result) | {"configuration": configuration}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, help="also write the tables to this file")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    parser.add_argument("--adapters", type=int, default=4, help="100 Gbit/s adapters per node; default 4")
    arguments = parser.parse_args()
    cluster = load_cluster("64x-v100-32", {"num_nics": arguments.adapters})
    begin = time.perf_counter()
    found = {model: {batch: study(model, cluster, batch) for batch in BATCHES_PER_GPU} for model in MODELS}
    seconds = time.perf_counter() - begin
    lines = list(preamble(arguments.adapters, seconds))
    lines += [line for model, studies in found.items() for line in summary(model, studies)] + [""]
    lines += [line for model, studies in found.items() for line in tables(model, studies)]
    if arguments.output:
        arguments.output.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    if arguments.json:
        document = {
            model.name: {
                str(batch): {
                    setting: {schedule: plain(result) for schedule, result in results.items()}
                    for setting, results in settings.items()
                }
                for batch, settings in studies.items()
            }
            for model, studies in found.items()
        }
        print(json.dumps(document))
        return
    print("\n".join(lines))


if __name__ == "__main__":
    main()
