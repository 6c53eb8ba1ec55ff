"""The command line: one file per verb."""

from __future__ import annotations

import os
import sys

if sys.argv[:1] == ["-m"] and not sys.flags.safe_path and sys.path[0] == os.getcwd():
    # Under `python -m stagewright.cli` too, nothing more is imported from the current folder.
    del sys.path[0]

import atexit
import gc
import getpass
import re
import signal
import warnings
from pathlib import Path
from typing import NoReturn

from stagewright.files import temporary_home


def command() -> NoReturn:
    """Entry point of `stagewright`: `main`, then out of the process without the interpreter's own end, in which torch takes
    a second to give back what the system takes back anyway."""
    code: int | str | None = 0
    try:
        main()
    except SystemExit as left:
        code = left.code
    if "torch" not in sys.modules or isinstance(code, str) or _has_children():
        sys.exit(code)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def _has_children() -> bool:
    from multiprocessing import active_children

    return bool(active_children())


_WIDTH = re.compile(r"0*[1-9]\d{0,3}")
"""A number of columns; no other word for it is meant."""
_ALLOCATIONS = 200_000
"""Objects after which dead cycles are looked for: graphs are many objects and no cycles, and each look goes over them."""


def main() -> None:
    """Runs a verb; whatever goes wrong is one message and an exit code.

    Exit codes: 0 done, 2 for input that cannot be used, 1 for a run that failed, 130 after Ctrl-C, 141 where the reader of
    our output has gone.
    """
    if not sys.warnoptions:
        # Of libraries about each other; none of them is for the user of a command to act on.
        warnings.simplefilter("ignore")
        os.environ.setdefault("PYTHONWARNINGS", "ignore")  # for the processes we start
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not _WIDTH.fullmatch(os.environ.get("COLUMNS", "80")):
        del os.environ["COLUMNS"]
    gc.set_threshold(_ALLOCATIONS)
    signal.signal(signal.SIGTERM, _end)
    from stagewright.cli.app import app
    from stagewright.cli.failure import fail_unexpectedly

    try:
        try:
            find_home()
            app()
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # who is leaving has no word for it
            sys.stdout.flush()  # what is short is only now found to have no reader
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        _leave_unread()
    except SystemExit as left:
        # Typer and rich make a failed run of it.
        if isinstance(left.__context__, BrokenPipeError):
            _leave_unread()
        raise
    except (
        BaseException
    ) as error:  # panics of libraries in Rust are no Exception, and not those of torch's checkpoints
        fail_unexpectedly(error)


def _end(number: int, _: object) -> NoReturn:
    """Not without a word, unless a verb has a better one."""
    print(f"ended by {signal.Signals(number).name}", file=sys.stderr, flush=True)
    sys.exit(128 + number)


def find_home() -> None:
    """Libraries write caches to the home directory, and name folders after the user, without a thought that there may be
    neither, as in containers that run under a bare number: then both are made up, for this process and those that it
    starts."""
    try:
        is_there = Path.home().is_dir()
    except RuntimeError:
        is_there = False
    if not is_there:
        os.environ["HOME"] = str(temporary_home())
    elif not os.access(Path.home(), os.W_OK):
        os.environ.setdefault("STAGEWRIGHT_CACHE", str(temporary_home()))
    try:
        getpass.getuser()
    except (KeyError, OSError):  # the latter from Python 3.13 on
        os.environ["LOGNAME"] = f"user-{os.geteuid()}"


def _leave_unread() -> NoReturn:
    """The reader of our output (`| head`) has gone: nothing is left to say, on exit neither."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(141)
