"""Everything that can be measured on one device in ten minutes, predicted beside measured, in one dated file of results.

    python benchmarks/gpu/campaign.py [--catalog h100] [--models gpt2 ...] [--output FILE] [--json]

Products and attention by shape; F and B of stages of several models, their gradients against plain autograd, active and
reserved peaks. Predictions are of the description that `stagewright probe` makes of the device, and of the catalog's where
--catalog names it. Without a GPU it runs small on the CPU, and says so. A part that fails leaves its error in the results;
the others go on.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import date
from functools import partial
from pathlib import Path

import kernels
import stages
import torch

from stagewright.cluster import Cluster, load_cluster
from stagewright.execution.probe import probe
from stagewright.files import write_whole

MODELS = {
    "cuda": ["gpt2-xl", "gemma-3-1b", "bert-large", "t5-large", "vit-huge", "tiny-mixtral"],
    "cpu": ["tiny-llama"],
}
NUM_STAGES = 4
LENGTHS = {"cuda": 1024, "cpu": 64}
TIME_BOX_S = {"cuda": 0.3, "cpu": 0.02}
"""Of one kernel."""


@dataclass
class Section:
    """A part of the campaign: its rows, (what, predicted by each description, measured), or what it failed of."""

    name: str
    rows: list[tuple[str, list[float], float]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    error: str = ""
    seconds: float = 0.0


def section(name: str, measure: Callable[[Section], None]) -> Section:
    """Measured, or with the error that ended it."""
    made, begun = Section(name), time.perf_counter()
    try:
        measure(made)
    except Exception as error:
        made.error = f"{type(error).__name__}: {error}"
    made.seconds = time.perf_counter() - begun
    return made


def campaign(
    device: torch.device, described: list[Cluster], models: list[str], dtype: str
) -> Iterator[Section]:
    """Every part, one after the other."""
    devices, box = [cluster.device for cluster in described], TIME_BOX_S[device.type]
    for name, measure in (("products", kernels.products), ("attention", kernels.attention)):
        yield section(name, lambda made, one=measure: made.rows.extend(one(device, devices, dtype, box)))
    for model in models:
        yield section(f"stages of {model}", partial(_stages, model, described, device, dtype))


def _stages(model: str, described: list[Cluster], device: torch.device, dtype: str, made: Section) -> None:
    found = [
        stages.measured(model, NUM_STAGES, LENGTHS[device.type], cluster, device, dtype)
        for cluster in described
    ]
    rows, differences = zip(*found, strict=True)
    for same in zip(*rows, strict=True):
        what, _, measured = same[0]
        made.rows.append((what, [predicted for _, predicted, _ in same], measured))
    tolerance = stages.TOLERANCES[dtype]
    verdict = "within" if max(differences) <= tolerance else "OUTSIDE"
    made.notes.append(f"largest difference of a gradient {max(differences):.2e}: {verdict} {tolerance}")


def report(sections: list[Section], names: list[str], heading: list[str]) -> Iterator[str]:
    """Lines of the file of results."""
    yield from heading
    for one in sections:
        yield f"\n## {one.name} ({one.seconds:.0f} s)\n"
        if one.error:
            yield f"FAILED: {one.error}"
        if one.rows:
            yield f"| what | measured | {' | '.join(names)} |\n| --- | ---: |{' ---: |' * len(names)}"
        for what, predicted, measured in one.rows:
            errors = " | ".join(f"{value:.4g} ({value / measured - 1:+.1%})" for value in predicted)
            yield f"| {what} | {measured:.4g} | {errors} |"
        yield from (f"\n{note}" for note in one.notes)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--catalog", metavar="NAME", help="what the catalog calls this device, e.g. h100")
    parser.add_argument("--models", nargs="*", help="by default six on a GPU, one on a CPU")
    parser.add_argument("--output", type=Path, help="the file of results; default in benchmarks/results")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    given = parser.parse_args()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    described = [probe(kind, processes=1)] + ([load_cluster(f"1x-{given.catalog}")] if given.catalog else [])
    dtype = "bf16" if kind == "cuda" else "fp32"
    name = torch.cuda.get_device_name() if kind == "cuda" else "CPU: there is no GPU here"
    models = MODELS[kind] if given.models is None else given.models
    found = []
    for one in campaign(torch.device(kind), described, models, dtype):
        found.append(one)
        print(
            f"{one.name}: {one.error or f'{len(one.rows)} rows'}, {one.seconds:.0f} s",
            file=sys.stderr,
            flush=True,
        )
    today = date.today().isoformat()
    command = " ".join(["python", "benchmarks/gpu/campaign.py", *sys.argv[1:]])
    heading = [
        f"# One device, {today}\n",
        f"{name}; torch {torch.__version__}, Python {platform.python_version()}, {dtype}. `{command}`. Seconds and bytes.",
    ]
    output = given.output or Path(__file__).parents[1] / "results" / f"gpu-{today}.md"
    write_whole(output, "\n".join(report(found, ["probed", given.catalog][: len(described)], heading)) + "\n")
    if given.json:
        print(json.dumps({"device": name, "sections": [asdict(one) for one in found]}, indent=1))
    else:
        print(f"Wrote {output}.")


if __name__ == "__main__":
    main()
