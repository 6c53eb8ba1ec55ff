"""Hold makespans of the simulator against those of RoundPipe's authors, and times of layers against what they measured.

Their microbatches recompute what a layer's backward needs, with kernels that are fused by hand, as compiled ones are here.
`roundpipe` binds no stage to a device: forward parts, then parts that recompute and run backward, are dealt out to the
devices in turn, each for all microbatches; so it is a chain of forwards here. Ignores: that as many microbatches as devices
make a round, the next of which begins on the next device, and that a device recomputes while it waits; with both the two
makespans that are too long agree.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from verdict import Row, arguments, document, show, summary

from stagewright.cluster import load_cluster
from stagewright.planning.estimate import estimate, estimate_breakdown
from stagewright.planning.job import Job
from stagewright.schedule import Program, build
from stagewright.simulation import StageCosts, simulate

DATA = Path(__file__).parent / "data" / "pipelines"
NAME = "roundpipe_schedule_reference.csv"
BAR, LAYER_BAR = 0.01, 0.10

_LAYERS = {"Llama3-8B": "llama-3-8b", "Qwen3-32B": "qwen3-32b"}
"""Dense models; which kernels compute experts is not told."""

_SAMPLES, _TOKENS = 3, 2048
"""A microbatch, which is not told: transfers of 2.25, 3.2 and 4 ms for hidden sizes of 2,880, 4,096 and 5,120 are then at
one rate, 15.7 GB/s, which PCIe 4.0 attains."""

_BUILDERS = {"1f1b": "1f1b", "interleaved-1f1b": "interleaved-1f1b", "looped-bfs": "breadth-first"}

Record = dict[str, str]


def counts(text: str) -> tuple[int, ...]:
    """Layers of every part, of which equal ones may be written `layers*parts`.

    >>> counts("0,1*3,2")
    (0, 1, 1, 1, 2)
    """
    parts: list[int] = []
    for item in text.split(","):
        layers, _, times = item.partition("*")
        parts += [int(layers)] * int(times or 1)
    return tuple(parts)


def makespan_s(record: Record) -> float:
    """Return the seconds that the simulator gives."""
    forward_s, backward_s, head_s, head_backward_s, hop_s = (
        float(record[key]) / 1e3
        for key in (
            "forward_ms_per_layer_rtx4090", "backward_ms_per_layer_rtx4090", "head_forward_ms", "head_backward_ms",
            "transfer_ms_per_hop",
        )
    )  # fmt: skip
    num_ranks, num_microbatches = int(record["num_gpus"]), int(record["microbatches"])
    if record["schedule"] == "roundpipe":
        ahead, behind = map(counts, record["partition"].split("|"))
        seconds = [layers * forward_s for layers in ahead]
        seconds += [layers * (forward_s + backward_s) for layers in behind]
        seconds[len(ahead)] += head_s + head_backward_s
        program = chain(len(seconds), num_ranks, num_microbatches)
        nothing = [0.0] * len(seconds)
        return simulate(program, StageCosts.of(seconds, nothing, nothing), hop_s).makespan_s
    layers = counts(record["partition"])
    forwards = [count * forward_s for count in layers]
    backwards = [count * (forward_s + backward_s) for count in layers]
    forwards[-1] += head_s
    backwards[-1] += head_backward_s
    num_chunks = len(layers) // num_ranks
    program = build(
        _BUILDERS[record["schedule"]], num_ranks, num_microbatches, num_chunks if num_chunks > 1 else None
    )
    return simulate(program, StageCosts.of(forwards, backwards, [0.0] * len(layers)), hop_s).makespan_s


def chain(num_parts: int, num_ranks: int, num_microbatches: int) -> Program:
    """Return forwards of `num_parts` stages, dealt out to the ranks in turn."""
    placed = " ".join(str(part % num_ranks) for part in range(num_parts))
    lines = [
        " ".join(
            f"{part}F{index}"
            for part in range(rank, num_parts, num_ranks)
            for index in range(num_microbatches)
        )
        for rank in range(num_ranks)
    ]
    text = "\n".join(f"{rank}: {line}" for rank, line in enumerate(lines))
    return Program.from_text(f"program chain\nmicrobatches {num_microbatches}\nplacement {placed}\n{text}")


def rows(folder: Path = DATA) -> Iterator[Row]:
    """One row per makespan of the reference."""
    with (folder / NAME).open(newline="", encoding="utf-8") as file:
        for record in csv.DictReader(file):
            label = f"{record['model']} {record['partition']}"
            yield Row(
                label,
                record["schedule"],
                makespan_s(record),
                float(record["simulated_makespan_ms"]) / 1e3,
                "other",
            )


def layer_rows(folder: Path = DATA) -> Iterator[Row]:
    """Forward and backward of a layer of every dense model on an RTX 4090, which is predicted without a pipeline."""
    with (folder / NAME).open(newline="", encoding="utf-8") as file:
        records = {record["model"]: record for record in csv.DictReader(file)}
    cluster = load_cluster("1x-rtx4090")
    job = Job(global_batch=_SAMPLES, sequence_length=_TOKENS, compiled=True)
    for name, record in records.items():
        if name not in _LAYERS:
            continue
        plan = estimate(_LAYERS[name], cluster, job, pp=1, dp=1, microbatch=_SAMPLES)
        layer = next(
            share for share in estimate_breakdown(plan, cluster, "layer") if share.name.endswith("layers.1")
        )
        for way, seconds in (("forward", layer.forward_s), ("backward", layer.backward_s)):
            measured_s = float(record[f"{way}_ms_per_layer_rtx4090"]) / 1e3
            yield Row(f"{name} {way}", "layer", seconds, measured_s, "other")


def main() -> None:
    """Print every makespan and layer; ends with 1 where a mean misses its bar."""
    given = arguments(__doc__, DATA).parse_args()
    judged = {"makespans": (list(rows(given.data)), BAR), "layers": (list(layer_rows(given.data)), LAYER_BAR)}
    if given.json:
        json.dump(
            {name: document(found, bar) for name, (found, bar) in judged.items() if found},
            sys.stdout,
            indent=1,
        )
        print()
    for name, (found, bar) in judged.items() if not given.json else ():
        print(f"{name}:")
        show(found, bar, "s", False)
        print()
    if any(summary(name, found).mean > bar for name, (found, bar) in judged.items() if found):
        sys.exit(1)


if __name__ == "__main__":
    main()
