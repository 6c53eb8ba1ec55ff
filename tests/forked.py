"""The processes of a run, forked from the server of `multiprocess` in place of started anew: importing torch and the models
takes longer than most runs of a test."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection

from multiprocess import forking
from stagewright.execution.rendezvous import LAUNCHER


class ForkedProcess:
    """What `stagewright.execution.processes` asks of a `subprocess.Popen`."""

    def __init__(self, module: str, arguments: Sequence[str], environment: dict[str, str]) -> None:
        errors = Connection(os.dup(2), readable=False)
        words = [module, *arguments]
        self._process = forking().Process(target=_main, args=(words, environment, os.getcwd(), errors))
        self._process.start()
        errors.close()
        assert self._process.pid is not None, "a started process has an id"
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self) -> None:
        self._process.join()

    def kill(self) -> None:
        self._process.kill()


def _main(words: list[str], environment: dict[str, str], folder: str, errors: Connection) -> None:
    """As ``python -m`` of these words; what is printed goes to `errors`."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(errors.fileno(), 1)
    os.dup2(errors.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment | {LAUNCHER: str(os.getppid())})
    os.chdir(folder)
    import torch

    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)
