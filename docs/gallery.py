"""Plans of six models for three clusters as pictures, and the page that shows them.

    python docs/gallery.py                    # a quarter of an hour; writes docs/gallery.md and docs/images/gallery
    python docs/gallery.py --only gpt2-xl     # the pictures of one model, then the page
    python docs/gallery.py --screenshot       # a report as a browser shows it, too: needs Chromium

Every picture is that of two commands of `stagewright`, which the page names.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parent
PICTURES = DOCS / "images" / "gallery"
ANSWERS = PICTURES / "answers.json"
"""What plans predict, for the page: by name of the picture."""

SHOWN = "nemotron-h-8b", "4x-a100-80"
"""Model and cluster of the screenshot."""


@dataclass(frozen=True)
class Cluster:
    name: str
    about: str
    dtype: str


@dataclass(frozen=True)
class Model:
    name: str
    about: str
    sequence_length: int
    options: tuple[str, ...] = ()


CLUSTERS = (
    Cluster("4x-a100-80", "four A100 of 80 GB, NVLink", "bf16"),
    Cluster("4x-a10g", "four A10G of 24 GB without NVLink", "bf16"),
    Cluster("2x-v100-32+2x-t4", "two V100 of 32 GB in one node, two T4 of 16 GB in another", "fp16"),
)

MODELS = (
    Model("gpt2-xl", "a decoder of 48 equal layers", 1024),
    Model("gemma-2b", "a decoder whose vocabulary of 256,000 makes the head heavy", 2048),
    Model(
        "nemotron-h-8b",
        "a hybrid of attention and state-space layers; its adapters alone are trained",
        2048,
        ("--lora", "16"),
    ),
    Model(
        "t5-large", "an encoder and a decoder: values of the encoder go to every layer of the decoder", 512
    ),
    Model("bert-large", "an encoder of masked tokens", 512),
    Model(
        "vit-huge", "a vision transformer; images have no length, of which a job needs one all the same", 1
    ),
)
BATCH = 8


def planned(model: Model, cluster: Cluster) -> list[str]:
    """The command that plans."""
    return [
        "stagewright", "plan", model.name, "--cluster", cluster.name, "--pp", "4", "--global-batch", str(BATCH),
        "--sequence-length", str(model.sequence_length), *model.options, "--dtype", cluster.dtype, "-o", "plan.json",
    ]  # fmt: skip


def drawn(picture: str) -> list[str]:
    """The command that draws."""
    return ["stagewright", "simulate", "plan.json", "--svg", picture]


def picture_of(model: Model, cluster: Cluster) -> str:
    return f"{model.name}-{cluster.name.replace('+', '-')}.svg"


def make(model: Model, cluster: Cluster) -> dict[str, object]:
    """Draws one; what its plan predicts, or why there is none."""
    with tempfile.TemporaryDirectory() as folder:
        done = _run([*planned(model, cluster), "--json"], folder)
        if done.returncode:
            return {"refused": done.stderr.strip().splitlines()[-1]}
        best = json.loads(done.stdout)["plans"][0]
        _run(drawn(str(PICTURES / picture_of(model, cluster))), folder).check_returncode()
    keys = ("step_seconds", "dp", "tp", "pp", "num_stages", "schedule", "num_microbatches", "microbatch_size")
    return {key: best[key] for key in (*keys, "allocated_peak_bytes")}


def screenshot() -> None:
    """The report of one plan, as Chromium shows it."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("no Chromium here: the screenshot stays as it was")
    model = next(one for one in MODELS if one.name == SHOWN[0])
    cluster = next(one for one in CLUSTERS if one.name == SHOWN[1])
    with tempfile.TemporaryDirectory() as folder:
        _run([*planned(model, cluster), "--html", "report.html"], folder).check_returncode()
        quiet = (
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
        )
        subprocess.run(
            [
                browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", *quiet, "--hide-scrollbars",
                f"--user-data-dir={folder}/browser", "--window-size=1400,1500",
                f"--screenshot={PICTURES / 'report.png'}", f"file://{folder}/report.html",
            ],
            check=True, capture_output=True,
        )  # fmt: skip


def _run(command: list[str], folder: str) -> subprocess.CompletedProcess[str]:
    """`command` by this Python's Stagewright."""
    words = [sys.executable, "-m", "stagewright.cli", *command[1:]]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)


def page(answers: dict[str, dict[str, object]]) -> str:
    lines = [
        "# Gallery",
        "",
        "Six models on three clusters: the best pipeline of four ranks that `stagewright plan` finds for each, drawn by",
        "`stagewright simulate --svg`. A row is a rank; colours are forwards, backwards and their halves, lighter shades",
        "later stages of the rank; beneath is the memory of each. [How to read them](schedules.md#pictures).",
        "`python docs/gallery.py` makes them all.",
        "",
    ]
    if (PICTURES / "report.png").exists():
        model, cluster = SHOWN
        lines += [
            f"The [report](report.md) of {model} on `{cluster}`, as a browser shows it:",
            "",
            "![Report of a plan: the answer, figures, timeline and memory](images/gallery/report.png)",
            "",
        ]
    for model in MODELS:
        lines += [f"## {model.name}", "", f"{model.about[0].upper()}{model.about[1:]}.", ""]
        for cluster in CLUSTERS:
            answer = answers.get(picture_of(model, cluster))
            if answer is not None:
                lines += [*_part(model, cluster, answer), ""]
    return "\n".join(lines).rstrip() + "\n"


def _part(model: Model, cluster: Cluster, answer: dict[str, object]) -> list[str]:
    command = f"`{shlex.join(planned(model, cluster))}`"
    heading = f"**{cluster.about}** (`{cluster.name}`): "
    if "refused" in answer:
        return [f"{heading}{answer['refused']}", "", command]
    figures = (
        f"{float(answer['step_seconds']):.3g} s a step, pp {answer['pp']} x dp {answer['dp']}"  # type: ignore[arg-type]
        f"{'' if answer['tp'] == 1 else ' x tp ' + str(answer['tp'])}, {answer['num_stages']} stages, "
        f"{answer['schedule']}, {answer['num_microbatches']} microbatches of {answer['microbatch_size']}, "
        f"peak {float(answer['allocated_peak_bytes']) / 2**30:.3g} GiB"  # type: ignore[arg-type]
    )
    picture = f"images/gallery/{picture_of(model, cluster)}"
    alternative = f"Timetable and memory of {model.name} on {cluster.name}"
    return [heading + figures, "", f"![{alternative}]({picture})", "", command]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="MODEL", help="one model's pictures")
    parser.add_argument("--screenshot", action="store_true", help="take the screenshot of a report, too")
    options = parser.parse_args()
    PICTURES.mkdir(parents=True, exist_ok=True)
    answers = json.loads(ANSWERS.read_text()) if ANSWERS.exists() else {}
    for model in MODELS:
        if options.only not in (None, model.name):
            continue
        for cluster in CLUSTERS:
            answers[picture_of(model, cluster)] = make(model, cluster)
            print(picture_of(model, cluster), answers[picture_of(model, cluster)], flush=True)
            ANSWERS.write_text(json.dumps(answers, indent=1) + "\n")
    if options.screenshot:
        screenshot()
    (DOCS / "gallery.md").write_text(page(answers), encoding="utf-8")


if __name__ == "__main__":
    main()
