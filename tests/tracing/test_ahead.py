"""Graphs that several processes trace at once, ahead of who asks for them."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from stagewright.tracing import ahead
from stagewright.tracing.ahead import trace_ahead
from stagewright.tracing.cache import to_trace, trace
from stagewright.tracing.models.reference import resolve


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGEWRIGHT_CACHE", str(tmp_path))


def sizes(*widths: int, microbatches: tuple[int, ...] = (1, 2, 4)) -> list[dict[str, Any]]:
    return [
        {"microbatch_size": size, "sequence_length": 16, "tp": tp, "expand": False}
        for tp, size in product(widths, microbatches)
    ]


def test_what_follows_is_not_traced() -> None:
    model = resolve("tiny-llama")
    assert to_trace(model, sizes(1, 2)) == sizes(1, 2, microbatches=(1, 2))
    assert to_trace(model, sizes(1, 2, 4, 8)) == sizes(1, 2, 4, microbatches=(1, 2))
    trace(model, 1, 16, expand=False)
    assert to_trace(model, sizes(1)) == sizes(1, microbatches=(2,))


def test_other_processes_leave_the_same_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, said = resolve("tiny-llama"), list[str]()
    monkeypatch.setattr(ahead, "_room", lambda: 2)
    asked = [*sizes(1, 2), *sizes(3)]  # three ranks cannot share its heads
    monkeypatch.setattr(ahead, "_FEWEST", 5)
    trace_ahead(model, asked, said.append)
    assert said[0] == "0 of 6 graphs, on 2 processes" and said[-1] == "6 of 6 graphs, on 2 processes"
    assert to_trace(model, asked) == []  # what is refused is not tried again
    one = sizes(2)[0]
    kept, traced = trace(model, **one), trace(model, use_cache=False, **one)
    assert (kept.nodes, kept.values, kept.facts) == (traced.nodes, traced.values, traced.facts)


def test_nothing_of_the_current_folder_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, model = tmp_path / "here", resolve("tiny-llama")
    here.mkdir()
    for name in ("json", "torch", "selectors"):
        (here / f"{name}.py").write_text(
            "import os\nopen(os.path.join(os.path.dirname(__file__), 'ran'), 'w')\n"
        )
    monkeypatch.chdir(here)
    monkeypatch.setattr(ahead, "_room", lambda: 2)
    monkeypatch.setattr(ahead, "_FEWEST", 2)
    trace_ahead(model, sizes(1, microbatches=(1, 2)))
    assert to_trace(model, sizes(1, microbatches=(1, 2))) == []
    assert not (here / "ran").exists()


def test_few_graphs_and_code_of_factories_start_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("subprocess.Popen", refuse)
    trace_ahead(resolve("tiny-llama"), sizes(1, 2))
    trace_ahead(resolve(f"{__file__}:sizes"), sizes(1, 2, 4, 8))


def test_what_no_process_can_do_is_left_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError("no processes left")

    monkeypatch.setattr("subprocess.Popen", refuse)
    monkeypatch.setattr(ahead, "_room", lambda: 2)
    trace_ahead(resolve("tiny-llama"), sizes(1, 2, 4))
    assert to_trace(resolve("tiny-llama"), sizes(1, 2, 4)) == sizes(1, 2, 4, microbatches=(1, 2))
