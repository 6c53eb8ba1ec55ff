"""The largest microbatch that trains, and speed at equal microbatches: Stagewright against other systems' planners.

BERT with 48 layers, GPT-2 XL, T5-large and AmoebaNet-D on pipelines of 4 and 8 devices like V100-16GB, V100-32GB and RTX
2080 Ti, fp32 with AdamW, four microbatches per device. Every planner (`benchmarks/peers/plans`) chooses
cuts and what is recomputed (ours also what is offloaded); what it chooses is split from the same traced graph, replayed for
memory and simulated for time, so that only the choices differ. PipeDream and vPipe are asynchronous, with as many versions
of the weights as that takes; they are compared with our choices under the same asynchronous schedule (`own-async`), the
others with those under 1F1B (`own-1f1b`). Sizes tried are two per power of two. Steps of the optimizer are left out of the
times.

A ratio is ours over theirs: of the largest microbatches, and of the times at the largest microbatch that theirs can train.
A planner that cannot train at all has none. Recomputing everything repeats the forwards, a third of a step's work, so that
of stages equally balanced none is more than about 4/3 times as fast as others that recompute, however much they do; larger
ratios are imbalance. `vpipe` recomputes here and does not swap.

Run: ``python benchmarks/max_batch.py [--models NAME ...] [--output FILE]`` (the best part of an hour on one
core; what is worked out is noted in the file of ``--records``, from which a run that was stopped goes on;
``--at-most N`` works out N more).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from figures import write
from peers.plans.strategies import STRATEGIES
from stagewright.cluster import load_cluster
from stagewright.errors import PlanError
from stagewright.estimation.stages import RangeCosts
from stagewright.planning.candidate import Candidate
from stagewright.planning.configuration import Configuration
from stagewright.planning.job import Job
from stagewright.planning.prediction.predict import run_timeline
from stagewright.planning.prediction.staged_model import costing
from stagewright.tracing.cache import trace
from stagewright.tracing.models.reference import resolve
from stagewright.version import __version__

SIZES = tuple(sorted({base * 2**power for base in (2, 3) for power in range(10)} | {1}))
NUM_STAGES = (8, 4)
DEVICES = ("rtx2080ti", "v100-16", "v100-32")
OWN = {True: "own-async", False: "own-1f1b"}
"""By whether the planner it is compared with is asynchronous."""
BASELINES = tuple(name for name in STRATEGIES if not name.startswith("own-"))


@dataclass(frozen=True)
class Model:
    text: str
    sequence_length: int
    overrides: dict[str, Any] = field(default_factory=dict)


AMOEBANET = str(Path(__file__).with_name("amoebanet.py")) + ":amoebanet_d"
MODELS = {
    "BERT, 48 layers": Model("bert-large", 128, {"num_hidden_layers": 48}),
    "GPT-2 XL": Model("gpt2-xl", 1024),
    "T5-large": Model("t5-large", 512),
    "AmoebaNet-D": Model(AMOEBANET, 1),
}


@lru_cache(maxsize=6)
def graph_of(name: str, size: int) -> Any:
    model = MODELS[name]
    return trace(resolve(model.text, model.overrides), size, model.sequence_length, "float32")


class Setting:
    """A model on a pipeline; what every planner makes of it at every size is worked out once."""

    def __init__(self, model: str, num_stages: int, device: str) -> None:
        self.model, self.num_stages, self.device = model, num_stages, device
        self.cluster = load_cluster(f"{num_stages}x-{device}")
        self.known: dict[tuple[str, int], float | None] = {}
        self.largest: dict[str, int] = {}

    def seconds(self, planner: str, size: int) -> float | None:
        """Of a batch of microbatches of `size`; None if the planner finds nothing that fits."""
        key = planner, size
        if key not in self.known:
            found = self._candidate(planner, size)
            fits = found is not None and found.excess_bytes <= 0
            self.known[key] = (
                run_timeline(found.staged, steps=False).makespan_s if found is not None and fits else None
            )
        return self.known[key]

    def _candidate(self, planner: str, size: int) -> Candidate | None:
        count = 4 * self.num_stages
        job = Job(global_batch=size * count, sequence_length=MODELS[self.model].sequence_length, dtype="fp32")
        graph = graph_of(self.model, size)
        model_costs = RangeCosts(graph, costing(graph, self.cluster, job))
        try:
            configuration = Configuration(1, self.num_stages, size, count, "1f1b")
            return STRATEGIES[planner].candidate(model_costs, configuration, self.cluster, job)
        except PlanError:
            return None

    def search(self, planner: str, hint: int) -> int:
        """The largest size at which the planner's choice trains, 0 for none; looked for from `hint` on."""
        place = SIZES.index(hint) if hint in SIZES else 0
        if self.seconds(planner, SIZES[place]) is None:
            while place >= 0 and self.seconds(planner, SIZES[place]) is None:
                place -= 1
            self.largest[planner] = SIZES[place] if place >= 0 else 0
        else:
            while place + 1 < len(SIZES) and self.seconds(planner, SIZES[place + 1]) is not None:
                place += 1
            self.largest[planner] = SIZES[place]
        return self.largest[planner]

    def speedup(self, planner: str) -> float | None:
        """Of our choice over the planner's, at the largest microbatch it can train."""
        size = self.largest[planner]
        own = self.seconds(OWN[STRATEGIES[planner].asynchronous], size) if size else None
        theirs = self.seconds(planner, size) if size else None
        return theirs / own if own is not None and theirs is not None else None


@dataclass(frozen=True)
class Record:
    """What came out of a setting."""

    model: str
    num_stages: int
    device: str
    largest: dict[str, int]
    speedups: dict[str, float | None]

    def gain(self, planner: str) -> float | None:
        """Our largest microbatch over the planner's."""
        own, size = self.largest[OWN[STRATEGIES[planner].asynchronous]], self.largest[planner]
        return own / size if size else None


def worked_out(model: str, num_stages: int, device: str) -> Record:
    setting, hint = Setting(model, num_stages, device), 8
    for planner in STRATEGIES:
        hint = max(setting.search(planner, hint), 1)
    speedups = {planner: setting.speedup(planner) for planner in BASELINES}
    return Record(model, num_stages, device, setting.largest, speedups)


def noted(path: Path) -> list[Record]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [Record(**json.loads(staged)) for staged in lines]


def records(models: Sequence[str], path: Path, at_most: int) -> Iterator[Record]:
    """All settings: those noted in the file at `path` already, and `at_most` others, noted as they are worked out."""
    known, num_new = noted(path), 0
    for (num_stages, device), model in itertools.product(itertools.product(NUM_STAGES, DEVICES), models):
        same = [
            one for one in known if (one.model, one.num_stages, one.device) == (model, num_stages, device)
        ]
        if not same and num_new == at_most:
            continue
        found = same[0] if same else worked_out(model, num_stages, device)
        if not same:
            num_new += 1
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(found)) + "\n")
        yield found


def batch_table(settings: Sequence[Record]) -> Iterator[str]:
    yield "| model | devices | " + " | ".join(STRATEGIES) + " |"
    yield "| --- | --- |" + " ---: |" * len(STRATEGIES)
    for one in settings:
        sizes = " | ".join(str(one.largest[name]) for name in STRATEGIES)
        yield f"| {one.model} | {one.num_stages} x {one.device} | {sizes} |"


def speed_table(settings: Sequence[Record]) -> Iterator[str]:
    yield "| model | devices | " + " | ".join(BASELINES) + " |"
    yield "| --- | --- |" + " ---: |" * len(BASELINES)
    for one in settings:
        ratios = " | ".join(shown(one.speedups[name]) for name in BASELINES)
        yield f"| {one.model} | {one.num_stages} x {one.device} | {ratios} |"


def shown(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def summary(settings: Sequence[Record]) -> Iterator[str]:
    yield "| planner | largest microbatch: mean | best case | cannot train, ours can | speed: mean | best case |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    for name in BASELINES:
        own = OWN[STRATEGIES[name].asynchronous]
        gains = [gain for one in settings if (gain := one.gain(name)) is not None]
        speeds = [speed for one in settings if (speed := one.speedups[name]) is not None]
        barred = sum(not one.largest[name] and one.largest[own] > 0 for one in settings)
        yield f"| {name} | {means(gains)} | {barred} | {means(speeds)} |"


def means(ratios: Sequence[float]) -> str:
    if not ratios:
        return "- | -"
    return f"{math.exp(np.mean(np.log(ratios))):.2f}x | {max(ratios):.2f}x"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--records", type=Path, default=Path("max_batch.jsonl"), help="to go on from")
    parser.add_argument("--at-most", type=int, default=24, help="settings to work out beyond those noted")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    settings = list(records(arguments.models, arguments.records, arguments.at_most))
    planners = [f"- `{one.name}`: {one.what}" for one in STRATEGIES.values()]
    lines = [
        f"# The largest microbatch, {date.today()}",
        "",
        *(__doc__ or "").split("Run:")[0].strip().splitlines(),
        "",
        *planners,
        "",
        f"`python benchmarks/max_batch.py`, {len(settings)} settings, on "
        f"{platform.machine()}, Python {platform.python_version()}, Stagewright {__version__}.",
        "",
        "## Ours over theirs (geometric means)",
        "",
        *summary(settings),
        "",
        "## The largest microbatch",
        "",
        *batch_table(settings),
        "",
        "## Speed of ours over theirs, at the largest microbatch that theirs can train",
        "",
        *speed_table(settings),
    ]
    write(lines, arguments.output)


if __name__ == "__main__":
    main()
