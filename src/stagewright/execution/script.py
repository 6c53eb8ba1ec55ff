"""The process of one rank that runs a script of the user's, in which a `stagewright.Trainer` joins the others."""

from __future__ import annotations

import os
import runpy
import signal
import sys
import traceback
import warnings
from pathlib import Path

from stagewright.errors import StagewrightWarning
from stagewright.execution.rank_process import end_process, exit_code


def main(script: str, arguments: list[str]) -> int:
    """Run `script` as ``python script *arguments`` would; returns the exit code. What it prints goes to stdout on the first
    rank and to stderr on the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher's to answer
    if os.environ["RANK"] != "0":
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    warnings.showwarning = _shown
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))

    def run() -> None:
        runpy.run_path(script, run_name="__main__")

    try:
        return exit_code(run)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception:
        traceback.print_exc()
        return 1


def _shown(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: object) -> None:
    """A line for what Stagewright says; all else as Python does."""
    if issubclass(category, StagewrightWarning):
        text = f"warning: rank {os.environ['RANK']}: {message}\n"
    else:
        text = warnings.formatwarning(message, category, filename, lineno)
    sys.stderr.write(text)


if __name__ == "__main__":
    end_process(main(sys.argv[1], sys.argv[2:]))
