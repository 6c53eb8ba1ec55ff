"""Ctrl-C while a model is planned: the best plan so far is written whole, and the user is told."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from typer.testing import CliRunner

from stagewright.cli.app import app
from stagewright.cli.progress import Progress
from stagewright.cluster import Cluster, load_cluster, save_cluster
from stagewright.graph import OperatorGraph
from stagewright.planning.job import Job
from stagewright.planning.plan import load_plan
from stagewright.planning.search import plan
from stagewright.tracing.cache import trace

WORDS = (
    "plan", "tiny-gemma", "--cluster", "4x-h100", "--global-batch", "8", "--sequence-length", "32", "--dtype", "fp32",
    "--pp", "4", "--microbatch", "1", "--schedule", "1f1b", "--schedule", "gpipe", "--schedule", "joint", "--json",
    "--top", "2",
)  # fmt: skip


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where the shell that started the tests in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_at(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, number: int = signal.SIGINT
) -> None:
    """A signal, SIGINT by default, once each of `words` has been told as progress."""
    left = list(words)

    def told(self: Progress, text: str, fraction: float | None = None) -> None:
        if left and left[0] in text:
            left.pop(0)
            if not left:
                signal.raise_signal(number)

    monkeypatch.setattr(Progress, "__call__", told)


@pytest.mark.parametrize("words", [("1f1b", "gpipe"), ("best batch",)])
def test_ctrl_c_leaves_the_best_plan_so_far(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    interrupt_at(words, monkeypatch)
    path = tmp_path / "plan.json"
    done = CliRunner().invoke(app, [*WORDS, "-o", str(path)])
    assert done.exit_code == 0, done.output
    assert "interrupted" in done.stderr
    best = json.loads(done.stdout)["plans"][0]
    assert load_plan(path).predictions.step_seconds == best["step_seconds"]
    assert (best["schedule"] == "joint") == (words == ("best batch",))


def test_sigterm_and_the_end_of_a_time_leave_the_best_plan_so_far(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    timed = CliRunner().invoke(app, [*WORDS, "-o", str(path), "--within", "0"])
    before = signal.getsignal(signal.SIGTERM)
    interrupt_at(("1f1b", "gpipe"), monkeypatch, signal.SIGTERM)
    ended = CliRunner().invoke(app, [*WORDS, "-o", str(path)])
    assert signal.getsignal(signal.SIGTERM) is before
    for done, what in ((timed, "ended after 0 s"), (ended, "ended by SIGTERM")):
        assert done.exit_code == 0, done.output
        assert f"{what}: these are the best plans so far" in done.stderr
        document = json.loads(done.stdout)
        assert document["ended_early"] == what and 0 <= document["gap"] <= 1


def test_a_plan_that_is_wanted_soon_takes_one_graph() -> None:
    """Other degrees and microbatches, each with a graph of its own, are traced once there is a plan."""
    traced = []

    def tracing(*arguments: Any, **settings: Any) -> OperatorGraph:
        traced.append(settings)
        return trace(*arguments, **settings)

    def interrupt(text: str) -> None:
        if "best so far" in text:
            raise KeyboardInterrupt

    job = Job(global_batch=32, sequence_length=32, dtype="fp32")
    result = plan(
        "tiny-gemma", load_cluster("4x-h100"), job, report=interrupt, trace=tracing, patience_s=1000.0
    )
    assert result.ended_early == "interrupted" and len(result.plans) == len(traced) == 1


def test_no_signal_reaches_a_compiled_kernel() -> None:
    """What a handler raises there crashes the process: numba does not check what it calls to convert results."""
    script = """
        import math, random, signal
        from stagewright.planning.search_result import EarlyEnd
        from stagewright.schedule.builders import build

        num_ended = 0
        while num_ended < 10:
            with EarlyEnd(math.inf, lambda: True) as searching:
                searching.patience_s = random.uniform(0.001, 0.1)
                signal.setitimer(signal.ITIMER_REAL, searching.patience_s, 0.2)
                build("v-half", 4, 8, 2)
            num_ended += searching.what is not None
        print(build("v-half", 4, 8, 2).num_stages)
    """
    done = subprocess.run([sys.executable, "-c", dedent(script)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "8\n"), done.stderr


def test_a_signal_in_a_finalizer_waits_until_it_is_over() -> None:
    """Python prints and ignores what is raised there."""
    script = """
        import math, os, signal, time
        from stagewright.planning.search_result import EarlyEnd

        class Finalized:
            def __del__(self):
                os.kill(os.getpid(), signal.SIGINT)
                print("finalized")

        with EarlyEnd(math.inf, lambda: True) as searching:
            Finalized()
            time.sleep(60)
        print(searching.what)
    """
    done = subprocess.run([sys.executable, "-c", dedent(script)], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("finalized\ninterrupted\n", "")


@pytest.mark.parametrize(
    ("number", "code", "what"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "ended by SIGTERM")],
)
def test_before_the_first_plan_the_command_ends_without_one_and_says_so(
    number: int, code: int, what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    interrupt_at(("",), monkeypatch, number)
    path = tmp_path / "plan.json"
    done = CliRunner().invoke(app, [*WORDS, "-o", str(path)])
    assert done.exit_code == code and not path.exists() and not done.stdout
    assert f"{what} before there was a plan: nothing was written" in done.stderr


MIXED = (
    "plan", "tiny-gemma", "--global-batch", "8", "--sequence-length", "32", "--dtype", "fp32", "--dp", "1",
    "--json", "--cluster", "mixed.toml", "--schedule", "1f1b", "--schedule", "gpipe", "--microbatch", "1",
)  # fmt: skip


def test_ctrl_c_ends_a_search_of_several_clusters_with_its_best_plan(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (fast,), (slow,) = (load_cluster(name).nodes for name in ("2x-h100", "2x-a100-40"))
    save_cluster(Cluster(name="mixed", nodes=(fast, slow)), "mixed.toml", "two kinds")
    interrupt_at(("1f1b", "gpipe"), monkeypatch)
    done = CliRunner().invoke(app, [*MIXED, "-o", "plan.json"])
    assert done.exit_code == 0, done.output
    assert done.stderr.count("interrupted") == 1
    best = json.loads(done.stdout)["plans"][0]
    assert (best["pp"], best["microbatch_size"]) == (4, 1)
    assert load_plan("plan.json").predictions.step_seconds == best["step_seconds"]
