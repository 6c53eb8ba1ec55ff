"""Everything that can be measured on one device in ten minutes, predicted beside measured, in one dated file of results.

    python benchmarks/gpu/campaign.py [--catalog h100] [--minutes 10] [--only stages saving ...] [--models gpt2 ...]
        [--output FILE] [--json]

* products, attention: by shape;
* stages: F and B, gradients beside plain autograd's, active and reserved peaks, of six models;
* passes: F, I and W apart, eager and compiled;
* saving: peaks with recomputation and with offload;
* overlap: how much longer passes take with offload;
* processes: two on the one device beside one: losses, seconds, peaks;
* checkpoint: saving, and going on from it.

Predictions are of the description that `stagewright probe` makes of the device, and of the catalog's where --catalog names
it. Every part has its share of the time; what there was none for is listed. A case that fails leaves its error in the
results, and the others go on. Without a GPU all of it runs small on the CPU, and says so.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import kernels
import saving
import stages
import torch
import training
from budget import Case, Part, Row, Section, TimeUp, measured, time_limit
from stages import Setting

from stagewright.cluster import Cluster, load_cluster
from stagewright.execution.probe import probe
from stagewright.files import write_whole
from stagewright.tracing.models.reference import resolve
from stagewright.version import __version__

Changes = dict[str, Any]
Models = Sequence[tuple[str, Changes]]
"""Names, and what of their configurations is changed."""
Measure = Callable[..., Iterator[Row | str]]

MEASURES: dict[str, list[tuple[str, Measure, tuple[Any, ...]]]] = {
    "stages": [("", stages.whole, ())],
    "passes": [("eager", stages.apart, (False,)), ("compiled", stages.apart, (True,))],
    "saving": [("", saving.peaks, (("keep", "recompute", "offload 1", "offload 4"),))],
    "overlap": [
        (name, saving.overlap, (every,)) for name, every in (("1 of 16", 16), ("all", 1), ("1 of 4", 4))
    ],
    "processes": [("", training.two_processes, ())],
    "checkpoint": [("", training.checkpoint, ())],
}
"""Of every part: which of its measurements, and what it is called with besides a setting and a model."""

_FEW: Changes = {"num_hidden_layers": 8}
_SOME: Changes = {"num_hidden_layers": 16}
_LONG: Changes = {"max_position_embeddings": 1024}
_TINY: Models = [("tiny-llama", {"num_hidden_layers": 2})]
MODELS: dict[str, dict[str, Models]] = {
    "cuda": {
        "stages": [
            ("gpt2-xl", {}), ("tiny-mixtral", {}), ("gemma-3-1b", {}), ("bert-large", _LONG), ("t5-large", {}),
            ("vit-huge", {}),
        ],
        "passes": [("gpt2-xl", _FEW), ("gemma-3-1b", _FEW)],
        "saving": [("gpt2-xl", _SOME), ("gemma-3-1b", _SOME), ("bert-large", _LONG)],
        "overlap": [("gpt2-xl", _SOME), ("gemma-3-1b", _SOME)],
        "processes": [("gpt2-xl", _FEW), ("gemma-3-1b", _FEW)],
        "checkpoint": [("gpt2", {}), ("gpt2-xl", _FEW)],
    },
    "cpu": dict.fromkeys(MEASURES, _TINY),
}  # fmt: skip
"""Of every part, the most telling first."""

SHARES = {
    "products": 1, "stages": 5, "passes": 4, "saving": 3, "overlap": 2, "processes": 3, "checkpoint": 2, "attention": 1,
}  # fmt: skip
NUM_STAGES = {"cuda": 4, "cpu": 2}
LENGTHS = {"cuda": 1024, "cpu": 64}
REPEATS = {"cuda": 10, "cpu": 2}
TIME_BOX_S = {"cuda": 0.3, "cpu": 0.02}
"""Of one kernel."""
_PROBED, _SPARE = 0.25, 0.05
"""Of the time: at the most for the probe; left for what is in front of the measurements, and behind."""


def setting_of(device: torch.device, described: Sequence[Cluster], dtype: str) -> Setting:
    kind = device.type
    return Setting(device, tuple(described), dtype, LENGTHS[kind], NUM_STAGES[kind], REPEATS[kind])


def parts_of(setting: Setting, only: Sequence[str] = (), models: Models | None = None) -> list[Part]:
    """In the order in which they are measured."""
    named = MODELS[setting.device.type]
    return [
        Part(name, share, _of_models(setting, name, models or named[name]) if name in named else _of_shapes(setting, name))
        for name, share in SHARES.items()
        if not only or name in only
    ]  # fmt: skip


def _of_shapes(setting: Setting, name: str) -> list[Case]:
    measure = {"products": kernels.products, "attention": kernels.attention}[name]
    devices, box = [cluster.device for cluster in setting.described], TIME_BOX_S[setting.device.type]
    return [Case("all shapes", partial(measure, setting.device, devices, setting.dtype, box))]


def _of_models(setting: Setting, part: str, models: Models) -> list[Case]:
    """The first measurement of every model, then the next."""

    def case(what: str, measure: Measure, given: tuple[Any, ...], model: str, overrides: Changes) -> Case:
        return Case(
            f"{model}: {what}" if what else model,
            lambda: measure(setting, resolve(model, overrides), *given),
        )

    return [case(*one, *model) for one in MEASURES[part] for model in models]


def report(sections: Sequence[Section], names: Sequence[str], heading: Sequence[str]) -> Iterator[str]:
    """Lines of the file of results."""
    yield from heading
    for one in sections:
        yield f"\n## {one.name} ({one.seconds:.0f} s)\n"
        yield from (f"FAILED: {error}\n" for error in one.errors)
        yield from (f"Left out for want of time: {name}\n" for name in one.left_out)
        if not (one.rows or one.notes or one.errors or one.left_out):
            yield "Nothing was measured." if one.seconds == 0 else "Done."
        if one.rows:
            yield f"| what | measured | {' | '.join(names)} |\n| --- | ---: |{' ---: |' * len(names)}"
        for what, predicted, found in one.rows:
            beside = [_beside(value, found) for value in predicted] or [""] * len(names)
            yield f"| {what} | {found:.4g} | {' | '.join(beside)} |"
        yield from (f"\n{note}" for note in one.notes)


def _beside(predicted: float, found: float) -> str:
    error = f" ({predicted / found - 1:+.1%})" if found > 0 else ""
    return f"{predicted:.4g}{error}"


def described(kind: str, catalog: str | None, seconds: float) -> tuple[dict[str, Cluster], Section]:
    """What predicts, by name, and what came of the probe; the catalog's alone where that fails."""
    section, begun = Section("probe"), time.monotonic()
    found: dict[str, Cluster] = {}
    try:
        with time_limit(seconds):
            found["probed"] = probe(kind, processes=1, time_limit_s=seconds)
        section.notes += found["probed"].cautions
    except (Exception, TimeUp) as error:
        section.errors.append(f"{type(error).__name__}: {error}")
        catalog = catalog or "h100"
    if catalog is not None:
        found[catalog] = load_cluster(f"1x-{catalog}", {"device.kind": "cpu"} if kind == "cpu" else None)
    section.seconds = time.monotonic() - begun
    return found, section


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--catalog", metavar="NAME", help="what the catalog calls this device, e.g. h100")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all of it, the probe included")
    parser.add_argument(
        "--only", nargs="*", default=[], choices=list(SHARES), metavar="PART", help="these parts"
    )
    parser.add_argument("--models", nargs="*", help="in place of those of every part")
    parser.add_argument("--output", type=Path, help="the file of results; default in benchmarks/results")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    return parser.parse_args()  # fmt: skip


def main() -> None:
    begun, given = time.monotonic(), _options()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = "bf16" if kind == "cuda" else "fp32"
    name = torch.cuda.get_device_name() if kind == "cuda" else "CPU: there is no GPU here"
    today = date.today().isoformat()
    output = given.output or Path(__file__).parents[1] / "results" / f"gpu-{today}.md"
    command = " ".join(["python", "benchmarks/gpu/campaign.py", *sys.argv[1:]])
    versions = {
        "stagewright": __version__,
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "Python": platform.python_version(),
    }
    heading = [
        f"# One device, {today}\n",
        f"{name}; {', '.join(f'{what} {version}' for what, version in versions.items())}; {dtype}. `{command}`. Seconds and "
        "bytes.",
    ]
    clusters, probed = described(kind, given.catalog, _PROBED * 60 * given.minutes)

    def tell(text: str) -> None:
        print(f"{time.monotonic() - begun:4.0f} s  {text}", file=sys.stderr, flush=True)

    def keep(sections: Sequence[Section]) -> None:
        write_whole(output, "\n".join(report([probed, *sections], list(clusters), heading)) + "\n")

    tell(f"probe: {probed.errors or 'done'}")
    threads = next(iter(clusters.values())).device.num_threads
    if threads is not None:  # of a CPU, as it was probed
        torch.set_num_threads(threads)
    models = None if given.models is None else [(model, {}) for model in given.models]
    parts = parts_of(setting_of(torch.device(kind), list(clusters.values()), dtype), given.only, models)
    left_s = 60 * given.minutes * (1 - _SPARE) - (time.monotonic() - begun)
    found = measured(parts, left_s, tell, keep)
    if given.json:
        sections = [asdict(one) for one in (probed, *found)]
        print(
            json.dumps({"device": name, "versions": versions, "command": command, "sections": sections}, indent=1)
        )  # fmt: skip
    else:
        print(f"Wrote {output}.")


if __name__ == "__main__":
    main()
