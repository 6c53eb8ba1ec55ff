"""Errors on the command line: one message on stderr, an exit code, a traceback only on request."""

from __future__ import annotations

import sys
import traceback
from typing import NoReturn

import typer

from stagewright.errors import RunError, StagewrightError, wants_traceback
from stagewright.text import printable


def exit_code(error: StagewrightError) -> int:
    """Return 1 for a run that failed, 2 for input that the user can change before anything runs.

    >>> from stagewright.errors import InputError
    >>> exit_code(RunError("rank 1 died")), exit_code(InputError("no such file"))
    (1, 2)
    """
    return 1 if isinstance(error, RunError) else 2


def fail(error: StagewrightError) -> NoReturn:
    """Print the error and exit."""
    if wants_traceback():
        _trace(error)
    else:
        _say(str(error))
    raise typer.Exit(exit_code(error))


def fail_unexpectedly(error: BaseException) -> NoReturn:
    """Print one message for an unexpected error, with how to learn more, and exit."""
    if (signal_number := getattr(error, "sigval", None)) is not None:
        sys.exit(128 + int(signal_number))  # torch's launcher turns Ctrl-C into its own exception
    if wants_traceback():
        _trace(error)
    elif isinstance(error, OSError) and error.filename:
        _say(f"{error.filename}: {error.strerror}")
        sys.exit(2)
    else:
        lines = str(error).strip().splitlines()
        _say(
            f"{type(error).__name__}: {lines[0] if lines else 'no message'}\n"
            "This is a fault of Stagewright, not of the input; run the same command with --traceback to see where."
        )
    sys.exit(1)


def _trace(error: BaseException) -> None:
    typer.echo(printable("".join(traceback.format_exception(error))), err=True, nl=False)


def _say(message: str) -> None:
    typer.secho("error: ", fg="red", bold=True, nl=False, err=True)
    typer.echo(printable(message), err=True)
