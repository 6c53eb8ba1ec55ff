"""A home for users who have none, as in containers that run under a bare number."""

from __future__ import annotations

import getpass
import os
from pathlib import Path

from stagewright.files import temporary_home


def find_home() -> None:
    """Libraries write caches to the home directory, and name folders after the user, without a thought that there may be
    neither: then both are made up, for this process and those that it starts."""
    try:
        is_there = Path.home().is_dir()
    except RuntimeError:
        is_there = False
    if not is_there:
        os.environ["HOME"] = str(temporary_home())
    elif not os.access(Path.home(), os.W_OK):
        os.environ.setdefault("NUMBA_CACHE_DIR", str(temporary_home() / "numba"))
        os.environ.setdefault("STAGEWRIGHT_CACHE", str(temporary_home()))
    try:
        getpass.getuser()
    except (KeyError, OSError):  # the latter from Python 3.13 on
        os.environ["LOGNAME"] = f"user-{os.geteuid()}"
