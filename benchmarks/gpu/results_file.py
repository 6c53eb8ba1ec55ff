"""A results file that grows while it is measured: parts with cases, in a limited time."""

from __future__ import annotations

import gc
import platform
import signal
import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import torch

from stagewright.cluster import Cluster, load_cluster
from stagewright.execution.probe import probe
from stagewright.files import write_whole
from stagewright.version import __version__

sys.path.append(str(Path(__file__).resolve().parents[1]))  # other benchmarks, wherever a script is started

Row = tuple[str, list[float], float]
"""What, as every description predicts it (empty where none does), measured: seconds or bytes."""
Results = Iterator[Row | str]
"""Rows and notes."""
_PROBE_SHARE = 0.25  # of the time, at most


@dataclass(frozen=True)
class Part:
    """Cases by name, the most telling first, and the weight of their share of the time."""

    name: str
    share: float
    cases: Mapping[str, Callable[[], Results]]


@dataclass
class Section:
    """The results of a part, with notes of cases that failed, or for which there was no time."""

    name: str
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0


class TimeUp(BaseException):
    """Not an `Exception`, so that code which catches all of those does not catch this."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TimeUp` inside after `seconds`, and again each second; for the main thread."""

    def ring(number: int, frame: object) -> None:
        raise TimeUp("no time left")

    before = signal.signal(signal.SIGALRM, ring)
    timer = signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3), 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, before)


def measured(
    parts: Sequence[Part], seconds: float, keep: Callable[[list[Section]], None] = lambda sections: None
) -> list[Section]:
    """Return the sections of all parts, measured in `seconds`; time that a part does not need goes to those after it.

    `keep` is given the sections after every case, and stderr a line.
    """
    end = time.monotonic() + seconds
    sections = [Section(part.name) for part in parts]
    for index, part in enumerate(parts):
        now, section = time.monotonic(), sections[index]
        deadline = now + (end - now) * part.share / sum(later.share for later in parts[index:])
        for name, measure in part.cases.items():
            outcome = _measure(section, name, measure, deadline)
            print(f"{part.name}: {name}: {outcome}", file=sys.stderr, flush=True)
            keep(sections)
    return sections


def _measure(section: Section, name: str, measure: Callable[[], Results], deadline: float) -> str:
    """Add the results of a case to its section; returns what became of it."""
    start, outcome = time.monotonic(), "done"
    try:
        if start >= deadline:
            raise TimeUp("no time left")
        with time_limit(deadline - start):
            for item in measure():
                section.notes.append(item) if isinstance(item, str) else section.rows.append(item)
    except (Exception, TimeUp) as error:
        outcome = f"FAILED: {type(error).__name__}: {error}"
        section.notes.append(f"{name} {outcome}")
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
    seconds = time.monotonic() - start
    section.seconds += seconds
    return f"{outcome} after {seconds:.0f} s"


def report(sections: Sequence[Section], names: Sequence[str], heading: Sequence[str]) -> Iterator[str]:
    """Lines of the results file."""
    yield from heading
    for section in sections:
        yield f"\n## {section.name} ({section.seconds:.0f} s)\n"
        if section.rows:
            yield f"| what | measured | {' | '.join(names)} |\n| --- | ---: |{' ---: |' * len(names)}"
        for what, predictions, value in section.rows:
            columns = [f"{one:.4g} ({one / (value or 1e-30) - 1:+.1%})" for one in predictions]
            yield f"| {what} | {value:.4g} | {' | '.join(columns or [''] * len(names))} |"
        yield from (f"\n{note}" for note in section.notes)


def described(chosen: Namespace, processes: int) -> tuple[dict[str, Cluster], list[str]]:
    """What predicts, by name, and notes; the catalog's alone where the probe fails or all is small."""
    clusters, notes = dict[str, Cluster](), list[str]()
    seconds, kind = _PROBE_SHARE * chosen.budget_seconds, chosen.device
    try:
        if not chosen.small:
            with time_limit(seconds):
                clusters["probed"] = probe(kind, processes, time_limit_s=seconds)
            notes += clusters["probed"].cautions
    except (Exception, TimeUp) as error:
        notes.append(f"The probe FAILED: {type(error).__name__}: {error}")
    if chosen.catalog is not None or not clusters:
        name = chosen.catalog or "h100"
        clusters[name] = load_cluster(
            f"{processes}x-{name}", {"device.kind": "cpu"} if kind == "cpu" else None
        )
    return clusters, notes


def options(parser: ArgumentParser, parts: Sequence[str], budget_s: float) -> Namespace:
    """The options of a script, with those of all scripts."""
    parser.formatter_class = RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    add("--small", action="store_true", help="small models, and neither a probe nor a compiler")
    add("--parts", nargs="*", default=parts, choices=parts, metavar="PART", help=", ".join(parts))
    add("--budget-seconds", type=float, default=budget_s, help="for all of it, the probe included")
    add("--catalog", metavar="NAME", help="the catalog's name of this device, e.g. h100")
    add("--output", type=Path, help="the results file; default in benchmarks/results")
    return parser.parse_args()


def run(
    title: str, chosen: Namespace, processes: int, parts_of: Callable[[list[Cluster]], Sequence[Part]]
) -> None:
    """Measure the parts that were chosen, and write the results file after every case."""
    begun = time.monotonic()
    output = chosen.output or Path(__file__).parents[1] / "results" / f"gpu-{title}-{date.today()}.md"
    device = f"{processes} x {torch.cuda.get_device_name()}" if chosen.device == "cuda" else "no GPU"
    command = " ".join([f"python benchmarks/gpu/{title}.py", *sys.argv[1:]])
    heading = [
        f"# benchmarks/gpu/{title}.py, {date.today()}\n",
        f"{device}; stagewright {__version__}, torch {torch.__version__}, CUDA {torch.version.cuda}, "
        f"Python {platform.python_version()}. `{command}`. Seconds and bytes.",
    ]
    clusters, notes = described(chosen, processes)
    heading += [f"\n{note}" for note in notes]

    def keep(sections: Sequence[Section]) -> None:
        write_whole(output, "\n".join(report(sections, list(clusters), heading)) + "\n")

    keep([])
    parts = [part for part in parts_of(list(clusters.values())) if part.name in chosen.parts]
    measured(parts, chosen.budget_seconds - (time.monotonic() - begun), keep)
    print(f"Wrote {output}.")
