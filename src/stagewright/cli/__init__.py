"""The command line: one file per verb."""

from __future__ import annotations

import os
import sys

if sys.argv[:1] == ["-m"] and not sys.flags.safe_path and sys.path[0] == os.getcwd():
    # Under `python -m stagewright.cli` too, nothing more is imported from the current folder.
    del sys.path[0]

import atexit
import getpass
import re
import signal
import warnings
from pathlib import Path
from typing import NoReturn

from stagewright.files import temporary_home
from stagewright.machine import collect_seldom


def command() -> NoReturn:
    """Entry point of `stagewright`: run `main`, then exit without the interpreter's shutdown, which spends seconds freeing
    what the system frees anyway."""
    code: int | str | None = 0
    try:
        main()
    except SystemExit as exit_request:
        code = exit_request.code
    if isinstance(code, str) or _has_children():
        sys.exit(code)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # as where it was closed before the start
            stream.flush()
    os._exit(code or 0)


def _has_children() -> bool:
    processes = sys.modules.get("multiprocessing")
    return processes is not None and bool(processes.active_children())


_WIDTH = re.compile(r"0*[1-9]\d{0,3}")
"""A valid number of columns."""


def main() -> None:
    """Run a verb; any error becomes one message and an exit code.

    Exit codes: 0 done, 2 for input that cannot be used, 1 for a run that failed, 130 after Ctrl-C, 141 if the reader of
    our output has gone.
    """
    if not sys.warnoptions:
        # Warnings of libraries about each other, on which a user cannot act.
        warnings.simplefilter("ignore")
        os.environ.setdefault("PYTHONWARNINGS", "ignore")  # for the processes we start
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not _WIDTH.fullmatch(os.environ.get("COLUMNS", "80")):
        del os.environ["COLUMNS"]
    collect_seldom()
    signal.signal(signal.SIGTERM, _end)
    from stagewright.cli.app import app
    from stagewright.cli.failure import fail_unexpectedly

    try:
        try:
            find_home()
            app()
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # no message while exiting
            sys.stdout.flush()  # short output only now finds that its reader has gone
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        _leave_unread()
    except SystemExit as exit_request:
        # Typer and rich turn it into a failed run.
        if isinstance(exit_request.__context__, BrokenPipeError):
            _leave_unread()
        raise
    except BaseException as error:
        # Panics of Rust libraries and errors of torch's checkpoints are no Exception.
        fail_unexpectedly(error)


def _end(number: int, _: object) -> NoReturn:
    """Report the signal and exit; a verb may install a better handler."""
    print(f"ended by {signal.Signals(number).name}", file=sys.stderr, flush=True)
    sys.exit(128 + number)


def find_home() -> None:
    """Set a home directory and a user name for this process and its children if there are none.

    Libraries write caches to the home directory and name folders after the user, and containers that run under a numeric
    user id may have neither.
    """
    try:
        has_home = Path.home().is_dir()
    except RuntimeError:
        has_home = False
    if not has_home:
        os.environ["HOME"] = str(temporary_home())
    elif not os.access(Path.home(), os.W_OK):
        os.environ.setdefault("STAGEWRIGHT_CACHE", str(temporary_home()))
    try:
        getpass.getuser()
    except (KeyError, OSError):  # the latter from Python 3.13 on
        os.environ["LOGNAME"] = f"user-{os.geteuid()}"


def _leave_unread() -> NoReturn:
    """Exit silently: the reader of our output (`| head`) has gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(141)
