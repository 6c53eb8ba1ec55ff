"""In a terminal of 80 columns everything that verbs print fits, and no word is broken."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from records import record_of
from stagewright.cli.app import app
from stagewright.planning.plan import load_plan
from stagewright.planning.plan_stages import stage_program
from stagewright.planning.prediction.step_times import simulated

MODEL = ("tiny-llama", "--set", "num_hidden_layers=2")
JOB = ("--global-batch", "16", "--sequence-length", "64")
WIDE, NARROW = "400", "80"


def shown(*words: object, columns: str = NARROW) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": columns})
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plans")


@pytest.fixture(scope="module")
def plan(folder: Path) -> Path:
    """Of stages that recompute, on two ranks."""
    path = folder / "plan.json"
    words = (
        "plan",
        *MODEL,
        *JOB,
        "--cluster",
        "2x-rtx3090",
        "--pp",
        "2",
        "--recompute",
        "full",
        "--schedule",
        "1f1b",
        "-o",
        path,
    )
    assert_fits(shown(*words))
    return path


def assert_fits(text: str) -> None:
    """No line is longer than a terminal's, but for those that are copied: options over several lines, and commands and
    paths that are longer themselves."""
    for line in text.splitlines():
        is_copied = line.startswith("--") or line.endswith("\\") or re.search(r"`[^`]{60,}`|/\S{40,}", line)
        assert len(line.rstrip()) <= 80 or is_copied, line


def assert_whole(*words: object) -> str:
    """The words of a wide terminal are those of a narrow one, and more where columns are repeated; without the timetable,
    which is drawn anew."""
    narrow = shown(*words)
    assert_fits(narrow)
    kept = [
        line
        for line in shown(*words, columns=WIDE).splitlines()
        if not re.match(r" *(rank \d|0 )|.*[─~]", line)
    ]
    missing = set(" ".join(kept).split()) - set(narrow.split())
    assert not missing, missing
    return narrow


@pytest.mark.parametrize(
    "words",
    [
        ("models",), ("models", "llama-3-8b"), ("clusters",), ("clusters", "64x-h100"), ("doctor",),
        ("trace", *MODEL), ("schedule", "1f1b", "--ranks", "4"),
        ("estimate", *MODEL, *JOB, "--cluster", "2x-rtx3090", "--by", "operator"),
        ("estimate", *MODEL, *JOB, "--cluster", "2x-rtx3090", "--by", "layer"),
        ("plan", *MODEL, *JOB, "--cluster", "4x-h100", "--runtime", "megatron-core+te", "--tokens", "1e9", "--pp", "2"),
    ],
    ids=["models", "model", "clusters", "cluster", "doctor", "trace", "schedule", "operators", "layers", "runtime"],
)  # fmt: skip
def test_what_needs_no_plan_fits(words: tuple[str, ...]) -> None:
    if words[0] in ("models", "clusters"):
        assert_whole(*words)
    else:
        assert_fits(shown(*words))


def test_a_plan_and_what_is_made_of_it_fits(plan: Path) -> None:
    assert "recom-" in assert_whole("estimate", plan)
    assert_whole("simulate", plan)
    assert_whole("check", plan)


def test_a_comparison_fits(plan: Path, folder: Path) -> None:
    loaded = load_plan(plan)
    assert loaded.predictions.costs is not None
    timeline = simulated(stage_program(loaded), loaded.predictions.costs)
    record = record_of(loaded, timeline, [0.0, 3.5])
    record.save(folder / "record.json")
    assert_fits(shown("compare", plan, folder / "record.json"))
