"""Ranks and launchers that are killed, halted and interrupted: who is named, what is left, and how soon."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from plans import make_plan

from faults import LOOPBACK, StartedRun, listening_addresses, small_disk, started_run
from multiprocess import Failed, Returned, watch_ranks
from patience import Deadline, patient

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
]

ENDS_WITHIN_S = 45.0


@pytest.fixture
def run(tmp_path: Path) -> Iterator[StartedRun]:
    """One that would go on for hours."""
    make_plan(tmp_path / "plan.json")
    words = ("--steps", "100000", "--device", "cpu", "--timeout", "20", "--out", str(tmp_path / "out"))
    with started_run(tmp_path / "log", str(tmp_path / "plan.json"), *words) as started:
        yield started


def ended(run: StartedRun) -> str:
    """What a run said that failed; no process of it is left, nor its private folder."""
    code, _ = run.end(ENDS_WITHIN_S)
    assert code == 1, run.said
    assert "Traceback" not in run.said and "Fault of" not in run.said
    assert_nothing_left(run)
    return run.said


def assert_nothing_left(run: StartedRun) -> None:
    deadline = Deadline(20)
    while run.left_over() and deadline:
        time.sleep(0.1)
    assert run.left_over() == []


def test_a_rank_that_is_killed_is_named_where_it_stood(run: StartedRun, tmp_path: Path) -> None:
    run.wait_for_step(2)
    os.kill(run.rank(1), signal.SIGKILL)
    assert re.search(r"rank 1 \(process \d+\) ended with SIGKILL .* at \S+", ended(run))
    assert not (tmp_path / "out" / "record.json").exists()
    steps = [json.loads(line) for line in (tmp_path / "out" / "steps.jsonl").read_text().splitlines()]
    assert [one["step"] for one in steps] == list(range(1, len(steps) + 1))


def test_a_rank_that_is_halted_is_named_where_it_stood(run: StartedRun) -> None:
    run.wait_for_step(2)
    os.kill(run.rank(0), signal.SIGSTOP)
    assert re.search(r"rank 0 (died or )?froze at \w+", ended(run))


def test_a_rank_that_is_halted_at_the_start_is_named(run: StartedRun) -> None:
    os.kill(run.rank(1), signal.SIGSTOP)
    assert re.search(r"rank 1 (died or )?froze at .*(stopped from outside|no sign of life)", ended(run))


def test_ranks_end_with_the_launcher_in_a_sentence(run: StartedRun) -> None:
    run.wait_for_step(2)
    folder = Path(run.environment_of(run.rank(0))["STAGEWRIGHT_RENDEZVOUS"])
    assert folder.stat().st_mode & 0o777 == 0o700
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait()
    assert_nothing_left(run)
    rest = [
        line
        for line in run.said.splitlines()
        if not line.startswith(("step ", "there are no weights next to"))
    ]
    assert len(rest) == 1 and "the process that started the run" in rest[0] and "has ended" in rest[0]
    assert not folder.exists()


def test_ranks_finish_while_the_launcher_is_halted(tmp_path: Path) -> None:
    make_plan(tmp_path / "plan.json")
    words = ("--steps", "3", "--device", "cpu", "--out", str(tmp_path / "out"))
    with started_run(tmp_path / "log", str(tmp_path / "plan.json"), *words) as run:
        run.wait_for_step(1)
        os.kill(run.process.pid, signal.SIGSTOP)
        run.wait_for(lambda: set(run.left_over()) == {run.process.pid})
        assert (tmp_path / "out" / "record.json").exists()
        os.kill(run.process.pid, signal.SIGCONT)
        assert run.end(ENDS_WITHIN_S)[0] == 0


@pytest.mark.parametrize("received", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_a_run_that_is_asked_to_stop_can_go_on(received: signal.Signals, tmp_path: Path) -> None:
    make_plan(tmp_path / "plan.json")
    words = ["--device", "cpu", "--out", str(tmp_path / "out"), "--checkpoint", str(tmp_path / "kept")]
    path = str(tmp_path / "plan.json")
    with started_run(tmp_path / "log", path, "--steps", "100000", *words) as run:
        run.wait_for_step(2)
        os.killpg(run.process.pid, received)  # as a terminal does
        assert run.end(ENDS_WITHIN_S)[0] == 128 + received, run.said
        assert_nothing_left(run)
    text = " ".join(run.said.split())
    found = re.search(rf"stopped by {received.name} after step (\d+) of 100000; its checkpoint is in", text)
    assert found is not None, run.said
    done = int(found[1])
    record = json.loads((tmp_path / "out" / "record.json").read_text())
    assert len(record["losses"]) == done and record["stopped_by"] == received.name
    assert (tmp_path / "kept" / f"step-{done:06d}" / "checkpoint.json").exists()
    if received == signal.SIGTERM:  # and so behind the other, which left the same
        with started_run(tmp_path / "log", path, "--steps", str(done + 1), "--resume", *words) as run:
            assert run.end(120)[0] == 0, run.said


@pytest.mark.slow
def test_a_second_interrupt_ends_at_once(run: StartedRun) -> None:
    run.wait_for_step(2)
    os.kill(run.rank(0), signal.SIGSTOP)  # so that the step cannot end
    os.kill(run.process.pid, signal.SIGINT)
    run.wait_for_words("a second signal ends the run at once")
    os.kill(run.process.pid, signal.SIGINT)
    assert run.end(8)[0] == 130
    assert_nothing_left(run)


def test_an_interrupt_before_the_first_step_ends_at_once(run: StartedRun) -> None:
    run.rank(1)
    os.kill(run.process.pid, signal.SIGINT)
    assert run.end(8)[0] == 130
    assert_nothing_left(run)


def test_nothing_listens_beyond_this_machine(run: StartedRun) -> None:
    run.wait_for_step(2)
    found = listening_addresses({run.process.pid, *run.left_over()})
    assert found and found <= LOOPBACK


def test_a_full_folder_names_itself_and_ends_no_training(tmp_path: Path) -> None:
    make_plan(tmp_path / "plan.json")
    words = (
        str(tmp_path / "plan.json"),
        "--steps",
        "100000",
        "--device",
        "cpu",
        "--out",
        str(tmp_path / "out"),
    )
    with small_disk(tmp_path / "out", 256 * 1024) as out:
        with started_run(tmp_path / "log", *words) as run:
            run.wait_for_step(1)
            with (out / "in the way").open("wb", buffering=0) as file, suppress(OSError):
                while True:
                    file.write(bytes(512))
            run.wait_for_words("are missing in")
            run.wait_for_step(int(re.findall(r"step (\d+)/", run.said)[-1]) + 1)
            os.kill(run.process.pid, signal.SIGINT)
            code, _ = run.end(ENDS_WITHIN_S)
        with started_run(tmp_path / "again", *words) as refused:
            assert refused.end(60)[0] == 2
    assert "nothing can be written to folder" in refused.said and "No space left" in refused.said
    said = " ".join(run.said.split())
    assert code == 2 and said.count("are missing in") == 1
    assert re.search(r"cannot write '\S+record.json': No space left on device; make room there", said), said


STARTS_AND_WAITS = """
import sys, time
from stagewright.execution.folder_lock import run_folder
with run_folder() as folder:
    print(folder, flush=True)
    time.sleep(100)
"""


def test_what_a_killed_launcher_left_is_removed_by_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stagewright.execution.folder_lock import run_folder

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    kept = tmp_path / "stagewright-run-of-others"
    kept.mkdir()
    starters = [
        subprocess.Popen(
            [sys.executable, "-c", STARTS_AND_WAITS], stdout=subprocess.PIPE, text=True,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )
        for _ in range(2)
    ]  # fmt: skip
    try:
        killed, alive = [Path((starter.stdout or sys.stdin).readline().strip()) for starter in starters]
        starters[0].kill()
        starters[0].wait()
        assert killed.is_dir()
        with run_folder() as own:
            assert own.stat().st_mode & 0o777 == 0o700
            assert set(tmp_path.iterdir()) == {own, alive, kept}
        assert set(tmp_path.iterdir()) == {alive, kept}
    finally:
        for starter in starters:
            starter.kill()
            starter.communicate()


def test_a_rank_that_starts_behind_a_killed_launcher_says_so(tmp_path: Path) -> None:
    """Another rank has removed the folder by then."""
    make_plan(tmp_path / "plan.json")
    done = subprocess.run(
        [sys.executable, "-m", "stagewright.execution.worker",
         json.dumps({"plan": str(tmp_path / "plan.json"), "out": str(tmp_path)})],
        env={**os.environ, "RANK": "1", "WORLD_SIZE": "2", "STAGEWRIGHT_RENDEZVOUS": str(tmp_path / "gone"),
             "STAGEWRIGHT_LAUNCHER": "1", "STAGEWRIGHT_TOKEN": "secret"},
        capture_output=True, text=True, check=False, timeout=patient(120),
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "stagewright: the process that started the run (1) has ended\n"


def test_a_rank_that_is_done_does_not_mind_the_loss_of_another(capfd: pytest.CaptureFixture[str]) -> None:
    ends = watch_ranks(be_lost_at_the_end, 2, timeout=60)
    assert isinstance(ends[0], Failed) and "died with exit code 9" in ends[0].reason
    assert ends[1] == Returned("done")
    assert "Traceback" not in capfd.readouterr().err


def be_lost_at_the_end(rank: int, num_ranks: int) -> str:
    from stagewright.execution.rank_process import rank_process
    from stagewright.execution.watchdog import Limits

    with rank_process("cpu", Limits(60, 60)) as (watch, _):
        if rank == 0:
            watch.stop = lambda: os._exit(9)  # type: ignore[method-assign]
    return "done"


def test_what_is_posted_without_the_secret_is_not_there(tmp_path: Path) -> None:
    from stagewright.execution.heartbeat import FileBoard, Post, Seal, places, read_post, write_post

    path = tmp_path / "board"
    ours, theirs = (FileBoard(path, places(2), Seal(token)) for token in ("secret", "guess"))
    write_post(ours, 0, Post(1, "2F0"))
    write_post(theirs, 1, Post(1, "failed: pay here"))
    assert read_post(ours, 0) == Post(1, "2F0") and read_post(ours, 1) is None
    write_post(theirs, 0, Post(2, "gone"))
    assert read_post(ours, 0) is None


def test_a_post_of_any_length_and_script_fits() -> None:
    from stagewright.execution.heartbeat import Failure, Post, read_post, write_post

    class Kept:
        def write(self, place: str, text: str) -> None:
            assert len(text.encode()) < 16_000
            self.text = text

        def read(self, place: str) -> str:
            return self.text

    for character in "a\n\0\U0001f600\ud800":
        board = Kept()
        write_post(board, 0, Post(1, character * 9000, failure=Failure("RunError", character * 90_000, 1.0)))
        assert read_post(board, 0) is not None


def test_a_private_folder_is_gone_behind_the_run(tmp_path: Path) -> None:
    make_plan(tmp_path / "plan.json", num_steps=1)
    (tmp_path / "temporary").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "stagewright.cli", "run", str(tmp_path / "plan.json"), "--device", "cpu", "--out",
         str(tmp_path / "out")],
        env={**os.environ, "TMPDIR": str(tmp_path / "temporary")}, capture_output=True, timeout=patient(120), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "temporary").glob("stagewright-*")) == []
