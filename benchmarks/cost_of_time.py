"""Days and V100-days to train the 52 B model of the breadth-first paper, by schedule and size of the cluster up to 4,096.

    python benchmarks/cost_of_time.py [--output FILE] [--picture FILE.svg] [--json]

Throughput per GPU at each batch per GPU is that of `breadth_first.py` on 64 V100, every schedule at its best configuration
as published. Larger clusters keep it at the same batch per GPU, as the paper's own extrapolation does (Lamy-Poirier 2023,
arXiv 2211.05953): more replicas of the same pipelines. With a larger batch, samples grow with 1 + B / B_crit (McCandlish et
al. 2018, arXiv 1812.06162, equation 2.11). Every size takes the batch that ends first, which is also the cheapest. A fifth
curve is that of `stagewright plan`: the best of its configurations (1F1B, plain or interleaved, and a sharded optimizer) of
the same layers as a GPT with dropout, timed for Megatron's kernels, at global batches of 512 to 8,192.

Critical batch: 2e8 tokens / L^(1/0.21) at the loss L = (8.8e13 / N)^0.076 of a model of N parameters (Kaplan et al. 2020,
arXiv 2001.08361, equations 1.1 and 1.4). Ignores: reductions over more replicas, failures, and that the critical batch
grows in training.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import NamedTuple

from breadth_first import BATCHES_PER_GPU, MODELS, NAMES, SCHEDULES, study
from figures import write
from stagewright.cluster import load_cluster
from stagewright.errors import InputError, PlanError
from stagewright.planning.cost import Bill, bill, halves
from stagewright.planning.job import Job
from stagewright.planning.search import plan
from stagewright.report.pictures.colours import LIGHT
from stagewright.tracing.models.reference import resolve

MODEL = MODELS[0]
NUM_DEVICES = (64, 128, 256, 512, 1024, 2048, 4096)
TOKENS = 3e11
PARAMETERS = 51.8e9
CONFIGURED = "configured"
LABELS = NAMES | {CONFIGURED: "stagewright plan"}
COLOURS = dict(zip(LABELS, ("#3a6fd8", "#c2571a", "#2f9461", "#8a5bb5", "#697386"), strict=True))


class Way(NamedTuple):
    """The best of a schedule on so many devices."""

    num_devices: int
    batch_per_device: float
    days: float
    device_days: float


Ways = dict[str, list[Way]]


def critical_batch() -> float:
    """In samples.

    >>> round(critical_batch(), -2)
    13200.0
    """
    loss = (8.8e13 / PARAMETERS) ** 0.076
    return 2e8 / loss ** (1 / 0.21) / MODEL.sequence


def bill_of(batch: int, tokens_per_second: float, num_devices: int) -> Bill:
    """With the tokens that a batch of so many samples needs."""
    return bill(TOKENS * (1 + batch / critical_batch()), batch, tokens_per_second, num_devices, None)


def ways() -> Ways:
    cluster = load_cluster("64x-v100-32")
    found: Ways = {schedule: [] for schedule in SCHEDULES}
    studies = {batch: study(MODEL, cluster, batch)["as published"] for batch in BATCHES_PER_GPU}
    for schedule in SCHEDULES:
        rates = {
            batch: batch * MODEL.sequence / result.step_s
            for batch, results in studies.items()
            if (result := results[schedule]) is not None
        }
        found[schedule] = [_fastest(rates, num) for num in NUM_DEVICES]
    return found | {CONFIGURED: configured()}


def configured() -> list[Way]:
    """The batch that ends first with the best plan, for every size."""
    sizes = {"n_layer": MODEL.num_layers, "n_embd": MODEL.hidden, "n_head": MODEL.num_heads}
    model = resolve("gpt2", sizes | {"vocab_size": MODEL.vocabulary, "n_positions": MODEL.sequence})
    job = Job(global_batch=2048, sequence_length=MODEL.sequence, dtype="fp16", runtime="megatron-deepspeed")
    cluster = load_cluster(f"{NUM_DEVICES[-1] // 8}x8x-v100-32")
    bills: dict[int, list[Bill]] = {}
    for part in halves(cluster):
        for batch in (512, 1024, 2048, 4096, 8192):
            with suppress(PlanError, InputError):
                best = plan(model, part, job.model_copy(update={"global_batch": batch}), keep=1).plans[0]
                rate = best.predictions.tokens_per_second
                bills.setdefault(part.num_devices, []).append(bill_of(batch, rate, part.num_devices))
    first = {num: min(bills[num], key=lambda one: one.days) for num in NUM_DEVICES if num in bills}
    return [Way(num, one.global_batch / num, one.days, one.days * num) for num, one in first.items()]


def _fastest(rates: dict[float, float], num_devices: int) -> Way:
    """`rates`: tokens per second and device by samples per device."""
    bills = {
        batch: bill_of(round(batch * num_devices), rate * num_devices, num_devices)
        for batch, rate in rates.items()
    }
    batch = min(bills, key=lambda batch: bills[batch].days)
    return Way(num_devices, batch, bills[batch].days, bills[batch].days * num_devices)


def report(found: Ways) -> Iterator[str]:
    """The result as Markdown."""
    yield f"# Cost against time of the 52 B model on up to 4,096 V100, {date.today().isoformat()}\n"
    yield "Predicted, not measured.\n"
    yield "Command: `python benchmarks/cost_of_time.py --output FILE --picture FILE` (an hour on one core).\n"
    yield from (__doc__ or "").split("\n\n", 2)[2].splitlines()
    yield f"\nCritical batch {critical_batch():,.0f} samples; {TOKENS:.0e} tokens with a small batch."
    yield "The picture is beside this file: `cost_of_time-" + date.today().isoformat() + ".svg`.\n"
    yield "Each cell: days, thousands of V100-days, (samples per GPU).\n"
    yield "| V100 | " + " | ".join(LABELS.values()) + " | breadth-first over depth-first |"
    yield "| ---: |" + " --- |" * len(LABELS) + " ---: |"
    for index, num in enumerate(NUM_DEVICES):
        row = {name: found[name][index] for name in LABELS}
        cells = [
            f"{way.days:.3g}, {way.device_days / 1e3:.1f} ({way.batch_per_device:g})" for way in row.values()
        ]
        lead = row["interleaved-1f1b"].days / row["breadth-first"].days - 1
        yield f"| {num:,} | " + " | ".join(cells) + f" | {lead:+.0%} |"


def picture(found: Ways) -> str:
    """Cost over time, both logarithmic; a curve per schedule, a point per size of the cluster."""
    every = [way for row in found.values() for way in row]
    days = min(way.days for way in every) / 1.2, max(way.days for way in every) * 1.2
    costs = min(way.device_days for way in every) / 1.05, max(way.device_days for way in every) * 1.05

    def x(value: float) -> float:
        return 70 + 600 * math.log(value / days[0]) / math.log(days[1] / days[0])

    def y(value: float) -> float:
        return 420 - 380 * math.log(value / costs[0]) / math.log(costs[1] / costs[0])

    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="700" height="480" font-family="sans-serif" font-size="12">',
        f'<rect width="700" height="480" fill="{LIGHT.ground}"/>',
    ]
    for value in (10, 20, 50, 100, 200, 500, 1000, 2000):
        if days[0] < value < days[1]:
            parts.append(_line(x(value), 40, x(value), 420))
            parts.append(_text(x(value), 438, f"{value} days", "middle"))
    for value in range(10_000, 200_001, 10_000):
        if costs[0] < value < costs[1]:
            parts.append(_line(70, y(value), 670, y(value)))
            parts.append(_text(64, y(value) + 4, f"{value // 1000}k", "end"))
    for index, (schedule, row) in enumerate(found.items()):
        points = " ".join(f"{x(way.days):.1f},{y(way.device_days):.1f}" for way in row)
        colour = COLOURS[schedule]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for way in row:
            label = f"{LABELS[schedule]}, {way.num_devices} V100: {way.days:.0f} days"
            place = f'cx="{x(way.days):.1f}" cy="{y(way.device_days):.1f}"'
            parts.append(f'<circle {place} r="3.5" fill="{colour}"><title>{label}</title></circle>')
        parts.append(_text(520, 60 + 18 * index, LABELS[schedule], "start", colour))
    parts.append(
        _text(70, 24, f"{MODEL.name}: V100-days against days, 64 V100 (right) to 4,096 (left)", "start")
    )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="{LIGHT.grid}"/>'


def _text(x: float, y: float, text: str, anchor: str, colour: str = LIGHT.text) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{text}</text>'


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = ways()
    if options.picture:
        options.picture.write_text(picture(found), encoding="utf-8")
    if options.json:
        print(json.dumps({LABELS[name]: [way._asdict() for way in row] for name, row in found.items()}))
        return
    write(report(found), options.output)


if __name__ == "__main__":
    main()
