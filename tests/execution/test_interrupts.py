"""Processes that somebody else ends do not hear Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

from stagewright.execution.probe import interrupts_ignored

ASK = "import signal; print(signal.getsignal(signal.SIGINT).name)"


def test_what_is_started_inside_ignores_interrupts_from_its_first_moment() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with interrupts_ignored():
            child = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True)
        assert child.stdout.strip() == "SIG_IGN"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_in_another_thread_signals_stay_as_they_are() -> None:
    found: list[object] = []

    def work() -> None:
        with interrupts_ignored():
            found.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [before] and signal.getsignal(signal.SIGINT) is before
