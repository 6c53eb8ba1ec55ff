"""Judge step times of zero-bubble and other schedules on A100: programs made and simulated for predicted stage times."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from functools import cache

import numpy as np
from footprints import DATA, with_lighter_ends
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
_FAMILIES = {
    "1F1B": "1f1b",
    "1F1B-I": "interleaved-1f1b",
    "ZB-1p": "zb-auto",
    "ZB-2p": "zb-auto",
    "ZB-V": "zb-v",
}

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
        tokens, pp=pp, microbatch_size=size, num_microbatches=count, schedule=_FAMILIES[schedule],
        num_chunks=num_chunks, layers_per_stage=with_lighter_ends(num_layers, pp * num_chunks),
    )  # fmt: skip
    shape = Shape.gpt(num_layers, hidden, heads, 51200, tokens)
    cluster = load_cluster("8x-a100-80" if pp <= 8 else f"{pp // 8}x8x-a100-80")
    return Run(shape, layout, find_megatron_stack("megatron-deepspeed"), FUSION, cluster), schedule


def program(run: Run, schedule: str) -> Program | None:
    """What the row ran, made for the predicted times; None: the layout's own."""
    layout = run.layout
    if schedule == "ZB-V":
        return build("zb-v", layout.pp, layout.num_microbatches)
    if schedule not in ("ZB-1p", "ZB-2p"):
        return None
    costs = run.costs()
    stages = stage_bytes(run.shape, layout, run.stack)
    saved = np.array([stage.saved for stage in stages], float)
    held = np.array([stage.for_weights for stage in stages], float)
    inner = float(np.sort(saved)[len(saved) // 2])
    saved, held = np.minimum(saved, inner), np.minimum(held, inner)
    times = StageTimes(
        costs.forward_s, costs.input_grad_s, costs.weight_grad_s, np.zeros(layout.pp - 1), saved, held
    )
    copies = 2 if schedule == "ZB-2p" else 1
    limit = copies * layout.pp * inner
    return automatic(linear(layout.pp), layout.num_microbatches, times, limit, num_moves=0, num_patterns=0)


@cache
def _seconds(key: tuple[tuple[str, str], ...]) -> float:
    run, schedule = run_of(dict(key))
    return run.step(program(run, schedule)).seconds


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


def main() -> None:
    """Print the verdict."""
    given = arguments(__doc__, DATA).parse_args()
    with (given.data / "zero_bubble_measured.csv").open(newline="", encoding="utf-8") as file:
        show(list(rows(list(csv.DictReader(file)))), BAR, "samples/s/GPU", given.json)


if __name__ == "__main__":
    main()
