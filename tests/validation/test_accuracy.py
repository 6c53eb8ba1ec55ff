"""The accuracy page: what it reads out of documents of scripts, and what it counts as fitted."""

from __future__ import annotations

import json
import re
from pathlib import Path

import accuracy
import cards
import other_pipelines
import pytest
from verdict import Row, document


@pytest.fixture
def found() -> dict:
    rows = [
        Row("a", "small", 1.1, 1.0),
        Row("b", "large", 0.8, 1.0, "other"),
        Row("c", "large", 1.0, 1.0, "other"),
    ]
    return {"set.csv": {"time": document(rows, 0.1), "left_out": {"no such device": 3}}}


def test_every_figure_is_a_row_with_its_halves_and_groups(found: dict, tmp_path: Path) -> None:
    for name in accuracy.SCRIPTS:
        (tmp_path / f"{name}.json").write_text(json.dumps(found if name == "runtimes" else {}))
    page = "\n".join(accuracy.page(tmp_path))
    assert "| set.csv, time | all | 3 | 10.0% | 10.0% | -3.3% | -20% |" in page
    assert "| set.csv, time | fit | 1 | 10.0% | 10.0% | +10.0% | +10% |" in page
    assert "| set.csv, time | other | 2 | 10.0% | 10.0% | -10.0% | -20% |" in page
    assert "| &nbsp;&nbsp;large | all | 2 | 10.0% | 10.0% | -10.0% | -20% |" in page
    assert "* 3 rows of set.csv: no such device" in page


def test_what_was_fitted_is_counted_where_sources_say_so() -> None:
    counted = dict(accuracy.constants())
    assert "products.fill_s" in counted["h100"] and "memory_bandwidth" not in counted["h100"]
    assert counted["mi300x"] == [] and counted["megatron-core+te"] == ["host.step_s", "waits.product_s"]


def test_a_script_that_is_not_asked_names_its_last_results(tmp_path: Path) -> None:
    for name in set(accuracy.SCRIPTS) - {"runtimes"}:
        (tmp_path / f"{name}.json").write_text("{}")
    page = "\n".join(accuracy.page(tmp_path, ["runtimes"]))
    assert accuracy.newest("runtimes") is not None
    assert f"({Path('../validation/results') / str(accuracy.newest('runtimes'))})" in page


def test_every_script_is_there_and_has_a_card() -> None:
    folder = Path(accuracy.__file__).parent
    assert all((folder / f"{name}.py").exists() for name in accuracy.SCRIPTS)
    assert set(accuracy.SCRIPTS) == {*cards.WHOLE, *cards.CARDS}


def test_the_page_begins_with_what_was_never_checked(found: dict, tmp_path: Path) -> None:
    for name in accuracy.SCRIPTS:
        (tmp_path / f"{name}.json").write_text(json.dumps(found if name == "runtimes" else {}))
    page = "\n".join(accuracy.page(tmp_path))
    sections = re.findall(r"^## (.*)$", page, re.MULTILINE)
    assert sections[0] == "Never checked" and f"* {cards.UNCHECKED[0]}" in page
    assert "| command | `python validation/runtimes.py` |" in page
    assert f"| claim | {cards.WHOLE['runtimes'].claim} |" in page


def test_a_set_with_a_card_says_what_was_claimed_measured_and_not_checked(found: dict) -> None:
    name = "nanotron_bench_cluster.csv"
    lines = list(cards.cards("other_pipelines", {name: found["set.csv"]}, "abc1234", "2026-11-28"))
    (measured,) = (line for line in lines if line.startswith("| measured |"))
    assert "time: mean 10.0%, bias -3.3%, worst -20% of 3 (bar 10%)" in measured
    assert f"| command | `python validation/other_pipelines.py --only {name}` |" in lines
    assert "| rows left out | 3: no such device |" in lines
    assert [line.split(" | ")[0] for line in lines[1:]].count("| not checked") == 1


def test_every_judged_table_of_pipelines_has_a_card() -> None:
    assert set(cards.CARDS["other_pipelines"]) == set(other_pipelines.SOURCES)
