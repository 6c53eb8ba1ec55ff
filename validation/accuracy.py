"""Write the accuracy page: every set of measurements, how predictions stand to it, what is left out, and what was fitted.

    python validation/accuracy.py --documents FOLDER > docs/accuracy.md

Each script here is asked with `--json`, whose document stays in FOLDER; one that lies there is not made again.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Collection, Iterator
from datetime import date
from importlib import metadata
from operator import attrgetter
from pathlib import Path
from typing import Any

from cards import CARDS, UNCHECKED, WHOLE, cards, table

from stagewright.cluster import load_cluster
from stagewright.cluster.catalog import device_names
from stagewright.cluster.schema import SourcedModel
from stagewright.estimation.runtime import load_runtime, runtime_names
from stagewright.files import write_whole

SCRIPTS = {
    **{name: card.title for name, card in WHOLE.items()},
    "other_pipelines": "Pipelines that others than NVIDIA published",
    "schedule_reference": "Schedules and layers of RoundPipe's authors",
    "pipelines": "Pipelines of Megatron-LM, NeMo and MLPerf",
    "differences": "Differences between runs",
}
"""Scripts of this folder that judge measurements of others, and what these are."""

_FITTED = "fit"
"""What sources of fitted figures begin with."""

RESULTS = Path(__file__).parent / "results"

LEFT_OUT = "left_out"
"""Key of scripts' documents: rows that are not judged, by the reason."""

_HEAD = """# How far predictions can be trusted

Every set of measurements by others that predictions are held against, as shipped: each prediction is what a user's command
gives, and nothing is overridden but where a section says so. Errors are relative to the measurement: their mean and median
size, the bias with its sign, and the worst. Rows of the half *fit* were seen by some constant, those of the half *other* by
none. Written by `python validation/accuracy.py` on {today}, Stagewright {version}, torch {torch}; `python
validation/NAME.py` prints one set, row by row where rows are few.

## Never checked

{unchecked}
"""


def documents(folder: Path, leave: Collection[str] = ()) -> Iterator[tuple[str, Any]]:
    """Script and document of each; made where the folder has none, or empty for those to `leave`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in SCRIPTS:
        path = folder / f"{name}.json"
        if not path.exists() and name in leave:
            yield name, {}
            continue
        if not path.exists():
            print(f"asking {name}.py", file=sys.stderr, flush=True)
            script = Path(__file__).with_name(f"{name}.py")
            # A script ends with 1 where a bar is missed, and prints its document all the same.
            made = subprocess.run([sys.executable, str(script), "--json"], stdout=subprocess.PIPE, text=True)
            if not made.stdout:
                sys.exit(
                    f"{script.name} printed no document (it ended with {made.returncode}): run it alone to see why"
                )
            write_whole(path, made.stdout)
        yield name, json.loads(path.read_text())


def judged(found: dict[str, Any], *names: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(figure, document) of everything that was judged in what a script printed."""
    if "all" in found:
        yield ", ".join(names), found
        return
    for name, inner in found.items():
        if name != LEFT_OUT and isinstance(inner, dict):
            yield from judged(inner, *names, name)


def left_out(found: dict[str, Any], *names: str) -> Iterator[tuple[str, str, int]]:
    """(set, reason, rows) of everything that a script says it left out."""
    for name, inner in found.items():
        if name == LEFT_OUT:
            yield from ((", ".join(names), reason, count) for reason, count in inner.items())
        elif isinstance(inner, dict):
            yield from left_out(inner, *names, name)


def row(figure: str, whole: dict[str, Any], half: str) -> str:
    """A line of a table: of all rows of a figure, or of a group or half of them."""
    errors = [f"{whole[key]:.1%}" for key in ("mean", "median")]
    return (
        f"| {figure} | {half} | {whole['num_rows']:,} | {' | '.join(errors)} | {whole['bias']:+.1%} | "
        f"{whole['worst_error']:+.0%} |"
    )


def halves(found: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Of the rows that constants saw and of those that they did not, where there are both."""
    names = {one["half"] for one in found["rows"]}
    for half in sorted(names) if len(names) > 1 else ():
        errors = [one["error"] for one in found["rows"] if one["half"] == half]
        sizes = sorted(map(abs, errors))
        middle = (sizes[(len(sizes) - 1) // 2] + sizes[len(sizes) // 2]) / 2
        yield half, {
            "num_rows": len(errors), "mean": sum(sizes) / len(sizes), "median": middle,
            "bias": sum(errors) / len(errors), "worst_error": max(errors, key=abs),
        }  # fmt: skip


def fitted(model: SourcedModel) -> list[str]:
    """Dotted names of the figures of a device, link or runtime whose source is a fit, those of what it holds included."""
    own = [name for name in model.figures() if _source(model, name).startswith(_FITTED)]
    own = [
        name
        for name in own
        if not isinstance(attrgetter(name)(model), bool | str) and _is_stated(model, name)
    ]
    for name in type(model).model_fields:
        held = getattr(model, name)
        for one in held if isinstance(held, tuple) else (held,):
            if isinstance(one, SourcedModel):
                own += [f"{name}.{inner}" for inner in fitted(one)]
    return own


def _is_stated(model: SourcedModel, figure: str) -> bool:
    """Whether a figure is the model's own, and not what is taken where a file has none."""
    holder, _, name = figure.rpartition(".")
    return name in (attrgetter(holder)(model) if holder else model).model_fields_set


def _source(model: SourcedModel, figure: str) -> str:
    """Where a figure comes from; of one that is "as" another of the model, where that does."""
    text = model.source_of(figure) or ""
    other = text.removeprefix("as ").split(",")[0]
    return (
        _source(model, other)
        if text.startswith("as ") and other in model.figures() and other != figure
        else text
    )


def constants() -> Iterator[tuple[str, list[str]]]:
    """Every device of the catalog with the links around it, then every runtime, and what of it was fitted."""
    for name in device_names():
        group = load_cluster(f"1x-{name}").nodes[0]
        links = (group.intra_node,) if group.intra_node is not None else ()
        yield name, [*fitted(group.device), *(inner for link in links for inner in fitted(link))]
    for name in runtime_names():
        yield name, fitted(load_runtime(name))


def newest(name: str) -> str | None:
    """The last dated file of a script's results."""
    dated = re.compile(r"\d{4}-\d\d-\d\d")
    found = [
        path.name for path in RESULTS.glob("*.md") if name.replace("_", "-") in path.name.replace("_", "-")
    ]
    return max(found, key=lambda file: dated.findall(file), default=None)


def _revision() -> str:
    """The commit that the page is written from."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "no repository"


def page(folder: Path, leave: Collection[str] = ()) -> Iterator[str]:
    """The lines of the page."""
    versions = {"version": metadata.version("stagewright"), "torch": metadata.version("torch")}
    today, revision = date.today().isoformat(), f"Stagewright {versions['version']}, {_revision()}"
    unchecked = "\n".join(f"* {sentence}" for sentence in UNCHECKED)
    yield _HEAD.format(today=today, unchecked=unchecked, **versions)
    for name, found in documents(folder, leave):
        yield f"\n## {SCRIPTS[name]}\n"
        if name in CARDS and found:
            yield from cards(name, found, revision, today)
            continue
        for card in [WHOLE[name]] if name in WHOLE else CARDS[name].values():
            if name not in WHOLE:
                yield f"\n### {card.title}\n"
            day = (
                today
                if found
                else f"not judged anew with this page: [{newest(name)}](../validation/results/{newest(name)})"
            )
            yield from table(
                card, f"python validation/{name}.py", revision if found else "as the results say", day
            )
        yield ""
        if not found:
            continue
        yield "| figure | half | rows | mean | median | bias | worst |\n| --- | --- | ---: | ---: | ---: | ---: | ---: |"
        for figure, document in judged(found):
            figure = figure or name
            yield row(figure, document["all"], "all")
            for half, whole in halves(document):
                yield row(figure, whole, half)
            for group in document["groups"] if 1 < len(document["groups"]) <= 24 else ():
                yield row(f"&nbsp;&nbsp;{group['name']}", group, "all")
        reasons = list(left_out(found))
        if reasons:
            yield "\nLeft out:\n"
            yield from (
                f"* {count:,} rows{f' of {own}' if own else ''}: {why.replace('|', '/')}"
                for own, why, count in reasons
            )
    yield "\n## Constants that were fitted\n\n| device or runtime | number | which |\n| --- | ---: | --- |"
    for name, names in constants():
        yield f"| {name} | {len(names)} | {', '.join(names) or 'none'} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--documents", type=Path, required=True, help="where documents of scripts are kept")
    parser.add_argument(
        "--leave", nargs="*", default=[], choices=SCRIPTS, help="not asked: their last results are named"
    )
    given = parser.parse_args()
    for line in page(given.documents, given.leave):
        print(line)


if __name__ == "__main__":
    main()
