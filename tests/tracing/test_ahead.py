"""Graphs that several processes trace at once, ahead of who asks for them."""

from __future__ import annotations

import subprocess
import sys
import threading
from itertools import product
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from stagewright.tracing import ahead
from stagewright.tracing.ahead import Ahead
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


def wait(others: Ahead) -> None:
    """Wait until other processes have done what they were given."""
    while others._num_waiting:
        assert all(worker.poll() is None for worker in others._workers)
        others._count(1.0)


def test_what_follows_is_not_traced() -> None:
    model = resolve("tiny-llama")
    assert to_trace(model, sizes(1, 2)) == sizes(1, 2, microbatches=(1, 2))
    assert to_trace(model, sizes(1, 2, 4, 8)) == [
        *sizes(1, 2, microbatches=(1, 2)),
        *sizes(4, microbatches=(1,)),
    ]
    trace(model, 1, 16, expand=False)
    assert to_trace(model, sizes(1)) == sizes(1, microbatches=(2,))


def test_other_processes_leave_the_same_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, said = resolve("tiny-llama"), list[str]()
    monkeypatch.setattr(ahead, "num_more_processes", lambda num_bytes: 2)
    wanted = [*sizes(1, 2), *sizes(3)]  # three ranks cannot share its heads
    with Ahead(model, wanted, said.append) as others:
        for index in range(len(wanted)):
            others.bring(wanted[index:])
            assert to_trace(model, wanted[index : index + 1]) == []
    assert said[0] == "0 of 5 graphs, on 3 processes"
    assert to_trace(model, wanted) == []  # what is refused is not tried again
    one = sizes(2)[0]
    kept, traced = trace(model, **one), trace(model, use_cache=False, **one)
    assert (kept.nodes, kept.values, kept.facts) == (traced.nodes, traced.values, traced.facts)


def test_who_waits_for_a_graph_traces_only_until_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    class Idle(Ahead):
        def _worker(self) -> subprocess.Popen[str]:
            return subprocess.Popen([sys.executable, "-c", "input()"], text=True, stdin=subprocess.PIPE)

    model, wanted = resolve("tiny-llama"), sizes(1, 2, microbatches=(1, 2))
    monkeypatch.setattr(ahead, "num_more_processes", lambda num_bytes: 1)
    with Idle(model, wanted) as others:
        others.bring(wanted)
        assert to_trace(model, wanted) == wanted[1:]


def test_another_process_begins_while_the_first_graph_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    model, wanted = resolve("tiny-llama"), sizes(1, 2, microbatches=(1,))
    monkeypatch.setattr(ahead, "num_more_processes", lambda num_bytes: 1)
    with Ahead(model, wanted) as others:
        others.start(wanted[1:], wanted[:1])
        wait(others)
        assert to_trace(model, wanted) == wanted[:1]  # which is left to this process


def test_a_process_gets_two_graphs_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model, wanted = resolve("tiny-llama"), sizes(1, 2, microbatches=(1, 2))
    monkeypatch.setattr(ahead, "num_more_processes", lambda num_bytes: 1)
    with Ahead(model, wanted) as others:
        others.start(wanted[2:] + wanted[:2])
        wait(others)
        assert to_trace(model, wanted) == wanted[:2]
        others.start(wanted)
        wait(others)
    assert to_trace(model, wanted) == []


def test_nothing_of_the_current_folder_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, model, wanted = tmp_path / "here", resolve("tiny-llama"), sizes(1, microbatches=(1, 2))
    here.mkdir()
    for name in ("json", "torch", "selectors"):
        (here / f"{name}.py").write_text(
            "import os\nopen(os.path.join(os.path.dirname(__file__), 'ran'), 'w')\n"
        )
    monkeypatch.chdir(here)
    monkeypatch.setattr(ahead, "num_more_processes", lambda num_bytes: 1)
    with Ahead(model, wanted) as others:
        others.start(wanted[1:], wanted[:1])
        wait(others)
    assert to_trace(model, wanted) == wanted[:1]
    assert not (here / "ran").exists()


def test_few_graphs_and_code_of_factories_start_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("subprocess.Popen", refuse)
    monkeypatch.setattr(ahead, "num_more_processes", lambda num_bytes: 2)
    for model, wanted in (
        ("tiny-llama", sizes(1, microbatches=(1,))),
        (f"{__file__}:sizes", sizes(1, 2, 4)),
    ):
        with Ahead(resolve(model), wanted) as others:
            others.start(wanted[1:], wanted[:1])


def test_what_no_process_can_do_is_left_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError("no processes left")

    model, wanted = resolve("tiny-llama"), sizes(1, 2, 4)
    monkeypatch.setattr("subprocess.Popen", refuse)
    monkeypatch.setattr(ahead, "num_more_processes", lambda num_bytes: 2)
    with Ahead(model, wanted) as others:
        others.start(wanted[1:], wanted[:1])
        others.bring(wanted)
    assert to_trace(model, wanted) == [*sizes(1, 2, microbatches=(1, 2)), *sizes(4, microbatches=(1,))]


def test_a_graph_that_another_process_traces_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (size,) = resolve("tiny-llama"), sizes(1, microbatches=(1,))
    script = """
        import sys
        from stagewright.tracing import cache
        own = cache._traced
        def slow(*arguments):
            print("traced here", flush=True)
            sys.stdin.readline()
            return own(*arguments)
        cache._traced = slow
        cache.trace("tiny-llama", 1, 16, expand=False)
    """
    other = subprocess.Popen(
        [sys.executable, "-c", dedent(script)], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdin is not None and other.stdout is not None
    with other:
        assert other.stdout.readline() == "traced here\n"
        threading.Timer(0.2, other.stdin.close).start()
        monkeypatch.setattr("stagewright.tracing.cache._traced", None)  # so that nothing is traced here
        messages = list[str]()
        graph = trace(model, report=messages.append, **size)
    assert messages == ["waiting for another process that traces the same graph"]
    assert other.returncode == 0 and len(graph.nodes) > 10
