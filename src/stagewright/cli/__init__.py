"""The command line: one file per verb."""

from __future__ import annotations

import os
import sys
import warnings


def main() -> None:
    """Entry point of `stagewright`: runs a verb; whatever goes wrong is one message and an exit code.

    Exit codes: 0 done, 2 for input that cannot be used, 1 for a run that failed, 130 after Ctrl-C.
    """
    if not sys.warnoptions:
        # Of libraries about each other; none of them is for the user of a command to act on.
        warnings.simplefilter("ignore")
        os.environ.setdefault("PYTHONWARNINGS", "ignore")  # for the processes we start
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from stagewright.cli.app import app
    from stagewright.cli.failure import fail_unexpectedly

    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output (`| head`) has gone: nothing is left to say, on exit neither.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except Exception as error:
        fail_unexpectedly(error)
