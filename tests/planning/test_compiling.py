"""Kernels of the joint search, which another process compiles during a first search."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from stagewright.planning.joint import compiling
from stagewright.planning.joint.compiling import compiled_meanwhile


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Names of the modules that processes are started for; in place of compiling, each waits for the end of its input."""
    commands: list[list[str]] = []

    def command(module: str) -> list[str]:
        commands.append([module])
        return [sys.executable, "-c", "input()"]

    monkeypatch.setattr(compiling, "python_command", command)
    monkeypatch.setattr(compiling, "num_more_processes", lambda num_bytes: 1)
    return commands


def test_a_process_compiles_once(commands: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "is_compiled", lambda name: True)
    with compiled_meanwhile() as wait:
        wait()
    assert commands == []
    monkeypatch.setattr(compiling, "is_compiled", lambda name: False)
    monkeypatch.setattr(compiling, "num_more_processes", lambda num_bytes: 0)
    with compiled_meanwhile() as wait:
        wait()
    assert commands == []


def test_the_process_ends_with_the_search(commands: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    processes, popen = list[subprocess.Popen[bytes]](), subprocess.Popen

    def started(*arguments: object, **options: object) -> subprocess.Popen[bytes]:
        processes.append(popen(*arguments, **options))  # type: ignore[call-overload]
        return processes[-1]

    monkeypatch.setattr(compiling, "is_compiled", lambda name: False)
    monkeypatch.setattr(subprocess, "Popen", started)
    with pytest.raises(KeyboardInterrupt), compiled_meanwhile():
        assert processes[0].poll() is None
        raise KeyboardInterrupt
    assert commands == [["stagewright.planning.joint.compiling"]]
    assert processes[0].poll() is not None


@pytest.mark.slow
def test_a_joint_search_has_nothing_left_to_compile(tmp_path: Path) -> None:
    script = """
        import sys
        from pathlib import Path
        from stagewright import compiled
        compiled._folder = lambda: Path(sys.argv[1])
        from stagewright.planning.joint.compiling import compile_all
        if len(sys.argv) > 2:
            compile_all()
        else:
            from numba.core.dispatcher import Dispatcher
            from stagewright.planning.search import plan
            job = {"global_batch": 16, "sequence_length": 64, "memory_limit": "60MiB"}
            plan("tiny-llama", "4x-rtx4090", job, pp=2, schedules=["1f1b", "joint"])
            from stagewright.planning.joint import anneal, layout, load_balancing, moves
            from stagewright.schedule.automatic import orders
            from stagewright.schedule.list_scheduler import kernels
            for module in (anneal, layout, load_balancing, moves, orders, kernels):
                for kernel in vars(module).values():
                    if isinstance(kernel, Dispatcher):
                        assert not kernel.stats.cache_misses, kernel
            assert anneal.anneal.stats.cache_hits
    """
    for more in (["compile"], []):
        command = [sys.executable, "-c", dedent(script), str(tmp_path), *more]
        subprocess.run(command, check=True, timeout=500)
