"""Judge step times of zero-bubble and other schedules on A100: programs made and simulated for predicted stage times."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from itertools import permutations

import numpy as np
from footprints import DATA, ZERO_BUBBLE_FAMILIES, ZERO_BUBBLE_VOCABULARY, with_lighter_ends
from verdict import Row, arguments, show

from stagewright.cluster import load_cluster
from stagewright.estimation.megatron import Layout, Shape, find_megatron_stack, stage_bytes
from stagewright.estimation.megatron.fusion import find_fusion
from stagewright.planning.configure.iteration import Run
from stagewright.schedule import Program
from stagewright.schedule.automatic import StageTimes, automatic
from stagewright.schedule.families import build
from stagewright.schedule.placement import linear

BAR = 0.05
FUSION = find_fusion("zero-bubble")

Record = dict[str, str]


def run_of(record: Record) -> tuple[Run, str]:
    """The configuration of a row, and the name of its schedule."""
    num_layers, hidden, heads, tokens, pp, size, count = (
        int(float(record[key]))
        for key in ("layers", "hidden", "heads", "seq_len", "pp", "micro_batch", "n_microbatches")
    )
    schedule = record["schedule"].rstrip("*")
    num_chunks = {"1F1B-I": (num_layers + 2) // pp, "ZB-V": 2}.get(schedule, 1)
    layout = Layout(
        tokens, pp=pp, microbatch_size=size, num_microbatches=count, schedule=ZERO_BUBBLE_FAMILIES[schedule],
        num_chunks=num_chunks, layers_per_stage=with_lighter_ends(num_layers, pp * num_chunks),
    )  # fmt: skip
    shape = Shape.gpt(num_layers, hidden, heads, ZERO_BUBBLE_VOCABULARY, tokens)
    cluster = load_cluster("8x-a100-80" if pp <= 8 else f"{pp // 8}x8x-a100-80")
    return Run(shape, layout, find_megatron_stack("megatron-deepspeed"), FUSION, cluster), schedule


def program(run: Run, schedule: str) -> Program | None:
    """What the row ran, made for the predicted times; None: the layout's own."""
    layout = run.layout
    if schedule == "ZB-V":
        return build("zb-v", layout.pp, layout.num_microbatches)
    if schedule == "ZB-1p":  # its published bubble rates are those of ZB-H1
        return build("zb-h1", layout.pp, layout.num_microbatches)
    if schedule != "ZB-2p":
        return None
    placed = linear(layout.pp)
    costs = run.costs(placed)
    stages = stage_bytes(run.shape, layout, run.stack)
    saved = np.array([stage.saved for stage in stages], float)
    held = np.array([stage.for_weights for stage in stages], float)
    inner = float(np.sort(saved)[len(saved) // 2])
    saved, held = np.minimum(saved, inner), np.minimum(held, inner)
    times = StageTimes(
        costs.forward_s, costs.input_grad_s, costs.weight_grad_s, np.zeros(layout.pp - 1), saved, held
    )
    limit = 2 * layout.pp * inner
    return automatic(placed, layout.num_microbatches, times, limit, by_span=True, num_moves=0, num_patterns=0)


@cache
def _seconds(key: tuple[tuple[str, str], ...]) -> float:
    run, schedule = run_of(dict(key))
    return run.step(program(run, schedule), by_span=schedule.startswith("ZB")).seconds


def rows(records: list[Record]) -> Iterator[Row]:
    """Samples per second and device."""
    for index, record in enumerate(records):
        count, size, pp = (int(float(record[key])) for key in ("n_microbatches", "micro_batch", "pp"))
        label = f"{record['model']} pp={pp} b={size} m={count} {record['schedule']}"
        rate = count * size / (_seconds(tuple(record.items())) * pp)
        yield Row(
            label,
            record["schedule"].rstrip("*"),
            rate,
            float(record["samples_per_gpu_s"]),
            "fit" if index % 3 == 0 else "held",
        )


def swapped(records: list[Record], found: list[Row]) -> tuple[list[str], int]:
    """Pairs of schedules of one model, width and batch whose order is predicted wrongly, and the number of all pairs."""
    keys = ("model", "pp", "micro_batch", "n_microbatches")
    wrong, num = [], 0
    for (a, one), (b, other) in permutations(zip(records, found, strict=True), 2):
        if any(a[key] != b[key] for key in keys) or one.measured >= other.measured:
            continue
        num += 1
        if one.predicted >= other.predicted:
            wrong.append(f"{one.label} before {b['schedule']}")
    return wrong, num


def main() -> None:
    """Print the verdict."""
    given = arguments(__doc__, DATA).parse_args()
    with (given.data / "zero_bubble_measured.csv").open(newline="", encoding="utf-8") as file:
        records = list(csv.DictReader(file))
    found = list(rows(records))
    show(found, BAR, "samples/s/GPU", given.json)
    if not given.json:
        wrong, num = swapped(records, found)
        print(f"order: {num - len(wrong)} of {num} pairs of schedules right; wrong: {wrong or 'none'}")
        print(asdict(FUSION))


if __name__ == "__main__":
    main()
