"""Runs under fire: ranks and launchers killed and halted at random moments, several in a row, and each time resumed.

Whoever is hit at whatever moment, the run ends in time, says which rank was lost at what, leaves nothing behind, and comes
to the bytes of a run that nobody touched. With STAGEWRIGHT_TORTURE=1 fifty kills and ten halts, else one of each.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest
from cells import SMALL_LLAMA
from plans import make_plan

from faults import StartedRun, is_running, started_run
from patience import Deadline
from torture import TORTURE, chance

NUM_TRIALS, KILLS, HALTS = (10, 5, 1) if TORTURE else (1, 1, 1)
NUM_STEPS = 40 if TORTURE else 16
ACTION_S = 20
"""What ``--timeout`` gives an action."""
ENDS_WITHIN_S = ACTION_S + 30
LONG_S = 300.0
"""What a run is given that nobody touches."""
MOMENTS = ("start", "step", "save", "end") if TORTURE else ("start", "step", "save")
SHAPES = {"replicas": {"pp": 1, "dp": 2, "sharding": 3}, "pipeline": {"pp": 2}}

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.torture,
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
]


@dataclass(frozen=True)
class Fault:
    """A signal to the launcher or to a rank, sent during the start, a step or a save, or behind the last of them."""

    signal: signal.Signals
    victim: int | None
    """A rank; None is the launcher."""
    moment: str


@dataclass(frozen=True)
class Unbroken:
    """A run that nobody touches: what it writes, and how long it takes to its first step."""

    plan: Path
    digests: dict[str, str]
    start_s: float


@pytest.fixture(params=range(NUM_TRIALS))
def unbroken(request: pytest.FixtureRequest, tmp_path: Path) -> Unbroken:
    shape = list(SHAPES.values())[request.param % len(SHAPES)]
    plan = tmp_path / "plan.json"
    make_plan(plan, overrides=dict(SMALL_LLAMA), num_microbatches=2, sequence_length=16, **shape)  # type: ignore[arg-type]
    began = time.monotonic()
    with started(tmp_path / "unbroken", plan) as run:
        run.wait_for_step(1)
        start_s = time.monotonic() - began
        assert run.end(LONG_S)[0] == 0, run.said
    return Unbroken(plan, digests_of(tmp_path / "unbroken" / "kept"), start_s)


def started(folder: Path, plan: Path, *more: str) -> AbstractContextManager[StartedRun]:
    """A run that keeps every step in ``folder/kept``."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary_of(folder).mkdir(exist_ok=True)
    words = ("--steps", str(NUM_STEPS), "--device", "cpu", "--timeout", str(ACTION_S), "--out", str(folder / "out"),
             "--checkpoint", str(folder / "kept"), "--checkpoint-every", "1")  # fmt: skip
    log = folder / f"log-{len(list(folder.glob('log-*')))}"
    # PyTorch's own cache is none of what a run is to clear up.
    places = {"TMPDIR": str(temporary_of(folder)), "TORCHINDUCTOR_CACHE_DIR": str(folder.parent / "inductor")}
    return started_run(log, str(plan), *words, *more, **places)


@pytest.mark.slow
def test_a_run_under_fire_comes_to_the_same_bytes(
    unbroken: Unbroken, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    dice = chance(tmp_path.name)
    faults = drawn_faults(dice)
    for life in itertools.count():
        folder = tmp_path / f"life-{life}"
        while faults and not is_through(folder):
            with started(folder, unbroken.plan, *(["--resume"] if newest_step(folder) else [])) as run:
                if not strike(run, faults[0], folder, unbroken.start_s, dice):
                    run.end(LONG_S)
                    break
                record_property("seconds", check_end(run, faults[0], folder))
                record_property("damage", (faults.pop(0).signal.name, 1))
        finish(folder, unbroken)
        if not faults:
            return


def drawn_faults(dice: random.Random) -> list[Fault]:
    """In any order, with moments and victims as different as their number allows."""
    victims, moments = [None, 0, 1], list(MOMENTS)
    dice.shuffle(victims)
    dice.shuffle(moments)
    kills = [Fault(signal.SIGKILL, victims[one % 3], moments[one % len(moments)]) for one in range(KILLS)]
    halts = [Fault(signal.SIGSTOP, dice.randrange(2), dice.choice(moments)) for _ in range(HALTS)]
    return dice.sample(kills + halts, KILLS + HALTS)


def strike(run: StartedRun, fault: Fault, folder: Path, start_s: float, dice: random.Random) -> bool:
    """Waits for the moment and sends the signal; False where the run ended before."""
    later = min(newest_step(folder) + dice.randint(1, 4), NUM_STEPS)
    has_come, spread_s = {
        "start": (lambda: True, start_s),
        "step": (lambda: newest_step(folder) >= later, 0.05),
        "save": (lambda: any(folder.glob("kept/.*.writing")) and newest_step(folder) >= later, 0.01),
        "end": (lambda: newest_step(folder) == NUM_STEPS, 0.2 if fault.victim is None else 0.02),
    }[fault.moment]
    pid = run.process.pid if fault.victim is None else run.rank(fault.victim)
    while not has_come() and is_running(pid):
        time.sleep(0.001)
    time.sleep(dice.uniform(0, spread_s))
    if not is_running(pid):
        return False
    os.kill(pid, fault.signal)
    return True


def temporary_of(folder: Path) -> Path:
    """Where temporary files go, of this run and of those behind it."""
    return folder.parent / "temporary"


def check_end(run: StartedRun, fault: Fault, folder: Path) -> float:
    """The run ends in time and says who was hit where; nothing of it is left. Returns the seconds that took."""
    deadline = Deadline(ENDS_WITHIN_S)
    code = run.end(ENDS_WITHIN_S)[0]
    while run.left_over():
        assert deadline, f"{fault}: processes are left over\n{run.said}"
        time.sleep(0.05)
    seconds = time.monotonic() - deadline.began
    told = f"{fault}, exit code {code}, after {seconds:.1f} s\n{run.said}"
    assert "Traceback" not in run.said and "Fault of" not in run.said, told
    if fault.victim is None:
        assert code == -signal.SIGKILL, told
    elif code != 0 or not is_through(folder):
        assert code == 1, told
        how = (
            r"\(process \d+\) ended with SIGKILL .*"
            if fault.signal == signal.SIGKILL
            else r"(died or )?froze"
        )
        assert re.search(rf"rank {fault.victim} {how} at \w+", run.said), told
    # A launcher that was killed may have had no ranks, which clear up behind it; then the next run does.
    if fault.victim is not None or (fault.moment in ("step", "save") and not is_through(folder)):
        assert list(temporary_of(folder).iterdir()) == [], told
    return seconds


def finish(folder: Path, unbroken: Unbroken) -> None:
    """Lets the run come to its last step, whose bytes are those of the unbroken one."""
    if not is_through(folder):
        with started(folder, unbroken.plan, *(["--resume"] if newest_step(folder) else [])) as run:
            assert run.end(LONG_S)[0] == 0, run.said
        assert list(temporary_of(folder).iterdir()) == []
        assert not any(folder.glob("*/.*"))  # locks, and checkpoints that are not whole
    found = digests_of(folder / "kept")
    assert {name for name in found if found[name] != unbroken.digests.get(name)} == set()
    assert found.keys() == unbroken.digests.keys()


def newest_step(folder: Path) -> int:
    """Steps after which the newest checkpoint was written; 0 where there is none."""
    return max((int(path.name.removeprefix("step-")) for path in folder.glob("kept/step-*")), default=0)


def is_through(folder: Path) -> bool:
    return newest_step(folder) == NUM_STEPS


def digests_of(folder: Path) -> dict[str, str]:
    """Of every file of every checkpoint, by path."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.glob("step-*/*"))
    }
