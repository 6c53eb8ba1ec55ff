"""The process of a rank that runs a user's script, in which a `stagewright.Trainer` joins the other ranks."""

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
    """Run `script` as ``python script *arguments`` would, and return the exit code. Its output goes to stdout on the first
    rank and to stderr on the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # handled by the launcher
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
    """Print Stagewright's warnings in one line, and others as Python does."""
    if issubclass(category, StagewrightWarning):
        text = f"warning: rank {os.environ['RANK']}: {message}\n"
    else:
        text = warnings.formatwarning(message, category, filename, lineno)
    sys.stderr.write(text)


if __name__ == "__main__":
    end_process(main(sys.argv[1], sys.argv[2:]))
