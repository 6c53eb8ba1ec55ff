"""What every test stands on: one thread, no network, repeatable examples, and the meaning of the markers."""

from __future__ import annotations

import fcntl
import gc
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_timeout
from hypothesis import settings

import torture
from nightly import left_to_the_night
from patience import Deadline

# Plans are compared with those of `peers`. Last, because there are scripts with names of the standard library's.
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

# Set before any test imports torch. Sums in one thread have one order, so bit-equality can be asked for.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# A terminal's, which libraries of the workers set too: tables are to be as wide as in a file.
os.environ.pop("COLUMNS", None)

# As in commands: graphs are many objects and few cycles, and each look for dead ones goes over all that was imported.
gc.set_threshold(200_000)

# The gate gives one answer for one tree; the full run looks for new examples.
settings.register_profile("gate", deadline=None, derandomize=True, database=None)
settings.register_profile("all", deadline=None, max_examples=500)
settings.load_profile("all" if torture.TEST_ALL else "gate")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "multiprocess: starts several processes; left out by make check")
    config.addinivalue_line(
        "markers", "matrix: of the whole matrix of the executor; make test-all, or -m matrix"
    )
    config.addinivalue_line(
        "markers", "torture: damage by chance, of which make torture does much more than the gate"
    )
    config.addinivalue_line("markers", "compares: models are compared with their graphs, as users' are")
    config.addinivalue_line("markers", "slow: runs with STAGEWRIGHT_TEST_ALL=1 only (make test-all), nightly")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torture.TEST_ALL:
        return
    for item in left_to_the_night(items):
        item.add_marker("slow")
    if "matrix" not in config.getoption("-m"):
        left_out = [item for item in items if item.get_closest_marker("matrix")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    for item in items:
        if item.get_closest_marker("slow") and not (torture.TORTURE and item.get_closest_marker("torture")):
            item.add_marker(pytest.mark.skip(reason="slow: set STAGEWRIGHT_TEST_ALL=1 (make test-all)"))


@pytest.fixture(autouse=True)
def _forked_ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of tests fork their ranks from a server that has imported what these need."""
    if request.node.get_closest_marker("multiprocess"):
        from forked import ForkedProcess
        from stagewright.execution import processes

        monkeypatch.setattr(processes, "started", ForkedProcess)


@pytest.fixture(autouse=True)
def _uncompared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of tests are compared with their graphs before they run only in tests that are marked `compares`."""
    if request.node.get_closest_marker("compares"):
        monkeypatch.setenv("STAGEWRIGHT_TEST_COMPARES", "1")
    if "torch" in sys.modules:
        import uncompared  # noqa: F401


Once = Callable[[str, Callable[[], Any]], Any]


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Once:
    """``once(name, make)`` is what `make` makes, for all processes of this run of the tests: one calls it, the others wait
    and read its pickled result. For fixtures that take a while where tests of one file are spread over processes."""
    base = tmp_path_factory.getbasetemp()
    folder = base if worker_id == "master" else base.parent

    def shared(name: str, make: Callable[[], Any]) -> Any:
        path = folder / f"{name}.pickle"
        with (folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                path.write_bytes(pickle.dumps(make()))
            return pickle.loads(path.read_bytes())

    return shared


@pytest.fixture(scope="session", autouse=True)
def _whole_annealing() -> Iterator[dict[str, int]]:
    """What stages recompute is annealed in a tenth of the steps, which are given: tests are of what a search does with
    the result, few of how good it is."""
    from stagewright.planning.checkpointing import reruns

    steps = {name: getattr(reruns, name) for name in ("_STEPS", "_MORE_STEPS")}
    with pytest.MonkeyPatch.context() as patch:
        for name, number in steps.items():
            patch.setattr(reruns, name, number // 10)
        yield steps


@pytest.fixture
def whole_annealing(_whole_annealing: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """In all the steps that a user's search takes."""
    from stagewright.planning.checkpointing import reruns

    for name, number in _whole_annealing.items():
        monkeypatch.setattr(reruns, name, number)


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: pytest_timeout.Settings) -> bool | None:
    """Time limits of tests are those of a machine that runs nothing but the tests."""
    if settings.method != "signal" or threading.current_thread() is not threading.main_thread():
        return None
    deadline = Deadline(settings.timeout)

    def end_or_wait(*_: object) -> None:
        if deadline:
            signal.setitimer(signal.ITIMER_REAL, max(deadline.left(), 0.01))
        else:
            pytest_timeout.timeout_sigalrm(item, settings)

    pytest_timeout.pytest_timeout_set_timer(item, settings)  # which also says how it is cancelled
    signal.signal(signal.SIGALRM, end_or_wait)
    return True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    if (line := torture.summary(one for report in reports for one in report.user_properties)) is not None:
        terminalreporter.write_line(line)
