"""The accuracy page: what it reads out of documents of scripts, and what it counts as fitted."""

from __future__ import annotations

import json
from pathlib import Path

import accuracy
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


def test_every_script_is_there() -> None:
    folder = Path(accuracy.__file__).parent
    assert all((folder / f"{name}.py").exists() for name in accuracy.SCRIPTS)
